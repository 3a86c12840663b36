"""A Llama of two layers with a tokenizer, in place of SmolLM2."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tiny_llama():
    """Two layers whose attention is sharp enough that a wrong position shows."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            gain = 2.5 if ".q_proj." in name or ".k_proj." in name else 1.0
            spread = 1.0 if weight.dim() == 1 else gain * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.1 if weight.dim() == 1 else spread))
            if weight.dim() == 1:
                weight.add_(1.0)
    return model


def tiny_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the lock, the keeper and the water"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")

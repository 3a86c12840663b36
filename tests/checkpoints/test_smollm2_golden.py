"""The real models: both against transformers' Llama on the same weights, and the strict one in transformers itself."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2ForCausalLM

from irminsul.checkpoints.perplexity import held_out_texts, perplexity, token_sequences, whole_sequence_logits
from irminsul.engine.model import MlaModel

pytestmark = [pytest.mark.checkpoint, pytest.mark.slow]


@pytest.fixture(scope="module")
def lossless_model(lossless):
    return MlaModel.load(lossless)


@pytest.fixture(scope="module")
def distilled_model(distilled_checkpoint):
    return MlaModel.load(distilled_checkpoint)


def original_logits(source):
    @torch.inference_mode()
    def logits_of(token_ids_T):
        return source.model(input_ids=token_ids_T[None]).logits[0]

    return logits_of


def answer(model, tokenizer, question, n_tokens=8):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt).input_ids
    for _ in range(n_tokens):
        ids.append(int(whole_sequence_logits(model)(torch.tensor(ids))[-1].argmax()))
    return tokenizer.decode(ids[-n_tokens:])


def test_lossless_logits_are_the_originals(source, lossless_model):
    text = held_out_texts()["json.decoder"]
    (token_ids_T,) = token_sequences(source.tokenizer, [text], limit=512)
    expected = original_logits(source)(token_ids_T)
    torch.testing.assert_close(whole_sequence_logits(lossless_model)(token_ids_T), expected, rtol=0, atol=1e-3)


def test_the_distilled_model_predicts_held_out_text_as_the_original_does(source, distilled_model):
    texts = held_out_texts()
    chosen = [texts[name] for name in ("ours-0", "ours-1", "help(execmodel)", "json.decoder")]
    sequences = token_sequences(source.tokenizer, chosen, limit=384)
    ratio = perplexity(distilled_model, sequences) / perplexity(original_logits(source), sequences)
    assert 0.95 < ratio < 1.03


def test_transformers_computes_the_same_logits_from_the_distilled_checkpoint(distilled_checkpoint, distilled_model):
    theirs = AutoModelForCausalLM.from_pretrained(distilled_checkpoint, dtype=torch.float32)
    assert isinstance(theirs, DeepseekV2ForCausalLM)
    token_ids_T = torch.arange(2000, 2300)
    with torch.inference_mode():
        expected = theirs(input_ids=token_ids_T[None]).logits[0]
    torch.testing.assert_close(whole_sequence_logits(distilled_model)(token_ids_T), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("form", ["distilled_model", "lossless_model"])
def test_it_knows_the_capital_of_france(form, source, request):
    model = request.getfixturevalue(form)
    assert "Paris" in answer(model, source.tokenizer, "What is the capital of France?")


def test_rows_have_the_widths_of_their_form(distilled_model, lossless_model):
    assert (distilled_model.layout.latent_dim, distilled_model.layout.rope_dim) == (512, 64)
    assert (lossless_model.layout.latent_dim, lossless_model.layout.rope_dim) == (192, 192)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 12", ["x", "Ġ=", "Ġ", "1", "2"]),
        ("    12", ["ĠĠĠĠ", "1", "2"]),  # transformers' reading of the file gives ĠĠĠ, Ġ, 1, 2
        ("2024-05", ["2", "0", "2", "4", "-", "0", "5"]),
    ],
)
def test_digits_are_tokens_of_their_own(distilled_checkpoint, text, expected):
    tokenizer = AutoTokenizer.from_pretrained(distilled_checkpoint)
    assert tokenizer.tokenize(text) == expected


@pytest.mark.parametrize("name", ["json.decoder", "ours-0", "ours-1"])
def test_the_tokenizer_gives_texts_back(distilled_checkpoint, source, name):
    text = held_out_texts()[name] + " naïve — 日本 😀 \t\n\n  x"
    tokenizer = AutoTokenizer.from_pretrained(distilled_checkpoint)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids == source.tokenizer(text).input_ids

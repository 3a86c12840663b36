"""The shape of the attention that is rewritten: grouped-query attention of a Llama."""

from dataclasses import dataclass

from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class AttentionShape:
    """The heads of a grouped-query attention; head h reads key head h // (n_heads // n_kv_heads)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def key_dim(self) -> int:
        """Values of all keys of a token."""
        return self.n_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads of a key head."""
        return self.n_heads // self.n_kv_heads


def shape_of(model: LlamaForCausalLM) -> AttentionShape:
    """Read the shape of a model."""
    config = model.config
    return AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)

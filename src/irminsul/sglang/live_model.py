"""What a running server's rows are, read from its model and pool, and a test that moving them is right.

Nothing is taken from a configuration file that the live objects can tell: row sizes and dtype come from the pool,
frequencies and pairing from the rotary module, and the test compares a moved row with one that the model computes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from irminsul.errors import UnsupportedModelError
from irminsul.kernels.row_movers import RowMover, row_mover
from irminsul.layout import RowLayout
from irminsul.rope import AngleSource, Pairing, RopeSpec
from irminsul.sglang.attention import AttentionShape

ROTARY_CLASSES = ("RotaryEmbedding", "DeepseekScalingRotaryEmbedding")
"""Rotary modules whose angle at a position is position times frequency, whatever the length of the sequence."""
TEST_MOVES = ((0, 1), (0, 37), (5, 4096), (4096, 5), (100, 30_000), (30_000, 100), (1234, 1234))
"""Positions (from, to) of the self-test; those beyond the model's context are left out."""
TEST_TOKENS = 64


@dataclass(frozen=True, eq=False)
class LiveModel:
    """A server's rows."""

    layers: tuple[Tensor, ...]
    """The pool: rows of each layer, [S, 1, W]."""
    layout: RowLayout
    rope: RopeSpec
    shape: AttentionShape
    attention: Any
    """The first attention module, of layer 0."""
    norm: Any
    """The norm before it."""
    model: Any

    @classmethod
    def of(cls, model_runner: Any, pool: Any) -> "LiveModel":  # SGLang's own
        """Read a loaded model and its pool.

        Raises:
            UnsupportedModelError: a model, rotary module or row format that has not been shown to work.
        """
        layers = _plain_mla_layers(pool)
        norm, attention = first_attention(model_runner.model)
        rotary = getattr(attention, "rotary_emb", None)
        if rotary is None:
            raise UnsupportedModelError(
                "NoPE models are not supported: the attention of layer 0 does not turn its keys"
            )
        latent, rope_dim = int(pool.kv_lora_rank), int(pool.qk_rope_head_dim)
        shape = AttentionShape(
            attention.num_local_heads, latent, rope_dim, attention.qk_nope_head_dim, attention.v_head_dim
        )
        dtype = str(layers[0].dtype).removeprefix("torch.")
        return cls(
            layers, RowLayout(latent, rope_dim, dtype), rope_of(rotary), shape, attention, norm, model_runner.model
        )

    def mover(self, kernel: str) -> RowMover:
        """Bind a row kernel to the pool; slots are the tree's and the allocator's, and not checked again."""
        return row_mover(kernel, self.layers, self.layout, check_slots=False)

    def self_test(self, kernel: str, max_position: int) -> None:
        """Compare moved rows of layer 0 with computed ones, at several distances.

        Rows of layer 0 depend on nothing but token and position, so a moved row must be the one that the model
        computes at the target, up to rounding. A wrong pairing, a wrong frequency or a wrong sign is far off.

        Raises:
            UnsupportedModelError: they differ, or a wrong move would have passed too.
        """
        moves = [move for move in TEST_MOVES if max(move) < max_position]
        old_N = torch.tensor([old for old, _ in moves]).repeat_interleave(TEST_TOKENS)
        new_N = torch.tensor([new for _, new in moves]).repeat_interleave(TEST_TOKENS)
        n_rows = len(old_N)
        token_ids_N = torch.randint(1, 1000, (TEST_TOKENS,), generator=torch.Generator().manual_seed(0)).repeat(
            len(moves)
        )
        device = self.layers[0].device
        with torch.inference_mode():
            before_NW, after_NW = (self._rows_at(token_ids_N, positions_N) for positions_N in (old_N, new_N))
            scratch_SW = torch.cat([before_NW, torch.zeros_like(before_NW)]).contiguous()
            move = row_mover(kernel, [scratch_SW], self.layout)
            slots_N = torch.arange(n_rows, device=device)
            move(self.rope, slots_N, slots_N + n_rows, old_N.to(device), new_N.to(device), AngleSource.TABLE)
            error = _relative(scratch_SW[n_rows:], after_NW)
            left_as_is = _relative(before_NW, after_NW)
        if not error < _tolerance(self.layout.dtype):
            raise UnsupportedModelError(
                f"self-test failed: moved rows of layer 0 differ from computed ones by {error:.2e} of their norm, "
                f"more than {_tolerance(self.layout.dtype):.0e}"
            )
        if not left_as_is > 10 * _tolerance(self.layout.dtype):
            raise UnsupportedModelError(
                f"self-test says nothing: rows differ by {left_as_is:.2e} of their norm without being turned"
            )

    def _rows_at(self, token_ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """Compute the rows of layer 0, [N, W], with the model's own modules."""
        device = self.layers[0].device
        attention = self.attention
        embed = self.model.get_input_embeddings()
        hidden_ND = self.norm(embed(token_ids_N.to(device)))
        if getattr(attention, "q_lora_rank", None) is None:
            projected_NW = attention.kv_a_proj_with_mqa(hidden_ND)[0]
        else:
            projected_NW = attention.fused_qkv_a_proj_with_mqa(hidden_ND)[0][:, attention.q_lora_rank :]
        latent_NC, rope_NR = self.layout.split(projected_NW)
        latent_NC = attention.kv_a_layernorm(latent_NC.contiguous())
        rope_N1R = rope_NR.contiguous()[:, None]
        _, turned_N1R = attention.rotary_emb(positions_N.to(device), rope_N1R.clone(), rope_N1R)
        dtype = self.layers[0].dtype
        return torch.cat([latent_NC, turned_N1R.reshape(len(projected_NW), -1)], dim=-1).to(dtype)


def max_shared_keys(model_runner: Any) -> int:
    """Return up to how many keys batch rows of a request can share in up-projected attention.

    With FlashAttention 3, as many as SGLang up-projects in one pass; none with other backends.
    """
    backend = getattr(model_runner.attn_backend, "prefill_backend", model_runner.attn_backend)
    if type(backend).__name__ != "FlashAttentionBackend" or backend.fa_impl_ver != 3:
        return 0
    from sglang.srt.environ import envs  # noqa: PLC0415

    return int(envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get())


def first_attention(model: Any) -> tuple[Any, Any]:
    """Return (norm, attention) of the first MLA attention of a model.

    Raises:
        UnsupportedModelError: there is none.
    """
    for module in model.modules():
        norm, attention = (_first(getattr(module, name, None)) for name in ("input_layernorm", "self_attn"))
        if norm is not None and hasattr(attention, "kv_a_layernorm"):
            return norm, attention
    raise UnsupportedModelError(f"{type(model).__name__} has no MLA attention whose layer 0 could be tested")


def _first(module: Any) -> Any:
    """Return the first of several: LongCat has two attentions and two norms in a layer."""
    return module[0] if isinstance(module, torch.nn.ModuleList) else module


def rope_of(rotary: Any) -> RopeSpec:
    """Read frequencies and pairing of SGLang's rotary module, and check them against its table.

    Raises:
        UnsupportedModelError: a rotary module that has not been shown to work, or one whose table is not that of its
            frequencies.
    """
    kind = type(rotary).__name__
    if kind not in ROTARY_CLASSES:
        raise UnsupportedModelError(f"rotary module {kind} is not supported; supported: {', '.join(ROTARY_CLASSES)}")
    scale = getattr(rotary, "scaling_factor", None)
    inv_freq_P = rotary._compute_inv_freq(rotary.base if scale is None else scale)  # noqa: SLF001
    pairing = Pairing.HALF_SPLIT if rotary.is_neox_style else Pairing.INTERLEAVED
    spec = RopeSpec.from_inv_freq(inv_freq_P.to(torch.float32), pairing, float(getattr(rotary, "mscale", 1.0)))
    table_SR = rotary.cos_sin_cache
    positions = torch.tensor([at for at in (0, 1, 63, 4095, len(table_SR) - 1) if at < len(table_SR)])
    angles = spec.table_angles(positions)
    expected = torch.cat([angles.cos(), angles.sin()], dim=-1) * spec.mscale
    found = table_SR[positions.to(table_SR.device)].to(device="cpu", dtype=torch.float64)
    # A table in bfloat16 is off by 2^-9; a wrong frequency by much more, somewhere.
    if found.shape != expected.shape or not bool(((found - expected).abs() < 2e-2).all()):
        raise UnsupportedModelError(f"the table of {kind} is not that of its frequencies")
    return spec


def _plain_mla_layers(pool: Any) -> tuple[Tensor, ...]:
    if type(pool).__name__ != "MLATokenToKVPool":
        raise UnsupportedModelError(f"rows of {type(pool).__name__} are not supported; supported: MLATokenToKVPool")
    if pool.kv_scale_buffer is not None or pool.store_dtype != pool.dtype:
        raise UnsupportedModelError(f"packed rows ({pool.dtype} stored as {pool.store_dtype}) are not supported")
    return tuple(pool.kv_buffer)


def _relative(found_NW: Tensor, expected_NW: Tensor) -> float:
    """Return the largest error of a row, as a part of its norm."""
    found_NW, expected_NW = found_NW.double(), expected_NW.double()
    return float(((found_NW - expected_NW).norm(dim=-1) / expected_NW.norm(dim=-1)).max())


def _tolerance(dtype: str) -> float:
    return {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}[dtype]

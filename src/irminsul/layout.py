"""What one cached row of an MLA model is: ``[c_kv | k_rope]``.

The latent ``c_kv`` carries no rotation and is copied as it is; ``k_rope`` is one key head, shared by all query heads,
already turned to the row's position (see ``irminsul.rope``). Nothing else of a token is cached.

Shape letters used below: ``W`` row width, ``C`` latent part, ``R`` rotary part (W = C + R).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from irminsul.errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value, by torch's name of each dtype that rows may have."""


@dataclass(frozen=True)
class RowLayout:
    """The two parts of a row and the dtype of both.

    Raises UnsupportedModelError for a row without a rotary part (NoPE) and for a dtype outside ``ITEM_SIZES``, such
    as the packed fp8 and fp4 rows of some engines; InputError for sizes that no row can have.
    """

    latent_dim: int
    """Values of ``c_kv`` (``kv_lora_rank``)."""
    rope_dim: int
    """Values of ``k_rope`` (``qk_rope_head_dim``); even."""
    dtype: str
    """torch's name of the dtype, without the ``torch.`` prefix."""

    def __post_init__(self) -> None:
        if self.latent_dim < 1:
            raise InputError(f"latent_dim must be >= 1, got {self.latent_dim!r}")
        if self.rope_dim == 0:
            raise UnsupportedModelError("NoPE models (rope_dim 0) are not supported: their rows hold no rotary part")
        if self.rope_dim < 0 or self.rope_dim % 2:
            raise InputError(f"rope_dim must be even and > 0, got {self.rope_dim!r}")
        if self.dtype not in ITEM_SIZES:
            raise UnsupportedModelError(f"unsupported row dtype {self.dtype!r}; supported: {', '.join(ITEM_SIZES)}")

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.latent_dim + self.rope_dim

    def bytes_per_token(self, layers: int) -> int:
        """Bytes of one token's rows in ``layers`` layers."""
        return layers * self.width * ITEM_SIZES[self.dtype]

    def split(self, rows_W: "Tensor") -> tuple["Tensor", "Tensor"]:
        """Return (latent [..., C], rope [..., R]): views of rows [..., W], so writing to them writes to the rows."""
        assert rows_W.shape[-1] == self.width, (rows_W.shape, self)
        return rows_W[..., : self.latent_dim], rows_W[..., self.latent_dim :]

    @property
    def fingerprint(self) -> str:
        """A name of the row format; caches share rows only where it is equal, so its form must not change."""
        return f"mla-{self.latent_dim}-{self.rope_dim}-{self.dtype}"

"""What the experiments measure."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from irminsul.engine.model import MlaModel
from irminsul.errors import InputError
from irminsul.reproduce.material import Material


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the text it reads, and how to measure."""

    model: MlaModel
    checkpoint: Path
    """Its directory."""
    material: Material
    quick: bool
    seed: int
    tell: Callable[[str], None]
    """Told what is being done, a sentence a step."""

    def generator(self) -> torch.Generator:
        """Return a fresh source of random numbers: the same for every experiment."""
        return torch.Generator().manual_seed(self.seed)

    def require_length(self, n_tokens: int) -> None:
        """Raise InputError if the model was not made for prompts of ``n_tokens``."""
        longest = self.model.config.max_position_embeddings
        if n_tokens > longest:
            raise InputError(f"this experiment needs prompts of {n_tokens} tokens, but the model reads {longest}")

"""What fixes a run of training: two runs go on with each other only if all of this is equal."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from irminsul.checkpoints.deepseek_form import DeepseekShape
from irminsul.checkpoints.delta import ATTENTION_MATRICES, MLP_MATRICES
from irminsul.errors import InputError

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class TrainingConfig:
    """The defaults are those of the checkpoint that ships."""

    theta: float = 8000.0
    """Base of the new rotary frequencies."""
    shape: DeepseekShape = field(default_factory=DeepseekShape)
    attention_rank: int = 32
    """Of what is added to each matrix of the attention."""
    mlp_rank: int = 10
    long: int = 8192
    """Tokens of a sequence in train_8k* and eval_*."""
    short: int = 2048
    """Tokens of a sequence in train_2k*."""
    watched: int = 10
    """Long sequences that the original is watched on before the start."""
    watched_length: int = 8192
    """Tokens of each that are read."""
    even_share: float = 0.0
    """See `training.fit.fit`."""
    learning_rate: float = 2e-3
    """At the top of the schedule."""
    total_minutes: float = 6.0
    """Of training, over all runs; the learning rate follows the share that has passed."""
    tokens_per_step: int = 32_768
    logits_chunk: int = 8192
    """Tokens whose logits exist at a time."""
    seed: int = 0
    """Of the first factors of what is trained."""

    def __post_init__(self) -> None:
        """Refuse what no run can be made of."""
        for name in ("theta", "learning_rate", "total_minutes", "attention_rank", "mlp_rank", "watched"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}, but must be positive and finite")
        if self.tokens_per_step < self.long:
            raise InputError(f"a step of {self.tokens_per_step} tokens has no room for a sequence of {self.long}")

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of what is added to each matrix, by name."""
        return dict.fromkeys(ATTENTION_MATRICES, self.attention_rank) | dict.fromkeys(MLP_MATRICES, self.mlp_rank)

    @classmethod
    def read(cls, folder: Path) -> "TrainingConfig":
        """Read the configuration of a run; InputError if the folder holds none of this version."""
        path = folder / CONFIG_FILE
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or values.keys() != {each.name for each in fields(cls)}:
                raise InputError(f"{path} has other keys than a configuration of this version")
            return cls(**{**values, "shape": DeepseekShape(**values["shape"])})
        except (OSError, json.JSONDecodeError, TypeError) as error:
            raise InputError(f"{path} is not the configuration of a run: {error}") from error

    def claim(self, folder: Path) -> None:
        """Make a folder that of this run.

        Raises:
            InputError: it holds a run of another configuration (names the difference), or files of an unknown run, or
                cannot be written to.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / CONFIG_FILE).exists():
                if any(folder.iterdir()):
                    raise InputError(f"{folder} has files but no {CONFIG_FILE}; choose a new directory")
                (folder / CONFIG_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
                return
        except OSError as error:
            raise InputError(f"{folder} cannot be the directory of a run: {error}") from error
        found, wanted = asdict(TrainingConfig.read(folder)), asdict(self)
        others = [f"{name} {found[name]}, not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
        if others:
            raise InputError(f"{folder} holds a run of {'; '.join(others)}")

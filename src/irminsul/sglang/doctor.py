"""``irminsul doctor``: would this environment serve this model with these flags, and why not. No server is started.

What only SGLang can say is asked in a process of its own: importing it hooks it, prints, and may end the process.
"""

import contextlib
import io
import json
import logging
import logging.handlers
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from irminsul.errors import InputError
from irminsul.sglang.plugin import BACKEND, HOOKED
from irminsul.sglang.settings import Settings, read_settings
from irminsul.sglang.support import (
    architecture_of,
    check_hooks,
    check_version,
    environment_problems,
    model_problems,
    option_problems,
)

ENTRY_POINTS = "sglang.srt.plugins"


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    REFUSED = "refused"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Check:
    """One finding; a check that finds several problems makes several."""

    name: str
    verdict: Verdict
    sentence: str


def examine(model: str, flags: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Check everything that a server would refuse at start, and that can be known before.

    Args:
        model: a checkpoint directory, or a name that SGLang understands.
        flags: of ``sglang serve``; ``--radix-cache-backend irminsul`` is added.
        environment: for the settings, and for SGLang.
    """
    settings: Settings | None = None
    try:
        settings = read_settings(environment)
        settings_check = Check("settings", Verdict.OK, _in_words(settings))
    except InputError as error:
        settings_check = Check("settings", Verdict.REFUSED, str(error))
    force_version = settings is not None and settings.force_version
    return [
        _checked("sglang", lambda: _version(force=force_version)),
        _checked("entry point", lambda: _entry_point(environment)),
        settings_check,
        *(_asked_sglang(model, flags, environment) if _is_installed("sglang") else _without_sglang(model)),
        _checked("gpu", _gpu),
        _triton(settings),
    ]


def works(checks: Iterable[Check]) -> bool:
    """Say whether nothing is refused."""
    return all(check.verdict is not Verdict.REFUSED for check in checks)


def as_text(checks: Iterable[Check]) -> str:
    """Return one line a check."""
    return "\n".join(f"{check.verdict:<12} {check.name:<12} {check.sentence}" for check in checks)


def as_json(model: str, flags: Sequence[str], checks: Sequence[Check]) -> str:
    """Return the checks as a JSON object."""
    report = {"model": model, "flags": list(flags), "works": works(checks), "checks": [asdict(one) for one in checks]}
    return json.dumps(report, indent=1)


def _checked(name: str, check: Callable[[], str]) -> Check:
    """Run a check that returns what it found, or raises InputError."""
    try:
        return Check(name, Verdict.OK, check())
    except InputError as error:
        return Check(name, Verdict.REFUSED, str(error))


def _listed(name: str, problems: Iterable[str], otherwise: str) -> list[Check]:
    """Return a check for each problem, or one that says that there is none."""
    refused = [Check(name, Verdict.REFUSED, problem) for problem in problems]
    return refused or [Check(name, Verdict.OK, otherwise)]


# The environment, seen from this process.


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _version(*, force: bool) -> str:
    if not _is_installed("sglang"):
        raise InputError("SGLang is not installed: pip install 'irminsul-kv[sglang]'")
    found = version("sglang")
    check_version(found, force=force)
    return f"SGLang {found}"


def _entry_point(environment: Mapping[str, str]) -> str:
    found = next(iter(entry_points(group=ENTRY_POINTS, name=BACKEND)), None)
    if found is None:
        raise InputError("SGLang would not find the plugin: irminsul-kv is not installed in this environment")
    named = environment.get("SGLANG_PLUGINS", "")
    if named and BACKEND not in [name.strip() for name in named.split(",")]:
        raise InputError(f"SGLANG_PLUGINS={named} leaves the plugin out; add {BACKEND} to it, or unset it")
    return f"{ENTRY_POINTS}: {found.value}"


def _in_words(settings: Settings) -> str:
    return f"mode {settings.mode}, matcher {settings.matcher}, row kernel {settings.row_kernel}"


def _gpu() -> str:
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise InputError(f"torch cannot be imported: {error}") from None
    if torch.version.cuda is None:
        raise InputError(f"torch {torch.__version__} is a build without CUDA; only NVIDIA GPUs have been tried")
    if not torch.cuda.is_available():
        raise InputError(f"torch {torch.__version__} sees no GPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; torch {torch.__version__}"


def _triton(settings: Settings | None) -> Check:
    if settings is not None and settings.row_kernel != "triton":
        return Check("triton", Verdict.NOT_CHECKED, f"row kernel {settings.row_kernel} does not need it")
    return _checked("triton", _triton_version)


def _triton_version() -> str:
    try:
        import triton  # noqa: PLC0415
    except ImportError as error:
        raise InputError(f"Triton cannot be imported: {error}") from None
    return f"Triton {triton.__version__}"


# The model, without SGLang.


def _without_sglang(model: str) -> list[Check]:
    unknown = [
        Check(name, Verdict.NOT_CHECKED, "only SGLang can say, and it is not installed")
        for name in ("surface", "flags")
    ]
    if not Path(model).is_dir():
        return [*unknown, Check("model", Verdict.NOT_CHECKED, f"{model} is not a directory, and SGLang not installed")]
    try:
        config = _read_config(Path(model) / "config.json")
    except InputError as error:
        return [*unknown, Check("model", Verdict.REFUSED, str(error))]
    return [*unknown, *_model_checks(config)]


def _read_config(path: Path) -> SimpleNamespace:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path} does not hold a JSON object")
    return SimpleNamespace(**loaded)


def _model_checks(hf_config: Any) -> list[Check]:
    found = architecture_of(hf_config)
    known = "" if found is None else "; ".join(filter(None, (f"{found.name}: {found.support.meaning}", found.note)))
    return _listed("model", model_problems(hf_config), known)


# What SGLang says, asked in a process of its own.


def _asked_sglang(model: str, flags: Sequence[str], environment: Mapping[str, str]) -> list[Check]:
    done = subprocess.run(  # noqa: S603  # this Python, this module
        [sys.executable, "-P", "-m", __name__, model, *flags],
        capture_output=True,
        text=True,
        check=False,
        env=dict(environment),
    )
    checks = [
        Check(**{**line, "verdict": Verdict(line["verdict"])}) for line in map(json.loads, done.stdout.splitlines())
    ]
    missing = [name for name in ("surface", "flags", "model") if name not in {check.name for check in checks}]
    for name in missing[:1]:
        sentence = f"SGLang ended the process that asked it (status {done.returncode}): {_last_line(done.stderr)}"
        checks.append(Check(name, Verdict.REFUSED, sentence))
    checks.extend(Check(name, Verdict.NOT_CHECKED, "SGLang cannot be asked, see above") for name in missing[1:])
    return checks


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _answers(model: str, flags: Sequence[str]) -> Iterator[Check]:
    yield _checked("surface", _surface)
    try:
        server_args = _parse(model, flags)
    except InputError as error:
        yield Check("flags", Verdict.REFUSED, str(error))
        # What the model's config depends on, as far as it can be told without SGLang.
        server_args = SimpleNamespace(
            model_path=model,
            trust_remote_code="--trust-remote-code" in flags,
            revision=None,
            json_model_override_args="{}",
            model_config_parser="auto",
        )
    else:
        yield from _listed("flags", _flag_problems(server_args), "none of those given is refused")
        if server_args.attention_backend is None:
            sentence = "--attention-backend is not given; SGLang chooses one at start, and it may be refused then"
            yield Check("flags", Verdict.NOT_CHECKED, sentence)
    yield from _model_that_sglang_reads(server_args)


def _surface() -> str:
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415

    # SGLang logs what goes wrong while plugins are loaded, and goes on.
    logged = logging.handlers.BufferingHandler(capacity=1000)
    logged.setLevel(logging.ERROR)
    logging.getLogger("sglang").addHandler(logged)
    load_plugins()
    try:
        check_hooks(HOOKED)
    except InputError as error:
        raise InputError("; ".join([str(error), *(record.getMessage() for record in logged.buffer)])) from None
    return f"{len(HOOKED)} functions of SGLang are hooked, and have the parameters expected"


def _parse(model: str, flags: Sequence[str]) -> Any:  # SGLang's ServerArgs
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return prepare_server_args(["--model-path", model, "--radix-cache-backend", BACKEND, *flags])
    except SystemExit:
        raise InputError(_last_line(said.getvalue()) or "with these flags sglang serve prints help and ends") from None
    except (ValueError, AssertionError, OSError) as error:
        raise InputError(f"SGLang refuses these flags: {_first_line(error)}") from None


def _flag_problems(server_args: Any) -> Iterator[str]:
    if server_args.radix_cache_backend != BACKEND:
        yield f"--radix-cache-backend {server_args.radix_cache_backend} leaves irminsul out; it must be {BACKEND}"
    yield from environment_problems(os.environ)
    yield from option_problems(server_args)


def _model_that_sglang_reads(server_args: Any) -> list[Check]:
    from sglang.srt.utils.hf_transformers import get_config  # noqa: PLC0415

    try:
        config = get_config(
            server_args.model_path,
            trust_remote_code=False,
            revision=server_args.revision,
            model_override_args=json.loads(server_args.json_model_override_args),
            model_config_parser=server_args.model_config_parser,
        )
    except (OSError, ValueError) as error:
        if server_args.trust_remote_code:
            sentence = "the config may need the checkpoint's own code, which is not run here"
            return [Check("model", Verdict.NOT_CHECKED, f"{sentence}: {_first_line(error)}")]
        path = Path(server_args.model_path)
        # Of a path that is not there, SGLang says that it is no name of a repository.
        why = "there is no such directory" if path.is_absolute() and not path.is_dir() else _first_line(error)
        return [Check("model", Verdict.REFUSED, f"SGLang cannot read the config of {path}: {why}")]
    return _model_checks(config)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _answer() -> None:
    """Write a JSON line a check; whatever SGLang prints goes to the standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for check in _answers(sys.argv[1], sys.argv[2:]):
            answers.write(json.dumps(asdict(check)) + "\n")
            answers.flush()


if __name__ == "__main__":
    _answer()

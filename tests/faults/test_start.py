"""What a server needs at its start and does not get: one sentence each."""

import logging
import shutil
import socket

import pytest
from fuzzing import irminsul
from numba.core.caching import FunctionCache

from irminsul.checkpoints import smollm2
from irminsul.checkpoints.build_directory import file_sha256
from irminsul.compiled import compiled

PLENTY = 100


def test_a_pool_without_memory(fault, tiny):
    told = irminsul("serve", tiny, "--pool-tokens", 10**12, "--page-size", 10**9, "--port", 0, seconds=PLENTY)
    assert told.sentence == (
        "a pool of 1000000000000 token rows takes 536,441.8 GiB of memory, which could not be had; take fewer"
    )
    fault("`irminsul serve` with a pool that no memory holds", f"exit status 1: {told.sentence}")


def test_a_port_in_use(fault, tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = irminsul("serve", tiny, "--pool-tokens", 256, "--port", port, seconds=PLENTY)
    assert f"cannot listen at 127.0.0.1:{port}: " in told.sentence
    assert "Address already in use" in told.sentence
    fault("`irminsul serve` at a port in use", f"exit status 1: {told.sentence}".replace(str(port), "PORT"))


@pytest.mark.parametrize("home", ["/dev/null", "/proc"])
def test_a_home_that_cannot_be_written(fault, tmp_path, monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("IRMINSUL_HOME", raising=False)
    told = irminsul("serve", seconds=PLENTY)
    assert told.sentence == "smollm2-mla has not been built; run: irminsul model build smollm2-mla"
    fault(f"`irminsul serve` with HOME={home}", f"exit status 1: {told.sentence}")
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "GGUF_SHA256", file_sha256(source))
    told = irminsul("model", "build", "--gguf", source, seconds=PLENTY)
    assert told.sentence.startswith(f"cannot write {home}/.cache/irminsul/smollm2-mla: ")
    fault(f"`irminsul model build` with HOME={home}", f"exit status 1: {told.sentence}")


@pytest.mark.parametrize("what", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_checkpoint_that_may_not_be_read(fault, tiny, tmp_path, what):
    """Root may read everything, so the file is a link to itself, which nobody can open."""
    folder = shutil.copytree(tiny, tmp_path / "m")
    (folder / what).unlink()
    (folder / what).symlink_to(what)
    told = irminsul("serve", folder, "--pool-tokens", 256, "--port", 0, seconds=PLENTY)
    assert told.status == 1
    assert str(folder) in told.sentence
    fault(f"`irminsul serve` on a checkpoint whose {what} cannot be opened", f"exit status 1: {told.sentence[:200]}")


def test_a_checkpoint_that_is_not_there(fault, tmp_path):
    told = irminsul("serve", tmp_path / "absent", seconds=PLENTY)
    assert f"'{tmp_path / 'absent'}' is neither a checkpoint directory nor a built-in model" in told.sentence
    fault("`irminsul serve` on a folder that is not there", f"exit status 1: {told.sentence}")


def test_no_place_for_compiled_code(fault, monkeypatch, caplog):
    """As in a read-only image without a home: numba finds no directory that it could write to, and raises."""
    monkeypatch.setattr(FunctionCache._impl_class, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        FunctionCache(test_no_place_for_compiled_code)
    with caplog.at_level(logging.WARNING):
        doubled = [compiled(lambda x: 2 * x), compiled(lambda x: 2 * x)][1]
    assert doubled(21) == 42
    (said,) = caplog.messages
    assert "NUMBA_CACHE_DIR" in said
    fault("any command where neither the package nor a home can be written", f"works, and warns once: {said}")

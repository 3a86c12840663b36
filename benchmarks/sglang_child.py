"""An SGLang engine in a process of its own, with an environment of its own, for benchmarks that compare two of them.

    with SglangEngine("stock", {"model_path": ...}, {"SGLANG_PLUGINS": "none"}) as stock:
        stock.wait()
        stock.generate(ids, max_new_tokens=1)

Run as a program it is that process: it connects back, starts the engine and answers calls.
"""

import asyncio
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_LIMIT_S = 420
ANSWER_LIMIT_S = 180
FLUSH_LIMIT_S = 60
OBSERVED = "SGLANG_CHILD_OBSERVED"
"""Names the file for what an observed scheduler writes."""
PROFILED = "SGLANG_CHILD_PROFILED"
"""Names the file for what a profiled scheduler writes."""


class SglangEngine:
    """A child process with an ``sglang.Engine``.

    Args:
        name: for messages and the log file.
        flags: arguments of ``sglang.Engine``.
        environment: variables set for the process.
        log_folder: where its output goes.
        observe: note the form of attention of every prefill, and let ``pool`` be asked; costs a file write a prefill.
        profile: time the parts of the scheduler, and let ``profile`` be asked.
    """

    def __init__(
        self,
        name: str,
        flags: dict[str, Any],
        environment: dict[str, str],
        log_folder: Path | None = None,
        *,
        observe: bool = False,
        profile: bool = False,
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        self.log = (log_folder or Path(self._folder.name)) / f"{name}.log"
        address = str(Path(self._folder.name) / "socket")
        asked = {name: str(Path(self._folder.name) / name) for name in (OBSERVED,) * observe + (PROFILED,) * profile}
        self._listener = Listener(address, "AF_UNIX")
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, address, json.dumps(flags)],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | environment | asked,
        )
        self._connection: Connection | None = None

    def wait(self) -> None:
        """Return when the engine answers; SystemExit with the end of its log if it does not start."""
        deadline = time.monotonic() + START_LIMIT_S
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]  # noqa: SLF001
        while self._connection is None:
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                self._check_alive(deadline)
        self._receive(deadline)

    def generate(self, token_ids: list[int] | list[list[int]], **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Generate for one prompt, or for several in one call.

        Returns:
            ``outputs``, SGLang's answers; ``seconds``, the wall time in the child; ``forwards``, of an observed engine:
            how often each form of attention was taken in a prefill.
        """
        answer: dict[str, Any] = self._call("generate", input_ids=token_ids, **arguments)
        return answer

    def generate_apart(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Send requests at once, each with arguments of its own; returns what ``generate`` does.

        Args:
            requests: arguments of ``sglang.Engine.async_generate``; ``abort_after_s`` aborts one after so many seconds.
        """
        answer: dict[str, Any] = self._call("generate_apart", requests=requests)
        return answer

    def flush(self) -> None:
        """Empty the prefix cache."""
        self._call("flush")

    def resolved(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return flags as SGLang resolved them."""
        answer: dict[str, Any] = self._call("resolved", names=names)
        return answer

    def pool(self) -> dict[str, int]:
        """Return what became of the slots of an observed engine: free, in the tree, locked there, and all."""
        answer: dict[str, int] = self._call("pool")
        return answer

    def profile(self) -> dict[str, Any]:
        """Return what a profiled scheduler did since it was last asked; see scheduler_profile.Profile.report."""
        answer: dict[str, Any] = self._call("profile")
        return answer

    def _call(self, name: str, **arguments: Any) -> Any:  # noqa: ANN401
        assert self._connection is not None
        with contextlib.suppress(ConnectionError):  # a process that has ended is reported with its log
            self._connection.send((name, arguments))
        return self._receive(time.monotonic() + ANSWER_LIMIT_S)

    def _receive(self, deadline: float) -> Any:  # noqa: ANN401
        assert self._connection is not None
        try:
            while not self._connection.poll(1.0):
                self._check_alive(deadline)
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.wait(60)
            self._check_alive(deadline)
            raise

    def _check_alive(self, deadline: float) -> None:
        if self._process.poll() is not None or time.monotonic() > deadline:
            self.close()
            lines = self.log.read_text(errors="replace").splitlines()
            sys.exit(f"{self.name} does not answer; the end of its log:\n" + "\n".join(lines[-60:]))

    def close(self) -> None:
        """End the process."""
        if self._connection is not None and self._process.poll() is None:
            with contextlib.suppress(ConnectionError):
                self._connection.send(None)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Server:
    """The other end: an engine, and a method for each call."""

    def __init__(self, flags: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self._observed = Path(os.environ[OBSERVED]) if OBSERVED in os.environ else None
        if self._observed is not None:
            Engine.run_scheduler_process_func = staticmethod(run_observed_scheduler)
        self._profiled = Path(os.environ[PROFILED]) if PROFILED in os.environ else None
        if self._profiled is not None:
            from scheduler_profile import run_profiled_scheduler

            Engine.run_scheduler_process_func = staticmethod(run_profiled_scheduler)
        self.engine = Engine(**flags)
        self._take_forwards()

    def generate(self, input_ids: Any, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Serve prompts in one call."""
        sampling = {"temperature": 0, "max_new_tokens": arguments.pop("max_new_tokens", 1)}
        for name in ("ignore_eos", "custom_params"):
            if name in arguments:
                sampling[name] = arguments.pop(name)
        with self._answering() as answer:
            outputs = self.engine.generate(input_ids=input_ids, sampling_params=sampling, **arguments)
            answer["outputs"] = outputs if isinstance(outputs, list) else [outputs]
        return answer

    def generate_apart(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serve requests that run beside each other."""

        async def serve_all() -> list[Any]:
            return await asyncio.gather(*(self._serve(at, **request) for at, request in enumerate(requests)))

        with self._answering() as answer:
            answer["outputs"] = self.engine.loop.run_until_complete(serve_all())
        return answer

    async def _serve(self, at: int, *, abort_after_s: float | None = None, **arguments: Any) -> Any:  # noqa: ANN401
        rid = f"apart-{time.monotonic_ns()}-{at}"
        if abort_after_s is not None:
            self.engine.loop.call_later(abort_after_s, self.engine.tokenizer_manager.abort_request, rid)
        return await self.engine.async_generate(rid=rid, **arguments)

    def flush(self) -> None:
        """Empty the cache; SGLang refuses while a request ends."""
        deadline = time.monotonic() + FLUSH_LIMIT_S
        while not self.engine.flush_cache().success:
            assert time.monotonic() < deadline, "the cache cannot be flushed: requests are pending"
            time.sleep(0.05)

    def resolved(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Read flags back."""
        flags = self.engine.get_server_info()
        return {name: flags[name] for name in names}

    def pool(self) -> dict[str, int]:
        """Ask the scheduler, which answers in a file."""
        assert self._observed is not None, "only an observed engine counts its slots"
        path = self._observed.with_suffix(".pool")
        self.engine.collective_rpc("write_pool", path=str(path))
        found: dict[str, int] = json.loads(path.read_text())
        return found

    def profile(self) -> dict[str, Any]:
        """Ask the scheduler, which answers in a file."""
        assert self._profiled is not None, "only a profiled engine knows its times"
        self.engine.collective_rpc("write_profile", path=str(self._profiled))
        found: dict[str, Any] = json.loads(self._profiled.read_text())
        return found

    @contextlib.contextmanager
    def _answering(self) -> Iterator[dict[str, Any]]:
        answer: dict[str, Any] = {}
        start = time.perf_counter()
        yield answer
        answer["seconds"] = time.perf_counter() - start
        answer["forwards"] = self._take_forwards()

    def _take_forwards(self) -> dict[str, int]:
        if self._observed is None or not self._observed.exists():
            return {}
        lines = self._observed.read_text().splitlines()
        self._observed.unlink()
        return dict(Counter(lines))


def run_observed_scheduler(*arguments: Any, **named: Any) -> None:  # noqa: ANN401
    """SGLang's scheduler process, observed: it writes a line for each prefill, and ``write_pool`` can be called."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.plugins import load_plugins

    load_plugins()  # so that what is wrapped here is what the plugins made of it
    forward, get_handler = ModelRunner.forward, AttentionBackendRegistry.get_handler
    form = ""

    @functools.wraps(forward)
    def observed_forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        nonlocal form
        # Only a prefill that is captured in a CUDA graph asks for no form of attention.
        form = "captured"
        split, mode = getattr(forward_batch, "irminsul", None), forward_batch.forward_mode
        mixed = ", with decodes" if mode.is_mixed() else ""
        result = forward(runner, forward_batch, *args, **kwargs)
        if mode.is_extend():
            with Path(os.environ[OBSERVED]).open("a") as file:
                file.write(f"{form}{', planned' if split is not None else ''}{mixed}\n")
        return result

    def observed_get_handler(_: Any, backend_name: str) -> Any:  # noqa: ANN401
        handler = get_handler(backend_name)

        def observed_handler(attention: Any, forward_batch: Any) -> Any:  # noqa: ANN401
            nonlocal form
            chosen = handler(attention, forward_batch)
            form = chosen.name
            return chosen

        return observed_handler

    ModelRunner.forward = observed_forward
    AttentionBackendRegistry.get_handler = classmethod(observed_get_handler)
    Scheduler.write_pool = write_pool
    run_scheduler_process(*arguments, **named)


def write_pool(scheduler: Any, path: str) -> None:  # noqa: ANN401  # SGLang's Scheduler
    """Write what became of all slots."""
    counts = {
        "slots": scheduler.max_total_num_tokens,
        "free": scheduler.token_to_kv_pool_allocator.available_size(),
        "in_tree": scheduler.tree_cache.evictable_size(),
        "locked": scheduler.tree_cache.protected_size(),
        "request_slots": scheduler.req_to_token_pool.size,
        "free_request_slots": len(scheduler.req_to_token_pool.free_slots),
    }
    Path(path).write_text(json.dumps(counts))


def serve(address: str, flags: dict[str, Any]) -> None:
    """Start an engine and answer calls until told to end."""
    connection = Client(address, "AF_UNIX")
    server = Server(flags)
    connection.send("ready")
    while (call := connection.recv()) is not None:
        name, arguments = call
        connection.send(getattr(server, name)(**arguments))
    server.engine.shutdown()


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))

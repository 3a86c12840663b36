"""An SGLang engine in a process of its own, with an environment of its own, for benchmarks that compare two of them.

    with SglangEngine("stock", {"model_path": ...}, plugins="") as stock: stock.generate(ids, max_new_tokens=1)

Run as a program it is that process: it connects back, starts the engine and answers calls.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_LIMIT_S = 420


class SglangEngine:
    """A child process with an ``sglang.Engine``.

    Args:
        name: for messages and the log file.
        flags: arguments of ``sglang.Engine``.
        environment: variables set for the process.
        log_folder: where its output goes.
    """

    def __init__(
        self, name: str, flags: dict[str, Any], environment: dict[str, str], log_folder: Path | None = None
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        self.log = (log_folder or Path(self._folder.name)) / f"{name}.log"
        address = str(Path(self._folder.name) / "socket")
        self._listener = Listener(address, "AF_UNIX")
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, address, json.dumps(flags)],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
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
        """Generate; returns SGLang's answer and ``seconds``, the wall time in the child."""
        assert self._connection is not None
        self._connection.send({"input_ids": token_ids, **arguments})
        answer: dict[str, Any] = self._receive(None)
        return answer

    def flush(self) -> None:
        """Empty the prefix cache."""
        self.generate([], flush=True)

    def _receive(self, deadline: float | None) -> Any:  # noqa: ANN401
        assert self._connection is not None
        try:
            while not self._connection.poll(1.0):
                self._check_alive(deadline)
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.wait(60)
            self._check_alive(deadline)
            raise

    def _check_alive(self, deadline: float | None) -> None:
        if self._process.poll() is not None or (deadline is not None and time.monotonic() > deadline):
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


def serve(address: str, flags: dict[str, Any]) -> None:
    """Start an engine and answer calls until told to end."""
    import sglang

    connection = Client(address, "AF_UNIX")
    engine = sglang.Engine(**flags)
    connection.send("ready")
    while (call := connection.recv()) is not None:
        if call.pop("flush", False):
            engine.flush_cache()
            connection.send({})
            continue
        sampling = {"temperature": 0, "max_new_tokens": call.pop("max_new_tokens", 1)}
        for name in ("ignore_eos", "custom_params"):
            if name in call:
                sampling[name] = call.pop(name)
        start = time.perf_counter()
        outputs = engine.generate(sampling_params=sampling, **call)
        seconds = time.perf_counter() - start
        connection.send({"seconds": seconds, "outputs": outputs if isinstance(outputs, list) else [outputs]})
    engine.shutdown()


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))

"""One thread owns the engine; coroutines talk to it through two queues.

Commands (submit, stop, abort) go to the thread and are carried out between two steps; the tokens of a step go back to
the event loop of whoever asked. A client that goes away is a cancelled iterator, and a cancelled iterator is an abort.
If the engine raises, its state can no longer be trusted: every request fails, and the runner stays unhealthy.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from irminsul.engine.types import Request, StepOutput
from irminsul.errors import InputError, IrminsulError, OverloadedError
from irminsul.plan import Mode

_logger = logging.getLogger(__name__)


class EngineFailedError(IrminsulError):
    """The engine raised, and nothing can be answered any more."""


class ShuttingDownError(IrminsulError):
    """The server is ending and takes or finishes no more requests."""


class EngineStats(Protocol):
    """Gauges and counters of an engine, each an integer."""

    @property
    def running(self) -> int:
        """Requests that hold slots."""

    @property
    def waiting(self) -> int:
        """Requests in the queue."""

    @property
    def pool_slots(self) -> int:
        """Rows the pool can hold."""

    @property
    def free_slots(self) -> int:
        """Slots that hold nothing."""

    @property
    def cached_slots(self) -> int:
        """Slots that only the cache holds."""

    @property
    def locked_slots(self) -> int:
        """Slots of the cache that running requests read."""

    @property
    def registry_entries(self) -> int:
        """Fingerprints that nominate donors."""

    @property
    def evicted_slots(self) -> int:
        """Slots taken from the cache so far."""


class Engine(Protocol):
    """What the server needs of an engine; synchronous, used by one thread."""

    @property
    def mode(self) -> Mode:
        """The server's mode."""

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt and output together that the engine admits, in tokens."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an output."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""

    def submit(self, request: Request) -> None:
        """Queue a request; InputError if it can never run, OverloadedError if the queue is full."""

    def abort(self, request_id: str) -> None:
        """Drop a request whose client went away; an unknown id is fine."""

    def stop(self, request_id: str) -> None:
        """End a running request as if it had finished by itself."""

    def step(self) -> list[StepOutput]:
        """Run one forward; return the new tokens."""

    def stats(self) -> EngineStats:
        """Count what is there now."""


class Generation(AsyncIterator[StepOutput]):
    """The outputs of one accepted request, in order; the last one has a finish reason.

    Iterating raises EngineFailedError or ShuttingDownError when no more can come. Whoever leaves before the end calls
    ``close``; cancelling the iteration does it by itself. ``EngineRunner.generate`` makes these.
    """

    def __init__(self, runner: "EngineRunner", request: Request) -> None:
        self.request = request
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        # None says that the engine took the request.
        self._inbox: asyncio.Queue[StepOutput | IrminsulError | None] = asyncio.Queue()
        self._ended = False

    async def __anext__(self) -> StepOutput:
        if self._ended:
            raise StopAsyncIteration
        output = await self._receive()
        assert output is not None, "accepted twice"
        self._ended = output.finish_reason is not None
        return output

    async def accepted(self) -> None:
        """Wait until the engine has taken the request; raise its InputError or OverloadedError if it did not."""
        first = await self._receive()
        assert first is None, first

    def stop(self) -> None:
        """End normally, here: what was computed is kept as after any finished request."""
        self._leave(self._runner.stop_request)

    def close(self) -> None:
        """Abort, unless the end was reached; safe to call again."""
        self._leave(self._runner.abort_request)

    def deliver(self, item: StepOutput | IrminsulError | None) -> None:
        """Hand over an item; called from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, item)
        except RuntimeError:  # the loop is closed, and whoever waited in it is gone
            self.close()

    async def _receive(self) -> StepOutput | None:
        try:
            item = await self._inbox.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(item, IrminsulError):
            self._ended = True
            raise item
        return item

    def _leave(self, tell_engine: Callable[[str], None]) -> None:
        if not self._ended:
            self._ended = True
            tell_engine(self.request.request_id)


class EngineRunner:
    """Runs an engine in a thread of its own; everything here but the thread's own methods is for the event loop.

    Args:
        engine: from ``start`` on, no one else may touch it.
    """

    def __init__(self, engine: Engine) -> None:
        self.mode = engine.mode
        self.max_prompt_tokens = engine.max_prompt_tokens
        self.eos_token_ids = engine.eos_token_ids
        self.stats = engine.stats()
        """As of the last step; reading it never waits for the engine."""
        self.failure: str | None = None
        """Why the engine cannot answer any more; None while it can."""
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._active: dict[str, Generation] = {}
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="irminsul-engine", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def close(self) -> None:
        """Abort what still runs and end the thread, after the step it is in; safe to call again."""
        if not self._closing:
            self._closing = True
            self._commands.put(self._end)
        if self._thread.is_alive():
            self._thread.join()

    async def generate(self, request: Request) -> Generation:
        """Submit a request.

        Returns:
            An asynchronous iterator of the outputs, once the engine has taken the request.

        Raises:
            InputError: the request can never run.
            OverloadedError: the queue is full.
            EngineFailedError: the engine has failed.
            ShuttingDownError: ``close`` has been called.
        """
        if self._closing:
            raise ShuttingDownError("the server is shutting down")
        generation = Generation(self, request)
        self._commands.put(partial(self._submit, generation))
        await generation.accepted()
        return generation

    def stop_request(self, request_id: str) -> None:
        """End a request normally at the next step."""
        self._commands.put(partial(self._forget, request_id, self._engine.stop))

    def abort_request(self, request_id: str) -> None:
        """Drop a request at the next step."""
        self._commands.put(partial(self._forget, request_id, self._engine.abort))

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while not self._ended:
                self._carry_out_commands()
                if self._engine.has_work:
                    self._hand_out(self._engine.step())
                self.stats = self._engine.stats()
        except Exception as error:  # the boundary of the thread: no request may wait for a thread that is dead
            _logger.exception("the engine failed")
            self._fail(f"the engine failed: {type(error).__name__}: {error}")
            while not self._ended:
                self._commands.get()()

    def _carry_out_commands(self) -> None:
        """Do all that is asked for; wait for a command if there is nothing else to do."""
        if not self._engine.has_work:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _hand_out(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            # Outputs of a request that was dropped while the step ran go nowhere.
            generation = self._active.get(output.request_id)
            if generation is None:
                continue
            if output.finish_reason is not None:
                del self._active[output.request_id]
            generation.deliver(output)

    def _submit(self, generation: Generation) -> None:
        if self.failure is not None:
            generation.deliver(EngineFailedError(self.failure))
            return
        try:
            self._engine.submit(generation.request)
        except (InputError, OverloadedError) as error:
            generation.deliver(error)
        else:
            self._active[generation.request.request_id] = generation
            generation.deliver(None)

    def _forget(self, request_id: str, tell_engine: Callable[[str], None]) -> None:
        # Not active: it ended by itself meanwhile, or was never taken.
        if self._active.pop(request_id, None) is not None:
            tell_engine(request_id)

    def _end(self) -> None:
        for request_id, generation in self._active.items():
            self._engine.abort(request_id)
            generation.deliver(ShuttingDownError("the server is shutting down"))
        self._active.clear()
        self._ended = True

    def _fail(self, failure: str) -> None:
        self.failure = failure
        for generation in self._active.values():
            generation.deliver(EngineFailedError(failure))
        self._active.clear()

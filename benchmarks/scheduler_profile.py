"""Where does a scheduler of SGLang spend its time? Exclusive times of the plugin's parts, inside the scheduler process.

Each part is timed at its own entry points and stopped where it calls SGLang's code, or another part: at any moment
exactly one part runs, so the times of all parts add up to the time of the loop. An iteration of the loop counts if it
launched a batch or processed one, and is one of prefill or decode. What times costs time, too: two reads of a clock for
each call of a part. So calls are counted, and the cost of one is measured when the process starts.
"""

import functools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST = "SGLang"
WAITING = "waiting for the GPU"
ADMISSION, SEARCH, PLAN, LOCK, MATCH, PUBLISH, INDEX, SPLIT, FORWARD, COUNTERS = (
    "admission, the rest",
    "search",
    "plan",
    "lock donors",
    "match",
    "publish",
    "index upkeep",
    "split and copy",
    "hooks of the forward",
    "counters",
)
PARTS = (ADMISSION, SEARCH, PLAN, LOCK, MATCH, PUBLISH, INDEX, SPLIT, FORWARD, COUNTERS)
"""Of the plugin. What waits for the GPU inside of one has a name of its own: the part's, and WAITING."""
PREFILL, DECODE = "prefill", "decode"
HOOKS = {
    "add_one_req": ADMISSION,
    "add_chunked_req": ADMISSION,
    "run_batch": INDEX,
    "process_batch_result": INDEX,
    "init_new": SPLIT,
    "forward": FORWARD,
    "from_forward_batch": FORWARD,
    "get_handler": FORWARD,
    "flash_attn_varlen_func": FORWARD,
    "is_request_level_customized_info_key": COUNTERS,
}
"""Parts of the plugin's hooks, by the name of what they hook; the others do not run in a scheduler."""


class Profile:
    """Times of the parts of one thread; see the module.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._part = HOST
        self._since = clock()
        self._times: defaultdict[str, float] = defaultdict(float)
        """Of the iteration that runs."""
        self._kind: str | None = None
        self._started = self._since
        self.cost_of_a_call_s = 0.0
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._changes = 0
        """From one part to another; a call of a part makes two."""
        self._iterations = {PREFILL: 0, DECODE: 0}
        self._seconds: dict[str, defaultdict[str, float]] = {kind: defaultdict(float) for kind in self._iterations}
        self._first_work: float | None = None
        self._last_first_token: float | None = None

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does what another does, as a part."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            outer = self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._enter(outer)

        return call

    def waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does what another does, told apart as waiting; threads beside the loop's pass by."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            outer = self._enter(WAITING if self._part == HOST else f"{self._part}, {WAITING}")
            try:
                return function(*args, **kwargs)
            finally:
                self._enter(outer)

        return call

    def hook(self, part: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook as a part; the function that it is wrapped around is SGLang's."""
        host = functools.cache(functools.partial(self.timed, HOST))

        @functools.wraps(hook)
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            outer = self._enter(part)
            try:
                return hook(host(original), *args, **kwargs)
            finally:
                self._enter(outer)

        return call

    def begin_iteration(self) -> None:
        """An iteration of the loop ends here, and the next begins."""
        self._enter(HOST)
        if self._kind is not None:
            self._iterations[self._kind] += 1
            seconds = self._seconds[self._kind]
            for part, time_s in self._times.items():
                seconds[part] += time_s
            if self._first_work is None:
                self._first_work = self._started
        self._times.clear()
        self._kind = None
        self._started = self._since

    def launched(self, *, prefill: bool) -> None:
        """The iteration that runs launches a batch."""
        self._kind = PREFILL if prefill else DECODE

    def processed(self, *, prefill: bool) -> None:
        """The iteration that runs has processed the result of a batch."""
        if self._kind is None:
            self.launched(prefill=prefill)
        if prefill:
            self._last_first_token = self._clock()

    def calibrate(self, calls: int = 20_000) -> None:
        """Measure what the measuring of a call costs."""

        def nothing() -> None:
            pass

        timed = self.timed(HOST, nothing)
        taken = []
        for function in (timed, nothing):
            start = self._clock()
            for _ in range(calls):
                function()
            taken.append(self._clock() - start)
        self.cost_of_a_call_s = (taken[0] - taken[1]) / calls
        self.clear()

    def report(self) -> dict[str, Any]:
        """Return what was measured since the last report.

        Returns:
            ``iterations`` and ``seconds``, by kind (and by part); ``calls`` of parts and ``cost_of_a_call_s``;
            ``first_tokens_s``, from the first iteration with work until the last prefill was processed.
        """
        first_tokens = None
        if self._first_work is not None and self._last_first_token is not None:
            first_tokens = self._last_first_token - self._first_work
        found = {
            "iterations": dict(self._iterations),
            "seconds": {kind: dict(seconds) for kind, seconds in self._seconds.items()},
            "calls": self._changes // 2,
            "cost_of_a_call_s": self.cost_of_a_call_s,
            "first_tokens_s": first_tokens,
        }
        self.clear()
        return found

    def _enter(self, part: str) -> str:
        now = self._clock()
        self._times[self._part] += now - self._since
        self._since = now
        self._changes += 1
        outer, self._part = self._part, part
        return outer


def run_profiled_scheduler(*arguments: Any, **named: Any) -> None:  # noqa: ANN401
    """SGLang's scheduler process with a profile; ``write_profile`` can be called."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    profile = Profile()
    if os.environ.get("SGLANG_PLUGINS") != "none":
        from irminsul.sglang import plugin

        for target, hook in plugin._hooks.items():  # noqa: SLF001
            name = target.rpartition(".")[2]
            if name in HOOKS:
                plugin._hooks[target] = profile.hook(HOOKS[name], hook)  # noqa: SLF001
    load_plugins()  # so that what is wrapped below is what the plugins made of it
    if os.environ.get("SGLANG_PLUGINS") != "none":
        wrap_plugin(profile)
    wrap_scheduler(profile)
    profile.calibrate()
    run_scheduler_process(*arguments, **named)


def wrap_plugin(profile: Profile) -> None:
    """Time the plugin's entry points, and what they call of SGLang's tree."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from irminsul.sglang.admission import Planner
    from irminsul.sglang.cache import IrminsulRadixCache
    from irminsul.sglang.donors import DonorIndex
    from irminsul.sglang.forward import Unsplit

    for owner, name, part in (
        (Planner, "_find", SEARCH),
        (Planner, "_plan", PLAN),
        (Planner, "_count", COUNTERS),
        (IrminsulRadixCache, "lock_donors", LOCK),
        (IrminsulRadixCache, "match_prefix", MATCH),
        (IrminsulRadixCache, "insert", PUBLISH),
        (IrminsulRadixCache, "checkpoint_into_tree", PUBLISH),
        (IrminsulRadixCache, "_apply_cache_action", INDEX),
        (DonorIndex, "settle", INDEX),
        (DonorIndex, "add", INDEX),
        (Unsplit, "choose", FORWARD),
        (UnifiedRadixCache, "match_prefix", HOST),
        (UnifiedRadixCache, "insert", HOST),
        (UnifiedRadixCache, "checkpoint_into_tree", HOST),
        (UnifiedRadixCache, "_apply_cache_action", HOST),
    ):
        setattr(owner, name, profile.timed(part, owner.__dict__[name]))


def wrap_scheduler(profile: Profile) -> None:
    """Tell the profile of iterations and batches, and let it be asked."""
    import torch
    from sglang.srt.managers.async_d2h_copy_worker import HostCopyDone
    from sglang.srt.managers.scheduler import Scheduler

    ingest, run, process = Scheduler.ingest_requests, Scheduler.run_batch, Scheduler.process_batch_result

    @functools.wraps(ingest)
    def begin_iteration(scheduler: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        profile.begin_iteration()
        return ingest(scheduler, *args, **kwargs)

    @functools.wraps(run)
    def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        profile.launched(prefill=batch.forward_mode.is_extend())
        return run(scheduler, batch, *args, **kwargs)

    @functools.wraps(process)
    def process_batch_result(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        prefill = batch.forward_mode.is_extend()
        result = process(scheduler, batch, *args, **kwargs)
        profile.processed(prefill=prefill)
        return result

    def write_profile(_: Any, path: str) -> None:  # noqa: ANN401
        Path(path).write_text(json.dumps(profile.report()))

    Scheduler.ingest_requests = begin_iteration
    Scheduler.run_batch = run_batch
    Scheduler.process_batch_result = process_batch_result
    Scheduler.write_profile = write_profile
    HostCopyDone.synchronize = profile.waiting(HostCopyDone.synchronize)
    torch.cuda.Event.synchronize = profile.waiting(torch.cuda.Event.synchronize)

import asyncio

import pytest
from fake_engine import FakeEngine
from server_fakes import wait_until

from irminsul.engine.types import FinishReason, Request, SamplingParams
from irminsul.errors import InputError, OverloadedError
from irminsul.server.runner import EngineFailedError, EngineRunner, ShuttingDownError

END = 0


@pytest.fixture
def counting():
    """An engine that answers with 1, 2, ..., 5 and the end."""
    return FakeEngine(lambda request: [1, 2, 3, 4, 5, END], eos=END)


def request(name, max_tokens=100):
    return Request(name, (7, 8, 9), SamplingParams(max_tokens=max_tokens))


async def drain(generation):
    return [output.token_id async for output in generation]


async def tokens(runner, name, **options):
    return await drain(await runner.generate(request(name, **options)))


def test_outputs_arrive_in_order_and_end(counting):
    with EngineRunner(counting) as runner:
        assert asyncio.run(tokens(runner, "a")) == [1, 2, 3, 4, 5, END]
        assert asyncio.run(tokens(runner, "b", max_tokens=2)) == [1, 2]
    assert counting.aborted == []


def test_requests_run_together(counting):
    async def several():
        counting.hold()
        generations = [await runner.generate(request(str(n))) for n in range(20)]
        counting.release()

        return await asyncio.gather(*map(drain, generations))

    with EngineRunner(counting) as runner:
        assert asyncio.run(several()) == [[1, 2, 3, 4, 5, END]] * 20


def test_refusals_reach_only_the_request_at_fault(counting):
    async def main():
        with pytest.raises(InputError, match="empty"):
            await runner.generate(Request("empty", ()))
        counting.max_waiting = 0
        with pytest.raises(OverloadedError):
            await runner.generate(request("one too many"))
        counting.max_waiting = 1
        assert await tokens(runner, "good") == [1, 2, 3, 4, 5, END]

    with EngineRunner(counting) as runner:
        asyncio.run(main())
        assert runner.failure is None


def test_cancelling_the_iteration_aborts():
    # Long enough that it cannot have ended by itself, however slow this thread is.
    counting = FakeEngine(lambda request: list(range(1, 1_000_000)), eos=END)

    async def main():
        generation = await runner.generate(request("a", max_tokens=1_000_000))
        assert (await anext(generation)).token_id == 1
        counting.hold()
        waiting = asyncio.create_task(drain(generation))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.to_thread(wait_until, lambda: counting.aborted == ["a"])

    with EngineRunner(counting) as runner:
        asyncio.run(main())
        counting.release()
        assert runner.stats.free_slots == 10_000


def test_cancelling_before_the_engine_has_answered_aborts(counting):
    async def main():
        first = await runner.generate(request("first"))
        counting.hold()
        submitting = asyncio.create_task(runner.generate(request("second")))
        await asyncio.sleep(0)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        counting.release()
        await asyncio.to_thread(wait_until, lambda: counting.aborted == ["second"])
        first.close()

    with EngineRunner(counting) as runner:
        asyncio.run(main())


def test_stop_ends_normally_and_close_after_it_does_nothing(counting):
    async def main():
        generation = await runner.generate(request("a"))
        await anext(generation)
        counting.hold()
        generation.stop()
        generation.close()
        assert [output async for output in generation] == []
        await asyncio.to_thread(wait_until, lambda: counting.stopped == ["a"])

    with EngineRunner(counting) as runner:
        asyncio.run(main())
    assert counting.aborted == []


def test_stopping_what_has_just_ended_does_not_reach_the_engine(counting):
    async def main():
        generation = await runner.generate(request("a", max_tokens=1))
        await asyncio.to_thread(wait_until, lambda: not counting.has_work)
        generation.stop()
        await tokens(runner, "b")

    with EngineRunner(counting) as runner:
        asyncio.run(main())
    assert counting.stopped == []


def test_an_engine_that_raises_fails_everyone_and_stays_failed(counting):
    async def main():
        generations = [await runner.generate(request(name)) for name in "ab"]
        counting.error = RuntimeError("rows are on fire")
        for generation in generations:
            with pytest.raises(EngineFailedError, match="RuntimeError: rows are on fire"):
                await drain(generation)
        counting.error = None
        with pytest.raises(EngineFailedError, match="on fire"):
            await runner.generate(request("c"))

    counting.step_seconds = 0.01
    with EngineRunner(counting) as runner:
        asyncio.run(main())
        assert runner.failure == "the engine failed: RuntimeError: rows are on fire"


def test_closing_aborts_what_runs_and_takes_no_more(counting):
    async def main():
        generation = await runner.generate(request("a"))
        counting.hold()
        await asyncio.to_thread(runner.close)
        with pytest.raises(ShuttingDownError):
            await drain(generation)
        with pytest.raises(ShuttingDownError):
            await runner.generate(request("b"))

    runner = EngineRunner(counting)
    runner.start()
    counting.step_seconds = 0.01
    asyncio.run(main())
    assert counting.aborted == ["a"]
    runner.close()


def test_the_last_output_has_the_reason(counting):
    async def reasons():
        return [output.finish_reason async for output in await runner.generate(request("a"))]

    with EngineRunner(counting) as runner:
        assert asyncio.run(reasons()) == [None] * 5 + [FinishReason.STOP]


def test_a_loop_that_ends_without_goodbye_is_an_abort(counting):
    async def leave():
        counting.hold()
        await runner.generate(request("a"))

    with EngineRunner(counting) as runner:
        asyncio.run(leave())
        counting.release()
        wait_until(lambda: counting.aborted == ["a"])
        assert asyncio.run(tokens(runner, "b")) == [1, 2, 3, 4, 5, END]
        assert runner.failure is None

"""Sleeps of an idle engine, with an engine process without a model, whose times are set."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from engine.api import EngineStopped, Request, Stop
from server.serving.engine_client import EngineClient, EngineState
from server.serving.idle_sleep import IdleSleep
from server.serving.metrics import ServerMetrics
from server.settings.settings import Serve
from tests.server.fake_engine import start_fake
from tests.server.scraped_metrics import samples_of
from tests.wrong import Call, calls_of, instead

CLIENT = "server.serving.engine_client"
PATIENCE_S = 20.0
IDLE_S = 0.05


class Sleeper:
    """A client of an engine process without a model, which sleeps after `IDLE_S`."""

    def __init__(self) -> None:
        self.client = EngineClient(Serve().engine_config(), 64)
        self.metrics = ServerMetrics("tiny", compat=False)
        self.metrics.watch_engine(lambda: self.client.engine_pid)
        self.client.on_ready = self.metrics.ready
        self.client.on_step = self.metrics.step

    async def become(self, state: EngineState) -> None:
        """Wait for a state."""
        async with asyncio.timeout(PATIENCE_S):
            while self.client.state is not state or self.client.facts is None:
                await asyncio.sleep(0.001)

    async def ask(self, name: str, length: int = 3, **more: Any) -> tuple[list[int], float]:
        """Return the tokens of an answer, and the time in the queue that it reports."""
        request = Request(request_id=name, prompt_token_ids=tuple(range(length)), **more)
        tokens: list[int] = []
        ends = 0
        async with asyncio.timeout(PATIENCE_S), self.client.submit([request]) as ticket:
            await ticket.grammars_ready()
            async for _, outcome, _ in ticket.parts():
                tokens += outcome.token_ids
                ends += outcome.finish_reason is not None
                queue_s = outcome.queue_s
        assert ends == 1
        return tokens, queue_s

    def values(self) -> dict[str, float]:
        """Every sample that is scraped now, by name and labels."""
        text = self.metrics.render(num_held=self.client.num_held).decode()
        return {f"{sample.name}{sorted(sample.labels.items())}": sample.value for sample in samples_of(text)}

    def value(self, name: str) -> float:
        """The sum of the samples of a metric."""
        return sum(value for key, value in self.values().items() if key.startswith(f"polydraft_{name}["))


@asynccontextmanager
async def sleeper() -> AsyncIterator[Sleeper]:
    """An engine that sleeps when it is idle; nothing of it is left after the block."""
    sleeping = Sleeper()
    client = sleeping.client
    client.connect(start_fake())
    await client.start()
    turns = asyncio.create_task(IdleSleep(client, sleeping.metrics, IDLE_S).run())
    try:
        yield sleeping
    finally:
        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)
        await client.close()
    assert client.num_open == 0
    assert not client.is_wanted.is_set()
    assert not turns.done() or turns.cancelled() or turns.exception() is None


def run(test: Coroutine[Any, Any, None], **next_process: Any) -> list[Call]:
    """Run a test in which later processes have these times; return their starts."""

    def start(_: Any) -> Any:
        return start_fake(**next_process)

    with instead(CLIENT, "start_process", start), calls_of(CLIENT, "start_process") as starts:
        asyncio.run(test)
    return starts


def test_a_request_that_comes_while_the_engine_falls_asleep_is_served() -> None:
    """It waits until the process has ended and another one is ready; it is answered once."""

    async def test() -> None:
        async with sleeper() as sleeping:
            await sleeping.become(EngineState.FALLING_ASLEEP)
            first = sleeping.client.engine_pid
            tokens, _ = await sleeping.ask("a", 5)
            assert tokens == [5]
            assert sleeping.client.engine_pid not in (0, first)

    assert len(run(test())) == 1


def test_requests_that_come_during_a_sleep_wake_the_engine_once() -> None:
    async def test() -> None:
        async with sleeper() as sleeping:
            await sleeping.become(EngineState.ASLEEP)
            assert sleeping.client.engine_pid == 0
            asked = [asyncio.create_task(sleeping.ask(str(number), number + 1)) for number in range(8)]
            await sleeping.become(EngineState.WAKING)
            assert sleeping.client.num_held == 8
            assert sleeping.value("num_requests_waiting") == 8
            late = await sleeping.ask("late", 20)
            answers = await asyncio.gather(*asked)
            assert [tokens for tokens, _ in [*answers, late]] == [[number + 1] for number in range(8)] + [[20]]
            assert sleeping.value("num_requests_waiting") == 0

    assert len(run(test(), load_s=0.3)) == 1


def test_waiting_for_the_engine_is_time_in_the_queue() -> None:
    """The time of the wake is in `queue_s`, and no longer in that of the next request."""

    async def test() -> None:
        async with sleeper() as sleeping:
            await sleeping.become(EngineState.ASLEEP)
            started_s = time.monotonic()
            _, queue_s = await sleeping.ask("a")
            _, next_queue_s = await sleeping.ask("b")
            assert 0.3 + 0.5 < queue_s < time.monotonic() - started_s + 0.5
            assert next_queue_s == 0.5

    run(test(), load_s=0.3)


def test_a_request_that_leaves_while_the_engine_wakes_leaves_no_trace() -> None:
    """It is never sent; the engine wakes, answers others and sleeps again."""

    async def test() -> None:
        async with sleeper() as sleeping:
            await sleeping.become(EngineState.ASLEEP)
            asked = asyncio.create_task(sleeping.ask("left", 100))
            await sleeping.become(EngineState.WAKING)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            assert sleeping.client.num_open == 0
            assert not sleeping.client.is_wanted.is_set()
            assert (await sleeping.ask("other", 2))[0] == [2]
            assert sleeping.value("prefix_cache_queries_total") == 2, "prompt tokens that have reached an engine"
            await sleeping.become(EngineState.ASLEEP)

    assert len(run(test(), load_s=0.3)) == 1


def test_abandoned_wake_is_cancelled() -> None:
    """A request that comes and leaves while the engine falls asleep."""

    async def test() -> None:
        async with sleeper() as sleeping:
            await sleeping.become(EngineState.FALLING_ASLEEP)
            asked = asyncio.create_task(sleeping.ask("left"))
            await asyncio.sleep(0)
            assert sleeping.client.num_open == 1
            asked.cancel()
            await sleeping.become(EngineState.ASLEEP)
            await asyncio.sleep(0.1)
            assert sleeping.client.state is EngineState.ASLEEP

    assert not run(test())


@pytest.mark.parametrize("failure", ["no such file: model.safetensors", ""])
def test_failed_wake_is_an_error_for_all_waiting_requests(failure: str) -> None:
    """If the model cannot be loaded, and if no process can be started."""

    async def test() -> None:
        async with sleeper() as sleeping:
            await sleeping.become(EngineState.ASLEEP)
            asked = [asyncio.create_task(sleeping.ask(str(number))) for number in range(3)]
            ends = await asyncio.gather(*asked, return_exceptions=True)
            for end in ends:
                assert isinstance(end, EngineStopped)
                assert "could not be loaded again" in str(end)
                assert "safetensors" not in str(end), "the cause is for the log"
            assert not sleeping.client.is_alive
            assert sleeping.client.failure is not None
            assert (failure or "no more processes") in sleeping.client.failure.message
            with pytest.raises(EngineStopped):
                await sleeping.ask("later")

    def refuse(_: Any) -> Any:
        raise OSError("no more processes")

    if failure:
        run(test(), failure=failure)
    else:
        with instead(CLIENT, "start_process", refuse):
            asyncio.run(test())


def test_no_count_goes_back_over_a_sleep() -> None:
    """Counts of an engine begin at 0 with each process; what is published only grows."""

    async def test() -> None:
        async with sleeper() as sleeping:
            await sleeping.become(EngineState.AWAKE)
            await sleeping.ask("a", 30)
            scrapes = [sleeping.values()]
            await sleeping.become(EngineState.ASLEEP)
            while sleeping.value("engine_sleeping") != 1:
                await asyncio.sleep(0.001)
            scrapes.append(sleeping.values())
            assert sleeping.value("engine_process_resident_memory_bytes") == 0
            await sleeping.ask("b", 4)
            scrapes.append(sleeping.values())
            assert sleeping.value("engine_sleeping") == 0
            assert sleeping.value("engine_sleeps_total") == sleeping.value("engine_wakes_total") == 1
            assert sleeping.value("engine_wake_seconds_total") > 0
            assert sleeping.value("prefix_cache_queries_total") == 34
            assert sleeping.value("engine_process_resident_memory_bytes") > 0
        for before, after in pairwise(scrapes):
            grown = [key for key in before if key.partition("[")[0].endswith(("_total", "_sum", "_count", "_bucket"))]
            assert "polydraft_engine_process_cpu_seconds_total[]" in grown
            for key in grown:
                assert after[key] >= before[key], key

    run(test())


@pytest.mark.sampled
@pytest.mark.parametrize("state", [EngineState.FALLING_ASLEEP, EngineState.ASLEEP, EngineState.WAKING])
def test_a_client_is_closed_at_once_in_every_state(state: EngineState) -> None:
    """No process and no open file is left."""

    async def test() -> None:
        files = set(os.listdir("/proc/self/fd"))
        async with sleeper() as sleeping:
            await sleeping.become(EngineState.FALLING_ASLEEP)
            if state is EngineState.ASLEEP:
                await sleeping.become(state)
            if state is EngineState.WAKING:
                asked = asyncio.create_task(sleeping.ask("a"))
                await sleeping.become(state)
                sleeping.client.end_all("the server is shutting down")
                with pytest.raises(EngineStopped, match="shutting down"):
                    await asked
        assert sleeping.client.exit_status is not None
        assert len(set(os.listdir("/proc/self/fd")) - files) <= 1

    with calls_of(EngineClient, "_send") as sent:
        run(test(), load_s=30)
    num_stops = sum(isinstance(call.operands[-1], Stop) for call in sent)
    assert num_stops <= (2 if state is EngineState.FALLING_ASLEEP else 1), "a loading engine would not read it"


@pytest.mark.slow
def test_sleeps_leave_no_open_files() -> None:
    """The second sleep has the number of open files of the first."""

    async def test() -> None:
        async with sleeper() as sleeping:
            counts = []
            for number in range(2):
                await sleeping.become(EngineState.ASLEEP)
                await asyncio.sleep(0.05)
                counts.append(len(os.listdir("/proc/self/fd")))
                await sleeping.ask(str(number))
            assert counts[0] == counts[1]

    run(test())

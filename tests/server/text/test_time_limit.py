"""Code in a pool's thread ends in time, and nothing behind it is ended in its place."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.api import RequestError
from server.text.time_limit import LimitedCall, TookTooLong, run_limited
from server.text.tokenizer import Tokenizer
from tests.grid import grid
from tests.server.tiny_models import TOKENIZER

ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{{ messages[0].content }}{% endfor %}{% endfor %}"


# A missing key makes jinja catch any `Exception` for a moment.
LOOKS_FOR_WHAT_IS_NOT_THERE = (
    "{% for a in range(100000) %}{% for b in range(100000) %}"
    "{{ messages[0]['no'] is defined }}{{ messages[0]['such'] is defined }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def spin(until: threading.Event) -> str:
    while not until.is_set():
        pass
    return "done"


def test_a_loop_ends_and_its_thread_goes_on(pool: ThreadPoolExecutor) -> None:
    never, at_once = threading.Event(), threading.Event()
    at_once.set()

    async def calls() -> str:
        with pytest.raises(TookTooLong):
            await run_limited(pool, 0.05, spin, never)
        return await run_limited(pool, 0.05, spin, at_once)

    assert asyncio.run(calls()) == "done"


def test_waiting_for_a_thread_does_not_count(pool: ThreadPoolExecutor) -> None:
    async def calls() -> list[str | None]:
        behind = run_limited(pool, 0.2, str, "in time")
        return await asyncio.gather(run_limited(pool, 60, time.sleep, 0.5), behind)

    assert asyncio.run(calls()) == [None, "in time"]


def test_a_cancelled_caller_ends_the_call(pool: ThreadPoolExecutor) -> None:
    async def calls() -> str:
        first = asyncio.create_task(run_limited(pool, 60, spin, threading.Event()))
        await asyncio.sleep(0.1)
        first.cancel()
        return await run_limited(pool, 60, str, "free again")

    assert asyncio.run(calls()) == "free again"


def test_a_call_that_was_ended_before_it_began_does_not_begin() -> None:
    call = LimitedCall(lambda: pytest.fail("it began"))
    call.end()
    with pytest.raises(TookTooLong):
        call()


class _Deaf:
    """Its finaliser takes a while, and what is raised in one is lost."""

    def __del__(self) -> None:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_call_ends_also_where_what_is_raised_is_lost(pool: ThreadPoolExecutor, is_cancelled: bool) -> None:
    """The wrong variant raises once, and the call never ends."""
    begun = threading.Event()

    def deaf() -> None:
        for _ in range(60):
            _Deaf()
            begun.set()
        while True:
            pass

    async def calls() -> str:
        call = asyncio.create_task(run_limited(pool, 60 if is_cancelled else 0.1, deaf))
        if is_cancelled:
            await asyncio.to_thread(begun.wait)
            call.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else TookTooLong):
            await call
        return await run_limited(pool, 60, str, "free again")

    assert asyncio.run(calls()) == "free again"


@pytest.mark.slow
def test_a_call_that_ends_as_its_time_does_hurts_nobody(pool: ThreadPoolExecutor) -> None:
    """Its own result or its own exception; what the thread does next is left alone."""

    def about(seconds: float) -> str:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return "done"

    async def calls() -> tuple[int, int]:
        late = 0
        for number in range(300):
            try:
                assert await run_limited(pool, 0.002, about, number % 15 / 1000) == "done"
            except TookTooLong:
                late += 1
            assert await asyncio.get_running_loop().run_in_executor(pool, sum, range(2000)) == 1999000
        return late, 300

    late, count = asyncio.run(calls())
    assert 0 < late < count, "the two were meant to meet"


TEMPLATES = [(ENDLESS, 3), (LOOKS_FOR_WHAT_IS_NOT_THERE, 60)]


@pytest.mark.parametrize(("template", "times"), grid(TEMPLATES, TEMPLATES[:1]))
def test_a_template_that_does_not_end_is_a_bad_request(template: str, times: int) -> None:
    """Wherever in the template's code the time is over."""
    tokenizer = Tokenizer(str(TOKENIZER), template, chat_limit_s=0.05)
    messages = [{"role": "user", "content": "hello"}]
    for _ in range(times):
        with pytest.raises(RequestError, match=r"took longer than 0\.05 s"):
            asyncio.run(tokenizer.run_chat(messages))
    assert asyncio.run(tokenizer.run(tokenizer.encode, "still there"))
    tokenizer.close()

"""Threads for texts: how many there are, and how they end. Costs are in `test_texts.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from server.text.lanes import LONG, Lanes, size_of_chat


@pytest.fixture
def free() -> Iterator[threading.Event]:
    """Work that waits for it ends with the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def names(prefix: str, others: set[threading.Thread]) -> list[str]:
    """Return threads of this name, without those that were there before."""
    return sorted(thread.name for thread in {*threading.enumerate()} - others if thread.name.startswith(prefix))


def test_lanes_have_threads_of_their_names(free: threading.Event) -> None:
    """Each is made when work comes, so work that waits shows how many there are."""
    others = {*threading.enumerate()}
    lanes = Lanes()
    assert not names("tokenizer", others)
    work = [one.submit(free.wait) for _ in range(4) for one in (lanes.short, lanes.long)]
    work += [lanes.answers.submit(free.wait) for _ in range(4)]
    assert names("tokenizer", others) == ["tokenizer-long_0", "tokenizer_0", "tokenizer_1"]
    assert names("answers", others) == ["answers_0"]
    free.set()
    assert all(one.result() for one in work)
    lanes.close()


def test_texts_go_to_the_lane_of_their_size() -> None:
    lanes = Lanes()
    assert lanes.of(LONG - 1) is lanes.short
    assert lanes.of(LONG) is lanes.long
    lanes.close()


def test_an_end_waits_for_nobody(free: threading.Event) -> None:
    """Running work continues without its caller; waiting work does not begin."""
    lanes = Lanes()
    work = {executor: [executor.submit(free.wait) for _ in range(3)] for executor in
            (lanes.short, lanes.long, lanes.answers)}  # fmt: skip
    closing = threading.Thread(target=lanes.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    for executor, waiting in work.items():
        assert waiting[-1].cancelled()
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(print)


def test_many_small_messages_do_not_delay_short_chats() -> None:
    """A text of many objects is rendered as slowly as a long one."""
    lanes = Lanes()
    assert lanes.of(size_of_chat(47_000, 1301)) is lanes.long
    assert lanes.of(size_of_chat(2_000, 10)) is lanes.short
    lanes.close()

"""Store and runner in this process, with known answers and a clock that is set."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.api import ConfigError, RequestError
from server.batches.database import Database, ListPage
from server.batches.endpoint import LINE_PRIORITY
from server.batches.lines import LineRequest
from server.batches.objects import BatchObject, LineResponse, OutputLine
from server.batches.runner import BatchRunner
from server.batches.store import BatchStore, NewBatch, StoreLimits
from server.wire.errors import StorageFault
from server.wire.fields import GenerationFields
from server.wire.ids import seed_of
from tests.server.batches.inputs import COMPLETIONS, line, short_lines
from tests.wrong import calls_of, instead

PATIENCE_S = 20
Reply = Callable[["Endpoint", LineRequest], Awaitable[int]]


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A ready engine; other clients have some requests open."""

    def __init__(self) -> None:
        self.num_urgent = 0
        self.endpoint: Endpoint | None = None

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def num_open(self) -> int:
        return self.num_urgent + (self.endpoint.num_running if self.endpoint else 0)

    def num_more_urgent(self, priority: int) -> int:
        return self.num_urgent


class Endpoint:
    """Answers each request with the status that a reply returns."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.num_running = 0
        self.most_running = 0
        self.prompts: list[str] = []
        self.line_ids: list[str] = []
        self.shapes: set[tuple[int, int]] = set()

    async def answer(self, request: LineRequest, client: str, line_id: str, shape: tuple[int, int]) -> LineResponse:
        self.line_ids.append(line_id)
        self.shapes.add(shape)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        prompt = json.loads(request.body)["prompt"]
        self.prompts.append(prompt)
        try:
            status = await self._reply(self, request)
        finally:
            self.num_running -= 1
        return LineResponse(status, "r", msgspec.Raw(msgspec.json.encode({"echo": prompt})))


async def at_once(endpoint: Endpoint, request: LineRequest) -> int:
    """Answer after a turn of the loop."""
    await asyncio.sleep(0)
    return 200


def new_batch(store: BatchStore, lines: list[str]) -> BatchObject:
    file = store.files.add("me", "lines.jsonl", io.BytesIO("\n".join(lines).encode()))
    return store.add_batch("me", NewBatch(file.id, COMPLETIONS, "24h"))


def output(store: BatchStore, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(text) for text in store.files.path_of(file_id).read_text().splitlines()]


def run(
    store: BatchStore, batch: BatchObject, reply: Reply, engine: Engine | None = None, num_seats: int = 4
) -> tuple[BatchObject, Endpoint]:
    """Run the open batches until one has ended."""

    async def until_ended() -> tuple[BatchObject, Endpoint]:
        endpoint = Endpoint(reply)
        load = engine or Engine()
        load.endpoint = endpoint
        runner = BatchRunner(store, endpoint, load, max(1, num_seats - 1), (1, 4))
        runner.repair_s = 0.01
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(PATIENCE_S):
            while (now := await store.database.do(store.get_batch, "me", batch.id)).status in (
                "validating",
                "in_progress",
            ):
                assert not running.done(), running
                await asyncio.sleep(0.005)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        return await store.database.do(store.get_batch, "me", now.id), endpoint

    return asyncio.run(until_ended())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Any:
    limits = StoreLimits(lines=30, files=3, open_batches=2)
    store = BatchStore(Database(tmp_path / "store", clock), limits)
    yield store
    store.database.close()


def test_lines_that_are_left_expire(store: BatchStore, clock: Clock) -> None:
    """The day ends during the fourth line; the rest is in the error file."""

    async def reply(endpoint: Endpoint, request: LineRequest) -> int:
        if len(endpoint.prompts) < 4:
            return 200
        clock.now += 24 * 3600
        await asyncio.Event().wait()
        raise AssertionError

    batch, endpoint = run(store, new_batch(store, [*short_lines(10), "{bad"]), reply)
    assert batch.status == "expired"
    assert batch.expired_at == clock.now == batch.finalizing_at
    assert (batch.completed_at, batch.cancelled_at) == (None, None)
    answered = [answer["custom_id"] for answer in output(store, batch.output_file_id)]
    assert answered == ["c-0", "c-1", "c-2"]
    bad, *expired = output(store, batch.error_file_id)
    assert bad["error"]["code"] == "invalid_json_line"
    assert [line["custom_id"] for line in expired] == [f"c-{number}" for number in range(3, 10)]
    assert {line["error"]["code"] for line in expired} == {"batch_expired"}
    assert all(line["response"] is None for line in expired)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (11, 3, 8)
    assert len(endpoint.prompts) < 10
    assert store.num_lines_left == 0


def test_a_line_waits_until_the_endpoint_is_not_busy(store: BatchStore) -> None:
    """429 and 503 are no answers; 504 is one."""
    statuses = {"word 0": [429, 503, 200], "word 1": [504], "word 2": [200]}

    async def reply(endpoint: Endpoint, request: LineRequest) -> int:
        return statuses[endpoint.prompts[-1]].pop(0)

    batch, endpoint = run(store, new_batch(store, short_lines(3)), reply)
    assert [answer["custom_id"] for answer in output(store, batch.output_file_id)] == ["c-0", "c-2"]
    (late,) = output(store, batch.error_file_id)
    assert (late["custom_id"], late["response"]["status_code"]) == ("c-1", 504)
    assert endpoint.prompts.count("word 0") == 3


def test_no_more_lines_run_at_once_than_there_is_room(store: BatchStore) -> None:
    async def together(endpoint: Endpoint, _: LineRequest) -> int:
        """Answer when two lines have run at once, and a third one had time to begin."""
        while endpoint.most_running < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        return 200

    engine = Engine()
    engine.num_urgent = 1
    _, endpoint = run(store, new_batch(store, short_lines(20)), together, engine)
    assert endpoint.most_running == 2, "three places, one of which another client has"


def test_each_attempt_of_a_line_has_its_name_and_shape(store: BatchStore, tmp_path: Path, clock: Clock) -> None:
    """After a busy endpoint, a fault of the server, and a start with another shape."""
    lines = [line(f"c-{number}", {"prompt": "equal"}) for number in range(3)]
    batch = new_batch(store, lines)
    statuses = [200, 503, 429]

    async def reply(endpoint: Endpoint, request: LineRequest) -> int:
        if not statuses:
            raise RuntimeError("a fault")
        return statuses.pop()

    async def interrupted() -> Endpoint:
        await store.database.do(store.validate, batch.id)
        endpoint = Endpoint(reply)
        runner = BatchRunner(store, endpoint, Engine(), 1, (0, 0))
        with pytest.raises(ExceptionGroup):
            await runner._run_lines(await store.database.do(store.get_batch, "me", batch.id))
        return endpoint

    endpoint = asyncio.run(interrupted())
    before, shapes = endpoint.line_ids, endpoint.shapes
    assert len(before) == 4, "the second line is interrupted"
    assert before[0] == before[1] == before[2] != before[3]
    store.database.close()
    again = BatchStore(Database(tmp_path / "store", clock))
    try:
        _, endpoint = run(again, batch, at_once)
    finally:
        again.database.close()
    assert endpoint.shapes == shapes == {(0, 0)}
    assert endpoint.line_ids[0] == before[3]
    assert len({*before, *endpoint.line_ids}) == 3
    assert len({seed_of(name) for name in {*before, *endpoint.line_ids}}) == 3


class LoadingEngine(Engine):
    """An engine that is ready from the fourth look on."""

    num_looks = 0

    @property
    def is_ready(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 3


def test_a_line_waits_until_the_engine_is_ready(store: BatchStore) -> None:
    engine = LoadingEngine()

    async def reply(endpoint: Endpoint, request: LineRequest) -> int:
        assert engine.num_looks == 4
        return 200

    batch, _ = run(store, new_batch(store, short_lines(1)), reply, engine)
    assert batch.request_counts.completed == 1


def test_the_outputs_of_a_batch_that_was_killed_while_they_were_written_are_written_again(
    store: BatchStore, tmp_path: Path, clock: Clock
) -> None:
    """A file without its row is removed at the next start, and no line is lost or twice."""
    batch = new_batch(store, short_lines(3))

    def killed(right: Any, *operands: Any) -> None:
        raise KeyboardInterrupt

    async def answer_all() -> None:
        await store.database.do(store.validate, batch.id)
        endpoint = Endpoint(at_once)
        runner = BatchRunner(store, endpoint, Engine(), 3, (1, 4))
        await runner._run_lines(await store.database.do(store.get_batch, "me", batch.id))

    asyncio.run(answer_all())
    with instead(store.files, "insert", killed), pytest.raises(KeyboardInterrupt):
        store.finish(batch.id)
    assert store.get_batch("me", batch.id).status == "finalizing"
    store.database.close()
    again = BatchStore(Database(tmp_path / "store", clock))
    try:
        assert len(list((tmp_path / "store" / "files").iterdir())) == 1, "the input"
        assert again.open_batches() == [batch.id]
        ended = again.finish(batch.id)
        assert ended.status == "completed"
        assert [answer["custom_id"] for answer in output(again, ended.output_file_id)] == ["c-0", "c-1", "c-2"]
    finally:
        again.database.close()


def test_a_line_is_recorded_once(store: BatchStore) -> None:
    batch = new_batch(store, short_lines(1))
    store.validate(batch.id)
    (line,) = store.lines_left(batch.id, 0, 9)
    for status in (200, 500):
        response = LineResponse(status, "r", msgspec.Raw(b"{}"))
        store.record(batch.id, line.number, OutputLine(line.line_id, line.custom_id, response))
    counts = store.get_batch("me", batch.id).request_counts
    assert (counts.completed, counts.failed, store.num_lines_left) == (1, 0, 0)


def test_a_batch_may_be_cancelled_before_its_lines_are_read(store: BatchStore) -> None:
    batch = new_batch(store, short_lines(3))
    store.cancel_batch("me", batch.id)
    batch, endpoint = run(store, batch, at_once)
    while batch.status == "cancelling":
        batch = store.finish(batch.id)
    assert (batch.status, batch.output_file_id, endpoint.prompts) == ("cancelled", None, [])


def fill(store: BatchStore, is_full: bool) -> None:
    """Let the database grow no more, as on a full disk, or let it grow again."""
    (num_pages,) = store.database.execute("PRAGMA page_count").fetchone()
    store.database.execute(f"PRAGMA max_page_count = {num_pages if is_full else 1 << 30}")


def test_full_disk_delays_answers_only(store: BatchStore) -> None:
    """No line is answered twice: the others run on while the first answer waits for its place."""
    batch = new_batch(store, short_lines(6))

    async def reply(endpoint: Endpoint, request: LineRequest) -> int:
        if len(endpoint.prompts) == 1:
            await store.database.do(fill, store, True)
        else:
            while len(writes) < 3:
                await asyncio.sleep(0.005)
            await store.database.do(fill, store, False)
        return 200

    async def long_answer(right: Any, *operands: Any) -> LineResponse:
        response: LineResponse = await right(*operands)
        return msgspec.structs.replace(response, body=msgspec.Raw(b'"%s"' % (b"x" * 9000)))

    with instead(Endpoint, "answer", long_answer), calls_of(BatchStore, "record") as writes:
        batch, endpoint = run(store, batch, reply)
    assert batch.status == "completed"
    assert sorted(endpoint.prompts) == [f"word {number}" for number in range(6)]
    assert len(writes) > 6


def test_a_full_disk_is_an_error_of_the_request(store: BatchStore) -> None:
    """The store works afterwards, and no content is left without a row."""
    batch = new_batch(store, short_lines(3))
    asyncio.run(store.database.do(store.validate, batch.id))
    big = io.BytesIO(b"x" * 100_000)
    num_contents = len(list(store.database.files_folder.iterdir()))

    def full(right: Any, *operands: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/path")

    def fails(*call: Any) -> None:
        with pytest.raises(StorageFault, match="the server's disk is full") as caught:
            asyncio.run(store.database.do(*call))
        assert caught.value.status == 507
        assert caught.value.headers["retry-after"]
        assert "/a/path" not in str(caught.value)
        assert len(list(store.database.files_folder.iterdir())) == num_contents

    with instead(shutil, "copyfileobj", full):
        fails(store.files.add, "me", "big", big)
    answered = OutputLine("id", "c-0", LineResponse(200, "r", msgspec.Raw(b'"%s"' % (b"x" * 9000))))
    store.record(batch.id, 1, answered)
    fill(store, True)
    fails(store.record, batch.id, 2, answered)
    name = "n" * 20_000
    fails(store.files.add, "me", name, io.BytesIO(b"small"))
    fails(store.add_batch, "me", NewBatch(batch.input_file_id, COMPLETIONS, "24h", {"k": name}))
    fill(store, False)
    with instead(store.files, "insert", full):
        fails(store.finish, batch.id)
    assert store.finish(batch.id).request_counts.completed == 1


def test_a_batch_goes_on_after_a_fault_of_the_server(store: BatchStore) -> None:
    failures = [RuntimeError("a fault")]

    async def reply(endpoint: Endpoint, request: LineRequest) -> int:
        if failures:
            raise failures.pop()
        return 200

    batch, _ = run(store, new_batch(store, short_lines(5)), reply)
    assert (batch.status, batch.request_counts.completed) == ("completed", 5)


def test_a_batch_runs_once(store: BatchStore) -> None:
    """Also if it is open at the start and begun by its client, too."""
    batch = new_batch(store, short_lines(5))
    endpoint = Endpoint(at_once)
    runner = BatchRunner(store, endpoint, Engine(), 3, (1, 4))

    async def run_both() -> None:
        runner.begin(batch.id)
        with suppress(TimeoutError):
            await asyncio.wait_for(runner.run(), 0.5)

    asyncio.run(run_both())
    assert sorted(endpoint.prompts) == [f"word {number}" for number in range(5)]


def test_limits_are_named(store: BatchStore) -> None:
    many = ended_batch(store, short_lines(31))
    assert many.errors is not None
    assert [(fault.code, fault.line) for fault in many.errors.data] == [("too_many_lines", 31)]
    assert "more than 30 lines; split it" in many.errors.data[0].message
    for _ in range(2):
        new_batch(store, short_lines(1))
    with pytest.raises(RequestError, match="3 files are stored, the most is 3; delete"):
        new_batch(store, short_lines(1))
    file_id = store.files.list(ListPage("files", "me", None, 1, "asc", "batch"))[0][0].id
    with pytest.raises(RequestError, match="2 batches are open, the most is 2; wait"):
        store.add_batch("me", NewBatch(file_id, COMPLETIONS, "24h"))


def ended_batch(store: BatchStore, lines: list[str]) -> BatchObject:
    """Return a batch after its validation."""
    return store.validate(new_batch(store, lines).id)


def test_a_folder_has_a_single_daemon(store: BatchStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another daemon uses it"):
        Database(tmp_path / "store")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Database(tmp_path / "file")


def test_lines_come_after_the_least_urgent_request() -> None:
    """Whatever priority a line asks for."""
    bounds = GenerationFields.model_fields["priority"].metadata
    lowest, highest = -(2**31), 2**31 - 1
    assert {bound.ge for bound in bounds if hasattr(bound, "ge")} == {lowest}
    assert LINE_PRIORITY + lowest > highest

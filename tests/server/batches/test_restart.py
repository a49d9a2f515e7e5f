"""A daemon that is killed in the middle of a batch goes on with it after a restart."""

from __future__ import annotations

import io
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Batch

from server.batches.database import Database
from server.batches.store import BatchStore, NewBatch
from tests.server.batches.inputs import COMPLETIONS, begin, ended, line, read, short_lines, wait_for
from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon, Daemons


@pytest.mark.slow
@pytest.mark.parametrize(("count", "number"), [(40, signal.SIGKILL), (40, signal.SIGTERM), (500, signal.SIGKILL)])
def test_each_line_is_in_the_output_once_after_a_signal(
    start_batch_daemon: Callable[[], Daemon], count: int, number: signal.Signals
) -> None:
    daemon = start_batch_daemon()
    with client_of(daemon) as client:
        batch = begin(client, [*short_lines(count, max_tokens=48), "{bad"])
        wait_for(client, batch, lambda now: now.request_counts and now.request_counts.completed >= count // 8)
        before = client.batches.retrieve(batch.id)
    daemon.process.send_signal(number)
    daemon.process.wait()
    assert before.status == "in_progress"
    with client_of(start_batch_daemon()) as client:
        after = client.batches.retrieve(batch.id)
        assert before.request_counts is not None
        assert after.request_counts is not None
        assert before.request_counts.completed <= after.request_counts.completed
        batch = ended(client, batch)
        answers = read(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"c-{index}" for index in range(count)]
        assert len({answer["id"] for answer in answers}) == count
        assert [fault["error"]["code"] for fault in read(client, batch.error_file_id)] == ["invalid_json_line"]
        assert batch.status == "completed"
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (count + 1, count, 1)


def has_completed(count: int, batch: Batch) -> bool:
    """Whether a number of lines have answers."""
    return batch.request_counts is not None and batch.request_counts.completed >= count


@pytest.mark.slow
def test_an_interrupted_line_has_the_answer_of_its_first_attempt(
    daemons: Daemons, pair_arguments: list[str], tmp_path: Path
) -> None:
    """One batch in copies of its folder: alone, next to clients, and killed.

    Clients take all seats again and again; a killed daemon starts with more seats.
    """
    body = {"prompt": "word", "max_tokens": 400, "temperature": 1}
    lines = [line(f"c-{number}", body) for number in range(24)]
    store = BatchStore(Database(tmp_path / "alone"))
    file = store.files.add("", "lines.jsonl", io.BytesIO("\n".join(lines).encode()))
    batch_id = store.add_batch("", NewBatch(file.id, COMPLETIONS, "24h")).id
    store.database.close()
    for name in ("loaded", "killed"):
        shutil.copytree(tmp_path / "alone", tmp_path / name)

    def start(name: str, seats: int = 4) -> Daemon:
        folder = ["--batch-folder", str(tmp_path / name), "--max-num-seqs", str(seats), "--enable-log-requests"]
        daemon = daemons.start(*pair_arguments, *folder, "--spec-shape", "adaptive")
        daemon.wait_ready()
        return daemon

    def answers(daemon: Daemon) -> dict[str, str]:
        with client_of(daemon) as client:
            batch = ended(client, client.batches.retrieve(batch_id))
            assert batch.request_counts is not None
            assert batch.request_counts.completed == len(lines)
            found = read(client, batch.output_file_id)
        daemon.terminate()
        assert daemon.exit_code() == 0
        return {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in found}

    alone = answers(start("alone"))
    assert len(set(alone.values())) == len(lines)
    loaded = start("loaded")
    with client_of(loaded) as client, ThreadPoolExecutor() as threads:
        while client.batches.retrieve(batch_id).status != "completed":
            calls = [threads.submit(client.completions.create, model=MODEL, prompt="x", max_tokens=8) for _ in range(4)]
            assert all(call.result().choices for call in calls)
        metrics = httpx.get(f"{loaded.url}/metrics").text
    assert "num_preemptions_total" in metrics
    assert not re.search(r"num_preemptions_total\S* 0.0\n", metrics), "no line was preempted"
    assert answers(loaded) == alone
    killed = start("killed")
    for count in (4, 8):
        with client_of(killed) as client:
            wait_for(client, client.batches.retrieve(batch_id), partial(has_completed, count))
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        killed = start("killed", 32)
    assert answers(killed) == alone


def client_of(daemon: Daemon) -> openai.OpenAI:
    """The official client, without retries."""
    return openai.OpenAI(base_url=f"{daemon.url}/v1", api_key=KEYS[0], max_retries=0)

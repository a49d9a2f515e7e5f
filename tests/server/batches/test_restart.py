"""A daemon that is killed in the middle of a batch goes on with it after a restart."""

from __future__ import annotations

import signal
from collections.abc import Callable

import openai
import pytest

from tests.server.batches.inputs import begin, ended, read, short_lines, wait_for
from tests.server.conftest import KEYS
from tests.server.daemon_process import Daemon


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_each_line_is_in_the_output_once_after_a_kill(start_batch_daemon: Callable[[], Daemon], count: int) -> None:
    daemon = start_batch_daemon()
    with client_of(daemon) as client:
        batch = begin(client, [*short_lines(count, max_tokens=48), "{bad"])
        wait_for(client, batch, lambda now: now.request_counts and now.request_counts.completed >= count // 8)
        before = client.batches.retrieve(batch.id)
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    assert before.status == "in_progress"
    with client_of(start_batch_daemon()) as client:
        after = client.batches.retrieve(batch.id)
        assert before.request_counts is not None
        assert after.request_counts is not None
        assert before.request_counts.completed <= after.request_counts.completed
        batch = ended(client, batch)
        answers = read(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"c-{number}" for number in range(count)]
        assert len({answer["id"] for answer in answers}) == count
        assert [fault["error"]["code"] for fault in read(client, batch.error_file_id)] == ["invalid_json_line"]
        assert batch.status == "completed"
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (count + 1, count, 1)


@pytest.mark.slow
def test_a_drained_daemon_leaves_its_batch_for_the_next_start(start_batch_daemon: Callable[[], Daemon]) -> None:
    daemon = start_batch_daemon()
    with client_of(daemon) as client:
        batch = begin(client, short_lines(40, max_tokens=48))
        wait_for(client, batch, lambda now: now.status == "in_progress")
    daemon.terminate()
    assert daemon.exit_code() == 0
    with client_of(start_batch_daemon()) as client:
        batch = ended(client, batch)
        answers = read(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [f"c-{number}" for number in range(40)]


def client_of(daemon: Daemon) -> openai.OpenAI:
    """The official client, without retries."""
    return openai.OpenAI(base_url=f"{daemon.url}/v1", api_key=KEYS[0], max_retries=0)

"""The official client's files and batches against a real daemon."""

from __future__ import annotations

import io
import json
import re
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.batches.lines import read_lines
from server.batches.objects import ENDPOINTS
from tests.server.batches.inputs import COMPLETIONS, begin, ended, line, read, short_lines, wait_for
from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, ROOT, Daemon
from tests.server.good_bodies import error_of

CHAT = "/v1/chat/completions"
SECRET = "an unmistakable secret"


@pytest.mark.sole("a batch")
def test_a_batch_is_answered_like_its_endpoint(client: openai.OpenAI, batch_daemon: Daemon) -> None:
    """Uploaded, begun, polled, and read with the client."""
    messages = [{"role": "user", "content": "A short story, please."}]
    bodies: dict[Any, dict[str, Any]] = {
        CHAT: {"messages": messages, "max_tokens": 8, "temperature": 0},
        COMPLETIONS: {"prompt": "once", "max_tokens": 8, "temperature": 0},
        "/v1/responses": {"input": "once", "max_output_tokens": 8, "temperature": 0},
    }
    with batch_daemon.client(KEYS[0]) as http:
        for endpoint, body in bodies.items():
            batch = begin(client, [line("a", body, endpoint)], endpoint, metadata={"purpose": "a test"})
            assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"purpose": "a test"})
            batch = ended(client, batch)
            assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
            (answer,) = read(client, batch.output_file_id)
            assert set(answer) == {"id", "custom_id", "response", "error"}
            assert (answer["custom_id"], answer["error"]) == ("a", None)
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["request_id"]
            direct = http.post(endpoint, json={"model": MODEL, **body}).json()
            assert text_of(answer["response"]["body"]) == text_of(direct) != ""
            assert set(answer["response"]["body"]) == set(direct)


def text_of(body: dict[str, Any]) -> str:
    """The text of an answer of any endpoint."""
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_batch_timestamps_are_ordered(client: openai.OpenAI) -> None:
    begun = int(time.time())
    batch = ended(client, begin(client, short_lines(3)))
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert None not in times
    assert [begun, *times] == sorted([begun, *times])  # type: ignore[type-var]
    assert batch.expires_at == batch.created_at + 24 * 3600
    assert [batch.failed_at, batch.expired_at, batch.cancelling_at, batch.cancelled_at] == [None] * 4
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (3, 3, 0)


def test_each_bad_line_is_in_the_error_file(client: openai.OpenAI) -> None:
    """The lines next to them are answered."""
    good = {"prompt": "x", "max_tokens": 1}
    lines = [
        line("good", good),
        "{not json",
        line("good", good),
        line("elsewhere", good, "/v1/embeddings"),
        line("other-endpoint", good, CHAT),
        line("got", good, method="GET"),
        line(7, good),
        '{"custom_id": "no-body", "method": "POST", "url": "/v1/completions"}',
        "",
        line("refused", {**good, "temperature": 9}),
        line("other-model", {**good, "model": "another"}),
        line("streams", {**good, "stream": True}),
        line("large", {**good, "prompt": "x" * 70_000}),
        line("last", good),
    ]
    batch = ended(client, begin(client, lines))
    assert batch.status == "completed"
    assert [answer["custom_id"] for answer in read(client, batch.output_file_id)] == ["good", "last"]
    faults = read(client, batch.error_file_id)
    assert len({fault["id"] for fault in faults}) == len(faults) == 11
    codes = [(fault["custom_id"], fault["error"]["code"]) for fault in faults if fault["error"]]
    assert codes == [
        (None, "invalid_json_line"),
        ("good", "duplicate_custom_id"),
        ("elsewhere", "invalid_url"),
        ("other-endpoint", "invalid_url"),
        ("got", "invalid_method"),
        (None, "invalid_custom_id"),
        ("no-body", "invalid_body"),
    ]
    messages = [fault["error"]["message"] for fault in faults if fault["error"]]
    assert messages[0].startswith("line 2: ")
    assert messages[3] == "line 5: url must be /v1/completions here, not '/v1/chat/completions'"
    refused = {fault["custom_id"]: fault["response"] for fault in faults if fault["response"]}
    assert {name: response["status_code"] for name, response in refused.items()} == {
        "refused": 400,
        "other-model": 404,
        "streams": 400,
        "large": 413,
    }
    assert refused["refused"]["body"]["error"]["param"] == "temperature"
    assert refused["streams"]["body"]["error"]["param"] == "stream"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (13, 2, 11)


def test_a_refused_line_has_the_body_of_the_endpoint(client: openai.OpenAI, batch_daemon: Daemon) -> None:
    body = {"prompt": "x", "max_tokens": 1, "temprature": 1}
    batch = ended(client, begin(client, [line("a", body)]))
    (fault,) = read(client, batch.error_file_id)
    with batch_daemon.client(KEYS[0]) as http:
        direct = http.post(COMPLETIONS, json={"model": MODEL, **body})
    assert fault["response"]["status_code"] == direct.status_code == 400
    assert fault["response"]["body"] == direct.json()


def test_a_file_without_lines_fails_as_a_whole(client: openai.OpenAI) -> None:
    batch = ended(client, begin(client, ["", "  ", ""]))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert [fault.code for fault in batch.errors.data or ()] == ["empty_file"]


def test_a_cancelled_batch_keeps_its_answers(client: openai.OpenAI) -> None:
    batch = begin(client, [*short_lines(2), *long_lines(60)])
    wait_for(client, batch, lambda now: now.request_counts and now.request_counts.completed >= 2)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    answered = [answer["custom_id"] for answer in read(client, batch.output_file_id)]
    assert {"c-0", "c-1"} <= set(answered)
    counts = batch.request_counts
    assert counts is not None
    assert counts.completed == len(answered) == len(set(answered)) < counts.total == 62
    assert batch.error_file_id is None
    with pytest.raises(openai.BadRequestError, match="'cancelled' cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_interactive_requests_are_not_queued_behind_lines(client: openai.OpenAI, batch_daemon: Daemon) -> None:
    """Lines take three of four seats, and give them up to requests at once."""
    batch = begin(client, long_lines(12))
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 300, "ignore_eos": True}
    statuses: list[int] = []
    with batch_daemon.client(KEYS[0]) as http:
        wait_until_running(http, 3)
        assert http.get("/load").json()["server_load"] == 3
        threads = [threading.Thread(target=answer, args=(batch_daemon, body, statuses)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    now = client.batches.retrieve(batch.id)
    assert statuses == [200] * 4
    assert now.status == "in_progress"
    assert now.request_counts is not None
    assert now.request_counts.completed == 0, "the requests took the seats of lines"
    client.batches.cancel(batch.id)
    ended(client, batch)


def long_lines(count: int) -> list[str]:
    """Lines whose answers take much longer than a look at the batch."""
    return [line(f"long-{number}", {"prompt": "x", "max_tokens": 900, "ignore_eos": True}) for number in range(count)]


def wait_until_running(http: httpx.Client, count: int) -> None:
    """Wait until the engine runs a number of requests."""
    deadline = time.monotonic() + 20
    while http.get("/load").json()["running"] != count:
        assert time.monotonic() < deadline, http.get("/load").json()
        time.sleep(0.01)


def answer(daemon: Daemon, body: dict[str, Any], statuses: list[int]) -> None:
    """Send a completion, and note the status of its answer."""
    with daemon.client(KEYS[0]) as http:
        statuses.append(http.post(COMPLETIONS, json=body).status_code)


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = f"{line('a', {'prompt': 'x'})}\n".encode()
    files = [client.files.create(file=(f"{name}.jsonl", content), purpose="batch") for name in "abc"]
    assert (files[0].bytes, files[0].filename, files[0].purpose, files[0].status) == (
        len(content),
        "a.jsonl",
        "batch",
        "processed",
    )
    ids = [file.id for file in files]
    first_page = client.files.list(limit=2, order="desc", purpose="batch")
    assert [file.id for file in first_page.data] == ids[:0:-1]
    assert first_page.has_more
    assert [file.id for file in client.files.list(order="asc", after=ids[0]).data][:2] == ids[1:]
    all_pages = [file.id for file in client.files.list(limit=1, purpose="batch")]
    assert all_pages[:3] == ids[::-1], "the client follows the pages"
    assert client.files.retrieve(ids[1]) == files[1]
    assert client.files.content(ids[1]).content == content
    assert client.files.delete(ids[1]).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="No file has the id") as missing:
            call(ids[1])
        assert missing.value.code == "file_not_found"
    with pytest.raises(openai.BadRequestError, match=r"after: .* is not in the list"):
        client.files.list(after=ids[1])


def test_batches_are_listed_newest_first(client: openai.OpenAI) -> None:
    batches = [ended(client, begin(client, short_lines(1))) for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [batches[2].id, batches[1].id]
    assert page.has_more
    after = client.batches.list(after=batches[1].id, limit=1)
    assert [batch.id for batch in after.data] == [batches[0].id]
    assert after.data[0] == batches[0]
    with pytest.raises(openai.NotFoundError, match="No batch has the id") as missing:
        client.batches.retrieve("batch_none")
    assert missing.value.code == "batch_not_found"


def test_the_input_of_an_open_batch_is_not_deleted(client: openai.OpenAI) -> None:
    batch = begin(client, long_lines(60))
    with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}}, "output_expires_after"),
    ],
)
def test_a_wrong_batch_is_refused_by_its_field(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    wanted: dict[str, Any] = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**(wanted | change))
    assert caught.value.param == param


def test_clients_see_the_objects_of_their_key_alone(client: openai.OpenAI, batch_daemon: Daemon) -> None:
    batch = ended(client, begin(client, short_lines(1)))
    with openai.OpenAI(base_url=f"{batch_daemon.url}/v1", api_key=KEYS[1], max_retries=0) as other:
        assert other.files.list().data == other.batches.list().data == []
        with pytest.raises(openai.NotFoundError):
            other.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.cancel(batch.id)
        assert batch.output_file_id is not None
        for call in (other.files.content, other.files.delete, other.files.retrieve):
            with pytest.raises(openai.NotFoundError):
                call(batch.output_file_id)
        with pytest.raises(openai.BadRequestError, match="No file has the id") as refused:
            other.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
        assert refused.value.code == "file_not_found"


def test_a_wrong_upload_is_refused(client: openai.OpenAI, batch_daemon: Daemon) -> None:
    with pytest.raises(openai.BadRequestError, match="only batch is served"):
        client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="the file is empty"):
        client.files.create(file=("a.jsonl", b""), purpose="batch")
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    with pytest.raises(openai.BadRequestError, match=r"expires_after.* is not supported"):
        client.files.create(file=("a.jsonl", b"{}"), purpose="batch", expires_after=expiry)
    for size in (1_060_000, 1_200_000):
        with pytest.raises(openai.APIStatusError, match="is larger than") as caught:
            client.files.create(file=("a.jsonl", b"x" * size), purpose="batch")
        assert caught.value.status_code == 413
    with batch_daemon.client(KEYS[0]) as http:
        assert error_of(http.post("/v1/files", json={}), 400)["param"] == "file"
        assert error_of(http.post("/v1/files", files={"file": b"x"}), 400)["param"] == "purpose"
        assert error_of(http.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), 400)
        assert error_of(http.post(COMPLETIONS, json={"prompt": "x" * 70_000}), 413)


def test_the_folder_is_private_and_the_log_has_no_text(
    client: openai.OpenAI, batch_daemon: Daemon, batch_folder: Path
) -> None:
    lines = [line("a", {"prompt": SECRET, "max_tokens": 1}), line("b", {"prompt": SECRET, "n": 0}), f"{{{SECRET}"]
    batch = ended(client, begin(client, lines))
    assert len(read(client, batch.error_file_id)) == 2
    for folder in (batch_folder, batch_folder / "files"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (batch_folder / "files").iterdir())
    assert batch.id in batch_daemon.log
    assert SECRET not in batch_daemon.log


def test_the_metrics_count_the_lines_that_are_left(client: openai.OpenAI, batch_daemon: Daemon) -> None:
    batch = begin(client, [*long_lines(60), "{bad"])
    wait_for(client, batch, lambda now: now.status == "in_progress")
    with batch_daemon.client(KEYS[0]) as http:
        assert 50 < lines_left(http) <= 60
        client.batches.cancel(batch.id)
        ended(client, batch)
        assert lines_left(http) == 0


def lines_left(http: httpx.Client) -> float:
    """The value of the gauge."""
    text = http.get("/metrics").text
    (value,) = [row.split()[-1] for row in text.splitlines() if row.startswith("polydraft_batch_lines_left{")]
    return float(value)


def test_the_description_has_the_routes(batch_daemon: Daemon) -> None:
    with batch_daemon.client(KEYS[0]) as http:
        paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"} <= set(paths)
    assert {"/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"} <= set(paths)
    body = paths["/v1/files"]["post"]["requestBody"]["content"]
    assert list(body) == ["multipart/form-data"], json.dumps(body)


@pytest.mark.slow
def test_the_program_of_the_page_runs(batch_daemon: Daemon) -> None:
    program, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/batches.md").read_text(), re.DOTALL)
    program = program.replace("http://localhost:8000", batch_daemon.url).replace('"none"', repr(KEYS[0]))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status, *answers = done.stdout.splitlines()
    assert status.startswith("completed BatchRequestCounts(completed=3, failed=0, total=3")
    assert [answer.partition(" ")[0] for answer in answers if answer.startswith("q-")] == ["q-0", "q-1", "q-2"]


def test_the_line_of_the_page_is_right() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/batches.md").read_text(), re.DOTALL)
    (read_line,) = read_lines(io.BytesIO(text.encode()), ENDPOINTS)
    assert (read_line.custom_id, read_line.error) == ("q-1", None)

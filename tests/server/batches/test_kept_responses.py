"""Responses that are kept: conversations by the last one's id, what a client sees, and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.api import RequestError
from server.batches.database import Database
from server.batches.kept_responses import KeptResponses
from server.openai.responses import ResponsesRequest
from server.wire.errors import ApiError
from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon
from tests.server.good_bodies import error_of

QUESTIONS = ("Hello.", "A story, please.", "And its end?")
ASKED: dict[str, Any] = {"model": MODEL, "max_output_tokens": 6, "temperature": 1, "extra_body": {"seed": 5}}
DAY_S = 24 * 3600


def test_three_turns_are_a_conversation(client: openai.OpenAI) -> None:
    """Their answers are those to the whole conversation; a stream is kept as a whole answer is."""
    first = client.responses.create(**ASKED, input=QUESTIONS[0])
    second = client.responses.create(**ASKED, input=QUESTIONS[1], previous_response_id=first.id)
    *_, last = client.responses.create(**ASKED, input=QUESTIONS[2], previous_response_id=second.id, stream=True)
    third = last.response
    turns: list[Any] = []
    for question, answer in zip(QUESTIONS, (first, second, third), strict=True):
        turns.append({"role": "user", "content": question})
        whole = client.responses.create(**ASKED, input=turns, store=False)
        assert whole.output_text == answer.output_text != ""
        assert whole.usage is not None
        assert answer.usage is not None
        assert whole.usage.input_tokens == answer.usage.input_tokens
        turns += [item.model_dump() for item in answer.output]
    kept = client.responses.retrieve(third.id)
    assert kept.output == third.output
    assert (kept.previous_response_id, kept.model_dump()["store"]) == (second.id, True)
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTIONS[2], previous_response_id=second.id)
    assert counted.input_tokens == whole.usage.input_tokens
    (item,) = client.responses.input_items.list(second.id)
    assert item.to_dict()["content"] == [{"type": "input_text", "text": QUESTIONS[1]}]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="No response has the id"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="send the conversation whole") as caught:
        client.responses.create(**ASKED, input="x", previous_response_id=third.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_key_sees_its_own_responses_alone(batch_daemon: Daemon, batch_http: httpx.Client) -> None:
    kept = batch_http.post("/v1/responses", json={"model": MODEL, "input": "x", "max_output_tokens": 1}).json()
    path = f"/v1/responses/{kept['id']}"
    with batch_daemon.client(KEYS[1]) as other:
        for method, place in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
            assert error_of(other.request(method, place), 404)["code"] == "response_not_found"
        asked = {"model": MODEL, "input": "y", "max_output_tokens": 1}
        refused = other.post("/v1/responses", json={**asked, "previous_response_id": kept["id"]})
        assert error_of(refused, 400)["code"] == "previous_response_not_found"
        reference = [{"type": "item_reference", "id": kept["output"][0]["id"]}]
        assert error_of(other.post("/v1/responses", json={**asked, "input": reference}), 400)["param"] == "input.0"
    assert batch_http.get(path).json()["output"] == kept["output"]


def test_a_response_is_not_kept_against_its_wish(batch_http: httpx.Client) -> None:
    asked = {"model": MODEL, "input": "x", "max_output_tokens": 1, "store": False}
    answer = batch_http.post("/v1/responses", json=asked).json()
    assert answer["store"] is False
    assert batch_http.get(f"/v1/responses/{answer['id']}").status_code == 404


def test_without_a_folder_nothing_is_kept(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "x", "max_output_tokens": 1, "store": True})
    assert answer.json()["store"] is False
    for method in ("GET", "DELETE"):
        error = error_of(http.request(method, f"/v1/responses/{answer.json()['id']}"), 404)
        assert "--batch-folder" in error["message"]


class Kept:
    """Kept responses of a client without a key, in a folder whose clock is set."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.now_s = 0.0
        self.database = Database(folder, lambda: self.now_s)
        self._kept = KeptResponses(self.database, lambda _: "", most_bytes, 10_000)

    def answer(self, name: str, given: Any, previous: str | None = None) -> tuple[list[Any], bool]:
        """Keep a response with this name; return (its whole input, whether it was kept)."""
        body = ResponsesRequest(input=given, previous_response_id=previous)
        output = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [], "status": "completed"}
        response = {"id": name, "output": [output], "store": True}

        async def keep() -> None:
            record = await self._kept.open(None, body)  # type: ignore[arg-type]
            assert record.save is not None
            await record.save(response)

        asyncio.run(keep())
        assert isinstance(body.input, list)
        return body.input, bool(response["store"])

    def names(self, names: str) -> str:
        """Return the names that are found."""
        found = ""
        for name in names:
            with contextlib.suppress(ApiError):
                found += json.loads(self._kept.get("", name))["id"]
        return found


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path / "folder", 2_000)
    yield kept
    kept.database.close()


def test_the_oldest_make_room_and_the_old_are_gone(kept: Kept) -> None:
    for name in "abc":
        kept.answer(name, "x" * 200)
        kept.now_s += 10 * DAY_S
    assert kept.names("abc") == "abc"
    kept.now_s += 1
    assert kept.names("abc") == "bc"
    kept.answer("d", "x" * 700)
    assert kept.names("abcd") == "cd"
    kept.answer("e", "x" * 1_500)
    assert kept.names("cde") == "e"
    assert not kept.answer("f", "x" * 2_000)[1]
    assert kept.names("ef") == "e"
    assert kept.database.execute("SELECT DISTINCT response FROM response_items").fetchall() == [("e",)]


def test_references_become_the_items(kept: Kept) -> None:
    """Clients send them if they know that the server has the items."""
    kept.answer("a", "hello")
    given = [{"role": "user", "content": "hello"}, {"type": "item_reference", "id": "msg_a"}]
    whole, _ = kept.answer("b", [*given, {"role": "user", "content": "more"}])
    assert [item.get("role") for item in whole] == ["user", "assistant", "user"]
    longer, _ = kept.answer("c", "last", previous="b")
    assert [item["id"] for item in longer[:3]][1] == "msg_a"
    assert len(longer) == 5
    with pytest.raises(RequestError, match="no item has this id"):
        kept.answer("d", [{"type": "item_reference", "id": "msg_x"}])


def test_a_conversation_is_bounded(kept: Kept) -> None:
    with pytest.raises(RequestError, match="begin a new one"):
        kept.answer("a", "x" * 10_001)

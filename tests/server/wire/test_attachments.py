"""One picture does not end a conversation: placeholders in all APIs, or an error that says how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.api import RequestError
from server.anthropic.messages import CountTokensRequest
from server.anthropic.messages import as_chat as of_messages
from server.text.attachments import replace_attachments
from server.wire.fields import ChatRequest
from tests.server.daemon_process import MODEL, Daemon
from tests.server.good_bodies import CHAT, MESSAGES, RESPONSES

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "See: "}
PLACEHOLDER = "[image left out: this model reads text only]"
CALL = {"id": "call00001", "type": "function", "function": {"name": "read", "arguments": "{}"}}
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
# A question with an image, its answer, a call with an image as its result, and the next question.
HISTORIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "user", "content": [TEXT, IMAGE]},
            {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": [IMAGE]},
            {"role": "user", "content": "And?"},
        ],
        "max_tokens": 2,
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "See: "}, {"type": "input_image"}]},
            {"role": "assistant", "content": "Yes."},
            {"type": "function_call", "call_id": "call00001", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call00001", "output": [{"type": "input_image"}]},
            {"role": "user", "content": "And?"},
        ],
        "max_output_tokens": 2,
    },
    MESSAGES: {
        "messages": [
            {"role": "user", "content": [TEXT, ANTHROPIC_IMAGE]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Yes."},
                    {"type": "tool_use", "id": "call00001", "name": "read", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call00001", "content": [ANTHROPIC_IMAGE]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "max_tokens": 2,
    },
    "/api/chat": {
        "messages": [
            {"role": "user", "content": "See: ", "images": ["AAAA"]},
            {"role": "assistant", "content": "Yes.", "tool_calls": [{"function": {"name": "read", "arguments": {}}}]},
            {"role": "tool", "tool_name": "read", "content": "", "images": ["AAAA"]},
            {"role": "user", "content": "And?"},
        ],
        "options": {"num_predict": 2},
        "stream": False,
    },
}


@pytest.fixture(scope="module")
def client(tool_daemon: Daemon) -> Iterator[httpx.Client]:
    with tool_daemon.client() as client:
        yield client


def num_prompt_tokens(answer: dict[str, Any]) -> int:
    """Tokens of an answer's prompt, in any API."""
    usage = answer.get("usage", answer)
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "prompt_eval_count")
    return sum(usage.get(name, 0) for name in names)


@pytest.mark.parametrize("path", HISTORIES)
def test_a_history_with_images_is_answered_if_the_request_says_so(client: httpx.Client, path: str) -> None:
    """The prompt is that of a chat with placeholders, and a header names what was left out."""
    body = {"model": MODEL, **HISTORIES[path]}
    refused = client.post(path, json=body)
    assert refused.status_code == 400
    assert all(way in refused.text for way in ("attachment_placeholders: true", "--attachment-placeholders"))
    answer = client.post(path, json={**body, "attachment_placeholders": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-polydraft-ignored-fields"] == "messages.image"
    seen, called, result, question = HISTORIES[CHAT]["messages"]
    texts = [{**seen, "content": f"See: {PLACEHOLDER}"}, called, {**result, "content": PLACEHOLDER}, question]
    expected = client.post(CHAT, json={"model": MODEL, "messages": texts, "max_tokens": 1})
    assert num_prompt_tokens(answer.json()) == num_prompt_tokens(expected.json())
    if path == CHAT:
        conversation = {"model": MODEL, "messages": body["messages"], "attachment_placeholders": True}
        counted = client.post("/tokenize", json=conversation)
        assert counted.json()["count"] == num_prompt_tokens(expected.json())


def test_what_is_asked_about_is_never_replaced(client: httpx.Client) -> None:
    turns = [*HISTORIES[CHAT]["messages"][:3], {"role": "user", "content": [TEXT, IMAGE]}]
    body = {"model": MODEL, "messages": turns, "attachment_placeholders": True}
    refused = client.post(CHAT, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "messages: parts of type 'image_url' are not supported; send text"


@pytest.mark.parametrize(("kind", "word"), [("input_audio", "audio"), ("file", "file"), ("video_url", "video")])
def test_other_attachments_have_placeholders_too(kind: str, word: str) -> None:
    turns = [{"role": "user", "content": [{"type": kind}]}, {"role": "assistant", "content": "Yes."}]
    chat = ChatRequest.model_validate({"messages": turns})
    with pytest.raises(RequestError, match=f"parts of type '{kind}'"):
        replace_attachments(chat.messages, False)
    assert replace_attachments(chat.messages, True) == [word]
    (part,) = chat.messages[0].content or ()
    assert part.text == f"[{word} left out: this model reads text only]"  # type: ignore[union-attr]


def test_documents_and_search_results_of_anthropic_are_text() -> None:
    """In a turn of the user and in a result; files are attachments."""
    text = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    inner = {"type": "content", "content": [{"type": "text", "text": "It "}, {"type": "text", "text": "snows."}]}
    blocks = [
        {"type": "document", "title": "Weather", "context": "Paris", "source": text, "citations": {"enabled": True}},
        {"type": "document", "source": inner},
        {"type": "search_result", "title": "News", "source": "https://x.org", "content": [TEXT]},
        {"type": "text", "text": "And?"},
    ]
    shown = "Weather\nParis\nIt rains.\nIt snows.\nNews\nhttps://x.org\nSee: \nAnd?"
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    for content in (blocks, [result]):
        body = CountTokensRequest.model_validate({"messages": [{"role": "user", "content": content}]})
        assert of_messages(body).messages[0].content == shown
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    turns = [{"role": "user", "content": [pdf]}, {"role": "assistant", "content": "Yes."}]
    chat = of_messages(CountTokensRequest.model_validate({"messages": turns}))
    assert replace_attachments(chat.messages, True) == ["file"]

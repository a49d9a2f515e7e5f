"""Streamed conversation of `polydraft chat` with a running daemon, without a terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from server.chat.origin import Origins, Run

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_POLL_S = 0.5


class ChatError(Exception):
    """Error of a daemon that does not answer or refuses; the message has advice."""


class AnswerPart(NamedTuple):
    """Part of an answer."""

    text: str
    origin: str
    """Origin: `server.chat.origin.ACCEPTED`, OWN or UNKNOWN."""
    is_thought: bool


@dataclass
class Conversation:
    """Messages of a conversation, and the settings of its requests."""

    client: httpx.Client
    model: str
    system: str = ""
    speculates: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of requests: temperature, seed, max_tokens."""
    messages: list[dict[str, str]] = field(default_factory=list)
    metrics: dict[str, Any] | None = None
    """Figures of the last answer."""
    cut: str = ""
    """Bound that has cut the last answer, with advice; "" if none has."""

    def ask(self, text: str) -> Generator[AnswerPart, None, None]:
        """Send a message and yield the answer while it arrives.

        The received part stays in the conversation, also if the caller ends early. Raises
        ChatError.
        """
        self.messages.append({"role": "user", "content": text})
        answer, is_cut, self.cut = _Answer(), False, ""
        try:
            for chunk in self._chunks():
                yield from answer.add(chunk)
                self.metrics = chunk.get("metrics") or self.metrics
                is_cut = is_cut or any(choice.get("finish_reason") == "length" for choice in chunk["choices"])
            self.cut = self._cut_by() if is_cut else ""
            yield from answer.rest()
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()

    def _cut_by(self) -> str:
        if "max_tokens" in (self.metrics or {}) or "max_tokens" not in self.options:
            return "the context is full; /new begins a new conversation"
        return f"cut after {self.options['max_tokens']} tokens; /set max_tokens N sets another bound"

    def clear(self) -> None:
        """Begin a new conversation."""
        self.messages.clear()
        self.metrics = None

    def save(self, path: Path) -> None:
        """Write system prompt, settings and messages as JSON; raises ChatError."""
        saved = {"system": self.system, "options": self.options, "messages": self.messages}
        try:
            path.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ChatError(f"{path}: cannot be written ({error.strerror})") from error

    def load(self, path: Path) -> None:
        """Go on with a saved conversation; raises ChatError and leaves this one if it is none."""
        try:
            saved = json.loads(path.read_text())
            messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in saved["messages"]]
            system, options = str(saved["system"]), dict(saved["options"])
        except OSError as error:
            raise ChatError(f"{path}: cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError(f"{path}: not a conversation that /save has written") from error
        self.clear()
        self.messages, self.system, self.options = messages, system, options

    def body(self) -> dict[str, Any]:
        """Return the body of the next request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *self.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "metrics": True,
            "speculation": {"enabled": self.speculates, "return_drafts": True},
            **self.options,
        }

    def _chunks(self) -> Iterator[dict[str, Any]]:
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=self.body()) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_message(response))
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise ChatError(chunk["error"]["message"])
                        yield chunk
        except httpx.HTTPError as error:
            raise ChatError(f"the daemon does not answer any more ({error})") from error
        raise ChatError("the connection ended before the answer did")


class _Answer:
    """Text and origins of one answer."""

    def __init__(self) -> None:
        self.text = ""
        self._origins = Origins()
        self._num_thought = 0
        """Number of characters of thoughts that have not been returned yet; they precede the
        text.
        """

    def add(self, chunk: dict[str, Any]) -> Iterator[AnswerPart]:
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            self._num_thought += len(thought)
            self.text += text
            yield from self._split(self._origins.add(thought + text, choice.get("drafts") or []))

    def rest(self) -> Iterator[AnswerPart]:
        yield from self._split(self._origins.rest())

    def _split(self, runs: list[Run]) -> Iterator[AnswerPart]:
        for text, origin in runs:
            thought, said = text[: self._num_thought], text[self._num_thought :]
            self._num_thought -= len(thought)
            for is_thought, part in ((True, thought), (False, said)):
                if part:
                    yield AnswerPart(part, origin, is_thought)


def key_headers() -> dict[str, str]:
    """Return the header with the (first) API key of `POLYDRAFT_API_KEY`, if it is set."""
    key = os.environ.get("POLYDRAFT_API_KEY", "").split(",")[0].strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def client_of(url: str) -> httpx.Client:
    """Return a client of an address, with the key of POLYDRAFT_API_KEY; raises ChatError."""
    try:
        client = httpx.Client(base_url=url, headers=key_headers(), timeout=_TIMEOUT)
    except httpx.InvalidURL as error:
        raise ChatError(f"--url {url}: no address ({error}); it looks like http://localhost:8000") from error
    if client.base_url.scheme not in ("http", "https") or not client.base_url.host:
        raise ChatError(f"--url {url}: no address; it looks like http://localhost:8000")
    return client


def served_model(client: httpx.Client, wanted: str | None, waiting: Callable[[], None]) -> str:
    """Return the name of the model, once it is loaded; raises ChatError.

    waiting: called once if the model is still loading.
    """
    try:
        if (response := client.get("/v1/models")).status_code == 503:
            waiting()
        while response.status_code == 503:
            time.sleep(_POLL_S)
            response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatError(f"no daemon answers at {client.base_url} ({error}); start one: polydraft serve") from error
    if response.status_code == 401:
        raise ChatError("the daemon needs an API key; set POLYDRAFT_API_KEY in the environment")
    if response.status_code != 200:
        raise ChatError(_message(response))
    served = [one["id"] for one in response.json()["data"]]
    if wanted is not None and wanted not in served:
        raise ChatError(f"--model {wanted}: the daemon serves {', '.join(served)}")
    return wanted or str(served[0])


def _message(response: httpx.Response) -> str:
    """Return the message of an error answer."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the daemon answered with status {response.status_code}"

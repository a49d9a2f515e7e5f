"""Reads server-sent events strictly: nothing but data frames and comments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

DONE = "[DONE]"


class EventStream(Iterator[dict[str, Any]]):
    """The chunks of a stream as they arrive, and what it has sent so far."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.comments: list[str] = []
        self.chunks: list[dict[str, Any]] = []
        self.is_done = False
        # Kept, because the connection is closed with it.
        self._arriving = self._frames()

    def __next__(self) -> dict[str, Any]:
        """Wait for a chunk; `[DONE]` is none, and nothing may follow it."""
        for frame in self._arriving:
            assert not self.is_done, f"{frame!r} after {DONE}"
            if frame.startswith(":"):
                self.comments.append(frame)
                continue
            assert frame.startswith("data: "), frame
            assert "\n" not in frame
            data = frame.removeprefix("data: ")
            if data == DONE:
                self.is_done = True
            else:
                self.chunks.append(json.loads(data))
                return self.chunks[-1]
        raise StopIteration

    def wait_for_comment(self) -> None:
        """Read one frame, which must be a comment."""
        self.comments.append(next(self._arriving))
        assert self.comments[-1].startswith(": "), self.comments[-1]

    def read(self) -> list[dict[str, Any]]:
        """Read to the end; all chunks."""
        for _ in self:
            pass
        return self.chunks

    def _frames(self) -> Iterator[str]:
        rest = ""
        for text in self.response.iter_text():
            *frames, rest = (rest + text).split("\n\n")
            yield from frames
        assert not rest, f"the stream ends within a frame: {rest!r}"


@contextmanager
def open_stream(client: httpx.Client, path: str, **body: Any) -> Iterator[EventStream]:
    """Start a streaming call; leaving the block closes the connection."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield EventStream(response)


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Joined text by choice, of chat or completion chunks."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            joined[choice["index"]] = joined.get(choice["index"], "") + text
    return joined

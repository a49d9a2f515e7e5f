"""Sends a generation in the format of any API: whole, or as a stream of events.

A disconnect ends the generation: a stream ends with its response, a whole answer is raced against
the disconnect. A stream begins only after admission, so earlier errors are ordinary JSON errors.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.api import PolydraftError
from server.serving.engine_client import EngineClient
from server.serving.generation import Delta, Generation
from server.serving.observer import Observer
from server.text.tokenizer import Tokenizer
from server.wire.answers import Metrics
from server.wire.errors import ErrorEnvelope, to_api_error

log = logging.getLogger("polydraft")

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_KEEP_ALIVE = b": keep-alive\n\n"
_LARGE = 2048
"""Logprobs and token ids from which a thread encodes an answer: milliseconds of work."""
_PIECE = 1 << 18
"""Maximum number of bytes that are sent at once."""

encode = msgspec.json.Encoder().encode

Event = dict[str, Any] | msgspec.Struct
"""Data of an event of a stream; in server-sent events a dictionary's `type` is its name."""


class AnswerWriter(ABC):
    """Writes one generation in the format of an API: as events, or whole at its end."""

    media_type: ClassVar[str] = "text/event-stream"
    last_frame: ClassVar[bytes] = b""
    """Frame that ends every stream, also after an error."""

    def frame(self, event: Event) -> bytes:
        """Return the bytes of an event."""
        data = b"data: " + encode(event) + b"\n\n"
        if isinstance(event, dict):
            name: str = event["type"]
            return b"event: " + name.encode() + b"\n" + data
        return data

    def silence(self) -> bytes:
        """Return bytes without content, which are sent after a time without tokens."""
        return _KEEP_ALIVE

    def frames(self, events: Sequence[Event]) -> bytes:
        """Return the bytes of events."""
        return b"".join(map(self.frame, events))

    def begin(self) -> Sequence[Event]:
        """Return the events before the first token."""
        return ()

    @abstractmethod
    def take(self, delta: Delta) -> Sequence[Event]:
        """Return the events of a step."""

    async def finish(self) -> None:
        """Do what must be done between the last token and `end` or `whole`."""
        return

    def end(self) -> Sequence[Event]:
        """Return the events after the last token."""
        return ()

    def fail(self, error: Exception) -> Sequence[Event]:
        """Return the events of an error in a stream that has begun."""
        return [ErrorEnvelope(to_api_error(error).body)]

    def collect(self, delta: Delta) -> None:
        """Take a step of an answer that is sent whole."""
        self.take(delta)

    @abstractmethod
    def whole(self) -> list[bytes]:
        """Return the answer after its last step, as JSON in parts."""


@dataclass(frozen=True)
class Sender:
    """Parts of a running server that generate an answer and send it."""

    client: EngineClient
    observer: Observer
    tokenizer: Tokenizer
    keep_alive_s: float
    """Seconds of silence after which a stream sends a comment; 0: never."""

    def run(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of a generation. Closing the iterator aborts its running requests."""
        return generation.run(self.client, self.observer)


async def answer(
    http: HttpRequest, sender: Sender, generation: Generation, writer: AnswerWriter, streams: bool
) -> Response:
    """Run a generation and send it, whole or as a stream; raises what admission raises."""
    if streams:
        deltas = await admitted(http, sender, generation)
        if deltas is None:
            return Response(status_code=499)
        frames = _frames(deltas, sender, writer)
        return EventStream(frames, deltas, bound_headers(generation), writer.media_type)
    if not await run_through(http, sender, generation, writer.collect):
        return Response(status_code=499)
    await writer.finish()
    num_reported = sum(choice.num_reported for choice in generation.choices)
    if num_reported >= _LARGE:
        parts = await sender.tokenizer.run_answer(writer.whole)
    else:
        parts = writer.whole()
    return _in_pieces(parts, speculation_headers(generation.metrics()) | bound_headers(generation))


def _in_pieces(parts: Sequence[bytes], headers: dict[str, str]) -> Response:
    """Return a JSON response. A large one is sent in pieces, so that no call copies all of it."""
    length = sum(map(len, parts))
    if length <= _PIECE:
        return Response(b"".join(parts), media_type="application/json", headers=headers)

    async def pieces() -> AsyncGenerator[bytes | memoryview, None]:
        for piece in _pieces_of(parts):
            yield piece

    headers = {**headers, "content-length": str(length)}
    return StreamingResponse(pieces(), media_type="application/json", headers=headers)


def _pieces_of(parts: Sequence[bytes]) -> Iterator[bytes | memoryview]:
    for part in parts:
        if len(part) <= _PIECE:
            yield part
        else:
            for start in range(0, len(part), _PIECE):
                yield memoryview(part)[start : start + _PIECE]


class EventStream(StreamingResponse):
    """Events of a generation. The generation ends with the response in all cases.

    The framework does not close a generator whose frame could not be sent.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes | memoryview, None],
        deltas: AsyncGenerator[Delta, None],
        headers: Mapping[str, str] | None = None,
        media_type: str = AnswerWriter.media_type,
    ) -> None:
        super().__init__(frames, media_type=media_type, headers={**_SSE_HEADERS, **(headers or {})})
        self._generators: tuple[AsyncGenerator[Any, None], ...] = (frames, deltas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generator in self._generators:
                await generator.aclose()


async def admitted(http: HttpRequest, sender: Sender, generation: Generation) -> AsyncGenerator[Delta, None] | None:
    """Return the deltas of an admitted generation, or None if the client has left.

    Raises the errors of admission.
    """
    deltas = sender.run(generation)
    try:
        if not generation.has_grammar:
            await anext(deltas)
        elif not await _before_leaving(http, asyncio.ensure_future(anext(deltas))):
            await deltas.aclose()
            return None
    except BaseException:
        await deltas.aclose()
        raise
    return deltas


async def run_through(
    http: HttpRequest, sender: Sender, generation: Generation, take: Callable[[Delta], object] = lambda _: None
) -> bool:
    """Run to the end, passing deltas to `take`; return False if the client left first."""
    return await _before_leaving(http, asyncio.create_task(_all_deltas(sender, generation, take)))


async def _before_leaving(http: HttpRequest, work: asyncio.Future[Any]) -> bool:
    """Wait for work, cancelled if the client leaves first; return whether it finished.

    Raises its errors.
    """
    gone = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return False
        await work
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
    return True


async def _all_deltas(sender: Sender, generation: Generation, take: Callable[[Delta], object]) -> None:
    async with aclosing(sender.run(generation)) as deltas:
        await anext(deltas)  # its requests are admitted
        async for delta in deltas:
            take(delta)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _frames(
    deltas: AsyncGenerator[Delta, None], sender: Sender, writer: AnswerWriter
) -> AsyncGenerator[bytes | memoryview, None]:
    def frames_of(delta: Delta) -> bytes:
        return writer.frames(writer.take(delta))

    try:
        yield writer.frames(writer.begin())
        # Closed before `deltas` is: the next delta may be awaited while a keep-alive is being sent.
        async with aclosing(with_silences(deltas, sender.keep_alive_s)) as paced:
            async for delta in paced:
                if delta is None:
                    yield writer.silence()
                    continue
                if delta.num_logprobs >= _LARGE:
                    frames = await sender.tokenizer.run_answer(frames_of, delta)
                else:
                    frames = frames_of(delta)
                for piece in _pieces_of([frames]):
                    yield piece
        await writer.finish()
        last = writer.end()
    except Exception as error:
        if not isinstance(error, PolydraftError):
            log.exception("a stream failed")
        last = writer.fail(error)
    yield writer.frames(last) + writer.last_frame


async def with_silences(deltas: AsyncGenerator[Delta, None], keep_alive_s: float) -> AsyncGenerator[Delta | None, None]:
    """Yield the deltas, and None after every `keep_alive_s` seconds without one."""
    upcoming: asyncio.Future[Delta] | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(anext(deltas))
            while not (await asyncio.wait({upcoming}, timeout=keep_alive_s or None))[0]:
                yield None
            yield upcoming.result()
    except StopAsyncIteration:
        return
    finally:
        if upcoming is not None:
            # It may have failed before the client left; its error is read here.
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)


def speculation_headers(metrics: Metrics) -> dict[str, str]:
    """Return tokens per pass, acceptance length and speedup of a whole answer as headers."""
    counted = metrics.speculative_decoding
    if counted is None:
        return {}
    headers = {}
    if counted.tokens_per_pass is not None:
        headers["x-polydraft-tokens-per-pass"] = f"{counted.tokens_per_pass:.2f}"
    if counted.mean_acceptance_length is not None:
        headers["x-polydraft-acceptance-length"] = f"{counted.mean_acceptance_length:.2f}"
    if counted.speedup is not None:
        headers["x-polydraft-speedup"] = f"{counted.speedup:.2f}"
    return headers


def bound_headers(generation: Generation) -> dict[str, str]:
    """Return the header with the most answer tokens, if less than requested fit."""
    if generation.cut_bound is None:
        return {}
    return {"x-polydraft-max-tokens": str(generation.cut_bound)}

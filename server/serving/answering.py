"""Sends a generation to the client, whole or as a stream of server-sent events.

A client that leaves ends its generation: a stream as its response ends, a whole
answer by racing it against the disconnect. A stream begins only after admission, so errors
before it are ordinary JSON errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.api import PolydraftError
from server.http.errors import ErrorEnvelope, to_api_error
from server.openai.answers import Answer, Metrics
from server.serving.choice import Choice
from server.serving.generation import Delta, Generation
from server.state import Server

log = logging.getLogger("polydraft")

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_LARGE = 2048
"""Numbers and texts beside an answer's own text from which it is encoded in a thread: some milliseconds of work."""
_PIECE = 1 << 18
"""Bytes of a large answer that are sent at once."""
_encoder = msgspec.json.Encoder()


class Shape(Protocol):
    """How chat and completions differ in what they send."""

    has_one_prompt: bool
    """Whether the prompt's tokens are reported once for all choices."""
    object_whole: str
    object_chunk: str

    def whole(self, index: int, choice: Choice) -> Any:
        """A choice of a whole answer."""

    def opening(self, index: int) -> list[Any]:
        """Choices of the chunks that open a stream."""

    def chunk(self, delta: Delta) -> list[Any]:
        """Choices of the chunks that carry a delta."""


@dataclass(frozen=True)
class AnswerOptions:
    """What an answer carries beside text."""

    answer_id: str
    created: int
    model: str
    with_metrics: bool
    include_usage: bool = False
    continuous_usage: bool = False


def prompt_ids_of(generation: Generation, shape: Shape) -> Sequence[int] | msgspec.UnsetType:
    """The tokens of the prompt that all choices have, where they were asked for."""
    first = generation.choices[0]
    return first.request.prompt_token_ids if shape.has_one_prompt and first.token_ids is not None else msgspec.UNSET


async def answer_whole(
    http: HttpRequest, server: Server, generation: Generation, shape: Shape, options: AnswerOptions
) -> Response:
    """Run to the end and answer at once."""
    if not await run_through(http, server, generation):
        return Response(status_code=499)
    metrics = generation.metrics()
    answer = Answer(
        options.answer_id,
        shape.object_whole,
        options.created,
        options.model,
        [],
        generation.usage(),
        metrics if options.with_metrics else msgspec.UNSET,
        prompt_ids_of(generation, shape),
    )

    def encoded() -> list[bytes]:
        # A bracket after this name is never in a string: its quotes would be escaped.
        head, tail = _encoder.encode(answer).split(b'"choices":[]')
        choices = [_encoder.encode(shape.whole(*one)) + b"," for one in enumerate(generation.choices)]
        return [head + b'"choices":[', *choices[:-1], choices[-1][:-1], b"]" + tail]

    is_large = sum(choice.num_reported for choice in generation.choices) >= _LARGE
    parts = await server.tokenizer.run_answer(encoded) if is_large else encoded()
    return _in_pieces(parts, speculation_headers(metrics))


def _in_pieces(parts: Sequence[bytes], headers: dict[str, str]) -> Response:
    """JSON as a response; sent piece by piece if it is large, so that no call copies all of it."""
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


async def answer_stream(
    http: HttpRequest, server: Server, generation: Generation, shape: Shape, options: AnswerOptions
) -> Response:
    """Answer step by step; raises what admission raises."""
    deltas = await admitted(http, server, generation)
    if deltas is None:
        return Response(status_code=499)
    return EventStream(_frames(deltas, server, generation, shape, options), deltas)


class EventStream(StreamingResponse):
    """Server-sent events of a generation, which ends with the response, whatever ends that.

    The framework closes no generator whose frame could not be sent.
    """

    def __init__(self, frames: AsyncGenerator[bytes | memoryview, None], deltas: AsyncGenerator[Delta, None]) -> None:
        super().__init__(frames, media_type="text/event-stream", headers=_SSE_HEADERS)
        self._generators: tuple[AsyncGenerator[Any, None], ...] = (frames, deltas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generator in self._generators:
                await generator.aclose()


async def admitted(http: HttpRequest, server: Server, generation: Generation) -> AsyncGenerator[Delta, None] | None:
    """The deltas of a generation that has been admitted; None when the client has left before. Raises what admission
    raises."""
    deltas = generation.run(server.client, server.observer)
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
    http: HttpRequest, server: Server, generation: Generation, take: Callable[[Delta], object] = lambda _: None
) -> bool:
    """Run to the end, every delta given to `take`; False when the client has left before."""
    return await _before_leaving(http, asyncio.create_task(_all_deltas(server, generation, take)))


async def _before_leaving(http: HttpRequest, work: asyncio.Future[Any]) -> bool:
    """Wait for some work, and cancel it if the client leaves first; whether it finished. Raises what it raises."""
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


async def _all_deltas(server: Server, generation: Generation, take: Callable[[Delta], object]) -> None:
    async with aclosing(generation.run(server.client, server.observer)) as deltas:
        async for delta in deltas:
            take(delta)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _frames(
    deltas: AsyncGenerator[Delta, None],
    server: Server,
    generation: Generation,
    shape: Shape,
    options: AnswerOptions,
) -> AsyncGenerator[bytes | memoryview, None]:
    def frame(choices: list[Any], usage: Any, metrics: Any = msgspec.UNSET, prompt_ids: Any = msgspec.UNSET) -> bytes:
        what = shape.object_chunk
        chunk = Answer(options.answer_id, what, options.created, options.model, choices, usage, metrics, prompt_ids)
        return b"data: " + _encoder.encode(chunk) + b"\n\n"

    def running_usage() -> Any:
        if options.continuous_usage:
            return generation.usage()
        return None if options.include_usage else msgspec.UNSET

    def last_metrics() -> Any:
        return generation.metrics() if options.with_metrics else msgspec.UNSET

    def frames_of(delta: Delta) -> list[bytes]:
        choices = shape.chunk(delta)
        frames = [frame([choice], running_usage()) for choice in choices[:-1]]
        for choice in choices[-1:]:
            is_last = generation.has_ended and not options.include_usage
            frames.append(frame([choice], running_usage(), last_metrics() if is_last else msgspec.UNSET))
        return frames

    try:
        for index in range(len(generation.choices)):
            for choice in shape.opening(index):
                prompt_ids = msgspec.UNSET if index else prompt_ids_of(generation, shape)
                yield frame([choice], running_usage(), prompt_ids=prompt_ids)
        # Closed before `deltas` is: the next delta may be awaited while a keep-alive is being sent.
        keep_alive_s = server.settings.sse_keep_alive_interval
        async with aclosing(with_silences(deltas, keep_alive_s)) as paced:
            async for delta in paced:
                if delta is None:
                    yield _KEEP_ALIVE
                    continue
                is_large = delta.num_logprobs >= _LARGE
                whole = await server.tokenizer.run_answer(frames_of, delta) if is_large else frames_of(delta)
                for piece in _pieces_of(whole):
                    yield piece
        if options.include_usage:
            yield frame([], generation.usage(), last_metrics())
    except PolydraftError as error:
        yield b"data: " + _encoder.encode(ErrorEnvelope(to_api_error(error).body)) + b"\n\n"
    except Exception as error:
        log.exception("a stream broke")
        yield b"data: " + _encoder.encode(ErrorEnvelope(to_api_error(error).body)) + b"\n\n"
    yield _DONE


async def with_silences(deltas: AsyncGenerator[Delta, None], keep_alive_s: float) -> AsyncGenerator[Delta | None, None]:
    """The deltas, and None for every `keep_alive_s` seconds without one."""
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
        if upcoming is not None and not upcoming.done():
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)


class Teller(Protocol):
    """Turns a generation into an API's named events, and into the whole answer at its end."""

    def begin(self) -> list[dict[str, Any]]:
        """Events before the first token."""

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Events of a step."""

    def end(self) -> list[dict[str, Any]]:
        """Events after the last token."""

    def fail(self, error: Exception) -> list[dict[str, Any]]:
        """Events of an error in a stream that has begun."""

    def whole(self) -> dict[str, Any]:
        """The answer as it is now."""


async def answer_told(
    http: HttpRequest, server: Server, generation: Generation, teller: Teller, streams: bool
) -> Response:
    """Run a generation, told in named events or at its end; raises what admission raises."""
    if streams:
        deltas = await admitted(http, server, generation)
        if deltas is None:
            return Response(status_code=499)
        return EventStream(_event_frames(deltas, server.settings.sse_keep_alive_interval, teller), deltas)
    if not await run_through(http, server, generation, teller.take):
        return Response(status_code=499)
    teller.end()
    headers = speculation_headers(generation.metrics())
    return Response(_encoder.encode(teller.whole()), media_type="application/json", headers=headers)


async def _event_frames(
    deltas: AsyncGenerator[Delta, None], keep_alive_s: float, teller: Teller
) -> AsyncGenerator[bytes | memoryview, None]:
    def frames(events: list[dict[str, Any]]) -> bytes:
        return b"".join(
            b"event: " + event["type"].encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n" for event in events
        )

    try:
        yield frames(teller.begin())
        async with aclosing(with_silences(deltas, keep_alive_s)) as paced:
            async for delta in paced:
                if delta is None:
                    yield _KEEP_ALIVE
                elif events := teller.take(delta):
                    yield frames(events)
        yield frames(teller.end())
    except PolydraftError as error:
        yield frames(teller.fail(error))
    except Exception as error:
        log.exception("a stream broke")
        yield frames(teller.fail(error))


def speculation_headers(metrics: Metrics) -> dict[str, str]:
    """Acceptance and speedup of a whole answer, as headers."""
    counted = metrics.speculative_decoding
    if counted is None:
        return {}
    headers = {}
    if counted.mean_acceptance_length is not None:
        headers["x-polydraft-acceptance-length"] = f"{counted.mean_acceptance_length:.2f}"
    if counted.speedup is not None:
        headers["x-polydraft-speedup"] = f"{counted.speedup:.2f}"
    return headers

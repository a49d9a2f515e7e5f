"""Answers of chat and completions: whole, or as chunks of a stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from engine.api import RequestError
from server.serving.answering import AnswerWriter, encode
from server.serving.choice import CallPiece, Choice, Part
from server.serving.generation import Delta, Generation
from server.text.logprobs import chat_logprobs, completion_logprobs
from server.text.reasoning import Thought
from server.wire.answers import (
    Answer,
    AnsweredCall,
    AnsweredFunction,
    ChatChoice,
    ChatMessage,
    ChunkChoice,
    CompletionChoice,
)
from server.wire.errors import ErrorEnvelope, to_api_error
from server.wire.fields import GenerationFields, StreamOptions
from server.wire.ids import new_id

Item = TypeVar("Item")


def known(items: Sequence[Item] | None) -> Sequence[Item] | msgspec.UnsetType:
    """Return token ids or drafts; unset if they are not reported."""
    return msgspec.UNSET if items is None else items


class ChunkWriter(AnswerWriter):
    """Common part of both APIs: an answer is an object with choices, and so is each chunk of its stream."""

    last_frame = b"data: [DONE]\n\n"
    id_prefix: ClassVar[str]
    object_whole: ClassVar[str]
    object_chunk: ClassVar[str]

    def __init__(self, body: GenerationFields, generation: Generation, with_metrics: bool) -> None:
        """Raises RequestError for options of a stream without `stream`."""
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options goes with stream: true", "stream_options")
        assert body.model is not None, "preparing names the served model"
        self._generation = generation
        self._model = body.model
        self._with_metrics = with_metrics
        self._options = body.stream_options or StreamOptions()
        self._id = f"{self.id_prefix}-{new_id()}"
        self._created = int(time.time())

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> Any:
        """Return a choice of a whole answer."""

    @abstractmethod
    def choices_of(self, delta: Delta) -> Sequence[Any]:
        """Return the choices of the chunks that carry a delta."""

    def prompt_ids(self) -> Sequence[int] | msgspec.UnsetType:
        """Return the tokens of the one prompt that all choices have, if they are reported."""
        return msgspec.UNSET

    def begin(self) -> list[Answer]:
        """Return no chunk."""
        return []

    def take(self, delta: Delta) -> list[Answer]:
        """Return the chunks of a delta; the last one of the stream has the metrics."""
        choices = self.choices_of(delta)
        is_end = self._generation.has_ended and not self._options.include_usage
        return [self.chunk(one, is_end and number == len(choices)) for number, one in enumerate(choices, start=1)]

    def end(self) -> list[Answer]:
        """Return the chunk with the usage, if it was asked for."""
        usage = self._generation.usage()
        return [self._answer(self.object_chunk, [], usage, is_last=True)] if self._options.include_usage else []

    def fail(self, error: Exception) -> list[ErrorEnvelope]:
        """Return the error as a chunk."""
        return [ErrorEnvelope(to_api_error(error).body)]

    def collect(self, delta: Delta) -> None:
        """Do nothing: the choices hold all that a whole answer needs."""

    def whole(self) -> list[bytes]:
        """Return the answer, each choice encoded by itself: the encoder holds the interpreter's lock."""
        answer = self._answer(self.object_whole, [], self._generation.usage(), True, True)
        # A bracket after this name is never in a string: its quotes would be escaped.
        head, tail = encode(answer).split(b'"choices":[]')
        choices = [encode(self.choice(*one)) + b"," for one in enumerate(self._generation.choices)]
        return [head + b'"choices":[', *choices[:-1], choices[-1][:-1], b"]" + tail]

    def chunk(self, choice: Any, is_last: bool = False, with_prompt: bool = False) -> Answer:
        """Return a chunk with one choice and, if they were asked for, the tokens so far."""
        usage: Any = None if self._options.include_usage else msgspec.UNSET
        if self._options.continuous_usage_stats:
            usage = self._generation.usage()
        return self._answer(self.object_chunk, [choice], usage, is_last, with_prompt)

    def _answer(
        self, object_name: str, choices: list[Any], usage: Any, is_last: bool, with_prompt: bool = False
    ) -> Answer:
        metrics = self._generation.metrics() if is_last and self._with_metrics else msgspec.UNSET
        prompt_ids = self.prompt_ids() if with_prompt else msgspec.UNSET
        return Answer(self._id, object_name, self._created, self._model, choices, usage, metrics, prompt_ids)


class ChatWriter(ChunkWriter):
    """Messages, and chunks with deltas of them."""

    id_prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def prompt_ids(self) -> Sequence[int] | msgspec.UnsetType:
        """Return the tokens of the prompt, if they are reported."""
        first = self._generation.choices[0]
        return msgspec.UNSET if first.token_ids is None else first.request.prompt_token_ids

    def begin(self) -> list[Answer]:
        """Return a chunk with the role for each choice; the first one has the prompt's tokens."""
        count = len(self._generation.choices)
        roles = [ChunkChoice(index, {"role": "assistant", "content": ""}, None) for index in range(count)]
        return [self.chunk(role, with_prompt=role.index == 0) for role in roles]

    def choice(self, index: int, choice: Choice) -> ChatChoice:
        """Return a choice with its whole message."""
        assert choice.finish_reason is not None
        logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
        calls: list[AnsweredCall] | msgspec.UnsetType = [
            AnsweredCall(call_id, AnsweredFunction(call.name, call.arguments))
            for call_id, call in zip(choice.call_ids, choice.calls, strict=True)
        ] or msgspec.UNSET
        content = None if (calls or choice.thoughts) and not choice.text else choice.text
        thoughts = choice.thoughts or msgspec.UNSET
        message = ChatMessage(content, tool_calls=calls, reasoning_content=thoughts, reasoning=thoughts)
        of_prompt = msgspec.UNSET if choice.prompt_logprobs is None else choice.prompt_logprobs
        ids, drafts = known(choice.token_ids), known(choice.drafts)
        return ChatChoice(index, message, choice.finish_reason, logprobs, choice.stop_reason, of_prompt, ids, drafts)

    def choices_of(self, delta: Delta) -> list[ChunkChoice]:
        """Return chunks with text, and one with the finish reason alone."""
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        chunks = [ChunkChoice(delta.index, chat_delta(part), None) for part in delta.parts]
        if logprobs is not None or delta.token_ids or delta.drafts:
            first = chunks[0].delta if chunks else {"content": ""}
            ids, drafts = known(delta.token_ids), known(delta.drafts)
            chunks[:1] = [ChunkChoice(delta.index, first, None, logprobs, token_ids=ids, drafts=drafts)]
        if delta.finish_reason is not None:
            chunks.append(ChunkChoice(delta.index, {}, delta.finish_reason, stop_reason=delta.stop_reason))
        return chunks


def chat_delta(part: Part) -> dict[str, Any]:
    """Return a part of an answer as a delta; thoughts appear under both of their names."""
    if isinstance(part, str):
        return {"content": part}
    if isinstance(part, Thought):
        return {"reasoning_content": part.text, "reasoning": part.text}
    return {"tool_calls": [call_delta(part)]}


def call_delta(piece: CallPiece) -> dict[str, Any]:
    """Return a piece of a call as a delta."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}


class CompletionWriter(ChunkWriter):
    """Plain texts, and chunks of them."""

    id_prefix = "cmpl"
    object_whole = object_chunk = "text_completion"

    def choice(self, index: int, choice: Choice) -> CompletionChoice:
        """Return a choice with its whole text."""
        logprobs = None if choice.logprobs is None else completion_logprobs(choice.logprobs)
        of_prompt = msgspec.UNSET if choice.prompt_logprobs is None else choice.prompt_logprobs
        ids = choice.token_ids
        prompt_ids = msgspec.UNSET if ids is None else choice.request.prompt_token_ids
        drafts = known(choice.drafts)
        ends = choice.finish_reason, logprobs, choice.stop_reason
        return CompletionChoice(index, choice.text, *ends, of_prompt, known(ids), prompt_ids, drafts)

    def choices_of(self, delta: Delta) -> list[CompletionChoice]:
        """Return one chunk with text and finish reason."""
        logprobs = completion_logprobs(delta.logprobs) if delta.logprobs else None
        if not (delta.text or delta.token_ids or delta.drafts) and delta.finish_reason is None and logprobs is None:
            return []
        ids, prompt_ids = known(delta.token_ids), known(delta.prompt_token_ids)
        return [
            CompletionChoice(
                delta.index,
                delta.text,
                delta.finish_reason,
                logprobs,
                msgspec.UNSET if delta.finish_reason is None else delta.stop_reason,
                token_ids=ids,
                prompt_token_ids=prompt_ids,
                drafts=known(delta.drafts),
            )
        ]

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
    Metrics,
)
from server.wire.fields import GenerationFields, StreamOptions
from server.wire.ids import new_id

Item = TypeVar("Item")


def speculation_of(choice: Choice) -> dict[str, Any] | msgspec.UnsetType | None:
    """Return `speculative_decoding_stats` of a choice; unset if they are not reported."""
    return choice.speculation.vllm_report() if choice.reports_speculation else msgspec.UNSET


def known(value: Item | None) -> Item | msgspec.UnsetType:
    """Return the value of a field of an answer; unset if it is not reported."""
    return msgspec.UNSET if value is None else value


class ChunkWriter(AnswerWriter):
    """Answers and chunks of streams: objects with choices, in both APIs."""

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

    def take(self, delta: Delta) -> list[Answer]:
        """Return the chunks of a delta; the last one of the stream has the metrics."""
        chunks = [self.chunk(choice) for choice in self.choices_of(delta)]
        if chunks and self._generation.has_ended and not self._options.include_usage:
            chunks[-1] = msgspec.structs.replace(chunks[-1], metrics=self._metrics())
        return chunks

    def end(self) -> list[Answer]:
        """Return the chunk with the usage, if it was asked for."""
        if not self._options.include_usage:
            return []
        return [self._answer(self.object_chunk, [], self._generation.usage(), self._metrics())]

    def collect(self, delta: Delta) -> None:
        """Do nothing: the choices hold all that a whole answer needs."""

    def whole(self) -> list[bytes]:
        """Return the answer, each choice encoded by itself, as the encoder holds the lock."""
        usage = self._generation.usage()
        answer = self._answer(self.object_whole, [], usage, self._metrics(), self.prompt_ids())
        # A bracket after this name is never in a string: its quotes would be escaped.
        head, tail = encode(answer).split(b'"choices":[]')
        choices = [encode(self.choice(index, choice)) for index, choice in enumerate(self._generation.choices)]
        with_commas = [choice + b"," for choice in choices[:-1]]
        return [head + b'"choices":[', *with_commas, choices[-1], b"]" + tail]

    def chunk(self, choice: Any, prompt_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET) -> Answer:
        """Return a chunk with one choice and, if it was asked for, the usage so far."""
        usage: Any = msgspec.UNSET
        if self._options.continuous_usage_stats:
            usage = self._generation.usage()
        elif self._options.include_usage:
            usage = None
        return self._answer(self.object_chunk, [choice], usage, prompt_ids=prompt_ids)

    def _metrics(self) -> Metrics | msgspec.UnsetType:
        """Return the metrics of the generation, if they are reported."""
        if not self._with_metrics:
            return msgspec.UNSET
        return self._generation.metrics()

    def _answer(
        self,
        object_name: str,
        choices: list[Any],
        usage: Any,
        metrics: Metrics | msgspec.UnsetType = msgspec.UNSET,
        prompt_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET,
    ) -> Answer:
        return Answer(self._id, object_name, self._created, self._model, choices, usage, metrics, prompt_ids)


class ChatWriter(ChunkWriter):
    """Messages, and chunks with deltas of them."""

    id_prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def prompt_ids(self) -> Sequence[int] | msgspec.UnsetType:
        """Return the tokens of the prompt, if they are reported."""
        first = self._generation.choices[0]
        if first.token_ids is None:
            return msgspec.UNSET
        return first.request.prompt_token_ids

    def begin(self) -> list[Answer]:
        """Return a chunk with the role for each choice; the first one has the prompt's tokens."""
        num_choices = len(self._generation.choices)
        roles = [ChunkChoice(index, {"role": "assistant", "content": ""}, None) for index in range(num_choices)]
        first = self.chunk(roles[0], self.prompt_ids())
        return [first, *map(self.chunk, roles[1:])]

    def choice(self, index: int, choice: Choice) -> ChatChoice:
        """Return a choice with its whole message."""
        assert choice.finish_reason is not None
        logprobs = None
        if choice.logprobs is not None:
            logprobs = chat_logprobs(choice.logprobs)
        return ChatChoice(
            index,
            _message(choice),
            choice.finish_reason,
            logprobs,
            choice.stop_reason,
            prompt_logprobs=known(choice.prompt_logprobs),
            token_ids=known(choice.token_ids),
            drafts=known(choice.drafts),
            speculative_decoding_stats=speculation_of(choice),
        )

    def choices_of(self, delta: Delta) -> list[ChunkChoice]:
        """Return chunks with text, and one with the finish reason alone."""
        chunks = [ChunkChoice(delta.index, chat_delta(part), None) for part in delta.parts]
        if delta.logprobs or delta.token_ids or delta.drafts:
            first = chunks[0] if chunks else ChunkChoice(delta.index, {"content": ""}, None)
            chunks[:1] = [
                msgspec.structs.replace(
                    first,
                    logprobs=chat_logprobs(delta.logprobs) if delta.logprobs else None,
                    token_ids=known(delta.token_ids),
                    drafts=known(delta.drafts),
                )
            ]
        if delta.finish_reason is not None:
            stats = speculation_of(self._generation.choices[delta.index])
            last = ChunkChoice(delta.index, {}, delta.finish_reason, stop_reason=delta.stop_reason)
            chunks.append(msgspec.structs.replace(last, speculative_decoding_stats=stats))
        return chunks


def _message(choice: Choice) -> ChatMessage:
    """Return a choice's message; its content is null if it has only calls or thoughts."""
    calls = [
        AnsweredCall(call_id, AnsweredFunction(call.name, call.arguments))
        for call_id, call in zip(choice.call_ids, choice.calls, strict=True)
    ]
    content: str | None = choice.text
    if not choice.text and (calls or choice.thoughts):
        content = None
    thoughts = choice.thoughts or msgspec.UNSET
    return ChatMessage(content, tool_calls=calls or msgspec.UNSET, reasoning_content=thoughts, reasoning=thoughts)


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
        logprobs = None
        if choice.logprobs is not None:
            logprobs = completion_logprobs(choice.logprobs)
        prompt_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
        if choice.token_ids is not None:
            prompt_ids = choice.request.prompt_token_ids
        return CompletionChoice(
            index,
            choice.text,
            choice.finish_reason,
            logprobs,
            choice.stop_reason,
            prompt_logprobs=known(choice.prompt_logprobs),
            token_ids=known(choice.token_ids),
            prompt_token_ids=prompt_ids,
            drafts=known(choice.drafts),
            speculative_decoding_stats=speculation_of(choice),
        )

    def choices_of(self, delta: Delta) -> list[CompletionChoice]:
        """Return one chunk with text and finish reason."""
        has_content = delta.text or delta.logprobs or delta.token_ids or delta.drafts
        if not has_content and delta.finish_reason is None:
            return []
        choice = CompletionChoice(
            delta.index,
            delta.text,
            delta.finish_reason,
            logprobs=completion_logprobs(delta.logprobs) if delta.logprobs else None,
            token_ids=known(delta.token_ids),
            prompt_token_ids=known(delta.prompt_token_ids),
            drafts=known(delta.drafts),
        )
        if delta.finish_reason is not None:
            stats = speculation_of(self._generation.choices[delta.index])
            choice = msgspec.structs.replace(choice, stop_reason=delta.stop_reason, speculative_decoding_stats=stats)
        return [choice]

"""`POST /v1/chat/completions` and `POST /v1/completions`: wire fields in, a `Generation` out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.api import RequestError
from server.http.bodies import BodyRoute
from server.openai.answers import AnsweredCall, AnsweredFunction, ChatChoice, ChatMessage, ChunkChoice, CompletionChoice
from server.openai.fields import ChatRequest, CompletionRequest, GenerationFields
from server.openai.preparing import prepare_chat, prepare_completion, wants_metrics
from server.serving.answering import AnswerOptions, Shape, answer_stream, answer_whole
from server.serving.choice import CallPiece, Choice, Part
from server.serving.generation import Delta, Generation
from server.state import Server
from server.text.logprobs import chat_logprobs, completion_logprobs
from server.text.reasoning import Thought

Item = TypeVar("Item")


def known(items: Sequence[Item] | None) -> Sequence[Item] | msgspec.UnsetType:
    """Token ids or drafts, left out where there are none to report."""
    return msgspec.UNSET if items is None else items


class ChatShape:
    """Messages and deltas."""

    has_one_prompt = True
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def whole(self, index: int, choice: Choice) -> ChatChoice:
        """A whole message."""
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
        return ChatChoice(index, message, choice.finish_reason, logprobs, of_prompt, ids, drafts)

    def opening(self, index: int) -> list[ChunkChoice]:
        """The role comes first."""
        return [ChunkChoice(index, {"role": "assistant", "content": ""}, None)]

    def chunk(self, delta: Delta) -> list[ChunkChoice]:
        """Text, and an empty delta with the finish reason."""
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        chunks = []
        for part in delta.parts:
            chunks.append(ChunkChoice(delta.index, chat_delta(part), None))
        if logprobs is not None or delta.token_ids or delta.drafts:
            first = chunks[0].delta if chunks else {"content": ""}
            ids, drafts = known(delta.token_ids), known(delta.drafts)
            chunks[:1] = [ChunkChoice(delta.index, first, None, logprobs, ids, drafts)]
        if delta.finish_reason is not None:
            chunks.append(ChunkChoice(delta.index, {}, delta.finish_reason))
        return chunks


def chat_delta(part: Part) -> dict[str, Any]:
    """A part of an answer in OpenAI's shape; thoughts under both of their names."""
    if isinstance(part, str):
        return {"content": part}
    if isinstance(part, Thought):
        return {"reasoning_content": part.text, "reasoning": part.text}
    return {"tool_calls": [call_delta(part)]}


def call_delta(piece: CallPiece) -> dict[str, Any]:
    """A piece of a call in OpenAI's shape."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}


class CompletionShape:
    """Plain text."""

    has_one_prompt = False
    object_whole = object_chunk = "text_completion"

    def whole(self, index: int, choice: Choice) -> CompletionChoice:
        """A whole text."""
        logprobs = None if choice.logprobs is None else completion_logprobs(choice.logprobs)
        of_prompt = msgspec.UNSET if choice.prompt_logprobs is None else choice.prompt_logprobs
        ids = choice.token_ids
        prompt_ids = msgspec.UNSET if ids is None else choice.request.prompt_token_ids
        drafts = known(choice.drafts)
        return CompletionChoice(
            index, choice.text, choice.finish_reason, logprobs, of_prompt, known(ids), prompt_ids, drafts
        )

    def opening(self, _: int) -> list[CompletionChoice]:
        """Nothing opens a completion."""
        return []

    def chunk(self, delta: Delta) -> list[CompletionChoice]:
        """Text and finish reason together."""
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
                token_ids=ids,
                prompt_token_ids=prompt_ids,
                drafts=known(delta.drafts),
            )
        ]


async def respond(
    http: Request, server: Server, body: GenerationFields, generation: Generation, shape: Shape, id_prefix: str
) -> Response:
    """Run a generation, whole or as a stream."""
    stream_options = body.stream_options
    if stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream: true", "stream_options")
    answer = AnswerOptions(
        answer_id=f"{id_prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=body.model,
        with_metrics=wants_metrics(server, body.metrics),
        include_usage=stream_options is not None and stream_options.include_usage,
        continuous_usage=stream_options is not None and stream_options.continuous_usage_stats,
    )
    if body.stream:
        return await answer_stream(http, server, generation, shape, answer)
    return await answer_whole(http, server, generation, shape, answer)


def build_router(server: Server) -> APIRouter:
    """The two generating routes."""
    router = APIRouter(route_class=BodyRoute)
    chat_shape, completion_shape = ChatShape(), CompletionShape()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        generation = await prepare_chat(server, body)
        return await respond(http, server, body, generation, chat_shape, "chatcmpl")

    @router.post("/v1/completions")
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        generation = await prepare_completion(server, body)
        return await respond(http, server, body, generation, completion_shape, "cmpl")

    return router

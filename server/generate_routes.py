"""`POST /v1/chat/completions` and `POST /v1/completions`: wire fields in, a `Generation` out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.api import Limits, RequestError, check_request, choice_seed
from engine.api import Request as EngineRequest
from server.answering import AnswerOptions, Shape, answer_stream, answer_whole
from server.answers import AnsweredCall, AnsweredFunction, ChatChoice, ChatMessage, ChunkChoice, CompletionChoice
from server.errors import model_not_found
from server.generation import CallPiece, Choice, Delta, Generation, TextOptions
from server.logprobs import chat_logprobs, completion_logprobs
from server.protocol import ChatRequest, CompletionRequest, GenerationFields
from server.sampling_fields import (
    num_logprobs_of,
    num_prompt_logprobs_of,
    refuse_unsupported,
    sampling_of,
    speculation_of,
    stop_strings,
    without_equal_chains,
)
from server.state import Server
from server.structured import grammar_of
from server.tools import ToolUse, plain_text, template_message, tool_use_of

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 128
# What `encode_chat` passes itself, and what would change the result's type or run other templates.
_OWN_VARIABLES = frozenset(
    """
    conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding
    truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    """.split()
)


class ChatShape:
    """Messages and deltas."""

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
        content = None if calls and not choice.text else choice.text
        message = ChatMessage(content, tool_calls=calls)
        return ChatChoice(index, message, choice.finish_reason, logprobs, choice.prompt_logprobs or msgspec.UNSET)

    def opening(self, index: int) -> list[ChunkChoice]:
        """The role comes first."""
        return [ChunkChoice(index, {"role": "assistant", "content": ""}, None)]

    def chunk(self, delta: Delta) -> list[ChunkChoice]:
        """Text, and an empty delta with the finish reason."""
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        chunks = []
        if delta.text or logprobs is not None:
            chunks.append(ChunkChoice(delta.index, {"content": delta.text}, None, logprobs))
        for piece in delta.calls:
            chunks.append(ChunkChoice(delta.index, {"tool_calls": [call_delta(piece)]}, None))
        if delta.finish_reason is not None:
            chunks.append(ChunkChoice(delta.index, {}, delta.finish_reason))
        return chunks


def call_delta(piece: CallPiece) -> dict[str, Any]:
    """A piece of a call in OpenAI's shape."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}


class CompletionShape:
    """Plain text."""

    object_whole = object_chunk = "text_completion"

    def whole(self, index: int, choice: Choice) -> CompletionChoice:
        """A whole text."""
        logprobs = None if choice.logprobs is None else completion_logprobs(choice.logprobs)
        of_prompt = choice.prompt_logprobs or msgspec.UNSET
        return CompletionChoice(index, choice.text, choice.finish_reason, logprobs, of_prompt)

    def opening(self, _: int) -> list[CompletionChoice]:
        """Nothing opens a completion."""
        return []

    def chunk(self, delta: Delta) -> list[CompletionChoice]:
        """Text and finish reason together."""
        logprobs = completion_logprobs(delta.logprobs) if delta.logprobs else None
        if not delta.text and delta.finish_reason is None and logprobs is None:
            return []
        return [CompletionChoice(delta.index, delta.text, delta.finish_reason, logprobs)]


def template_variables(asked: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the chat template; raises RequestError for names that are the server's own."""
    for name in asked or {}:
        if name in _OWN_VARIABLES:
            raise RequestError(f"chat_template_kwargs: {name!r} is set by the server", "chat_template_kwargs")
    return asked or {}


def check_model(server: Server, name: str | None) -> None:
    """Raise 404 for a model that is not the one served."""
    if name is not None and name != server.model_name:
        raise model_not_found(name, server.model_name)


def engine_requests(
    server: Server,
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
    prediction: tuple[int, ...] = (),
) -> list[EngineRequest]:
    """One engine request per prompt and choice, all checked; raises RequestError."""
    facts = server.client.ready_facts()
    sampling = sampling_of(body, server.defaults, bad_words, grammar, server.settings.seed_stable)
    speculation = speculation_of(body, server.client.config.speculation, facts)
    num_logprobs = num_logprobs_of(body)
    requests: list[EngineRequest] = []
    for prompt in prompts:
        answer = max_tokens if max_tokens is not None else max(1, facts.max_model_len - len(prompt))
        limits = Limits(
            max_tokens=answer,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
        )
        for _ in range(body.n):
            number = len(requests)
            request = EngineRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=tuple(prompt),
                sampling=msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, number)),
                limits=limits,
                speculation=speculation,
                num_logprobs=num_logprobs,
                priority=body.priority,
                prediction=prediction,
                cache_salt=body.cache_salt or "",
                num_prompt_logprobs=num_prompt_logprobs_of(body, num_logprobs),
            )
            check_request(request, facts, server.client.config.speculation)
            requests.append(without_equal_chains(request, facts))
    return requests


async def respond(
    http: Request,
    server: Server,
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    shape: Shape,
    id_prefix: str,
    tools: ToolUse | None = None,
) -> Response:
    """Run a call that has been tokenized."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream: true", "stream_options")
    bad_words: tuple[tuple[int, ...], ...] = ()
    if body.bad_words:
        bad_words = await server.tokenizer.run(server.tokenizer.encode_words, body.bad_words)
    grammar = await server.tokenizer.run(grammar_of, body)
    if tools is not None:
        if grammar:
            raise RequestError("structured output and tools: ask for one, or for tool_choice none", "tools")
        grammar = await server.tokenizer.run(tools.grammar)
    prediction: tuple[int, ...] = ()
    if body.prediction is not None:
        text = plain_text(body.prediction.content, "prediction")
        prediction = tuple(await server.tokenizer.run(server.tokenizer.encode, text, False))
    requests = engine_requests(server, body, prompts, max_tokens, bad_words, grammar, prediction)
    echo = isinstance(body, CompletionRequest) and body.echo
    # Calls may be marked by special tokens.
    skips = body.skip_special_tokens and (tools is None or "skip_special_tokens" in body.model_fields_set)
    options = TextOptions(stop_strings(body), body.include_stop_str_in_output, skips, echo, tools, body.prompt_logprobs)
    generation = Generation(requests, server.tokenizer, options, body.n)
    with_metrics = server.settings.per_request_spec_decode_metrics == "detailed"
    stream_options = body.stream_options
    answer = AnswerOptions(
        answer_id=f"{id_prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=server.model_name,
        with_metrics=with_metrics if body.metrics is None else body.metrics,
        include_usage=stream_options is not None and stream_options.include_usage,
        continuous_usage=stream_options is not None and stream_options.continuous_usage_stats,
    )
    if body.stream:
        return await answer_stream(server, generation, shape, answer)
    return await answer_whole(http, server, generation, shape, answer)


async def completion_prompts(server: Server, prompt: Any) -> list[list[int]]:
    """The prompts of a completion as token ids."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise RequestError("the prompt is empty; send at least one token", "prompt")
    if isinstance(prompt[0], int):
        return [list(prompt)]
    if len(prompt) > _MAX_PROMPTS:
        raise RequestError(f"at most {_MAX_PROMPTS} prompts in one call, not {len(prompt)}", "prompt")
    if isinstance(prompt[0], str):
        return [await server.tokenizer.run(server.tokenizer.encode, text) for text in prompt]
    return [list(tokens) for tokens in prompt]


def build_router(server: Server) -> APIRouter:
    """The two generating routes."""
    router = APIRouter()
    chat_shape, completion_shape = ChatShape(), CompletionShape()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        check_model(server, body.model)
        refuse_unsupported(body)
        server.client.ready_facts()
        messages = [template_message(one, number) for number, one in enumerate(body.messages)]
        tools = tool_use_of(body, server.call_format)
        if body.continue_final_message and messages[-1]["role"] != "assistant":
            raise RequestError("continue_final_message: the last message must be the assistant's", "messages")
        prompt = await server.tokenizer.run(
            server.tokenizer.encode_chat,
            messages,
            True,
            body.continue_final_message,
            template_variables(body.chat_template_kwargs),
            [] if tools is None else tools.for_template(),
        )
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return await respond(http, server, body, [prompt], max_tokens, chat_shape, "chatcmpl", tools)

    @router.post("/v1/completions")
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        check_model(server, body.model)
        refuse_unsupported(body)
        server.client.ready_facts()
        prompts = await completion_prompts(server, body.prompt)
        max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return await respond(http, server, body, prompts, max_tokens, completion_shape, "cmpl")

    return router

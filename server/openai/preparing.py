"""Turns a validated body into a `Generation`: prompts, tokens, grammars, engine requests.

Not for: formats of answers (`writers.py`, `responses.py`), or the meaning
of single fields (`sampling_fields.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.api import Limits, RequestError, Thinking, check_requests, choice_seed
from engine.api import Request as EngineRequest
from server.openai.infilling import infill_for, infill_prompts
from server.openai.sampling_fields import (
    answer_bound,
    check_earlier_answers,
    check_num_entries,
    given_or,
    max_tokens_of,
    named_seed,
    num_logprobs_of,
    num_prompt_logprobs_of,
    sampling_of,
    speculation_of,
    stop_strings,
    truncated,
    with_seed,
    without_equal_chains,
)
from server.openai.thinking import GrammarScope, thoughts_of
from server.serving.filters import TextOptions
from server.serving.generation import Generation
from server.state import Server
from server.text.attachments import replace_attachments
from server.text.call_formats import END_MARKS, call_marks
from server.text.line_bounds import LineBounds
from server.text.structured import Structure, structure_of
from server.text.thinking_switch import Setting
from server.text.tools import ToolUse, other_kinds, plain_text, template_message, tool_use_of
from server.wire.current_call import this_call
from server.wire.errors import model_not_found
from server.wire.fields import ChatRequest, CompletionRequest, Effort, GenerationFields
from server.wire.ids import new_id
from server.wire.limits import MOST_PROMPTS
from server.wire.unsupported_fields import refuse_unsupported

_DEFAULT_COMPLETION_TOKENS = 16
_DECIDING_FIELDS = ("reasoning_effort", "enable_thinking", "reasoning.effort", "thinking")
"""Fields about thinking, from the first that counts."""
# Arguments that `render_chat` passes, that would change the result's type, or that would run other
# templates.
_OWN_VARIABLES = frozenset(
    """
    conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding
    truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    """.split()
)


def template_variables(asked: dict[str, Any] | None) -> dict[str, Any]:
    """Return chat template variables; raise RequestError for names that the server sets."""
    for name in asked or {}:
        if name in _OWN_VARIABLES:
            raise RequestError(f"chat_template_kwargs: {name!r} is set by the server", "chat_template_kwargs")
    return asked or {}


def check_model(server: Server, name: str | None) -> str:
    """Return the model's name, by default the served one; raise 404 for others.

    Raises RequestError if a strict server gets no name.
    """
    names = server.settings.served_names()
    if name is None and server.settings.strict_fields:
        raise RequestError("model: --strict-fields demands the name of the model", "model")
    if name is not None and name not in names:
        raise model_not_found(name, ", ".join(names))
    return names[0] if name is None else name


@dataclass(frozen=True)
class Filling:
    """Further ends of an answer that fills a gap, or has calls."""

    end_token_ids: frozenset[int]
    """Tokens that end it, as the model's end tokens do."""
    line_bounds: Callable[[], LineBounds] | None = None
    """Makes the bounds of its lines; None if there are none."""


@dataclass(frozen=True)
class Prepared:
    """Parts of a body as tokens, and what its answers must follow."""

    prompts: Sequence[Sequence[int]]
    bounds: Sequence[int]
    """Maximum number of answer tokens for each prompt."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    prediction: tuple[int, ...] = ()
    thinking: Thinking | None = None
    """Thoughts that the engine tracks."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, besides those of the body and of the model."""


def engine_requests(server: Server, body: GenerationFields, prepared: Prepared) -> list[EngineRequest]:
    """Return one checked engine request per prompt and choice; raises RequestError."""
    facts = server.client.ready_facts()
    prompts = prepared.prompts
    server.client.check_count(len(prompts) * body.n)
    sampling = sampling_of(
        body,
        server.defaults,
        prepared.bad_words,
        prepared.grammar,
        server.settings.seed_stable,
        prepared.thinking,
    )
    speculation_limits = server.client.config.speculation
    speculation = speculation_of(body, speculation_limits, facts)
    if body.seed is not None:
        speculation = with_seed(speculation, sampling, speculation_limits, facts)
    check_earlier_answers(body, speculation)
    if this_call().attempt_of:
        lasting = msgspec.structs.replace(speculation_limits, seed_shape=this_call().shape)
        speculation = with_seed(speculation, sampling, lasting, facts)
    num_logprobs = num_logprobs_of(body)
    num_prompt_logprobs = num_prompt_logprobs_of(body, num_logprobs)
    check_num_entries(prompts, num_prompt_logprobs, body)
    stop_token_ids = (*(body.stop_token_ids or ()), *sorted(prepared.end_token_ids))
    requests: list[EngineRequest] = []
    for prompt, bound in zip(prompts, prepared.bounds, strict=True):
        prompt_ids = tuple(prompt)
        limits = Limits(
            max_tokens=bound,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=stop_token_ids,
            ignore_eos=body.ignore_eos,
        )
        for choice in range(body.n):
            number = len(requests)
            request = EngineRequest(
                request_id=new_id(),
                prompt_token_ids=prompt_ids,
                sampling=msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, number)),
                limits=limits,
                speculation=speculation,
                num_logprobs=num_logprobs,
                priority=body.priority + this_call().added_priority,
                prediction=prepared.prediction,
                cache_salt=body.cache_salt or "",
                client=this_call().client,
                # The prompt's logprobs are the same for every choice, so they are computed once.
                num_prompt_logprobs=None if choice else num_prompt_logprobs,
                reports_drafts=_reports_drafts(body),
            )
            requests.append(request)
    check_requests(requests, facts, speculation_limits)
    return [without_equal_chains(request, facts) for request in requests]


def _reports_drafts(body: GenerationFields) -> bool:
    return body.speculation is not None and body.speculation.return_drafts


async def prepare(
    server: Server,
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    tools: ToolUse | None = None,
    filling: Filling | None = None,
) -> Generation:
    """Return the generation of a body whose prompts are tokenized.

    filling: further ends of the answer; None if there are none.
    """
    body.seed = named_seed(body)
    bad_words = await _bad_words(server, body)
    structure: Structure = await server.tokenizer.run(structure_of, body)
    # Strict tools alone leave an answer free.
    is_bound = bool(structure.grammar) or (tools is not None and tools.forced)
    if tools is not None:
        structure = await server.tokenizer.run(tools.structure, structure, server.tokenizer.special_token)
    prediction = await _prediction(server, body)
    context = server.client.ready_facts().max_model_len
    is_strict = server.settings.strict_fields
    prompts = [truncated(prompt, body, max_tokens, context) for prompt in prompts]
    bounds = [answer_bound(len(prompt), body, max_tokens, context, is_strict) for prompt in prompts]
    scope = None
    if structure.grammar:
        covers_thoughts = tools is not None and tools.covers_thoughts
        scope = GrammarScope(is_whole=is_bound, covers_thoughts=covers_thoughts)
    thoughts = thoughts_of(server, body, prompts[0], bounds[0], scope, tools)
    filling = filling or Filling(frozenset())
    end_token_ids = frozenset[int]() if body.ignore_eos else filling.end_token_ids
    prepared = Prepared(prompts, bounds, bad_words, structure.grammar, prediction, thoughts.followed, end_token_ids)
    requests = engine_requests(server, body, prepared)
    # Calls may be marked by special tokens.
    may_skip = tools is None or "skip_special_tokens" in body.model_fields_set
    options = TextOptions(
        stops=stop_strings(body),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens and may_skip,
        echo=isinstance(body, CompletionRequest) and body.echo,
        thoughts=thoughts.reader,
        shown=thoughts.shown,
        tools=tools,
        num_prompt_logprobs=body.prompt_logprobs,
        reports_drafts=_reports_drafts(body),
        reports_speculation=server.settings.per_request_spec_decode_stats == "summary",
        reports_token_ids=bool(body.return_token_ids),
        end_token_ids=end_token_ids - frozenset(body.stop_token_ids or ()),
        line_bounds=filling.line_bounds,
    )
    cut_bound = None
    if max_tokens is not None and min(bounds) < max_tokens:
        cut_bound = min(bounds)
    this_call().on_prompt.close()
    return Generation(requests, server.tokenizer, options, body.n, structure, cut_bound)


async def _bad_words(server: Server, body: GenerationFields) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the words that the answer may not have."""
    if not body.bad_words:
        return ()
    size = sum(map(len, body.bad_words))
    tokens: tuple[tuple[int, ...], ...]
    tokens = await server.tokenizer.run(server.tokenizer.encode_words, body.bad_words, size=size)
    return tokens


async def _prediction(server: Server, body: GenerationFields) -> tuple[int, ...]:
    """Return the tokens of the text that the answer is expected to repeat."""
    if body.prediction is None:
        return ()
    text = plain_text(body.prediction.content, "prediction")
    most = server.client.ready_facts().max_model_len
    return tuple(await server.tokenizer.run_encode(text, False, most, "prediction"))


def _most_tokens(server: Server, body: GenerationFields) -> int | None:
    """Return the maximum number of prompt tokens; None if the prompt will be truncated."""
    if body.truncate_prompt_tokens is not None:
        return None
    return server.client.ready_facts().max_model_len


def _wanted_thinking(body: ChatRequest) -> tuple[bool | None, Effort | None]:
    """Return (whether thoughts are wanted, effort), None if the body says nothing."""
    is_wanted = body.enable_thinking
    if is_wanted is None and body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        is_wanted = body.thinking.type == "enabled"
    effort = body.reasoning_effort
    if not effort and body.reasoning is not None:
        effort = body.reasoning.effort
    return is_wanted, effort


def _thinking_of(server: Server, body: ChatRequest) -> Setting:
    """Return the setting of the chat template for the body's fields about thinking.

    A wish that the template cannot follow is reported.
    """
    is_wanted, effort = _wanted_thinking(body)
    given = _thinking_fields(body)
    switch = server.dialogue.thinking
    if not switch:
        for name in given:
            server.unknown_fields.ignore(name, "this model's chat template has no switch for thinking")
        return Setting()
    if is_wanted is None and not effort:
        return Setting()
    deciding = next(name for name in _DECIDING_FIELDS if name in given)
    if is_wanted is False or (effort == "none" and not is_wanted):
        if switch.off is not None:
            return switch.off
        if not switch.efforts:
            server.unknown_fields.ignore(deciding, "this model's chat template cannot turn thoughts off")
            return Setting()
        effort = "minimal"
        why = f"this model always thinks; {switch.word_of(effort)} is used"
        server.unknown_fields.ignore(deciding, why)
        return switch.efforts[effort]
    if not effort or effort == "none":
        if switch.on is None:
            server.unknown_fields.ignore(deciding, "this model's chat template has no switch for thinking")
        return switch.on or Setting()
    if effort not in switch.efforts:
        server.unknown_fields.ignore(deciding, "this model's chat template has no words of effort")
        return switch.on or Setting()
    if not switch.is_exact(effort):
        server.unknown_fields.ignore(deciding, f"{switch.word_of(effort)} is the nearest effort of this model")
    return switch.efforts[effort]


def _thinking_fields(body: ChatRequest) -> list[str]:
    """Return the names of the body's fields about thinking."""
    has_effort = body.reasoning is not None and body.reasoning.effort is not None
    fields = {
        "reasoning.effort": has_effort,
        "reasoning_effort": body.reasoning_effort is not None,
        "enable_thinking": body.enable_thinking is not None,
        "thinking": body.thinking is not None,
    }
    return [name for name, is_given in fields.items() if is_given]


async def chat_prompt(server: Server, body: ChatRequest, most: int | None = None) -> tuple[list[int], ToolUse | None]:
    """Return the tokens of a conversation and the tools that the model may call.

    Raises RequestError if there are more than `most` tokens.
    """
    body.model = check_model(server, body.model)
    server.unknown_fields.check(body)
    refuse_unsupported(body)
    server.client.ready_facts()
    body.continue_final_message = body.continue_final_message or body.messages[-1].prefix
    may_replace = given_or(body.attachment_placeholders, server.settings.attachment_placeholders)
    for kind in replace_attachments(body.messages, may_replace):
        server.unknown_fields.ignore(f"messages.{kind}", "the model reads text only; the prompt has a placeholder")
    messages = [template_message(message, number) for number, message in enumerate(body.messages)]
    for kind in other_kinds(body.tools):
        why = "only functions are supported; the prompt does not mention other tools"
        server.unknown_fields.ignore(f"tools.{kind}", why)
    tools = tool_use_of(body, server.dialogue.call_format, server.dialogue.tools_refusal)
    if body.continue_final_message:
        _check_continued(body, messages[-1])
    setting = _thinking_of(server, body)
    if users := [message for message in messages if message["role"] == "user"]:
        users[-1]["content"] += setting.word
    elif setting.word:
        why = "this model's switch for thinking is a word of the user, who says nothing"
        server.unknown_fields.ignore(_thinking_fields(body)[0], why)
    prompt = await server.tokenizer.run_chat(
        messages,
        body.add_generation_prompt,
        body.continue_final_message,
        {**setting.variables, **template_variables(body.chat_template_kwargs)},
        [] if tools is None else tools.for_template(),
        body.documents or [],
        call_marks(server.dialogue.call_format),
        most=most,
    )
    # Thousands of objects, which each full garbage collection would visit until the answer ends.
    body.messages.clear()
    return prompt, tools


def _check_continued(body: ChatRequest, last_message: dict[str, Any]) -> None:
    """Raise RequestError if the last message cannot be continued."""
    if last_message["role"] != "assistant":
        raise RequestError("continue_final_message: the last message must be the assistant's", "messages")
    if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise RequestError(
            "add_generation_prompt opens a new message, continue_final_message goes on with the last one; "
            "ask for one of them",
            "add_generation_prompt",
        )


async def prepare_chat(server: Server, body: ChatRequest) -> Generation:
    """Return the generation of a conversation's next message."""
    prompt, tools = await chat_prompt(server, body, _most_tokens(server, body))
    end = None if tools is None else server.tokenizer.token_of(END_MARKS.get(tools.format, ""))
    filling = None if end is None else Filling(frozenset({end}))
    return await prepare(server, body, [prompt], max_tokens_of(body), tools, filling)


async def prepare_completion(
    server: Server, body: CompletionRequest, most_tokens: int | None = _DEFAULT_COMPLETION_TOKENS
) -> Generation:
    """Return the generation of a text's continuation.

    most_tokens: bound of a body without a bound; None for the room that the context leaves.
    """
    body.model = check_model(server, body.model)
    server.unknown_fields.check(body)
    refuse_unsupported(body)
    server.client.ready_facts()
    listed = listed_prompts(body.prompt)
    filling = None
    if body.suffix:
        filling = Filling(infill_for(server, "suffix").ends)
        prompts = await infill_prompts(server, body, listed)
    else:
        prompts = await _token_prompts(server, body, listed)
    max_tokens = max_tokens_of(body)
    if max_tokens is None:
        max_tokens = most_tokens
    return await prepare(server, body, prompts, max_tokens, filling=filling)


def listed_prompts(prompt: Any) -> list[str] | list[list[int]]:
    """Return a completion's prompts, all texts or all ids; raise for too many or none."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise RequestError("the prompt is empty; send at least one token", "prompt")
    if isinstance(prompt[0], int):
        return [list(prompt)]
    if len(prompt) > MOST_PROMPTS:
        raise RequestError(f"at most {MOST_PROMPTS} prompts in one call, not {len(prompt)}", "prompt")
    return list(prompt)


async def _token_prompts(
    server: Server, body: CompletionRequest, prompts: Sequence[str | Sequence[int]]
) -> list[list[int]]:
    """Return prompts as token ids; raise RequestError for a text beyond the context."""
    most = _most_tokens(server, body)
    tokens = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokens.append(await server.tokenizer.run_encode(prompt, body.add_special_tokens, most))
        else:
            tokens.append(list(prompt))
    return tokens

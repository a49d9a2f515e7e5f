"""`POST /infill` and `/completion` of llama.cpp's server, as completions, for editors.

Not for: marks of gaps and their order (`text/infill.py`), or bounds of lines
(`text/line_bounds.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from engine.api import RequestError
from server.openai.infilling import infill_for
from server.openai.preparing import Filling, check_model, prepare
from server.openai.translating import endpoint_names, refuse_drafts
from server.serving.answering import AnswerWriter, encode
from server.serving.choice import Choice
from server.serving.generation import Delta, Generation
from server.state import Server
from server.text.infill import FurtherText, Gap, Infill
from server.text.line_bounds import LineBounds
from server.wire.answers import Metrics
from server.wire.fields import CompletionRequest, GenerationFields, Listed, Wire
from server.wire.limits import MOST_FURTHER, MOST_STRINGS
from server.wire.unsupported_fields import UNSUPPORTED, refuse_unsupported

_PARAMS = {"max_tokens": "n_predict", "n": "n_cmpl"}
"""Names that both endpoints have for a completion's fields."""
_OWN_ORDER = ("penalties", "temperature", "min_p", "top_k", "top_p")
"""Samplers that are served, in the order in which they are applied."""
_BY_OWN_FIELDS = frozenset({"dry", "xtc", "typ_p", "typical_p", "top_n_sigma", "adaptive_p"})
"""Samplers that are off unless a field of theirs turns them on, and such fields are refused."""
_INFILL = "infill"
_OFF_PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
_SUFFIX_SHARE = 4
"""A suffix that does not fit is cut to a quarter of the room, as in llama.cpp."""
_DECIMALS = 3


class InputExtra(Wire):
    """Text of another file."""

    text: str = ""
    filename: str = "tmp"


class LlamaFields(GenerationFields):
    """Common fields of `/infill` and `/completion`."""

    n_predict: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Maximum number of tokens; -1 for no other limit than the context."""
    n_cmpl: Annotated[int, Field(ge=1, le=128)] | None = None
    """Number of answers; for more than one the body of the answer is a list."""
    n_indent: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Minimum indentation: a line with less white space before its text ends the answer."""
    t_max_predict_ms: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """Time after which an answer of several lines ends; 0 or -1 for no limit."""
    samplers: Annotated[Listed[str], Field(max_length=MOST_STRINGS)] | None = None
    """Samplers to apply; the order is fixed."""
    response_fields: Listed[str] = Field(default_factory=list, max_length=MOST_STRINGS)
    """Fields of a whole answer, empty for all; `timings/prompt_n` takes one out of an object."""
    return_tokens: bool = False
    """Whether the answer has token ids; streams always have them."""

    # Accepted without effect: there are no slots, and every common beginning is cached.
    id_slot: int | None = None
    cache_prompt: bool | None = None
    n_cache_reuse: int | None = None
    n_keep: int | None = None
    t_max_prompt_ms: int | None = None
    timings_per_token: bool | None = None
    penalty_last_n: Literal[-1, 0] | None = None
    """Number of tokens that penalties count: all of them; 0 turns penalties off."""


class InfillRequest(LlamaFields):
    """Body of `POST /infill`."""

    input_prefix: str
    input_suffix: str
    input_extra: Listed[InputExtra] = Field(default_factory=list, max_length=MOST_FURTHER)
    """Texts of other files; those that do not fit are left out, the first ones first."""
    prompt: str = ""
    """Beginning of the answer, which is not repeated in it."""


class LlamaCompletionRequest(LlamaFields):
    """Body of `POST /completion`."""

    prompt: str | Listed[int]


async def prepare_infill(server: Server, body: InfillRequest) -> tuple[Generation, bool]:
    """Return the generation that fills a gap, and whether the texts were cut to the context."""
    _check(server, body)
    infill = infill_for(server, "input_suffix")
    context = server.client.ready_facts().max_model_len
    max_tokens = _max_tokens(body)
    sampling = _sampling_fields(server, body)
    size = len(body.input_prefix) + len(body.input_suffix) + sum(len(further.text) for further in body.input_extra)
    room = context - _answer_room(max_tokens, context) - infill.num_marks
    gap, is_cut = await server.tokenizer.run(_gap_of, server, body, room, size=size)
    prompt = infill.prompt(gap)
    return await _prepared(server, body, prompt, sampling, infill.ends), is_cut


async def prepare_llama_completion(server: Server, body: LlamaCompletionRequest) -> Generation:
    """Return the generation that continues a text."""
    _check(server, body)
    sampling = _sampling_fields(server, body)
    prompt = body.prompt
    if isinstance(prompt, str):
        prompt = await server.tokenizer.run_encode(prompt, True, server.client.ready_facts().max_model_len)
    return await _prepared(server, body, prompt, sampling, frozenset())


def _check(server: Server, body: LlamaFields) -> None:
    """Raise RequestError for fields that are not served, and report fields without effect."""
    refuse_drafts(body.speculation)
    body.model = check_model(server, body.model or None)
    server.unknown_fields.check(body)
    refuse_unsupported(body)
    _refuse_fields_of_completions(body)
    if body.response_fields and body.stream:
        server.unknown_fields.ignore("response_fields", "the events of streams have all fields")


async def _prepared(
    server: Server, body: LlamaFields, prompt: Sequence[int], sampling: dict[str, Any], ends: frozenset[int]
) -> Generation:
    """Return the generation of an answer. ends: tokens that end it, besides the model's."""
    completion = _as_completion(body, sampling, prompt)
    line_bounds = partial(LineBounds, body.n_indent, max(0, body.t_max_predict_ms) / 1000)
    params = _PARAMS
    if isinstance(body, InfillRequest):
        params = _PARAMS | {"prompt": "input_prefix"}
    with endpoint_names(params):
        return await prepare(server, completion, [prompt], _max_tokens(body), filling=Filling(ends, line_bounds))


def _refuse_fields_of_completions(body: LlamaFields) -> None:
    """Raise RequestError for completion fields without a place in answer or prompt."""
    for name in ("prompt_logprobs", "truncate_prompt_tokens", "truncation_side", "stream_options"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} is not served here; leave it out, or use /v1/completions", name, UNSUPPORTED)


def _max_tokens(body: LlamaFields) -> int | None:
    """Return the maximum number of answer tokens; None if the context alone limits it."""
    if body.n_predict is not None:
        return None if body.n_predict < 0 else body.n_predict
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _answer_room(max_tokens: int | None, context: int) -> int:
    """Return the tokens that texts leave to the answer, at most half of the context."""
    if max_tokens is None:
        return context // _SUFFIX_SHARE
    return min(max(1, max_tokens), context // 2)


def _sampling_fields(server: Server, body: LlamaFields) -> dict[str, Any]:
    """Return fields that the samplers change; raise RequestError for lists not served."""
    if body.samplers is None:
        return _OFF_PENALTIES if body.penalty_last_n == 0 else {}
    names = [name for name in body.samplers if name not in _BY_OWN_FIELDS]
    is_infilling = _INFILL in names
    names = [name for name in names if name != _INFILL]
    if unknown := [name for name in names if name not in _OWN_ORDER]:
        raise RequestError(f"samplers: {unknown[0]!r} is not served; leave it out", "samplers", UNSUPPORTED)
    if names != [name for name in _OWN_ORDER if name in names]:
        order = ", ".join(_OWN_ORDER)
        raise RequestError(f"samplers: the order is fixed ({order}); send them in it", "samplers", UNSUPPORTED)
    fields: dict[str, Any] = {}
    if "temperature" not in names:
        fields["temperature"] = 1.0
    if is_infilling:
        # It leaves tokens of at least a fifth of the probability, so the likeliest token is closest
        # to it.
        fields["temperature"] = body.temperature or 0.0
        server.unknown_fields.ignore("samplers.infill", "it is not served; the answer is greedy in its place")
    neutral = {"min_p": 0.0, "top_k": 0, "top_p": 1.0}
    fields |= {name: value for name, value in neutral.items() if name not in names}
    if "penalties" not in names or body.penalty_last_n == 0:
        fields |= _OFF_PENALTIES
    return fields


def _gap_of(server: Server, body: InfillRequest, room: int) -> tuple[Gap, bool]:
    """Return the texts as tokens, at most `room` of them, and whether some were cut.

    The prefix is cut at its beginning, the suffix at its end. Raises RequestError if
    `prompt` leaves no room.
    """
    infill = infill_for(server, "input_suffix")
    most = server.tokenizer.longest_token
    prefix_text, suffix_text = body.input_prefix, body.input_suffix
    if most is not None:
        # Characters that cannot belong to the last or first `room` tokens are not encoded.
        prefix_text = prefix_text[-most * (room + 1) :]
        suffix_text = suffix_text[: most * (room + 1)]
    prefix = infill.prefix_ids(prefix_text)
    suffix = infill.inner_ids(suffix_text)
    opening = infill.inner_ids(body.prompt)
    left = room - len(opening)
    if left <= 0:
        raise RequestError(
            f"prompt: the line before the gap has {len(opening)} tokens, and the context has room for {room}; "
            "shorten it",
            "prompt",
            "context_length_exceeded",
        )
    num_suffix = min(len(suffix), max(left // _SUFFIX_SHARE, left - len(prefix)))
    num_prefix = min(len(prefix), left - num_suffix)
    further, num_further = _further_of(infill, body, left - num_suffix - num_prefix)
    is_cut = (
        num_suffix < len(suffix)
        or num_prefix < len(prefix)
        or num_further < len(body.input_extra)
        or len(prefix_text) < len(body.input_prefix)
        or len(suffix_text) < len(body.input_suffix)
    )
    return Gap(prefix[len(prefix) - num_prefix :], suffix[:num_suffix], opening, further), is_cut


def _further_of(infill: Infill, body: InfillRequest, room: int) -> tuple[list[int], int]:
    """Return the last other texts that fit into `room` tokens, and their number."""
    texts = [FurtherText(extra.filename, extra.text) for extra in body.input_extra]
    parts = infill.further_ids(texts)
    num_taken = 0
    taken: list[int] = []
    while num_taken < len(parts):
        longer = infill.with_heads(parts[len(parts) - num_taken - 1 :])
        if len(longer) > room:
            break
        taken = longer
        num_taken += 1
    return taken, num_taken


def _as_completion(body: LlamaFields, sampling: dict[str, Any], prompt: Sequence[int]) -> CompletionRequest:
    """Return the request as a completion of a prompt of token ids."""
    shared = set(GenerationFields.model_fields)
    fields = body.model_dump(exclude_unset=True, include=shared) | sampling
    fields["prompt"] = list(prompt)
    if body.seed == -1:
        fields.pop("seed")
    if body.n_cmpl is not None:
        fields["n"] = body.n_cmpl
    if sampling:
        fields.pop("repeat_penalty", None)
    if body.return_tokens or body.stream:
        fields["return_token_ids"] = True
    return CompletionRequest.model_validate(fields)


class Timings(msgspec.Struct, frozen=True):
    """Times of an answer."""

    cache_n: int
    prompt_n: int
    """Number of prompt tokens that were not cached."""
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class InfillChunk(msgspec.Struct, frozen=True):
    """Part of an answer in a stream, before its last event."""

    index: int
    content: str
    tokens: Sequence[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int


class InfillAnswer(InfillChunk, frozen=True):
    """A whole answer, or the last event of one in a stream."""

    id_slot: int
    model: str
    has_new_line: bool
    truncated: bool
    """Whether texts were cut to the context."""
    stop_type: str
    stopping_word: str
    tokens_cached: int
    generation_settings: dict[str, Any]
    timings: Timings
    metrics: Metrics | msgspec.UnsetType


class InfillWriter(AnswerWriter):
    """Answers in the format of llama.cpp."""

    def __init__(self, is_cut: bool, body: LlamaFields, generation: Generation, with_metrics: bool) -> None:
        """is_cut: whether texts were cut to the context."""
        assert body.model is not None, "preparing names the served model"
        self._is_cut = is_cut
        self._body = body
        self._generation = generation
        self._with_metrics = with_metrics

    def take(self, delta: Delta) -> list[InfillChunk]:
        """Return an event with text and, at an answer's end, its last event."""
        choice = self._generation.choices[delta.index]
        events = []
        if delta.text or delta.token_ids:
            events.append(
                InfillChunk(
                    delta.index,
                    delta.text,
                    delta.token_ids or (),
                    False,
                    choice.num_tokens,
                    self._generation.num_prompt_tokens,
                )
            )
        if delta.finish_reason is not None:
            events.append(self._answer(delta.index, choice, "", ()))
        return events

    def collect(self, delta: Delta) -> None:
        """Do nothing: the choices hold all that a whole answer needs."""

    def whole(self) -> list[bytes]:
        """Return the answer, or a list of several."""
        answers: list[Any] = [
            self._answer(index, choice, choice.text, choice.token_ids or ())
            for index, choice in enumerate(self._generation.choices)
        ]
        if self._body.response_fields:
            answers = [selected(msgspec.to_builtins(answer), self._body.response_fields) for answer in answers]
        return [encode(answers if len(answers) > 1 else answers[0])]

    def _answer(self, index: int, choice: Choice, content: str, tokens: Sequence[int]) -> InfillAnswer:
        assert self._body.model is not None
        metrics: Metrics | msgspec.UnsetType = msgspec.UNSET
        if self._with_metrics:
            metrics = self._generation.metrics()
        return InfillAnswer(
            index=index,
            content=content,
            tokens=tokens,
            stop=True,
            tokens_predicted=choice.num_tokens,
            tokens_evaluated=self._generation.num_prompt_tokens,
            id_slot=-1,
            model=self._body.model,
            has_new_line="\n" in choice.text,
            truncated=self._is_cut,
            stop_type=_stop_type(choice),
            stopping_word=choice.stop_string or "",
            tokens_cached=choice.num_cached,
            generation_settings=self._settings(choice),
            timings=_timings(choice),
            metrics=metrics,
        )

    def _settings(self, choice: Choice) -> dict[str, Any]:
        """Return the parameters of an answer under llama.cpp's names."""
        sampling = choice.request.sampling
        return {
            "n_predict": choice.request.limits.max_tokens,
            "seed": sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "n_indent": self._body.n_indent,
            "stream": self._body.stream,
        }


def selected(answer: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the named fields of an answer; slashes take fields out of objects."""
    fields = {}
    for name in names:
        value: Any = answer
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            fields[name] = value
    return fields


def _stop_type(choice: Choice) -> str:
    if choice.stop_string is not None:
        return "word"
    return "limit" if choice.finish_reason == "length" else "eos"


def _timings(choice: Choice) -> Timings:
    """Return the times of an answer; rates of no time are 0."""
    times_s = choice.clock.times_s()
    prompt_ms = round(1000 * (times_s.get("prefill") or 0.0), _DECIMALS)
    predicted_ms = round(1000 * (times_s.get("decode") or 0.0), _DECIMALS)
    num_prompt = len(choice.request.prompt_token_ids) - choice.num_cached
    num_predicted = choice.num_tokens
    return Timings(
        cache_n=choice.num_cached,
        prompt_n=num_prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, num_prompt),
        prompt_per_second=_ratio(1000 * num_prompt, prompt_ms),
        predicted_n=num_predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, num_predicted),
        predicted_per_second=_ratio(1000 * num_predicted, predicted_ms),
        draft_n=choice.speculation.num_nodes,
        draft_n_accepted=choice.speculation.num_accepted,
    )


def _ratio(numerator: float, denominator: float) -> float:
    return round(numerator / denominator, _DECIMALS) if denominator else 0.0

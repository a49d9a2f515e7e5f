"""Runs the requests of one HTTP call and yields one `Delta` per choice and step. Not for: formats of APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec

from engine.api import GRAMMAR, Outcome, PolydraftError, Request, RequestError, StepStats
from server.serving.choice import Choice, Part, TextOptions
from server.serving.engine_client import EngineClient
from server.serving.observer import Observer
from server.serving.statistics import Clock, GenerationState, SpeculationCount
from server.text.logprobs import SpelledToken
from server.text.prompts import Arrival, ShownPrompt, with_prompts
from server.text.tokenizer import Tokenizer
from server.wire.answers import CompletionTokensDetails, DraftedStep, Metrics, PromptTokensDetails, Usage
from server.wire.current_call import this_call


@dataclass(frozen=True)
class Delta:
    """Addition of one step to one choice."""

    index: int
    parts: Sequence[Part]
    """Text, thoughts and pieces of function calls, in order."""
    finish_reason: str | None
    logprobs: Sequence[SpelledToken] | None = None
    """Logprobs of the step's tokens, if they were requested."""
    token_ids: Sequence[int] | None = None
    """Token ids of the step, if they were requested."""
    prompt_token_ids: Sequence[int] | None = None
    """Token ids of the prompt, in a choice's first delta."""
    drafts: Sequence[DraftedStep] | None = None
    """Drafts of the step, if they were requested."""
    stop_reason: str | int | None = None
    """Stop string or stop token id that has ended the choice."""

    @property
    def num_logprobs(self) -> int:
        """Number of its logprobs, with those of alternatives."""
        return len(self.logprobs) * (1 + len(self.logprobs[-1].top)) if self.logprobs else 0

    @property
    def text(self) -> str:
        """Text outside calls."""
        return "".join(part for part in self.parts if isinstance(part, str))


class Generation:
    """Choices of one HTTP call, `num_choices` of them for each prompt."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        options: TextOptions,
        num_choices: int,
        grammar_param: str | None = None,
        cut_bound: int | None = None,
    ) -> None:
        """grammar_param: field of the body that defines the grammar. cut_bound: maximum number of answer tokens, if
        the context left less room than the body asked for; the least one of all prompts.
        """
        self._grammar_param = grammar_param
        self.cut_bound = cut_bound
        self._tokenizer = tokenizer
        top = options.num_prompt_logprobs
        self._prompts = [
            ShownPrompt(request, tokenizer, options.echo, options.skip_special_tokens, top)
            for request in (requests[::num_choices] if options.echo or top is not None else ())
        ]
        self.choices = [
            Choice(request, tokenizer, options, self._prompts[number // num_choices] if self._prompts else None)
            for number, request in enumerate(requests)
        ]
        self.num_choices = num_choices
        self.clock = Clock()

    async def run(self, client: EngineClient, observer: Observer) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of all choices. Closing the iterator aborts the running requests."""
        call, early_end = this_call(), "abort"
        async with client.submit([choice.request for choice in self.choices]) as ticket, self._naming_its_field():
            await ticket.grammars_ready()
            observer.begin(call, self.num_prompt_tokens_each, self.state)
            if self.cut_bound is not None:
                observer.metrics.cut_bound()
            try:
                # The requests are admitted: a stream may send its headers now.
                yield Delta(-1, (), None)
                async with aclosing(ticket.parts()) as parts, aclosing(self._read_prompts(parts)) as ready:
                    async for index, outcome, stats in ready:
                        choice = self.choices[index]
                        if choice.finish_reason is not None:
                            continue
                        known, before = len(choice.logprobs or ()), choice.num_tokens
                        released = self._add(choice, outcome, stats, observer)
                        if choice.finish_reason is not None:
                            client.abort(choice.request.request_id)
                        new = None if choice.logprobs is None else choice.logprobs[known:]
                        token_ids = None if choice.token_ids is None else choice.token_ids[before:]
                        of_prompt = choice.request.prompt_token_ids if token_ids is not None and not before else None
                        drafts = None if choice.drafts is None else choice.drafts[-1:]
                        stop = choice.stop_reason
                        yield Delta(index, released, choice.finish_reason, new, token_ids, of_prompt, drafts, stop)
            except PolydraftError:
                early_end = "error"
                raise
            finally:
                observer.end(call, self.state, early_end)

    def _read_prompts(self, parts: AsyncGenerator[Arrival, None]) -> AsyncGenerator[Arrival, None]:
        return with_prompts(parts, self._prompts, self.num_choices, self._tokenizer) if self._prompts else parts

    @asynccontextmanager
    async def _naming_its_field(self) -> AsyncIterator[None]:
        """Name the field that defines the grammar in errors of the grammar."""
        try:
            yield
        except RequestError as error:
            if error.param != GRAMMAR or self._grammar_param is None:
                raise
            raise RequestError(f"{self._grammar_param}: {error}", self._grammar_param, error.code) from error

    def _add(self, choice: Choice, outcome: Outcome, stats: StepStats, observer: Observer) -> list[Part]:
        is_first, before = choice.num_tokens == 0, choice.num_tokens
        parts, gap_s, taken = choice.add(outcome, stats)
        num_new = choice.num_tokens - before
        self.clock.add(outcome, num_new)
        metrics = observer.metrics
        observer.take(taken, stats)
        metrics.tokens(num_new, gap_s, choice.clock.ttft_s if is_first and num_new else None)
        if choice.finish_reason is not None:
            times_s = choice.clock.times_s()
            metrics.finish(choice.finish_reason, choice.num_tokens, times_s, choice.speculation)
            if self.has_ended:
                metrics.end_call([choice.num_tokens for choice in self.choices])
        return parts

    @property
    def has_ended(self) -> bool:
        """Whether all choices are complete."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def has_grammar(self) -> bool:
        """Whether its answers follow a grammar, which must be compiled before they begin."""
        return any(choice.request.sampling.grammar for choice in self.choices)

    @property
    def num_prompt_tokens_each(self) -> list[int]:
        """Number of tokens of each prompt."""
        return [len(choice.request.prompt_token_ids) for choice in self.choices[:: self.num_choices]]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts, each counted once."""
        return sum(self.num_prompt_tokens_each)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens whose K/V was cached."""
        cached = [choice.num_cached for choice in self.choices]
        return sum(min(cached[i : i + self.num_choices]) for i in range(0, len(cached), self.num_choices))

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens of all answers so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def speculation(self) -> SpeculationCount:
        """Return the sum of the choices' speculation counts."""
        first = self.choices[0].speculation
        total = SpeculationCount(first.rule, max(choice.speculation.num_spec_tokens for choice in self.choices))
        for choice in self.choices:
            total.merge(choice.speculation)
        return total

    def state(self) -> GenerationState:
        """Return the current state for observers."""
        request = self.choices[0].request
        return GenerationState(
            reasons=[choice.finish_reason for choice in self.choices],
            num_choices=self.num_choices,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_answer_tokens=self.num_answer_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            max_tokens=request.limits.max_tokens,
            clock=self.clock,
            speculation=self.speculation(),
        )

    def usage(self) -> Usage:
        """Return the number of tokens so far."""
        return Usage(
            self.num_prompt_tokens,
            self.num_answer_tokens,
            self.num_prompt_tokens + self.num_answer_tokens,
            PromptTokensDetails(self.num_cached_tokens),
            CompletionTokensDetails(
                sum(choice.num_predicted for choice in self.choices),
                sum(choice.num_mispredicted for choice in self.choices),
                sum(choice.num_thought for choice in self.choices),
            ),
        )

    def metrics(self) -> Metrics:
        """Return times and speculation of the call, and of each choice if there are several."""
        metrics = self.clock.report(self.speculation().report())
        if self.cut_bound is not None:
            metrics = msgspec.structs.replace(metrics, max_tokens=self.cut_bound)
        if len(self.choices) == 1:
            return metrics
        return msgspec.structs.replace(metrics, choices=[choice.speculation.report() for choice in self.choices])

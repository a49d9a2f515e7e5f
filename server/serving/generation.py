"""Runs the requests of one HTTP call and yields one `Delta` per choice and step."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec

from engine.api import GRAMMAR, Outcome, PolydraftError, Request, RequestError, StepStats
from server.serving.choice import Choice, Part
from server.serving.engine_client import EngineClient
from server.serving.filters import TextOptions
from server.serving.observer import Observer
from server.serving.statistics import Clock, GenerationState, SpeculationCount
from server.text.logprobs import SpelledToken
from server.text.prompts import Arrival, ShownPrompt, with_prompts
from server.text.structured import Structure
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
        """Number of its logprobs, with the logprobs of alternatives."""
        if not self.logprobs:
            return 0
        num_alternatives = len(self.logprobs[-1].top)
        return len(self.logprobs) * (1 + num_alternatives)

    @property
    def text(self) -> str:
        """Text outside calls."""
        return "".join(part for part in self.parts if isinstance(part, str))


ADMITTED = Delta(index=-1, parts=(), finish_reason=None)
"""First delta of every generation: its requests are admitted, and no choice has a token yet."""


class Generation:
    """Choices of one HTTP call, `num_choices` of them for each prompt."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        options: TextOptions,
        num_choices: int,
        structure: Structure | None = None,
        cut_bound: int | None = None,
    ) -> None:
        """structure: names causes of grammar errors.

        cut_bound: most answer tokens of the shortest prompt, if the context
        left less than requested.
        """
        self._structure = structure
        self.cut_bound = cut_bound
        self._tokenizer = tokenizer
        self.num_choices = num_choices
        self._prompts: list[ShownPrompt] = []
        if options.echo or options.num_prompt_logprobs is not None:
            self._prompts = [
                ShownPrompt(
                    request,
                    tokenizer,
                    options.echo,
                    options.skip_special_tokens,
                    options.num_prompt_logprobs,
                )
                for request in requests[::num_choices]
            ]
        self.choices = [
            Choice(request, tokenizer, options, self._shown_prompt(number)) for number, request in enumerate(requests)
        ]
        self.clock = Clock()

    def _shown_prompt(self, number: int) -> ShownPrompt | None:
        """Return the prompt of a choice, if answers show prompts."""
        if not self._prompts:
            return None
        return self._prompts[number // self.num_choices]

    async def run(self, client: EngineClient, observer: Observer) -> AsyncGenerator[Delta, None]:
        """Yield `ADMITTED`, then the deltas of all choices; closing aborts running requests."""
        call = this_call()
        early_end = "abort"
        requests = [choice.request for choice in self.choices]
        async with client.submit(requests) as ticket, self._naming_its_field():
            await ticket.grammars_ready()
            observer.begin(call, self.num_prompt_tokens_each, self.state)
            if self.cut_bound is not None:
                observer.metrics.cut_bound()
            try:
                # A stream may send its headers now.
                yield ADMITTED
                async with aclosing(ticket.parts()) as parts, aclosing(self._read_prompts(parts)) as ready:
                    async for index, outcome, stats in ready:
                        choice = self.choices[index]
                        if choice.finish_reason is not None:
                            continue
                        delta = self._advance(index, outcome, stats, observer)
                        if choice.finish_reason is not None:
                            client.abort(choice.request.request_id)
                        yield delta
            except PolydraftError:
                early_end = "error"
                raise
            finally:
                observer.end(call, self.state, early_end)

    def _read_prompts(self, parts: AsyncGenerator[Arrival, None]) -> AsyncGenerator[Arrival, None]:
        if not self._prompts:
            return parts
        return with_prompts(parts, self._prompts, self.num_choices, self._tokenizer)

    @asynccontextmanager
    async def _naming_its_field(self) -> AsyncIterator[None]:
        """Name the field that defines the grammar in errors of the grammar."""
        try:
            yield
        except RequestError as error:
            if error.param != GRAMMAR or self._structure is None:
                raise
            raise self._structure.refused(error) from error

    def _advance(self, index: int, outcome: Outcome, stats: StepStats, observer: Observer) -> Delta:
        """Add a step to a choice, and return what the step has added."""
        choice = self.choices[index]
        num_tokens = choice.num_tokens
        num_logprobs = len(choice.logprobs or ())
        parts = self._add(choice, outcome, stats, observer)
        logprobs = token_ids = prompt_token_ids = drafts = None
        if choice.logprobs is not None:
            logprobs = choice.logprobs[num_logprobs:]
        if choice.token_ids is not None:
            token_ids = choice.token_ids[num_tokens:]
            if num_tokens == 0:
                prompt_token_ids = choice.request.prompt_token_ids
        if choice.drafts is not None:
            drafts = choice.drafts[-1:]
        return Delta(
            index,
            parts,
            choice.finish_reason,
            logprobs,
            token_ids,
            prompt_token_ids,
            drafts,
            choice.stop_reason,
        )

    def _add(self, choice: Choice, outcome: Outcome, stats: StepStats, observer: Observer) -> list[Part]:
        num_tokens_before = choice.num_tokens
        parts, gap_s, taken = choice.add(outcome, stats)
        num_new = choice.num_tokens - num_tokens_before
        self.clock.add(outcome, num_new)
        metrics = observer.metrics
        observer.take(taken, stats)
        ttft_s = None
        if num_tokens_before == 0 and num_new:
            ttft_s = choice.clock.ttft_s
        metrics.tokens(num_new, gap_s, ttft_s)
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
        num_cached = [choice.num_cached for choice in self.choices]
        starts = range(0, len(num_cached), self.num_choices)
        return sum(min(num_cached[start : start + self.num_choices]) for start in starts)

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens of all answers so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def speculation(self) -> SpeculationCount:
        """Return the sum of the choices' speculation counts."""
        counts = [choice.speculation for choice in self.choices]
        num_spec_tokens = max(count.num_spec_tokens for count in counts)
        total = SpeculationCount(counts[0].rule, num_spec_tokens)
        for count in counts:
            total.merge(count)
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
        metrics = self.clock.report(self.speculation())
        if self.cut_bound is not None:
            metrics = msgspec.structs.replace(metrics, max_tokens=self.cut_bound)
        if len(self.choices) == 1:
            return metrics
        return msgspec.structs.replace(metrics, choices=[choice.speculation.report() for choice in self.choices])

"""Checks the distribution of a running engine's output against the target's.

Plain passes compute the exact distribution of the first three tokens after a prompt: rules may
change later targets, so two drafting steps must be among them (four tokens for a head, which does
not draft the first). The engine answers many times with different seeds. Counts of the most
likely texts (others in groups) must pass a G-test; the bias that it would find is reported. If
the pair disagrees enough, the test must reject over-acceptance. It needs an idle engine, and
leaves no request in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.errors import LoadError
from engine.kernels.torch_kernels import TORCH
from engine.models.runner import ModelRunner
from engine.noise import Purpose, uniform
from engine.request import Limits, Request, Sampling, Speculation
from engine.sampling.distribution import DistributionParameters, distribution
from engine.scheduling.outcome import Outcome
from engine.step.engine import Engine

SIGNIFICANCE = 1e-5
"""p-value below which a rule fails; a right one fails once in 100,000 checks."""

_SMALLEST_CELL = 5.0
_NUM_FIRST, _NUM_SECOND, _NUM_LATER, _NUM_GROUPS = 12, 6, 3, 8
_LEAST_DIVIDED = 0.04
"""Least probability of a text of two tokens or more that is divided by its next token."""
_NUM_TOKENS = 3
"""Compared tokens from the first drafted one on."""
_OTHER, _GROUPED = -1, -2
_OVER_ACCEPTANCE = 0.3

Cell = tuple[int, ...]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Check:
    """The result of one rule on one prompt."""

    name: str
    p_value: float
    num_cells: int
    num_answers: int
    tokens_per_step: float
    reported_bias: float
    """Mean bias by lossy acceptance in an answer; 0 for exact rules."""

    @property
    def detectable_bias(self) -> float:
        """Return the total variation that the test detects with probability 0.99.

        A bias d of the cells' distribution e has noncentrality N sum d_i^2/e_i >= 4 N TV^2.
        """
        if self.num_cells < 2:
            return 1.0
        degrees = self.num_cells - 1
        critical = chi2.isf(SIGNIFICANCE, degrees)
        noncentrality = brentq(lambda x: ncx2.sf(critical, degrees, x) - 0.99, 1e-6, 1e4)
        return min(1.0, float(math.sqrt(noncentrality / (4 * self.num_answers))))

    @property
    def rejected(self) -> bool:
        """Whether the output does not have the target's distribution."""
        return self.p_value < SIGNIFICANCE


@dataclass
class CheckedAnswer:
    """Answer of one request."""

    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[int, Outcome]] = field(default_factory=list)
    """(number of its tokens before, outcome) of steps that emitted."""

    @property
    def bias(self) -> float:
        """Return the mean bias that lossy acceptance allowed."""
        return sum(outcome.bias for _, outcome in self.steps)


def run_to_end(
    engine: Engine, requests: Sequence[Request], progress: Callable[[int], object] = lambda _: None
) -> dict[str, CheckedAnswer]:
    """Answer all requests on an idle engine; the limits of served requests do not apply.

    progress: is called with the number of tokens of each result of a step.
    """
    answers = {request.request_id: CheckedAnswer() for request in requests}
    engine.scheduler.tables.forget_all()  # passes outside the scheduler may have written anywhere
    for request in requests:
        engine.queue(request)
    while engine.scheduler.has_work:
        for outcome in engine.run_step().outcomes:
            answer = answers[outcome.request_id]
            answer.steps.append((len(answer.tokens), outcome))
            answer.tokens += outcome.token_ids
            progress(len(outcome.token_ids))
    return answers


def make_prompt(engine: Engine, seed: int, length: int = 24) -> tuple[int, ...]:
    """Return a text of the target, up to its least certain position.

    If the first drafted token were nearly certain, a test would see nothing. A head drafts from the
    second token on, so the first one should be nearly certain.
    """
    first = int(uniform(seed, 0, Purpose.DRAFT)[0] * engine.facts.vocab_size)
    length = min(length, engine.facts.max_model_len - 8)
    request = Request(
        request_id="prompt",
        prompt_token_ids=(first,),
        sampling=Sampling(seed=seed),
        limits=Limits(max_tokens=length, ignore_eos=True),
    )
    text = (first, *run_to_end(engine, [request])["prompt"].tokens)
    blocks = tuple(range(-(-len(text) // engine.facts.block_size)))
    logits_NV = engine.target.forward([SequenceInput(text, 0, blocks, NO_NODES, slice(0, None))])
    probs_NV = logits_NV.softmax(-1).cpu()
    entropy_N = torch.special.entr(probs_NV).sum(-1)
    if engine.scheduler.draft_prefill.by_head:
        entropy_N = probs_NV[:-1].gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1) * entropy_N[1:]
    shortest = min(4, len(entropy_N) - 1)
    return text[: shortest + 1 + int(entropy_N[shortest:].argmax())]


@dataclass(frozen=True)
class Cells:
    """A partition of all answers by their first tokens, with the exact probability of each part.

    A likely prefix is divided by its likely next tokens, with one part for other tokens, down to
    `num_tokens` tokens. The first tokens that are not likely are pooled in groups of equal mass,
    ordered by the ratio of draft to target probability, which shows bias.
    """

    expected: dict[Cell, float]
    group_V: Ints
    """Group of each first token; -1 if the token has its parts."""
    num_tokens: int

    def of(self, tokens: Sequence[int]) -> Cell:
        """Return the part that an answer belongs to."""
        if self.group_V[tokens[0]] >= 0:
            return _GROUPED, int(self.group_V[tokens[0]])
        for length in range(1, self.num_tokens + 1):
            prefix = tuple(tokens[:length])
            if prefix in self.expected:
                return prefix
            if (*prefix[:-1], _OTHER) in self.expected and not self._is_divided(prefix):
                return (*prefix[:-1], _OTHER)
        raise AssertionError(tokens)

    def _is_divided(self, prefix: Cell) -> bool:
        return (*prefix, _OTHER) in self.expected


def _distributions(
    runner: ModelRunner, engine: Engine, prompt: Sequence[int], paths: Sequence[Cell], sampling: Sampling
) -> torch.Tensor:
    """Return [1 + N, V] distributions after the prompt, and after each of N paths below it.

    A path comes after its prefixes.
    """
    count = len(paths)
    blocks = tuple(range(-(-(len(prompt) + count) // engine.facts.block_size)))
    is_above_NN = np.array([[path[: len(other)] == other for other in paths] for path in paths], np.bool_)
    nodes = NodeInput(
        [path[-1] for path in paths], [len(path) for path in paths], (), is_above_NN.reshape(count, count)
    )
    logits_NV = runner.forward([SequenceInput(prompt, 0, blocks, nodes, slice(len(prompt) - 1, None))])
    return (
        distribution(logits_NV, DistributionParameters.of([sampling] * (1 + count), logits_NV.device, TORCH))
        .double()
        .cpu()
    )


def make_cells(engine: Engine, prompt: Sequence[int], sampling: Sampling, num_tokens: int) -> Cells:
    """Return the cells of the first tokens after a prompt."""
    assert engine.draft_runner is not None, "only a pair can be checked"
    first_V = _distributions(engine.target, engine, prompt, (), sampling)[0]
    if engine.scheduler.draft_prefill.by_head:  # a head does not draft the first token
        draft_V = torch.ones_like(first_V)
    else:
        draft_V = _distributions(engine.draft_runner, engine, prompt, (), sampling)[0]
    first = torch.topk(first_V, min(_NUM_FIRST, len(first_V)))
    parts: dict[Cell, float] = {
        (token,): share for token, share in zip(first.indices.tolist(), first.values.tolist(), strict=True)
    }
    cells = _divided(engine, prompt, sampling, parts, num_tokens)
    rest_V = first_V.scatter(0, first.indices, 0.0)
    order = torch.argsort(torch.where(first_V > 0, draft_V / first_V, torch.inf))
    before = rest_V[order].cumsum(0) / rest_V.sum().clamp(min=1e-12)
    group_V = torch.zeros_like(order)
    group_V[order] = (before * _NUM_GROUPS).long().clamp(max=_NUM_GROUPS - 1)
    for group in range(_NUM_GROUPS):
        cells[_GROUPED, group] = float(rest_V[group_V == group].sum())
    group_V[first.indices] = -1
    return Cells(cells, group_V.numpy(), num_tokens)


def _divided(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, parts: dict[Cell, float], num_tokens: int
) -> dict[Cell, float]:
    """Divide prefixes of one token that are likely enough by their next tokens."""
    cells: dict[Cell, float] = {}
    paths: list[Cell] = []
    for num_likely in (_NUM_SECOND, *(_NUM_LATER,) * (num_tokens - 2)):
        divided = parts if not paths else {path: share for path, share in parts.items() if share >= _LEAST_DIVIDED}
        cells |= {path: share for path, share in parts.items() if path not in divided}
        paths += divided
        next_NV = _distributions(engine.target, engine, prompt, paths, sampling)[1:]
        parts = {}
        for (path, share), next_V in zip(divided.items(), next_NV[len(paths) - len(divided) :], strict=True):
            likely = torch.topk(next_V, min(num_likely, len(next_V)))
            cells[*path, _OTHER] = share * max(0.0, 1.0 - float(likely.values.sum()))
            parts |= {
                (*path, token): share * probability
                for token, probability in zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
            }
    return cells | parts


def g_test(counts: Counter[Cell], expected: dict[Cell, float]) -> tuple[float, int]:
    """Return (p-value, number of cells) of the counts; cells too small for the test are pooled."""
    total = counts.total()
    small = {cell for cell, probability in expected.items() if probability * total < _SMALLEST_CELL}
    observed: list[float] = [counts[cell] for cell in expected if cell not in small]
    wanted = [probability * total for cell, probability in expected.items() if cell not in small]
    pooled = sum(expected[cell] for cell in small) * total
    if pooled >= _SMALLEST_CELL:
        observed.append(sum(counts[cell] for cell in small))
        wanted.append(pooled)
    elif wanted:
        wanted[0] += pooled
        observed[0] += sum(counts[cell] for cell in small)
    if len(wanted) < 2:
        return 1.0, len(wanted)
    statistic = 2 * sum(o * math.log(o / w) for o, w in zip(observed, wanted, strict=True) if o > 0)
    return float(chi2.sf(max(0.0, statistic), len(wanted) - 1)), len(wanted)


def check_distribution(
    engine: Engine,
    name: str,
    speculation: Speculation,
    prompt: Sequence[int],
    num_answers: int,
    temperature: float,
    max_tokens: int = 6,
    **filters: Any,
) -> Check:
    """Answer a prompt many times and compare with the exact distribution.

    filters: fields of `Sampling`; max_tokens: of an answer, of which the first ones are compared.
    """
    sampling = Sampling(temperature=temperature, **filters)
    num_tokens = _NUM_TOKENS + engine.scheduler.draft_prefill.by_head
    cells = make_cells(engine, prompt, sampling, min(num_tokens, max_tokens))
    counts: Counter[Cell] = Counter()
    requests = [
        Request(
            request_id=str(seed),
            prompt_token_ids=tuple(prompt),
            sampling=replace(sampling, seed=seed),
            limits=Limits(max_tokens=max_tokens, ignore_eos=True),
            speculation=speculation,
        )
        for seed in range(num_answers)
    ]
    answers = run_to_end(engine, requests).values()
    for answer in answers:
        counts[cells.of(answer.tokens)] += 1
    tokens_per_step = sum(len(answer.tokens) for answer in answers) / sum(len(answer.steps) for answer in answers)
    p_value, num_cells = g_test(counts, cells.expected)
    bias = sum(answer.bias for answer in answers) / num_answers
    return Check(name, p_value, num_cells, num_answers, tokens_per_step, bias)


def check_power(engine: Engine, prompt: Sequence[int], num_answers: int, temperature: float) -> Check:
    """Run the same test on a rule that is known to be biased: see `is_blind`."""
    # Bias is reported of all drafted tokens, so answers have few that are not compared.
    length, max_tokens = (1, 3) if engine.scheduler.draft_prefill.by_head else (2, 4)
    biased = Speculation(rule="token", num_drafts=1, draft_length=length, over_acceptance=_OVER_ACCEPTANCE)
    return check_distribution(engine, "over-acceptance", biased, prompt, num_answers, temperature, max_tokens)


def is_blind(power: Check) -> bool:
    """Whether the test missed a bias that is clearly larger than the detectable one."""
    return not power.rejected and power.reported_bias > 3 * power.detectable_bias


def short_check(engine: Engine, speculation: Speculation, report: Callable[[str], None]) -> None:
    """Check the configured speculation on one prompt at start; raises LoadError if it fails."""
    num_answers = 600
    prompt = make_prompt(engine, seed=1)
    report(f"self-check of rule {speculation.rule}")
    check = check_distribution(engine, speculation.rule, speculation, prompt, num_answers, temperature=1.0)
    power = check_power(engine, prompt, num_answers, temperature=1.0)
    if check.rejected:
        raise LoadError(
            f"self-check failed: with rule {speculation.rule} the output does not have the target's distribution "
            f"(p = {check.p_value:.2g} on {num_answers} answers); please report this, and serve with --spec-rule off"
        )
    if is_blind(power):
        raise LoadError("self-check failed: it did not find a rule that is known to be biased; please report this")
    report(
        f"self-check passed: p = {check.p_value:.2g} on {num_answers} answers; "
        f"a bias of {check.detectable_bias:.2f} would have been found"
    )

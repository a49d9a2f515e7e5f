"""*A Theoretical Perspective for Speculative Decoding Algorithm* (NeurIPS 2024).

By Yin et al.: rejections and biases.

Theorem 1 on the served rule `token`: rejections in the engine's own steps compared with the sum of
TV(p, q) over the same texts. Theorem 3 on a Markov chain like that of the paper's simulations, by
its formula and by the algorithm. Theorem 5, and Decoding-OPT compared with Decoding-UNO: at single
positions in closed form, and on whole answers of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.request import Speculation
from engine.speculation.theory import Law
from engine.start.distribution_check import CheckedAnswer
from loadtest.statistics import interval, ratio_of_sums
from research.analysis.pair import answers_of, laws_along, log_probs
from research.analysis.papers.cases import Progress, ServedPair, recorded_distributions, texts_of
from research.analysis.papers.grid import TheoreticalGrid
from tests.oracles import bounds

_STATES, _HORIZON = 7, 50
_TIMES, _SEEDS = 4, 8
"""Repetitions of a task's prompts, and seeds of each: the comparison with a formula needs more
answers than a table of ratios.
"""

Laws = npt.NDArray[np.float64]
"""[T, S, S] distribution of the next state by position and state."""


def measure(pair: ServedPair, grid: TheoreticalGrid, positions: int, progress: Progress) -> dict[str, Any]:
    """Return all tables of the paper."""
    prompts = pair.dialogues(_TIMES)
    return {
        "rejections": [_rejections(pair, prompts * _SEEDS, length, progress) for length in grid.lookaheads],
        "batches": batches(grid, progress),
        "front": front(
            recorded_distributions(pair, texts_of(pair, pair.dialogues(), 1.0), 1.0, positions), grid.epsilons
        ),
        "answers": _answers(pair, prompts, grid.epsilons, progress),
    }


def _rejections(
    pair: ServedPair, prompts: Sequence[tuple[int, ...]], length: int, progress: Progress
) -> dict[str, Any]:
    """Check Theorem 1: rejections of served answers, and the sum of TV.

    Over the positions that were verified in them.
    """
    speculation = Speculation(rule="token", num_drafts=1, draft_length=length)
    counted, predicted = [], []
    answers = answers_of(pair.engine, prompts, speculation, 1.0, pair.tokens, ignore_eos=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        verified, rejections = verified_and_rejected(answer)
        target_NV, draft_NV = laws_along(pair.engine, prompt, answer.tokens, 1.0)
        distance_N = 0.5 * (target_NV.double() - draft_NV.double()).abs().sum(1)
        counted.append(rejections)
        predicted.append(float(distance_N[torch.tensor(verified)].sum()))
    progress(f"rejections, lookahead {length}")
    found = ratio_of_sums(counted, predicted)
    tokens_each = pair.tokens * len(prompts)
    return {
        "lookahead": length,
        "tokens": tokens_each,
        "rejections_per_token": sum(counted) / tokens_each,
        "predicted": sum(predicted) / tokens_each,
        **found._asdict(),
    }


def verified_and_rejected(answer: CheckedAnswer) -> tuple[list[bool], int]:
    """Return (whether each token was verified against a draft, rejections).

    The token after a wholly accepted chain, and that of a plain step, was not.
    """
    verified = [False] * len(answer.tokens)
    rejections = 0
    for start, step in answer.steps:
        is_rejected = step.num_accepted < min(step.draft_length, len(step.token_ids))
        rejections += is_rejected
        end = start + step.num_accepted + is_rejected
        verified[start:end] = [True] * (end - start)
    return verified, rejections


def markov_chain(seed: int) -> tuple[Laws, Laws]:
    """Return target and draft: a chain whose distributions change with the position."""
    random = np.random.default_rng(seed)
    p, q = (random.dirichlet(np.full(_STATES, 0.6), (_HORIZON, _STATES)) for _ in range(2))
    return p, 0.5 * p + 0.5 * q


def batches(grid: TheoreticalGrid, progress: Progress) -> list[dict[str, Any]]:
    """Check Theorem 3 and its limit: rejections of a text by the number of drafts.

    Of the drafts at the first position after each rejection.
    """
    p, q = markov_chain(0)

    def laws(state: tuple[int, ...]) -> tuple[Law, Law]:
        position, last = state or (0, 0)
        return p[position, last], q[position, last]

    rows = []
    for size in grid.batches:
        simulated = simulate(p, q, size, grid.runs, seed=size)
        found = interval(lambda sample, axis: sample.mean(axis), simulated)
        predicted = bounds.expected_rejections(laws, _HORIZON, size, merged)
        rows.append(
            {"batch": size, "predicted": predicted, "simulated": found.ratio, "low": found.low, "high": found.high}
        )
        progress(f"batch of {size}")
    return rows


def merged(prefix: tuple[int, ...]) -> tuple[int, ...]:
    """Return (position, last state) of such a name with one more state.

    The future depends on these alone.
    """
    return (1, prefix[0]) if len(prefix) == 1 else (prefix[0] + 1, prefix[2])


def simulate(p: Laws, q: Laws, batch: int, runs: int, seed: int) -> Law:
    """Return [runs] the rejections of the paper's Algorithm 4.

    A restart tries `batch` chains' first tokens, then follows one.
    """
    random = np.random.default_rng(seed)
    state = np.zeros(runs, dtype=np.int64)
    is_first = np.ones(runs, dtype=bool)
    rejections = np.zeros(runs)
    every = np.arange(runs)

    def drawn(law: Laws) -> npt.NDArray[np.int64]:
        below: npt.NDArray[np.int64] = (law.cumsum(1) < random.random((runs, 1)) * law.sum(1, keepdims=True)).sum(1)
        tokens: npt.NDArray[np.int64] = np.minimum(below, law.shape[1] - 1)
        return tokens

    for p_now, q_now in zip(p, q, strict=True):
        residual, draft = p_now[state].copy(), q_now[state]
        token = np.full(runs, -1)
        for attempt in range(batch):
            tries = (token < 0) & (is_first | (attempt == 0))
            if not tries.any():
                break
            x = drawn(draft)
            accepted = tries & (random.random(runs) * draft[every, x] < residual[every, x])
            token[accepted] = x[accepted]
            reduced = (residual - draft).clip(min=0)
            mass = reduced.sum(1, keepdims=True)
            # If nothing is left, a rejection has probability zero.
            residual = np.where(tries[:, None] & (mass > 1e-15), reduced / mass.clip(min=1e-300), residual)
        is_first = token < 0
        rejections += is_first
        state = np.where(is_first, drawn(residual), token)
    return rejections


def front(laws: Sequence[tuple[Law, Law]], epsilons: Sequence[float]) -> list[dict[str, float]]:
    """Return means over positions: rejection, and the distance from the target.

    For OPT and UNO, by epsilon.
    """
    rows = []
    for epsilon in (0.0, *epsilons):
        points = []
        for p, q in laws:
            accept = bounds.over_acceptance(p, q, epsilon)
            rejection = 1 - float((accept * q).sum())
            biases = [
                0.5 * float(np.abs(bounds.decoding_law(p, q, accept, residual) - p).sum())
                for residual in ("optimal", "target")
            ]
            points.append((rejection, *biases, bounds.pareto_bias(p, q, rejection)))
        rejection, opt, uno, line = np.mean(points, axis=0).clip(min=0).tolist()
        rows.append({"epsilon": epsilon, "rejection": rejection, "opt": opt, "uno": uno, "line": line})
    return rows


def _answers(
    pair: ServedPair, prompts: Sequence[tuple[int, ...]], epsilons: Sequence[float], progress: Progress
) -> list[dict[str, Any]]:
    """Return whole answers of the engine: tokens per pass, and their quality.

    The target judges the quality.

    The judge is the target's mean log-likelihood of a token. A comparison is won by the likelier
    answer to the same prompt; a tie counts for half.
    """
    exact = answers_of(pair.engine, prompts, _lossy(0.0, "optimal"), 1.0, pair.tokens)
    rows = [{"epsilon": 0.0, "opt": _quality(pair, prompts, exact)[0]}]
    for epsilon in epsilons:
        row: dict[str, Any] = {"epsilon": epsilon}
        judged = {}
        for name, residual in (("opt", "optimal"), ("uno", "target")):
            answers = answers_of(pair.engine, prompts, _lossy(epsilon, residual), 1.0, pair.tokens)
            row[name], judged[name] = _quality(pair, prompts, answers)
            progress(f"over-acceptance {epsilon}, {residual}")
        wins = (judged["opt"] > judged["uno"]) + 0.5 * (judged["opt"] == judged["uno"])
        found = interval(lambda sample, axis: sample.mean(axis), wins)
        rows.append(row | {"win_rate": found.ratio, "low": found.low, "high": found.high})
    return rows


def _lossy(epsilon: float, residual: Any) -> Speculation:
    return Speculation(
        rule="token", num_drafts=1, draft_length=5, over_acceptance=epsilon, over_acceptance_residual=residual
    )


def _quality(
    pair: ServedPair, prompts: Sequence[tuple[int, ...]], answers: Sequence[CheckedAnswer]
) -> tuple[dict[str, float], Law]:
    """Return (means, each answer's log-likelihood of a token)."""
    likelihoods = []
    for prompt, answer in zip(prompts, answers, strict=True):
        target_NV, _ = laws_along(pair.engine, prompt, answer.tokens, 1.0)
        likelihoods.append(float(log_probs(target_NV, answer.tokens).mean()))
    tokens = sum(len(answer.tokens) for answer in answers)
    means = {
        "tokens_per_pass": tokens / sum(len(answer.steps) for answer in answers),
        "log_likelihood": float(np.mean(likelihoods)),
        "bias_bound": sum(answer.bias for answer in answers) / tokens,
    }
    return means, np.array(likelihoods)

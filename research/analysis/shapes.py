"""`analyze shapes`: tokens a pass of every shape of drafts, and the shape that pays at a given
price of rows.

Nothing is drafted. The target writes texts, and the draft model's distributions along them say how
many tokens the score race accepts of any tree (`bounds.race_acceptance`): in closed form above
temperature 0, and by the rank of the target's token at temperature 0. Trees that branch after a
stem, or at several depths, are compared although `bv_race` is served for chains that part at the
root. A text is followed step by step: a step that accepts i tokens begins the next one i + 1 tokens
later.

Not for: heads, whose distributions below drafted tokens depend on where a step began.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.errors import ConfigError
from engine.fanout import Fanout, level_widths, num_nodes
from engine.request import Speculation
from engine.speculation.theory import Law
from engine.step.engine import Engine
from loadtest.results import document, table
from research.analysis.draft_logits import drafts_by_head
from research.analysis.load import PROMPTS_HELP
from research.analysis.loading import add_pair_arguments, load_pair, prompts_of
from research.analysis.pair import answers_of, laws_along, log_probs
from tests.oracles.bounds import race_acceptance

KINDS = ("one chain", "from the root", "after a stem", "at several depths")
_LONGEST, _STEMS, _BRANCHES = 8, range(1, 5), (2, 3, 4, 8)
_AT_SEVERAL_DEPTHS = ((2, 2), (3, 2), (2, 1, 2), (3, 1, 2), (2, 1, 1, 2), (2, 2, 2))
_LEAST_ANSWER = 8
"""Tokens of the shortest answer that is followed."""
_FURTHER_DRAFT_ROW = 0.1
"""Time of a further row of the draft model's pass, over its pass of one row."""


def all_shapes() -> list[Fanout]:
    """Return the trees that are compared."""
    heads = [(1,), *((count,) for count in _BRANCHES), *_AT_SEVERAL_DEPTHS]
    heads += [(*(1,) * stem, count) for stem in _STEMS for count in _BRANCHES]
    return [(*head, *(1,) * more) for head in heads for more in range(_LONGEST - len(head) + 1)]


def kind_of(fanout: Fanout) -> str:
    """Return where a tree branches, one of `KINDS`."""
    branching = [depth for depth, count in enumerate(fanout) if count > 1]
    if not branching:
        return KINDS[0]
    if len(branching) > 1:
        return KINDS[3]
    return KINDS[2] if branching[0] else KINDS[1]


def expected_passes(accepted_NL: Law) -> float:
    """Return the expected number of passes over a text.

    accepted_NL: the probability that a step which begins at each position accepts the first 1, ...,
    L tokens.
    """
    num_tokens, length = accepted_NL.shape
    at_least = np.concatenate([np.ones((num_tokens, 1)), accepted_NL, np.zeros((num_tokens, 1))], axis=1)
    exactly = at_least[:, :-1] - at_least[:, 1:]
    begins = np.zeros(num_tokens + length + 1)
    begins[0] = 1.0
    for position in range(num_tokens):
        begins[position + 1 : position + 2 + length] += begins[position] * exactly[position]
    return float(begins[:num_tokens].sum())


def windows_of(along_N: Law, beyond: float) -> Law:
    """Return [N, L] the numbers from every position on; beyond: number of positions after the
    text.
    """
    padded = np.concatenate([along_N, np.full(_LONGEST - 1, beyond)])
    return np.lib.stride_tricks.sliding_window_view(padded, _LONGEST)


def accepted_by_race(ratio_NL: Law, fanout: Fanout) -> Law:
    """Return [N, L] the probabilities that the first tokens are accepted, from windows of q/p."""
    return race_acceptance(ratio_NL[:, : len(fanout)], fanout)


def accepted_by_match(rank_NL: Law, fanout: Fanout) -> Law:
    """Return [N, L] whether the first tokens are accepted, from windows of the ranks of the
    target's tokens.
    """
    matches: Law = np.cumprod(rank_NL[:, : len(fanout)] < np.array(fanout), axis=1).astype(np.float64)
    return matches


def _texts(engine: Engine, options: argparse.Namespace, temperature: float) -> list[Law]:
    """Return windows of q/p along each answer of the target; at temperature 0 of ranks in the
    draft's logits.
    """
    room = engine.facts.max_model_len - options.tokens - 1
    prompts = [prompt[-room:] for prompt in prompts_of(options.prompts, options)[: options.most_prompts]]
    answers = answers_of(engine, prompts, Speculation(), temperature, options.tokens)
    texts = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer.tokens) < _LEAST_ANSWER:
            continue
        target_NV, draft_NV = laws_along(engine, prompt, answer.tokens, temperature or 1.0)
        if temperature:
            log_p, log_q = (log_probs(rows, answer.tokens) for rows in (target_NV, draft_NV))
            texts.append(windows_of(np.exp(log_q - log_p), 0.0))
            continue
        own_N1 = draft_NV.gather(1, torch.tensor(answer.tokens).unsqueeze(1))
        texts.append(windows_of((draft_NV > own_N1).sum(1).double().numpy(), np.inf))
    return texts


def tokens_a_pass(texts: Sequence[Law], fanout: Fanout, temperature: float) -> float:
    """Return the tokens of a step of this shape, over all texts."""
    accepted = accepted_by_race if temperature else accepted_by_match
    passes = sum(expected_passes(accepted(windows, fanout)) for windows in texts)
    return sum(len(windows) for windows in texts) / passes


def step_cost(fanout: Fanout, row_cost: float, draft_cost: float) -> float:
    """Return the time of a step over that of plain decoding."""
    widths = level_widths(fanout)
    further = sum(widths[:-1]) - len(widths[:-1])
    return 1 + row_cost * sum(widths) + draft_cost * (len(fanout) + _FURTHER_DRAFT_ROW * further)


def best_of_kinds(tokens: dict[Fanout, float], row_cost: float, draft_cost: float) -> dict[str, tuple[Fanout, float]]:
    """Return the fastest shape of each kind, and its speed over plain decoding."""
    best: dict[str, tuple[Fanout, float]] = {}
    for fanout, emitted in tokens.items():
        speed, kind = emitted / step_cost(fanout, row_cost, draft_cost), kind_of(fanout)
        if kind not in best or speed > best[kind][1]:
            best[kind] = fanout, speed
    return best


def markdown(result: dict[str, Any]) -> str:
    """Return a table of the best shapes by temperature and price of a row."""
    rows = []
    for cell in result["cells"]:
        shown = [f"{'.'.join(map(str, one['shape']))} {one['speed']:.2f}x" for one in map(cell["best"].get, KINDS)]
        rows.append([cell["prompts"], cell["temperature"], f"{cell['row_cost']:.1%}", *shown])
    return table(["prompts", "T", "price of a row", *KINDS], rows)


def _costs(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--prompts", default="dialogues", help=f"{PROMPTS_HELP}; random:N for N random tokens")
    add("--most-prompts", type=int, default=48, help="prompts used (default 48)")
    add("--prompt-length", type=int, default=256, help="last tokens of a prompt that are used (default 256)")
    add("--tokens", type=int, default=96, help="tokens of an answer (default 96)")
    add("--temperatures", type=_costs, default=[1.0, 0.0], help="temperatures (default 1,0)")
    add(
        "--row-costs",
        type=_costs,
        default=[0.0, 0.01, 0.03, 0.06, 0.09],
        help="times of a further row of the target's pass, over its pass of one row (default 0,0.01,0.03,0.06,0.09)",
    )
    add("--draft-cost", type=float, default=0.06, help="time of the draft model's pass, over the same (default 0.06)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Let the target write, and predict every shape; raise ConfigError for a head."""
    engine = load_pair(options, 16, 1, 1)
    if drafts_by_head(engine):
        raise ConfigError("a head drafts from the beginning of each step; `analyze shapes` needs a draft model")
    cells, shapes = [], []
    for temperature in options.temperatures:
        texts = _texts(engine, options, temperature)
        if not texts:
            raise ConfigError("all answers are too short to be followed; choose other --prompts")
        tokens = {fanout: tokens_a_pass(texts, fanout, temperature) for fanout in all_shapes()}
        for fanout, emitted in tokens.items():
            nodes = num_nodes(fanout)
            shapes.append({"temperature": temperature, "shape": fanout, "nodes": nodes, "tokens_per_pass": emitted})
        for row_cost in options.row_costs:
            best = best_of_kinds(tokens, row_cost, options.draft_cost)
            found = {kind: {"shape": fanout, "speed": speed} for kind, (fanout, speed) in best.items()}
            cells.append({"prompts": options.prompts, "temperature": temperature, "row_cost": row_cost, "best": found})
    what = "predicted speed over plain decoding of the best shapes at one request, by price of a row; tokens a pass"
    return document(what, options, cells=cells, shapes=shapes)

"""Rules that are nearly right, and by how much they are wrong.

`python -m tests.speculation.wrong` prints the table of docs/speculation-rules.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.speculation.verification.greedy import greedy
from engine.speculation.verification.rrs import rrs
from tests.oracles.enumeration import (
    EveryChain,
    Path,
    Rows,
    RuleOutcome,
    TabularModel,
    block_outcomes,
    joint,
    race,
    top_down_outcomes,
)
from tests.speculation.exact import distance_from_target, outcomes_of, random_model


def published_spectr_gbv(model: TabularModel, num_chains: int) -> list[RuleOutcome]:
    """A wrong rule: SpecTr-GBV as its authors' code accepts and redraws."""

    def ceiling(node: Path) -> float:
        p = joint(model.target, node)
        return min(1.0, joint(model.draft, node) / p) if p > 0 else 1.0

    def missed(value: float) -> float:
        return (1 - value) ** num_chains

    def acceptance(node: Path) -> float:
        p, q = joint(model.target, node), joint(model.draft, node)
        if len(node) == model.length:
            return min(1.0, p * (1 - missed(ceiling(node))) / (1 - missed(q)))
        children = [(*node, token) for token in range(model.vocabulary)]
        below = sum(joint(model.target, child) * missed(ceiling(child)) for child in children)
        kept = sum(joint(model.target, child) * (1 - missed(ceiling(child))) for child in children)
        above, under = below - p * missed(ceiling(node)), 1 - missed(q) - kept
        return min(1.0, max(0.0, above / under)) if under > 1e-14 else float(above > 1e-14)

    def redraw(node: Path) -> np.ndarray:
        children = [(*node, token) for token in range(model.vocabulary)]
        mass = np.array([joint(model.target, c) * (1 - ceiling(c) ** num_chains) for c in children])
        return mass / mass.sum() if mass.sum() > 1e-300 else np.asarray(model.target[node])

    outcomes: list[RuleOutcome] = []

    def emit(node: Path, law: np.ndarray, probability: float) -> None:
        outcomes.extend(RuleOutcome(node, token, probability * float(law[token])) for token in range(model.vocabulary))

    def try_next(chains: tuple[Path, ...], accepted: Path, rejected: frozenset[Path], probability: float) -> None:
        if probability <= 0:
            return
        if chains:
            go_down(chains, accepted, rejected, probability, len(accepted))
        else:
            emit(accepted, redraw(accepted), probability)

    def go_down(
        chains: tuple[Path, ...], accepted: Path, rejected: frozenset[Path], probability: float, depth: int
    ) -> None:
        """Walk the rest of the first chain, from below `depth`."""
        if probability <= 0:
            return
        for below in range(depth + 1, model.length):
            node = chains[0][:below]
            if node not in rejected:
                chance = acceptance(node)
                go_down(chains, node, rejected, probability * chance, below)
                go_down(chains, accepted, rejected | {node}, probability * (1 - chance), below)
                return
        finish(chains, accepted, rejected, probability)

    def finish(chains: tuple[Path, ...], accepted: Path, rejected: frozenset[Path], probability: float) -> None:
        chance = acceptance(chains[0])
        emit(chains[0], np.asarray(model.target[chains[0]]), probability * chance)
        try_next(chains[1:], accepted, rejected, probability * (1 - chance))

    drawn = [path for path in model.paths(model.length) if joint(model.draft, path) > 0]
    for chains in itertools.product(drawn, repeat=num_chains):
        weight = float(np.prod([joint(model.draft, chain) for chain in chains]))
        try_next(chains, (), frozenset(), weight)
    return outcomes


def race_of_shared_trunks(model: TabularModel) -> list[RuleOutcome]:
    """A wrong rule: the score race over two chains with a common first token."""
    block = block_outcomes(EveryChain.of(model))
    outcomes = []
    for (first,) in model.paths(1):
        share = np.asarray(model.draft[()])[first]
        given_first = [replace(o, probability=o.probability / share) for o in block if o.path[0] == first]
        outcomes += [replace(o, probability=o.probability * share) for o in race([given_first] * 2)]
    return outcomes


def redrawn(outcomes: Sequence[RuleOutcome], verified: Rows, model: TabularModel) -> list[RuleOutcome]:
    """Return outcomes of chains drawn from `model.draft`, verified as from `verified`."""
    return [
        replace(o, probability=o.probability * joint(model.draft, o.path) / joint(verified, o.path)) for o in outcomes
    ]


def token_residual(model: TabularModel) -> list[RuleOutcome]:
    """The residual of token verification after block acceptance."""
    every = EveryChain.of(model)
    return block_outcomes(every, torch.ones((len(every.paths), model.length + 1), dtype=torch.float64))


def score_without_lower_end(model: TabularModel) -> list[RuleOutcome]:
    """A score that does not stop at the next token's ceiling."""
    return race([[replace(o, lower=0.0) for o in block_outcomes(EveryChain.of(model))]] * 2)


def longest_wins(model: TabularModel) -> list[RuleOutcome]:
    """The longest accepted chain wins, whatever its score."""
    block = block_outcomes(EveryChain.of(model))
    return race([[replace(o, lower=2.0 - len(o.accepted), upper=3.0 - len(o.accepted)) for o in block]] * 2)


def other_temperature(model: TabularModel) -> list[RuleOutcome]:
    """Verified with a draft law that the tokens were not drawn from."""
    hotter = {prefix: np.sqrt(row) / np.sqrt(row).sum() for prefix, row in model.draft.items()}
    return redrawn(block_outcomes(EveryChain.of(replace(model, draft=hotter))), hotter, model)


def skipped_duplicates(model: TabularModel) -> list[RuleOutcome]:
    """RRS with replacement that does not test a token again."""

    def skipping(target: Tensor, draft: Tensor, drafted: Tensor, present: Tensor) -> Tensor:
        seen = [(drafted[:, :k] == drafted[:, k : k + 1]).any(1) for k in range(drafted.shape[1])]
        return rrs(target, draft, drafted, present & ~torch.stack(seen, 1))

    return top_down_outcomes(model, skipping, (3, 1), "iid")


def inconsistent_ties(model: TabularModel) -> list[RuleOutcome]:
    """Greedy drafts whose verification takes the other of two equally likely tokens."""

    def other(target: Tensor, draft: Tensor, drafted: Tensor, present: Tensor) -> Tensor:
        if drafted.shape[1] < 2:
            return greedy(target, draft, drafted, present)
        last_of_ties = draft.shape[1] - 1 - draft.flip(1).argmax(1)
        return greedy(target, draft, torch.stack([last_of_ties, drafted[:, 1]], 1), present)

    tied = {prefix: np.array([0.4, 0.4, 0.2]) for prefix in model.draft}
    return top_down_outcomes(replace(model, draft=tied), other, (2, 1), "greedy")


WRONG: dict[str, Callable[[TabularModel], list[RuleOutcome]]] = {
    "the longest accepted chain wins": longest_wins,
    "a score without its lower end": score_without_lower_end,
    "the residual of token verification after block acceptance": token_residual,
    "the race over chains that share their first token": race_of_shared_trunks,
    "verified with the draft law of another temperature": other_temperature,
    "greedy block verification without its change of the target": lambda m: outcomes_of("greedy_block", m, 1),
    "the same behind the race, K = 2": lambda m: outcomes_of("spectr_gbv", m, 2),
    "SpecTr-GBV's published acceptance, K = 2": lambda m: published_spectr_gbv(m, 2),
    "recursive rejection that skips duplicates, three drafts": skipped_duplicates,
    "ties broken differently in drafting and verification": inconsistent_ties,
}
"""One step of every wrong rule."""


def bias(name: str, model: TabularModel) -> float:
    """Total variation between the law of three tokens that a wrong rule emits and the target's."""
    return distance_from_target(model, WRONG[name](model))


def main() -> None:
    """Print mean and maximum of every bias over synthetic models of three tokens."""
    models = [random_model(seed, kind="dense") for seed in range(40)]
    print("| wrong rule | mean bias | largest |\n| --- | --- | --- |")
    for name in WRONG:
        biases = [bias(name, model) for model in models]
        print(f"| {name} | {np.mean(biases):.3f} | {max(biases):.3f} |")


if __name__ == "__main__":
    main()

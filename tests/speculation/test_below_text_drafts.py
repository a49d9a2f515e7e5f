"""Sampled chains below accepted text drafts: the joint law of what a step serves.

(accepted tokens, next token) are compared with an enumeration that knows no chains and no shifted
arrays. The walk down the text drafts ends at a node with a known probability. A number of sampled
nodes, whose distribution is known, stand at the same text. Below it a step of the rule begins whose
first target law is the node's own without the refused tokens. The emitted text alone would not
notice everything: a rule that overlooks drafts is still lossless, only slower.

Rules that decide node by node are enumerated themselves, too, up to 1e-12. All
are sampled through `verify_chains`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.step.verify as verifying
from engine.fanout import level_widths
from engine.kernels.protocol import ChainNoise, ProbsTable
from engine.kernels.torch_kernels import TORCH, Kernels
from engine.request import Speculation, TextDraft
from engine.speculation.conditions import WHOLE_BLOCKS
from engine.speculation.verification import RULES, node
from engine.speculation.verification.text_drafts import Below, below, refuse
from tests.grid import FAMILIES
from tests.oracles.enumeration import EveryChain, Path, TabularModel, drafted_trees, joint, rule_outcomes
from tests.oracles.node_enumeration import draft_tuples
from tests.speculation.exact import from_prefix
from tests.speculation.served import KERNELS, WITHOUT_DECIDE, Fit, fit, small_world
from tests.speculation.test_served_steps import VOCABULARY, row_of, step
from tests.wrong import instead

ALPHA = 1e-6
NUM_ROWS = 3_000
TEXT_DRAFTS = (TextDraft("prediction", (0, 1, 2)), TextDraft("prompt_lookup", (1, 0)))
Ends = dict[tuple[Path, int], float]
"""Probability of every (accepted tokens, next token)."""


def test_a_law_without_refused_tokens_keeps_its_bits() -> None:
    laws = torch.tensor([[0.1, 0.2, 0.6], [0.1, 0.2, 0.6]])
    refuse(laws, [0, 1], [[], [2]])
    assert laws[0].tolist() == torch.tensor([0.1, 0.2, 0.6]).tolist()
    assert laws[1, 2] == 0


def world_of_likely_text_drafts(vocabulary: int) -> TabularModel:
    """A generic world, in which text drafts and sampled chains begin alike in most steps."""
    world = small_world("generic", vocabulary, 11)
    target, draft = np.full((2, vocabulary), 0.2 / (vocabulary - 2))
    target[:2], draft[:2] = (0.45, 0.35), (0.5, 0.3)
    return replace(world, target={**world.target, (): target}, draft={**world.draft, (): draft})


WORLD, SMALL = world_of_likely_text_drafts(VOCABULARY), world_of_likely_text_drafts(3)


@dataclass(frozen=True)
class Drafting:
    """Drafts and verification of the rows of a case."""

    rule: str
    method: str
    fanout: tuple[int, ...]
    """Children by depth; a tree where a node below the root has several."""

    @property
    def speculation(self) -> Speculation:
        return Speculation(
            rule=self.rule,
            num_drafts=prod(self.fanout),
            draft_length=len(self.fanout),
            draft_method=self.method,
            tree=self.fanout if max(self.fanout[1:], default=1) > 1 else (),
        )

    def __str__(self) -> str:
        return f"{self.rule}-{self.method}-{'x'.join(map(str, self.fanout))}"


CHAINS = [
    Drafting("token", "iid", (1, 1, 1)),
    Drafting("block", "iid", (1, 1, 1)),
    Drafting("bv_race", "iid", (3, 1, 1)),
]
TRAVERSALS = [Drafting("traversal", "without_replacement", (2, 1)), Drafting("traversal", "iid", (1, 3))]
BY_NODES = [
    Drafting("nss", "iid", (1, 2, 1)),
    Drafting("nss", "greedy", (2, 2)),
    Drafting("rrs", "iid", (1, 2, 1)),
    Drafting("rrs_without_replacement", "without_replacement", (1, 2, 1)),
    Drafting("kseq", "iid", (1, 2, 1)),
    Drafting("spechub", "spechub", (2, 2)),
    Drafting("greedy", "greedy", (1, 2, 1)),
    Drafting("weighted_race", "iid", (1, 2, 1)),
]
LINEAR_PROGRAM = Drafting("ot_lp", "iid", (1, 2))


def walk_ends(world: TabularModel) -> Iterator[tuple[Path, float, list[int]]]:
    """Yield (text, probability, refused tokens) where the walk can end."""
    nodes: list[tuple[Path, float]] = [((), 1.0)]
    for path, probability in nodes:
        refused = sorted(
            {one.tokens[len(path)] for one in TEXT_DRAFTS if one.tokens[: len(path)] == path != one.tokens}
        )
        law = np.asarray(world.target[path])
        nodes += [((*path, token), probability * float(law[token])) for token in refused]
        yield path, probability * float(1 - law[refused].sum()), refused


def nodes_at(path: Path, world: TabularModel, drafting: Drafting) -> Mapping[int, float]:
    """Probability of each number of sampled nodes that stand at a text."""
    counts: dict[int, float] = {1: 1.0}
    for depth, token in enumerate(path):
        deeper: dict[int, float] = defaultdict(float)
        for count, probability in counts.items():
            number = count * drafting.fanout[depth]
            drawn = (
                draft_tuples(drafting.method, np.asarray(world.draft[path[:depth]]), number) if number else {(): 1.0}
            )
            for tokens, chance in drawn.items():
                deeper[tokens.count(token)] += probability * chance
        counts = deeper
    return counts


@cache
def expected(drafting: Drafting, vocabulary: int = VOCABULARY) -> Ends:
    """The enumeration."""
    law: Ends = defaultdict(float)
    world = WORLD if vocabulary == VOCABULARY else SMALL
    for path, probability, refused in walk_ends(world):
        fanout = drafting.fanout[len(path) :]
        rest = from_prefix(world, path, len(fanout))
        root = np.where(np.isin(np.arange(vocabulary), refused), 0.0, rest.target[()])
        rest = replace(rest, target={**rest.target, (): root / root.sum()})
        for count, chance in (nodes_at(path, world, drafting) if fanout else {0: 1.0}).items():
            if not count:
                for token, share in enumerate(root / root.sum()):
                    law[path, token] += probability * chance * float(share)
                continue
            for end in rule_outcomes(drafting.rule, rest, (count * fanout[0], *fanout[1:]), drafting.method):
                law[(*path, *end.accepted), end.next_token] += probability * chance * end.probability
    return law


EVERY = [*CHAINS, *TRAVERSALS, *BY_NODES, LINEAR_PROGRAM]


def test_the_cases_are_of_every_rule_that_goes_with_text_drafts() -> None:
    assert {case.rule for case in EVERY} == {name for name, rule in RULES.items() if WHOLE_BLOCKS not in rule.needs}


@pytest.mark.parametrize("drafting", EVERY, ids=str)
def test_the_enumeration_is_the_target_s_law(drafting: Drafting) -> None:
    texts: dict[Path, float] = defaultdict(float)
    for (accepted, token), probability in expected(drafting, SMALL.vocabulary).items():
        ends = {(*accepted, token): probability}
        for depth in range(len(accepted) + 1, 4):
            ends = {
                (*text, x): p * SMALL.target[text][x]  # type: ignore[index, misc]
                for text, p in ends.items()
                for x in range(3)
                if len(text) == depth
            }
        for text, share in ends.items():
            texts[text] += share
    for path in SMALL.paths(4):
        assert texts[path] == pytest.approx(joint(SMALL.target, path), abs=1e-12)


def moved(part: str, right: Below, drafted: Below) -> Below:
    """The rest of the chains with one part where it was drafted."""
    if part in ("leads_CL", "tokens_CL", "draft"):
        return replace(right, chains=replace(right.chains, **{part: getattr(drafted.chains, part)}))
    root, rest = (right, drafted) if part == "target" else (drafted, right)
    row_CX = torch.cat([root.target.row_CX[:, :1], rest.target.row_CX[:, 1:]], 1)
    return replace(right, target=replace(right.target, row_CX=row_CX))


def unshifted(part: str) -> Callable[..., Below]:
    """A wrong `below` that shifts all but one part."""

    def wrong(chains: Any, target: ProbsTable, noise: ChainNoise, *where: Any) -> Below:
        right = below(chains, target, noise, *where)
        index = torch.from_numpy(right.origin_C)
        return moved(
            part, right, replace(right, chains=chains.select(index, right.chains.shape), target=target.select(index))
        )

    return wrong


PARTS = ("leads_CL", "tokens_CL", "draft", "target", "root")


class Branches:
    """In place of `categorical`: rows take the script's next token; chances are multiplied."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script = list(script)
        self.chance: Any = 1.0

    def __call__(self, probs_BV: Tensor, _: Tensor) -> Tensor:
        token = self.script.pop(0)
        self.chance = self.chance * probs_BV[:, token].numpy()
        return torch.full((len(probs_BV),), token)


def enumerated(drafting: Drafting, rest_of: Callable[..., Below] = below) -> Ends:
    """Enumerate `RULES[name].verify` behind `below`: trees, ends of the walk, tokens."""
    law: Ends = defaultdict(float)
    length = len(drafting.fanout)
    trees = drafted_trees(SMALL, drafting.fanout, drafting.method)
    tree_C = np.repeat(np.arange(len(trees)), prod(drafting.fanout))
    leaves = [leaf for _, tree in trees for leaf in tree]
    every = EveryChain.among(from_prefix(SMALL, (), length), leaves, torch.from_numpy(tree_C))
    below_L = prod(drafting.fanout) // np.array(level_widths(drafting.fanout))
    leads_CL = torch.from_numpy(np.arange(len(leaves))[:, None] % prod(drafting.fanout) % below_L == 0)
    chains = replace(every.chains, leads_CL=leads_CL)
    number = torch.zeros(len(leaves), dtype=torch.float64)
    numbers_CL = number.unsqueeze(1).expand(-1, length)
    noise = ChainNoise(numbers_CL, number, number, numbers_CL, number)
    for path, probability, refused in walk_ends(SMALL):
        alive = {leaf for leaf in leaves if leaf[: len(path)] == path and len(leaf) > len(path)}
        lives_C = np.array([leaf in alive for leaf in leaves])
        probs_NV = torch.cat([every.target.probs_NV, torch.from_numpy(SMALL.target[path]).unsqueeze(0)])
        refuse(probs_NV, [len(probs_NV) - 1], [refused])
        rest = rest_of(
            chains,
            ProbsTable(probs_NV, every.target.row_CX, TORCH),
            noise,
            tree_C,
            np.full(len(leaves), len(path)),
            lives_C,
            np.full(len(leaves), len(probs_NV) - 1),
        )
        for script in itertools.product(range(3), repeat=length + 1):
            branches = Branches(script)
            with instead(node, "categorical", lambda _, *operands, branches=branches: branches(*operands)):
                verdict = RULES[drafting.rule].verify(rest.chains, rest.target, rest.noise)
            verdicts = zip(verdict.chain_B.tolist(), verdict.accepted_B.tolist(), branches.chance, strict=True)
            for (weight, _), (chain, accepted, chance) in zip(trees, verdicts, strict=True):
                kept = leaves[rest.origin_C[chain]][len(path) :][:accepted]
                law[(*path, *kept), script[accepted]] += probability * weight * chance
    return law


def distance(ends: Ends, drafting: Drafting) -> float:
    """Largest difference from the enumeration."""
    right = expected(drafting, SMALL.vocabulary)
    return max(abs(ends.get(end, 0.0) - right.get(end, 0.0)) for end in {*ends, *right})


def in_gate(drafting: Drafting, cheap: bool) -> Any:
    return drafting if cheap else pytest.param(drafting, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [in_gate(one, one.rule in FAMILIES) for one in BY_NODES], ids=str)
def test_rules_by_nodes_have_the_exact_law_below_text_drafts(drafting: Drafting) -> None:
    assert distance(enumerated(drafting), drafting) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("part", ["leads_CL", *(pytest.param(part, marks=pytest.mark.slow) for part in PARTS[1:])])
@pytest.mark.parametrize("drafting", [in_gate(one, one.rule in ("rrs", "greedy")) for one in BY_NODES], ids=str)
def test_a_part_that_is_not_shifted_changes_the_exact_law(drafting: Drafting, part: str) -> None:
    """`nss` alone reads neither draft laws nor leaders."""
    is_read = drafting.rule != "nss" or part not in ("leads_CL", "draft")
    difference = distance(enumerated(drafting, unshifted(part)), drafting)
    assert difference > 1e-4 if is_read else difference < 1e-12


def sampled(drafting: Drafting, kernels: Kernels = TORCH, seed: int = 0, num_rows: int = NUM_ROWS) -> Fit:
    """Return the fit of the results of many rows' steps to the enumeration."""
    fields = {"speculation": drafting.speculation, "fanout": drafting.fanout, "text_drafts": TEXT_DRAFTS}
    emissions = step([row_of(seed + i, fields) for i in range(num_rows)], world=WORLD, kernels=kernels)[1]
    return fit([(emission.accepted, emission.next_token) for emission in emissions], expected(drafting))


@pytest.mark.sole("rules below text drafts")
@pytest.mark.sampled
@pytest.mark.parametrize("drafting", [in_gate(one, one not in BY_NODES) for one in EVERY[:-1]], ids=str)
def test_a_step_serves_the_enumerated_law(drafting: Drafting) -> None:
    assert sampled(drafting).p_value > ALPHA


@pytest.mark.sole("kernels below text drafts")
@pytest.mark.sampled
@pytest.mark.parametrize("kernels", [KERNELS, WITHOUT_DECIDE], ids=["one kernel", "walk before the kernels"])
@pytest.mark.parametrize("drafting", CHAINS, ids=str)
def test_kernels_serve_the_enumerated_law(drafting: Drafting, kernels: Kernels) -> None:
    """The kernels are those of the device: of Numba on a CPU."""
    assert sampled(drafting, kernels, seed=NUM_ROWS).p_value > ALPHA


@pytest.mark.slow
def test_triton_s_race_serves_the_enumerated_law() -> None:
    """On a CPU in its interpreter."""
    triton = pytest.importorskip("engine.cuda.kernels")
    mixed = Kernels()
    mixed.race = triton.TritonKernels().race  # type: ignore[method-assign]
    assert sampled(CHAINS[-1], mixed, num_rows=300).p_value > ALPHA


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", [TORCH, WITHOUT_DECIDE], ids=["plain", "kernels"])
@pytest.mark.parametrize("part", PARTS[1:])
def test_a_race_whose_chains_are_not_shifted_is_rejected(part: str, kernels: Kernels) -> None:
    """`leads_CL` is not among its operands: rules by nodes read it."""
    with instead(verifying, "below", lambda _, *operands: unshifted(part)(*operands)):
        assert sampled(CHAINS[-1], kernels, num_rows=1_000).p_value < ALPHA

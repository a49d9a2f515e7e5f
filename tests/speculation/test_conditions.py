"""Every pair of a rule and a source of drafts is exact, or it is refused by name.

The laws of three tokens over all their steps are enumerated, with draft laws and shapes that
change from step to step as those of the source do. A pair is refused if and only if its law
is not the target's.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath

import msgspec
import numpy as np
import pytest

from engine.config import MODEL, MTP, DraftFacts, SpeculationConfig
from engine.errors import RequestError
from engine.heads.config import READERS
from engine.plan import TargetShift
from engine.request import Speculation
from engine.scheduling.request_checks import check_speculation, default_speculation
from engine.scheduling.text_drafters import TEXT_DRAFTERS
from engine.speculation.conditions import (
    CHANGING_SHAPES,
    CONDITIONS,
    DRAFTER_FACTS,
    LATE_BRANCHES,
    check_conditions,
    served_rules,
    unmet,
)
from engine.speculation.rule_facts import RULE_FACTS
from engine.speculation.verification import RULES
from tests.oracles.enumeration import Path, RuleOutcome, TabularModel
from tests.server.step_results import facts
from tests.speculation.exact import ModelOf, from_prefix, outcomes_of, random_model, stream_distance
from tests.speculation.test_chain_rules import TREES_THAT_BRANCH_LATER

EXACT, BIASED = 1e-11, 1e-3
LIMITS = SpeculationConfig()
PAGE = (FilePath(__file__).parents[2] / "docs" / "speculation.md").read_text()
LENGTH = 3
WORLD = random_model(11, vocabulary=2, length=2 + LENGTH, kind="dense")

Memory = Callable[[Path], Path]
"""Part of a drafted path on which the draft law below it depends."""


def whole_path(path: Path) -> Path:
    return path


def last_token(path: Path) -> Path:
    return (len(path), *path[-1:])


def depth_alone(path: Path) -> Path:
    return (len(path),)


def drafted_by_head(memory: Memory) -> ModelOf:
    """Return models whose draft laws depend on the text at the root and some path."""

    def model_of(world: TabularModel, prefix: Path, length: int, shifts: tuple[TargetShift, ...]) -> TabularModel:
        model = from_prefix(world, prefix, length, shifts)
        draft = {path: random_row(prefix, memory(path), world.vocabulary) for path in model.draft}
        return replace(model, draft=draft)

    return model_of


def random_row(*names: object) -> np.ndarray:
    """Return a draft law that its names determine."""
    return np.random.default_rng(zlib.crc32(repr(names).encode())).dirichlet(np.ones(2))


def short_after_odd_texts(world: TabularModel, prefix: Path, length: int, shifts: tuple) -> TabularModel:
    """Return models whose chains have one token after texts of an odd length."""
    return from_prefix(world, prefix, 1 if len(prefix) % 2 else length, shifts)


MODELS: dict[str, ModelOf] = {
    MODEL: from_prefix,
    "eagle3": drafted_by_head(whole_path),
    MTP: drafted_by_head(whole_path),
    "peagle": drafted_by_head(depth_alone),
    "dflash": drafted_by_head(depth_alone),
    "dflash2": drafted_by_head(last_token),
    "dspark": drafted_by_head(whole_path),
}
PAIRS = [(rule, drafter) for rule in RULES for drafter in MODELS]


def step_of(rule: str, num_drafts: int = 2) -> Callable[[TabularModel], list[RuleOutcome]]:
    return lambda model: outcomes_of(rule, model, num_drafts, RULES[rule].draft_methods[0])


def test_every_drafter_states_what_it_meets() -> None:
    assert set(DRAFTER_FACTS) == {MODEL, MTP, *READERS, *TEXT_DRAFTERS}
    assert set(MODELS) == set(DRAFTER_FACTS) - set(TEXT_DRAFTERS)
    stated = [*(one.needs for one in RULE_FACTS.values()), *(one.meets for one in DRAFTER_FACTS.values())]
    assert set(itertools.chain(*stated)) == set(CONDITIONS)


@pytest.mark.sampled
@pytest.mark.parametrize(("rule", "drafter"), PAIRS)
def test_a_rule_and_a_drafter_are_exact_or_refused(rule: str, drafter: str) -> None:
    distance = stream_distance(WORLD, step_of(rule), num_tokens=3, length=LENGTH, model_of=MODELS[drafter])
    known, limits = facts(drafter, vocab_size=2), SpeculationConfig(rule=rule, num_drafts=2)
    speculation = default_speculation(limits, known)
    if unmet(RULES[rule], DRAFTER_FACTS[drafter]) is None:
        assert distance < EXACT
        assert rule in served_rules(known)
        check_speculation(speculation, known, limits)
        return
    assert distance > BIASED
    assert rule not in served_rules(known)
    needs = "needs a draft distribution after a text that is the same in every step; choose bv_race"
    with pytest.raises(
        RequestError, match=f"rule '{rule}' would be biased with {DRAFTER_FACTS[drafter].title}: it {needs}"
    ):
        check_speculation(speculation, known, limits)


def text_drafts(step: Callable[[TabularModel], list[RuleOutcome]]) -> Callable[[TabularModel], list[RuleOutcome]]:
    """Return steps before which a text draft of one token is tried.

    The draft's distribution there is unknown, so nothing is known about pending
    changes of the target.
    """

    def walked(model: TabularModel) -> list[RuleOutcome]:
        if not model.shifts:
            return step(model)
        return [RuleOutcome((), token, float(share)) for token, share in enumerate(np.asarray(model.target[()]))]

    return walked


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_with_text_drafts_is_exact_or_refused(rule: str) -> None:
    """`test_below_text_drafts.py` enumerates single steps of the rules that take text drafts."""
    distance = stream_distance(WORLD, text_drafts(step_of(rule)), num_tokens=3, length=LENGTH)
    for name in TEXT_DRAFTERS:
        speculation = Speculation(rule=rule, num_drafts=1, draft_length=2, drafters=(MODEL, name))
        if unmet(RULES[rule], DRAFTER_FACTS[name]) is None:
            assert distance < EXACT
            check_conditions(speculation, facts(MODEL, vocab_size=9))
            continue
        assert distance > BIASED
        with pytest.raises(
            RequestError, match=rf"would be biased with {DRAFTER_FACTS[name].title}: .*leave text drafts"
        ):
            check_conditions(speculation, facts(MODEL, vocab_size=9))


@pytest.mark.parametrize("rule", RULES)
def test_shapes_that_change_are_exact_or_never_chosen(rule: str) -> None:
    known = facts(MODEL, vocab_size=9)
    distance = stream_distance(WORLD, step_of(rule), num_tokens=3, length=LENGTH, model_of=short_after_odd_texts)
    default = default_speculation(SpeculationConfig(rule=rule, adaptive=True), known)
    speculation = Speculation(rule=rule, num_drafts=1, draft_length=2, adaptive=True)
    assert default.adaptive == (unmet(RULES[rule], CHANGING_SHAPES) is None)
    if default.adaptive:
        assert distance < EXACT
        check_conditions(speculation, known)
        return
    assert distance > BIASED
    with pytest.raises(RequestError, match=r"with shapes that the controller changes: .*fix num_drafts"):
        check_conditions(speculation, known)


def test_the_number_of_chains_may_change_below_a_changed_target() -> None:
    """The condition is about the length: a change holds the number of chains that caused it."""

    def step(model: TabularModel) -> list[RuleOutcome]:
        return outcomes_of("spectr_gbv", model, 1 + len(model.shifts) % 2)

    assert stream_distance(WORLD, step, num_tokens=3, length=LENGTH) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_trees_that_branch_late_are_exact_or_refused(rule: str) -> None:
    """`test_chain_rules.py` enumerates those that are taken."""
    is_exact = rule in {one for one, _, _ in TREES_THAT_BRANCH_LATER}
    assert is_exact == (unmet(RULES[rule], LATE_BRANCHES) is None)
    speculation = Speculation(rule=rule, num_drafts=2, draft_length=2, tree=(1, 2))
    if is_exact:
        check_conditions(speculation, facts(MODEL, vocab_size=9))
        return
    with pytest.raises(RequestError, match="would be biased with chains that share drafted tokens"):
        check_conditions(speculation, facts(MODEL, vocab_size=9))


@pytest.mark.parametrize("rule", ["greedy_block", "spectr_gbv"])
def test_a_missing_condition_would_let_a_biased_pair_through(rule: str) -> None:
    """The wrong variant: the rule's needs are forgotten."""
    forgetful = facts("peagle", vocab_size=9)
    rules = {name: msgspec.structs.replace(one, needs=()) for name, one in forgetful.rules.items()}
    forgetful = msgspec.structs.replace(forgetful, rules=rules)
    check_conditions(Speculation(rule=rule, num_drafts=1, draft_length=2), forgetful)


def test_the_page_has_the_refused_pairs() -> None:
    sources: list[DraftFacts] = [*DRAFTER_FACTS.values(), LATE_BRANCHES, CHANGING_SHAPES]
    refused: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for source in sources:
        rules = tuple(name for name, rule in RULE_FACTS.items() if unmet(rule, source) is not None)
        refused[rules].append(source.title.removesuffix(", as this tree's do"))
    rows = dict(re.findall(r"^\| ([^|]*) \| ((?:`[a-z_]+`(?:, )?)+|none) \|$", PAGE, re.MULTILINE))
    expected = {
        ", ".join(titles): ", ".join(f"`{name}`" for name in rules) or "none" for rules, titles in refused.items()
    }
    assert rows == expected

"""Conditions under which rules are exact, and the one place that compares them with drafts.

Every rule names the conditions that it needs (`rule_facts.py`). Every source of drafts names the
conditions that its chains meet (`DRAFTER_FACTS`), and every shape, too. `check_conditions` compares
both lists for requests and for the settings at start. `may_adapt` compares them for the controller.
`docs/speculation-rules.md` proves why each condition is needed. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from engine.config import EARLIER_ANSWERS, MODEL, MTP, PREDICTION, PROMPT_LOOKUP, DraftFacts, EngineFacts, RuleFacts
from engine.errors import RequestError
from engine.request import Speculation


class Condition(NamedTuple):
    """Words for a condition in messages."""

    needs: str
    instead: str
    """Advice if drafts do not meet it."""


INDEPENDENT_CHAINS = "independent_chains"
WHOLE_BLOCKS = "whole_blocks"
FIXED_DISTRIBUTION = "fixed_distribution"
FIXED_SHAPE = "fixed_shape"
CONDITIONS: Mapping[str, Condition] = MappingProxyType(
    {
        INDEPENDENT_CHAINS: Condition(
            "chains that are independent given the text",
            "let it branch at the root only, or choose traversal or a rule that decides position by position",
        ),
        WHOLE_BLOCKS: Condition(
            "steps whose tokens are all drawn from the draft distribution", "choose bv_race, or leave text drafts out"
        ),
        FIXED_DISTRIBUTION: Condition(
            "a draft distribution after a text that is the same in every step",
            "choose bv_race or block, or draft with a draft model",
        ),
        FIXED_SHAPE: Condition("chains of the same number and length in every step", "fix num_drafts and draft_length"),
    }
)
"""Conditions by name.

`independent_chains`: no two chains share a random number below the root. `whole_blocks`: while an
earlier step changes the target, every node has a draft distribution, on which the change depends;
text drafts have none. `fixed_distribution`: the draft distribution depends on the text alone, not
on where the step began. `fixed_shape`: no step drafts shorter chains than an earlier one whose
change holds, but at the answer's end.
"""

_OF_HEADS = (INDEPENDENT_CHAINS, WHOLE_BLOCKS, FIXED_SHAPE)
ANY_DRAFTER = DraftFacts(title="this drafter", meets=_OF_HEADS)
"""Facts of all drafters (`drafting/drafter.py`)."""
_OF_TEXT_DRAFTS = (INDEPENDENT_CHAINS, FIXED_DISTRIBUTION)
DRAFTER_FACTS: Mapping[str, DraftFacts] = MappingProxyType(
    {
        MODEL: DraftFacts(title="a draft model", meets=tuple(CONDITIONS)),
        "eagle3": DraftFacts(title="an EAGLE-3 head", meets=_OF_HEADS),
        MTP: DraftFacts(title="an MTP module", meets=_OF_HEADS),
        "peagle": DraftFacts(title="a P-EAGLE head", meets=_OF_HEADS),
        "dflash": DraftFacts(title="a DFlash head", meets=_OF_HEADS),
        "dflash2": DraftFacts(title="a DFlash2 head", meets=_OF_HEADS),
        "dspark": DraftFacts(title="a DSpark head", meets=_OF_HEADS),
        PROMPT_LOOKUP: DraftFacts(title="prompt lookup", meets=_OF_TEXT_DRAFTS),
        PREDICTION: DraftFacts(title="a prediction", meets=_OF_TEXT_DRAFTS),
        EARLIER_ANSWERS: DraftFacts(title="earlier answers", meets=_OF_TEXT_DRAFTS),
    }
)
"""Sources of drafts: the draft model, heads, and text drafters.

A head drafts from the target's state at the step's root, so a text has another draft distribution
in the next step. A draft model's depends on the text alone; a request that needs
`fixed_distribution` drafts without `--draft-window` (`Sequence`). Rounding differs with other
requests in the pass, and biases by no more than its size.
"""
LATE_BRANCHES = DraftFacts(
    title="chains that share drafted tokens, as this tree's do",
    meets=tuple(name for name in CONDITIONS if name != INDEPENDENT_CHAINS),
)
CHANGING_SHAPES = DraftFacts(
    title="shapes that the controller changes", meets=tuple(name for name in CONDITIONS if name != FIXED_SHAPE)
)

# Draft methods that draw at most this number of children below a node.
_MOST_CHILDREN_OF_METHOD = {"spechub": 2}


def drafters_of(draft: DraftFacts | None) -> dict[str, DraftFacts]:
    """Return the facts of each drafter of a server, by the drafter's name.

    draft: facts of the draft model or head; None if the server has neither.
    """
    text_drafters = {name: DRAFTER_FACTS[name] for name in (PROMPT_LOOKUP, PREDICTION, EARLIER_ANSWERS)}
    return text_drafters if draft is None else {MODEL: draft, **text_drafters}


def unmet(rule: RuleFacts, drafts: DraftFacts) -> str | None:
    """Return the first unmet condition of a rule; None if it is exact with these drafts."""
    return next((name for name in rule.needs if name not in drafts.meets), None)


def served_rules(facts: EngineFacts) -> list[str]:
    """Return the names of the rules that this pair of models can be served with."""
    drafts = facts.drafters.get(MODEL, DRAFTER_FACTS[MODEL])
    return [
        name
        for name, rule in facts.rules.items()
        if facts.vocab_size <= (rule.max_vocabulary or facts.vocab_size) and unmet(rule, drafts) is None
    ]


def may_adapt(rule: RuleFacts, tree: tuple[int, ...]) -> bool:
    """Return whether the controller may choose the shape; it never chooses trees."""
    return not tree and unmet(rule, CHANGING_SHAPES) is None


def check_conditions(speculation: Speculation, facts: EngineFacts) -> None:
    """Raise RequestError if the rule of drawn chains is biased or cannot be computed."""
    name, rule = speculation.rule, facts.rules[speculation.rule]
    if facts.vocab_size > (rule.max_vocabulary or facts.vocab_size):
        raise RequestError(
            f"rule {name!r} can be computed for vocabularies up to {rule.max_vocabulary}, this model has "
            f"{facts.vocab_size}; weighted_race reaches the same acceptance",
            "speculation.rule",
        )
    for drafts, param in _drafts_of(speculation, facts):
        condition = unmet(rule, drafts)
        if condition is not None:
            raise RequestError(
                f"rule {name!r} would be biased with {drafts.title}: it needs {CONDITIONS[condition].needs}; "
                f"{CONDITIONS[condition].instead}",
                param,
            )
    _check_method(speculation, rule, facts)


def _drafts_of(speculation: Speculation, facts: EngineFacts) -> Iterator[tuple[DraftFacts, str]]:
    """Yield the facts of each drafter and shape, with the field that asks for it."""
    if max(speculation.tree[1:], default=1) > 1:
        yield LATE_BRANCHES, "speculation.tree"
    if speculation.adaptive:
        yield CHANGING_SHAPES, "speculation"
    for name in dict.fromkeys((MODEL, *speculation.drafters)):
        yield facts.drafters[name], "speculation.rule"


def _check_method(speculation: Speculation, rule: RuleFacts, facts: EngineFacts) -> None:
    method = speculation.draft_method or rule.draft_methods[0]
    if method not in rule.draft_methods:
        raise RequestError(
            f"rule {speculation.rule!r} would be biased with drafts drawn by {method!r}; it is exact for "
            f"{', '.join(rule.draft_methods)}",
            "speculation.draft_method",
        )
    widest = max(speculation.fanout)
    most = _MOST_CHILDREN_OF_METHOD.get(method, rule.max_drafts)
    if most is not None and widest > most:
        raise RequestError(
            f"rule {speculation.rule!r} with drafts drawn by {method!r} takes at most {most} drafts below one "
            f"position, not {widest}; lower num_drafts or choose bv_race",
            "speculation.num_drafts",
        )
    if widest > facts.vocab_size:
        raise RequestError(
            f"{widest} drafts at one position are more than the vocabulary of {facts.vocab_size}",
            "speculation.num_drafts",
        )

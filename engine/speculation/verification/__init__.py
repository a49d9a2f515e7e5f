"""Verification rules by name. Each is exact: the law of the output is the target's.

A rule takes the drafted chains, the target laws at their nodes and the noise. For every
request it returns the chain that it follows, the number of accepted tokens, and one further
token. Node rules (`node.py`) are composed top-down. To add a rule, add a file, an entry here,
and its facts in `engine.speculation.rule_facts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from engine.kernels.protocol import ChainVerdict
from engine.speculation import theory
from engine.speculation.rule_facts import RULE_FACTS
from engine.speculation.verification.chain_rules import verify_race, verify_token
from engine.speculation.verification.greedy import greedy, spechub
from engine.speculation.verification.greedy_block import verify_greedy_block
from engine.speculation.verification.kseq import accept_kseq, kseq
from engine.speculation.verification.node import TopDown
from engine.speculation.verification.ot_lp import ot_lp
from engine.speculation.verification.over_acceptance import OverAcceptance
from engine.speculation.verification.rrs import nss, rrs, rrs_without_replacement
from engine.speculation.verification.rule import Acceptance, Rule, Verify
from engine.speculation.verification.traversal import verify_traversal
from engine.speculation.verification.weighted_race import weighted_race


def _rule(name: str, verify: Verify, acceptance: Acceptance | None, **known: Any) -> Rule:
    """Return a rule with its facts; known: further fields of `Rule`."""
    return Rule(name, verify, acceptance, **known, **msgspec.structs.asdict(RULE_FACTS[name]))


_ALL = (
    _rule("token", verify_token, theory.accept_token, by_tiles=True),
    _rule(
        "nss",
        TopDown(nss),
        theory.accept_nss,
        acceptance_of_one=theory.accept_nss,
        closed_form_of=("iid",),
        node_rule=nss,
    ),
    _rule("rrs", TopDown(rrs), theory.accept_rrs),
    _rule(
        "rrs_without_replacement",
        TopDown(rrs_without_replacement),
        None,
        node_rule=rrs_without_replacement,
    ),
    _rule("kseq", TopDown(kseq), accept_kseq),
    _rule("spechub", TopDown(spechub), lambda p, q, n: theory.alpha_star_greedy(p, q, min(n, 2))),
    _rule("greedy", TopDown(greedy), theory.alpha_star_greedy),
    _rule("weighted_race", TopDown(weighted_race), theory.alpha_star_iid),
    _rule("ot_lp", TopDown(ot_lp), theory.alpha_star_iid),
    _rule("block", verify_race, theory.accept_token, by_tiles=True),
    _rule("greedy_block", verify_greedy_block, theory.accept_token),
    _rule("bv_race", verify_race, theory.accept_score_race, by_tiles=True),
    _rule("spectr_gbv", verify_greedy_block, theory.accept_selected_block),
    _rule(
        "traversal",
        verify_traversal,
        None,
        node_rule=rrs_without_replacement,
    ),
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ALL})


__all__ = ["RULES", "ChainVerdict", "OverAcceptance", "Rule", "Verify"]

"""The verification rules by name. Each is exact: the output law is the target's own.

A rule takes the drafted chains, the target laws at their nodes and the noise, and returns for every
request which chain it follows, how far, and one token more. Node rules (`node.py`) are composed top-down.
To add a rule: a file, and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.speculation import theory
from engine.speculation.drafting import DRAFT_METHODS
from engine.speculation.verification.block import verify_block
from engine.speculation.verification.greedy import greedy, spechub
from engine.speculation.verification.greedy_block import verify_greedy_block, verify_spectr_gbv
from engine.speculation.verification.kseq import kseq
from engine.speculation.verification.node import TopDown
from engine.speculation.verification.nss import nss
from engine.speculation.verification.ot_lp import MAX_VOCABULARY, ot_lp
from engine.speculation.verification.over_acceptance import OverAcceptance
from engine.speculation.verification.race import verify_bv_race
from engine.speculation.verification.rrs import rrs, rrs_without_replacement
from engine.speculation.verification.rule import ChainVerdict, Rule, Verify
from engine.speculation.verification.token import verify_token
from engine.speculation.verification.traversal import verify_traversal
from engine.speculation.verification.weighted_race import weighted_race

_EVERY_METHOD = tuple(DRAFT_METHODS)

_ALL = (
    Rule("token", verify_token, theory.accept_token, max_drafts=1, by_tiles=True),
    Rule(
        "nss",
        TopDown(nss),
        theory.accept_nss,
        draft_methods=_EVERY_METHOD,
        trees=True,
        acceptance_of_one=theory.accept_nss,
        closed_form_of=("iid",),
        node_rule=nss,
    ),
    Rule("rrs", TopDown(rrs), theory.accept_rrs, trees=True),
    Rule(
        "rrs_without_replacement",
        TopDown(rrs_without_replacement),
        theory.accept_rrs_without_replacement,
        draft_methods=("without_replacement", "iid"),
        trees=True,
        closed_form_of=(),
        node_rule=rrs_without_replacement,
    ),
    Rule("kseq", TopDown(kseq), theory.accept_kseq, trees=True),
    Rule("spechub", TopDown(spechub), theory.accept_spechub, max_drafts=2, draft_methods=("spechub",), trees=True),
    Rule("greedy", TopDown(greedy), theory.alpha_star_greedy, draft_methods=("greedy",), trees=True),
    Rule("weighted_race", TopDown(weighted_race), theory.alpha_star_iid, trees=True),
    Rule("ot_lp", TopDown(ot_lp), theory.alpha_star_iid, trees=True, max_vocabulary=MAX_VOCABULARY),
    Rule("block", verify_block, theory.accept_token, max_drafts=1, by_tiles=True),
    Rule("greedy_block", verify_greedy_block, theory.accept_token, max_drafts=1, changes_targets=True),
    Rule("bv_race", verify_bv_race, theory.accept_score_race, by_tiles=True),
    Rule("spectr_gbv", verify_spectr_gbv, theory.accept_selected_block, changes_targets=True),
    Rule(
        "traversal",
        verify_traversal,
        theory.accept_rrs_without_replacement,
        draft_methods=("without_replacement", "iid"),
        trees=True,
        closed_form_of=(),
        node_rule=rrs_without_replacement,
    ),
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ALL})


__all__ = ["RULES", "ChainVerdict", "OverAcceptance", "Rule", "Verify"]

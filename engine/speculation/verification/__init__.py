"""The verification rules by name. Each is exact: the output law is the target's own.

A rule takes the drafted chains, the target laws at their nodes and the noise, and returns for every
request which chain it follows, how far, and one token more. Node rules (`node.py`) are composed top-down.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.speculation.verification.block import verify_block
from engine.speculation.verification.greedy import greedy, spechub
from engine.speculation.verification.kseq import kseq
from engine.speculation.verification.node import TopDown
from engine.speculation.verification.nss import nss
from engine.speculation.verification.race import verify_bv_race
from engine.speculation.verification.rrs import rrs, rrs_without_replacement
from engine.speculation.verification.rule import ChainVerdict, Rule
from engine.speculation.verification.token import verify_token
from engine.speculation.verification.weighted_race import weighted_race

_ALL = (
    Rule("token", verify_token, max_drafts=1),
    Rule("nss", TopDown(nss), draft_methods=("iid", "without_replacement", "greedy", "spechub")),
    Rule("rrs", TopDown(rrs)),
    Rule("rrs_without_replacement", TopDown(rrs_without_replacement), draft_methods=("without_replacement", "iid")),
    Rule("kseq", TopDown(kseq)),
    Rule("spechub", TopDown(spechub), max_drafts=2, draft_methods=("spechub",)),
    Rule("greedy", TopDown(greedy), draft_methods=("greedy",)),
    Rule("weighted_race", TopDown(weighted_race)),
    Rule("block", verify_block, max_drafts=1),
    Rule("bv_race", verify_bv_race),
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ALL})

__all__ = ["RULES", "ChainVerdict", "Rule"]

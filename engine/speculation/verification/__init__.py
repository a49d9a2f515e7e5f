"""The verification rules by name. Each is exact: the output law is the target's own.

A rule takes the drafted chains, the target laws at their nodes and the noise, and returns for
every chain where it would stop and how it would continue; the best chain of a request wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.speculation.verification.block import verify_block
from engine.speculation.verification.race import verify_bv_race
from engine.speculation.verification.rule import ChainVerdict, Rule
from engine.speculation.verification.token import verify_token

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "token": Rule("token", verify_token, max_drafts=1),
        "block": Rule("block", verify_block, max_drafts=1),
        "bv_race": Rule("bv_race", verify_bv_race, max_drafts=None),
    }
)

__all__ = ["RULES", "ChainVerdict", "Rule"]

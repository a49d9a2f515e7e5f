"""Notation of a measurement's arms.

`bv_race:4x5` means 4 chains of 5 tokens, `traversal:2.2.1` a tree with these numbers of children by
depth. A draft method may follow the rule, as in `block/iid:1x5`.
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

OFF, AGAIN, ADAPTIVE = "off", "again", "adaptive"
"""Plain decoding, plain decoding again (which shows the noise), and the server's own choice."""
_ARM = re.compile(
    r"(?P<rule>[a-z_]+)(/(?P<method>[a-z_]+))?(:((?P<chains>\d+)x(?P<length>\d+)|(?P<tree>\d+(\.\d+)*)))?"
)


class ArmShape(NamedTuple):
    """Drafts of an arm and their verification."""

    rule: str
    method: str
    """Draft method; empty for the rule's default."""
    num_drafts: int
    """Number of chains; 0 if the arm does not name it."""
    draft_length: int
    tree: tuple[int, ...]


def parse(text: str) -> ArmShape:
    """Parse an arm's name; raises ValueError."""
    found = _ARM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text}: must look like bv_race:4x5 or traversal:2.2.1")
    tree = tuple(int(part) for part in (found["tree"] or "").split(".") if part)
    chains, length = (prod(tree), len(tree)) if tree else (int(found["chains"] or 0), int(found["length"] or 0))
    return ArmShape(found["rule"], found["method"] or "", chains, length, tree)

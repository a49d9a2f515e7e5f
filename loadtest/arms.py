"""How an arm of a measurement is written: `bv_race:4x5` is 4 chains of 5 tokens, `traversal:2.2.1` a tree with so many
children by depth; a draft method may follow the rule, as in `block/iid:1x5`."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

OFF, AGAIN, ADAPTIVE = "off", "again", "adaptive"
"""Plain decoding, the same once more (which shows the noise), and whatever the server chooses."""
_ARM = re.compile(
    r"(?P<rule>[a-z_]+)(/(?P<method>[a-z_]+))?(:((?P<chains>\d+)x(?P<length>\d+)|(?P<tree>\d+(\.\d+)*)))?"
)


class ArmShape(NamedTuple):
    """What an arm drafts and how that is verified."""

    rule: str
    method: str
    """Empty for the rule's own."""
    num_drafts: int
    """0 where the arm does not say its size."""
    draft_length: int
    tree: tuple[int, ...]


def parse(text: str) -> ArmShape:
    """An arm from its name; raises ValueError with what is wrong."""
    found = _ARM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text}: must look like bv_race:4x5 or traversal:2.2.1")
    tree = tuple(int(part) for part in (found["tree"] or "").split(".") if part)
    chains, length = (prod(tree), len(tree)) if tree else (int(found["chains"] or 0), int(found["length"] or 0))
    return ArmShape(found["rule"], found["method"] or "", chains, length, tree)

"""Rows of a step that are verified together, and the rule of each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine.plan import Row
from engine.speculation.verification import RULES, OverAcceptance, Verify
from engine.speculation.verification.chain_rules import verify_certain, verify_race

_BY_TILES = frozenset(rule.verify for rule in RULES.values() if rule.by_tiles)
"""Rules that on CUDA store a sum for each tile of the vocabulary, instead of arrays [chains, vocabulary]."""


def verified_together(
    rows: Sequence[Row],
    goes_on_R: npt.NDArray[np.bool_],
    vocab_size: int,
    by_tiles: bool,
    most_bytes: int = 64 << 20,
    chain_bytes: int = 32,
) -> Iterator[tuple[Verify, list[int]]]:
    """Yield (rule, row numbers) of rows that are verified together: they share a rule, and fit into its memory.

    goes_on_R: whether chains of the row are still verified. by_tiles: whether the kernels store one sum for each tile
    of the vocabulary, where a rule allows it. most_bytes: working memory of a verification; one row is always taken.
    chain_bytes: what a rule needs of it for each chain and token of the vocabulary, about.
    """
    by_rule: dict[Verify, list[int]] = {}
    for number, row in enumerate(rows):
        by_rule.setdefault(_rule_of(row, bool(goes_on_R[number])), []).append(number)
    for verify, numbers in by_rule.items():
        part: list[int] = []
        size = 0
        token_bytes = 1 if by_tiles and verify in _BY_TILES else chain_bytes
        for number in numbers:
            chains_bytes = max(1, rows[number].num_drafts) * vocab_size * token_bytes
            if part and size + chains_bytes > most_bytes:
                yield verify, part
                part, size = [], 0
            part.append(number)
            size += chains_bytes
        yield verify, part


def _rule_of(row: Row, goes_on: bool) -> Verify:
    """Return the rule that verifies the row's sampled chains.

    If no chain is left, any rule is right. The race is usual, and rules that are alike share a verification.
    """
    speculation = row.speculation
    if not goes_on:
        return verify_race
    if speculation.over_acceptance > 0:
        return OverAcceptance(speculation.over_acceptance, speculation.over_acceptance_residual)
    if row.sampling.is_certain:
        return verify_certain
    return RULES[speculation.rule].verify

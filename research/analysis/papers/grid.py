"""Sizes of the papers' tables."""

from __future__ import annotations

from dataclasses import dataclass

from research.analysis.load import SpeculationSetup
from tests.oracles.bounds import Verification

TASKS = ("dialogues", "gsm8k", "humaneval", "mgsm", "alpaca")
"""Task sets of SpecTr-GBV, with held-out dialogues in place of LM1B."""
ONE_CHAIN = ("token", "block", "greedy_block")
SEVERAL = ("kseq", "spectr_gbv", "bv_race", "traversal")


@dataclass(frozen=True)
class OptimalGrid:
    """Sizes for *Towards Optimal Multi-draft Speculative Decoding*."""

    temperatures: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2, 1.4)
    drafts: tuple[int, ...] = (2, 3, 4, 6, 8)
    vocabularies: tuple[int, ...] = (32_000, 152_000)


@dataclass(frozen=True)
class BlocksGrid:
    """Sizes for *SpecTr-GBV*."""

    tasks: tuple[str, ...] = TASKS
    temperatures: tuple[float, ...] = (0.4, 1.0)
    lengths: tuple[int, ...] = (4, 8, 12)
    chains: tuple[int, ...] = (2, 3, 4, 6, 8)
    checked: int = 1200
    """Answers in the test of a rule's output distribution."""
    compared_length: int = 8
    """Tokens of a chain in the comparison with closed forms."""

    def shapes(self) -> list[SpeculationSetup]:
        """Return every rule with i.i.d. chains."""
        found = [SpeculationSetup(rule, "iid", 1, length) for length in self.lengths for rule in ONE_CHAIN]
        return found + [
            SpeculationSetup(rule, "iid", count, length)
            for length in self.lengths
            for rule in SEVERAL
            for count in self.chains
        ]


@dataclass(frozen=True)
class TheoreticalGrid:
    """Sizes for *A Theoretical Perspective for Speculative Decoding Algorithm*."""

    epsilons: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    batches: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32, 64)
    lookaheads: tuple[int, ...] = (4, 8, 16)
    runs: int = 20_000
    """Simulated texts of the Markov chain."""


@dataclass(frozen=True)
class RacesGrid:
    """Sizes for the comparison of the races with all other rules."""

    temperatures: tuple[float, ...] = (0.6, 1.0)
    shapes: tuple[str, ...] = (
        "block:1x12", "bv_race:2x6", "bv_race:3x4", "bv_race:4x3", "weighted_race:3x4", "weighted_race:4x3", "kseq:3x4",
        "rrs:3x4", "spectr_gbv:3x4", "traversal/iid:3x4", "traversal/without_replacement:3x4",
        "rrs_without_replacement/without_replacement:3x4", "greedy/greedy:3x4", "spechub/spechub:2x6",
    )  # fmt: skip
    """Shapes of twelve drafted tokens; equal tokens below the same parent are one node."""
    block_shapes: tuple[tuple[str, Verification], ...] = (
        ("token:1x12", "token"),
        ("block:1x12", "block"),
        *((f"bv_race:{size}", "block") for size in ("2x6", "3x4", "4x3")),
        ("greedy_block:1x12", "greedy"),
        *((f"spectr_gbv:{size}", "greedy") for size in ("2x6", "3x4", "4x3")),
    )
    """Shapes whose expected length has a closed form, with the form; for greedy rules it holds in
    an answer's first block.
    """
    second_pair: tuple[str, str, int, float, int] = ("draft", "tiny", 4096, 0.65, 512)
    """Sizes of target and draft, vocabulary, acceptance of a single draft, longest text."""


@dataclass(frozen=True)
class Grids:
    """Sizes of all sections; the defaults are those of docs/results."""

    optimal: OptimalGrid = OptimalGrid()
    blocks: BlocksGrid = BlocksGrid()
    theoretical: TheoreticalGrid = TheoreticalGrid()
    races: RacesGrid = RacesGrid()

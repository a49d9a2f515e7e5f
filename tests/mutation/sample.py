"""A seeded sample of the mutants of all modules that changed since their record, and its table by
room.

Every mutant of these modules has the same chance, so the share of a room that is noticed estimates
the share of all its mutants. The results do not enter docs/results/mutants.json: a module keeps the
status "changed since its record".
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from tests.mutation.changes import Module, Mutant
from tests.mutation.runs import HARMLESS, KILLED, TIMEOUT, part_of

PAGE = Path("docs/results/mutants_sample.md")
_Z = 1.959963984540054  # of a two-sided interval of 95 %


class Sampled(NamedTuple):
    """A mutant of the sample that was run."""

    mutant: Mutant
    status: str

    @property
    def is_noticed(self) -> bool:
        return self.status in (KILLED, TIMEOUT)

    @property
    def is_gap(self) -> bool:
        return not self.is_noticed and self.status != HARMLESS


class Sample(NamedTuple):
    """A sample and what it was drawn from."""

    mutants: list[Mutant]
    """Drawn mutants, those of a part of parts.toml in a row."""
    num_by_room: dict[str, int]
    """Number of mutants that could have been drawn, by room."""
    seed: int


def room_of(module: str) -> str:
    """Return the room of a module: its first two folders."""
    return "/".join(Path(module).parent.parts[:2])


def draw(modules: Sequence[Module], size: int, seed: int) -> Sample:
    """Draw mutants of some modules without replacement; all mutants if there are fewer."""
    mutants = [mutant for module in modules for mutant in module.mutants]
    num_by_room: dict[str, int] = {}
    for mutant in mutants:
        room = room_of(mutant.module.name)
        num_by_room[room] = num_by_room.get(room, 0) + 1
    drawn = random.Random(seed).sample(mutants, min(size, len(mutants)))
    drawn.sort(key=lambda mutant: (_part_key(mutant), mutant.module.name, mutant.number))
    return Sample(drawn, num_by_room, seed)


def by_part(sample: Sample) -> Iterator[list[Mutant]]:
    """Yield the drawn mutants of each part: their tests are traced once."""
    for _, mutants in groupby(sample.mutants, _part_key):
        yield list(mutants)


def _part_key(mutant: Mutant) -> str:
    return repr(part_of(mutant.module.name))


def wilson(num_noticed: int, num_run: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share; (0, 1) without any."""
    if not num_run:
        return 0.0, 1.0
    share = num_noticed / num_run
    weight = _Z * _Z / num_run
    centre = (share + weight / 2) / (1 + weight)
    half_width = _Z / (1 + weight) * sqrt(share * (1 - share) / num_run + weight / (4 * num_run))
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def page(sample: Sample, results: Sequence[Sampled]) -> str:
    """Return the sample's results as Markdown."""
    lines = [
        "# A sample of mutants",
        "",
        f"{len(results)} of {len(sample.mutants)} drawn mutants were run (seed {sample.seed}), part by part. They were",
        f"drawn from the {sum(sample.num_by_room.values())} mutants of the modules that changed since their record in",
        "[mutants.md](mutants.md). The score is the share that is noticed of the run mutants that are not harmless,",
        "with Wilson's interval of 95 %.",
        "",
        "| room | mutants | run | noticed | harmless | gaps | score | interval |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for room, num_mutants in sorted(sample.num_by_room.items()):
        of_room = [result for result in results if room_of(result.mutant.module.name) == room]
        lines.append(_row(room, num_mutants, of_room))
    lines.append(_row("all", sum(sample.num_by_room.values()), results))
    lines += ["", "## Gaps", ""]
    for mutant, _ in (result for result in results if result.is_gap):
        before, after = mutant.change
        lines.append(f"- `{mutant.module.name}` {mutant.function}: `{before}` -> `{after}`")
    return "\n".join(lines) + "\n"


def _row(room: str, num_mutants: int, results: Sequence[Sampled]) -> str:
    num_noticed = sum(result.is_noticed for result in results)
    num_gaps = sum(result.is_gap for result in results)
    num_harmless = len(results) - num_noticed - num_gaps
    score, interval = "-", "-"
    if num_noticed + num_gaps:
        low, high = wilson(num_noticed, num_noticed + num_gaps)
        score, interval = f"{num_noticed / (num_noticed + num_gaps):.0%}", f"{low:.0%} to {high:.0%}"
    cells = (room, num_mutants, len(results), num_noticed, num_harmless, num_gaps, score, interval)
    return "| " + " | ".join(map(str, cells)) + " |"

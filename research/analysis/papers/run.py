"""`analyze papers`: measure what is missing, and write JSON, plots and the page."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from engine.errors import ConfigError
from engine.start.host import usable_cores
from loadtest.environment import environment
from loadtest.results import write
from research.analysis.loading import add_pair_arguments, load_pair, names_of
from research.analysis.papers import blocks, lengths, optimal, races, theoretical
from research.analysis.papers.cases import Progress, ServedPair
from research.analysis.papers.grid import ONE_CHAIN, SEVERAL, Grids, RacesGrid
from research.analysis.papers.page import write_page
from research.analysis.papers.pictures import draw
from research.demo import bench_pair

_SEATS, _MOST_CHAINS, _MOST_LENGTH = 32, 8, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_pair_arguments(parser)
    parser.add_argument("--prompts-per-task", type=int, default=16, help="prompts of each task set (default 16)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of an answer (default 40)")
    parser.add_argument("--positions", type=int, default=60, help="positions whose laws are compared (default 60)")
    parser.add_argument("--only", choices=sorted(SECTIONS), action="append", help="one section (may be repeated)")
    parser.add_argument("--output", type=Path, default=Path("papers"), help="folder for all files (default papers)")
    parser.add_argument("--fresh", action="store_true", help="discard and repeat existing measurements")


@dataclass(frozen=True)
class PaperSection:
    """One paper."""

    pieces: Callable[[Grids], int]
    """Pieces of its work: how often it reports progress."""
    measure: Callable[[ServedPair, Grids, argparse.Namespace, Progress], Any]


def _races(pair: ServedPair, grids: Grids, options: argparse.Namespace, progress: Progress) -> Any:
    grid = grids.races
    rows = races.measure(pair, grid, pair.dialogues(races.TIMES), progress)
    recorded = races.recorded(pair, grid, pair.dialogues(races.TIMES), options.positions, progress)
    with _second_pair(options, grid) as second:
        prompts = races.random_prompts(races.TIMES * options.prompts_per_task, second.engine.facts.vocab_size)
        return {"runs": rows + races.measure(second, grid, prompts, progress), "recorded": recorded}


SECTIONS = {
    "optimal": PaperSection(
        lambda grids: len(grids.optimal.temperatures) * len(grids.optimal.drafts) + len(grids.optimal.vocabularies),
        lambda pair, grids, options, progress: optimal.measure(pair, grids.optimal, options.positions, progress),
    ),
    "blocks": PaperSection(
        lambda grids: (
            len(grids.blocks.tasks) * len(grids.blocks.temperatures) * len(grids.blocks.shapes())
            + len(("times", *lengths.CASES, *ONE_CHAIN, *SEVERAL))
        ),
        lambda pair, grids, _, progress: blocks.measure(pair, grids.blocks, progress),
    ),
    "theoretical": PaperSection(
        lambda grids: (
            len(grids.theoretical.lookaheads) + len(grids.theoretical.batches) + 2 * len(grids.theoretical.epsilons)
        ),
        lambda pair, grids, options, progress: theoretical.measure(
            pair, grids.theoretical, options.positions, progress
        ),
    ),
    "races": PaperSection(lambda grids: len(grids.races.temperatures) * (2 * len(grids.races.shapes) + 1), _races),
}


def analyze(options: argparse.Namespace, grids: Grids | None = None) -> dict[str, Any]:
    """Measure, write, and report the written files; grids: those of docs/results if None."""
    grids = grids or Grids()
    # Nothing else runs meanwhile, so all cores are used, unless fewer are requested.
    options.threads = options.threads or usable_cores()
    target, draft = names_of(options)
    settings = {
        "target": Path(target).name,
        "draft": Path(draft).name,
        "prompts_per_task": options.prompts_per_task,
        "tokens": options.tokens,
        "positions": options.positions,
    }
    names = options.only or list(SECTIONS)
    known = {name: _saved(options, name, settings) for name in SECTIONS}
    missing = [name for name in names if known[name] is None]
    if missing:
        pair = served_pair(options)
        measured_on = environment()  # before the files that git keeps are written again
        with tqdm(total=sum(SECTIONS[name].pieces(grids) for name in missing), unit="piece") as bar:

            def progress(done: str) -> None:
                bar.set_description(done)
                bar.update()

            for name in missing:
                began = time.monotonic()
                result = SECTIONS[name].measure(pair, grids, options, progress)
                took_s = round(time.monotonic() - began)
                known[name] = {"settings": settings, "environment": measured_on, "took_s": took_s, "result": result}
                write(known[name], _file(options, name))
    found = {name: content for name, content in known.items() if content is not None}
    pictures = draw({name: content["result"] for name, content in found.items()}, options.output)
    page = write_page(found, pictures, options.output)
    print(page.read_text(), file=sys.stderr)
    return {"page": str(page), "files": [str(_file(options, name)) for name in found]}


def _file(options: argparse.Namespace, name: str) -> Path:
    return Path(options.output / f"papers-{name}.json")


def _saved(options: argparse.Namespace, name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return a measured section; raise ConfigError if its settings differ."""
    file = _file(options, name)
    if not file.exists() or (options.fresh and name in (options.only or SECTIONS)):
        return None
    content: dict[str, Any] = json.loads(file.read_text())
    if content["settings"] != settings:
        raise ConfigError(f"{file}: holds results of other settings; choose another --output, or add --fresh")
    return content


def served_pair(options: argparse.Namespace) -> ServedPair:
    """Load the pair that the options name."""
    target, _ = names_of(options)
    engine = load_pair(options, _SEATS, _MOST_CHAINS, _MOST_LENGTH)
    return ServedPair(engine, target, Path(target).name, options.prompts_per_task, options.tokens)


@contextmanager
def _second_pair(options: argparse.Namespace, grid: RacesGrid) -> Iterator[ServedPair]:
    """Create a pair of another size with chosen distributions, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        random_state = torch.get_rng_state()
        bench_pair.write(Path(folder), *grid.second_pair)
        torch.set_rng_state(random_state)
        bench_options = argparse.Namespace(**vars(options))
        bench_options.target, bench_options.draft = f"{folder}/target", f"{folder}/draft"
        yield replace(served_pair(bench_options), name="synthetic laws")

"""`analyze limits`: duration of passes and steps by length of the text, on one core and on several, and what limits
them.

A pass reads all weights, and the K/V of its text. The least time for that, and for its products, follows from the
machine's rates, which are measured in the same run. Engines with different numbers of cores take turns. Only for models
that run in the CPU's decoder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from analysis.loading import add_format_arguments, add_pair_arguments, config_of, load_engine, names_of
from analysis.times import durations_s
from engine.attention.inputs import NO_NODES, SequenceInput
from engine.config import SchedulerConfig
from engine.errors import ConfigError
from engine.models.runner import ModelRunner
from engine.request import Speculation
from engine.start.calibration import middle_steps, synthetic_plan
from engine.step.engine import Engine
from loadtest.arguments import integers
from loadtest.checkpoints import lengthened
from loadtest.results import document, table
from loadtest.statistics import median_of_ratios

ROWS = (1, 6, 21)
"""Rows of the measured passes: plain decoding, one chain of five drafts, four of them."""
_SHAPES = {"plain": Speculation(), "1x5": Speculation(rule="block", num_drafts=1, draft_length=5)}
_PLACE = 64
"""Tokens of room beyond a text."""
_READ_BYTES = 1 << 28
_RUNS = 5
"""Runs of which the fastest counts."""
_PRODUCT = 64, 512, 512
"""Rows, sums and columns of the product whose rate is measured."""


def build(options: argparse.Namespace, num_cores: int, folders: tuple[Path, Path]) -> Engine:
    """Build an engine with room for one text of the greatest length."""
    target, draft = map(str, folders)
    named = argparse.Namespace(**{**vars(options), "target": target, "draft": draft, "threads": num_cores})
    length = max(options.contexts) + _PLACE
    engine = load_engine(config_of(named, SchedulerConfig(max_model_len=length, max_num_seqs=1)))
    if not engine.target.backend.reads_pages:
        raise ConfigError("analyze limits needs models that run in the CPU's decoder")
    return engine


def rates(num_cores: int) -> dict[str, float]:
    """Measure bytes a second that this many cores read from memory, and the decoder's operations a second."""
    from engine.cpu.compiled.block_products import product
    from engine.cpu.compiled.simd_vectors import BLOCK
    from engine.cpu.compiler import compiled_for_cpu

    @compiled_for_cpu()
    def multiply(rows, weights, scales, bias, found):  # type: ignore[no-untyped-def]
        product(rows, weights, scales, bias, found, (0, len(weights)), (0, 1))

    num_rows, depth, num_columns = _PRODUCT
    rows, found = (np.ones((num_rows, width), np.float32) for width in (depth, num_columns))
    weights = np.ones((num_columns // BLOCK, depth, BLOCK), np.float32)
    scales, bias = np.ones((len(weights), 0, BLOCK), np.float32), np.zeros(num_columns, np.float32)
    numbers = torch.ones(_READ_BYTES // 4)
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores)
    read_s = min(durations_s(numbers.sum, _RUNS))
    torch.set_num_threads(before)
    product_s = min(durations_s(lambda: multiply(rows, weights, scales, bias, found), _RUNS))
    return {"bytes": _READ_BYTES / read_s, "operations": num_cores * 2 * num_rows * depth * num_columns / product_s}


def least_s(runner: ModelRunner, num_rows: int, context: int, machine: dict[str, float]) -> dict[str, float]:
    """Return the least seconds of a pass for reading weights and K/V, and for products."""
    config = runner.model.config
    numbers = sum(one.in_features * one.out_features for one in runner.model.modules() if isinstance(one, nn.Linear))
    weight_bytes: int = runner.backend.weight_bytes  # type: ignore[attr-defined]
    num_bytes = weight_bytes + context * runner.storage.keys[:, 0].nbytes * 2
    head_dim = int(runner.storage.keys.shape[-1])
    attended = config.num_hidden_layers * config.num_attention_heads * head_dim * (context + num_rows / 2)
    return {
        "bytes": num_bytes / machine["bytes"],
        "arithmetic": num_rows * (2 * numbers + 4 * attended) / machine["operations"],
    }


def pass_of(runner: ModelRunner, num_rows: int, context: int) -> Callable[[], object]:
    """Return a function that runs a pass of new tokens after a text that was never computed."""
    blocks = range(-(-(context + num_rows) // runner.block_size))
    one = [SequenceInput([0] * num_rows, context, blocks, NO_NODES, slice(0, None))]
    return lambda: runner.forward(one)


@torch.inference_mode()
def measure(engines: dict[int, Engine], contexts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return a cell for each length of the text and number of cores, with the durations of its passes and steps."""
    cells: list[dict[str, Any]] = [
        {"context": context, "cores": cores, "passes": {str(rows): [] for rows in ROWS}, "steps": {}}
        for context in contexts
        for cores in engines
    ]
    for turn in tqdm(range(repeats), desc="turns", unit="turn"):
        for cell in cells if turn % 2 == 0 else cells[::-1]:
            engine, context = engines[cell["cores"]], cell["context"]
            torch.set_num_threads(1)
            for rows in ROWS:
                runs_s = durations_s(pass_of(engine.target, rows, context), _RUNS)
                cell["passes"][str(rows)].append(min(runs_s))
            plans = [synthetic_plan(engine, 1, context, speculation) for speculation in _SHAPES.values()]
            for shape, (wall_s, phases_s) in zip(_SHAPES, middle_steps(engine, plans), strict=True):
                parts_s = {
                    "draft": phases_s["draft"],
                    "target": phases_s["target"],
                    "around": wall_s - phases_s["draft"] - phases_s["target"],
                }
                cell["steps"].setdefault(shape, []).append({"step": wall_s, **parts_s})
    return cells


def summary(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of a cell: seconds of passes by rows, and of steps by part."""
    return {
        "passes": {rows: statistics.median(runs) for rows, runs in cell["passes"].items()},
        "steps": {
            shape: {part: statistics.median(run[part] for run in runs) for part in runs[0]}
            for shape, runs in cell["steps"].items()
        },
    }


def speedups(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the speedup of plain steps and of passes of one row from the fewest cores to more, in the same turns."""
    found = []
    fewest = min(cell["cores"] for cell in cells)
    first = {cell["context"]: cell for cell in cells if cell["cores"] == fewest}
    for cell in cells:
        if cell["cores"] > fewest:
            one = first[cell["context"]]
            steps = [[run["step"] for run in of_cell["steps"]["plain"]] for of_cell in (one, cell)]
            found.append(
                {
                    "context": cell["context"],
                    "cores": cell["cores"],
                    "over": fewest,
                    "plain step": median_of_ratios(*steps)._asdict(),
                    "pass of one row": median_of_ratios(one["passes"]["1"], cell["passes"]["1"])._asdict(),
                }
            )
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per length of the text and number of cores, in milliseconds."""
    rows = []
    for cell in result["cells"]:
        found = cell["median"]
        passes = [
            f"{1000 * seconds:.2f} ({cell['least'][num]['bytes'] / seconds:.0%}, "
            f"{cell['least'][num]['arithmetic'] / seconds:.0%})"
            for num, seconds in found["passes"].items()
        ]
        steps = [
            " + ".join(f"{1000 * step[part]:.2f}" for part in ("draft", "target", "around"))
            for step in found["steps"].values()
        ]
        rows.append([f"{cell['context']:,}", cell["cores"], *passes, *steps])
    head = ["text", "cores", *(f"{num} rows" if num > 1 else "1 row" for num in ROWS)]
    return table([*head, *(f"{shape}: draft + target + around" for shape in _SHAPES)], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add_format_arguments(parser)
    parser.add_argument(
        "--contexts", type=integers, default=[32, 1000, 8000], help="tokens of the texts (default 32,1000,8000)"
    )
    parser.add_argument("--cores", type=integers, default=[1, 2], help="numbers of cores to compare (default 1,2)")
    parser.add_argument("--repeats", type=int, default=8, help="turns of every cell (default 8)")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells; a checkpoint for shorter texts is used as if its positions reached that far."""
    with tempfile.TemporaryDirectory() as place:
        room = max(options.contexts) + 2 * _PLACE
        target, draft = (
            lengthened(Path(name), room, Path(place) / str(number)) for number, name in enumerate(names_of(options))
        )
        engines = {cores: build(options, cores, (target, draft)) for cores in options.cores}
    cells = measure(engines, options.contexts, options.repeats)
    machine = {cores: rates(cores) for cores in options.cores}
    for cell in cells:
        runner, of_cores = engines[cell["cores"]].target, machine[cell["cores"]]
        cell["median"] = summary(cell)
        cell["least"] = {str(rows): least_s(runner, rows, cell["context"], of_cores) for rows in ROWS}
    return document(
        "durations of passes and steps after texts, and their least durations by the machine's rates; in seconds",
        options,
        ("contexts", "cores", "repeats"),
        cores_chosen={str(cores): engine.target.backend.cores for cores, engine in engines.items()},  # type: ignore[attr-defined]
        rates_per_second={str(cores): found for cores, found in machine.items()},
        cells=cells,
        more_cores=speedups(cells),
    )

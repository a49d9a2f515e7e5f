"""`analyze limits`: passes and steps by length of the text and cores.

A pass reads all weights, and the K/V of its text. The least time for that, and for its products,
follows from the machine's rates, which are measured in the same run. Engines with different numbers
of cores take turns. Only for models that run in the CPU's decoder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from engine.attention.inputs import NO_NODES, SequenceInput
from engine.config import SchedulerConfig, SpeculationConfig
from engine.errors import ConfigError
from engine.models.runner import ModelRunner
from engine.plan import Plan
from engine.request import Speculation
from engine.start.measuring import middle_steps, synthetic_plan
from engine.step.engine import Engine
from loadtest.arguments import integers
from loadtest.checkpoints import lengthened
from loadtest.results import document, table
from loadtest.statistics import median_of_ratios
from research.analysis.loading import add_format_arguments, add_pair_arguments, config_of, load_engine, names_of

ROWS = (1, 6, 16, 21)
"""Rows of the measured passes: plain decoding, one chain of five drafts, three of them, four."""
_SHAPES = {"plain": Speculation(), "1x5": Speculation(rule="block", num_drafts=1, draft_length=5)}
_PLACE = 64
"""Tokens of room beyond a text."""
_READ_BYTES = 1 << 28
_RUNS = 5
"""Runs of which the fastest counts."""
_PRODUCT = 64, 512, 512
"""Rows, sums and columns of the product whose rate is measured."""


Seconds = dict[str, float]
"""Seconds of a step (`step`), of its phases `draft`, `target` and `verify`, and of all but the
models (`around`).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--contexts", type=integers, default=[32, 1000, 8000], help="tokens of the texts (default 32,1000,8000)")
    add("--cores", type=integers, default=[1, 2], help="numbers of cores to compare (default 1,2)")
    add("--draft-window", type=int, default=0, help="draft window, as of `serve` (default 0)")
    add("--repeats", type=int, default=8, help="measurements of every point (default 8)")
    add_pair_arguments(parser)
    add_format_arguments(parser)


def measure_turn(engine: Engine, plans: Mapping[str, Plan]) -> dict[str, Seconds]:
    """Return the durations of a step of each plan, by the plan's name."""
    measured = {}
    for name, (step_s, phases_s) in zip(plans, middle_steps(engine, list(plans.values())), strict=True):
        phases = {phase: phases_s[phase] for phase in ("draft", "target", "verify")}
        measured[name] = {"step": step_s, **phases, "around": step_s - phases["draft"] - phases["target"]}
    return measured


def part(turns: list[Seconds], name: str) -> list[float]:
    """Return one duration of every turn."""
    return [seconds[name] for seconds in turns]


def build(options: argparse.Namespace, num_cores: int, folders: list[Path]) -> Engine:
    """Build an engine with room for one text of the greatest length."""
    target, draft = map(str, folders)
    named = argparse.Namespace(**{**vars(options), "target": target, "draft": draft, "threads": num_cores})
    speculation = SpeculationConfig(draft_window=options.draft_window)
    scheduler = SchedulerConfig(max_model_len=max(options.contexts) + _PLACE, max_num_seqs=1)
    engine = load_engine(config_of(named, scheduler, speculation))
    if not engine.target.backend.reads_pages:
        raise ConfigError("analyze limits needs models that run in the CPU's decoder")
    return engine


def durations_s(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the durations of several runs, after one that is not measured."""
    run()
    taken_s = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        taken_s.append(time.perf_counter() - began)
    return taken_s


def rates(num_cores: int) -> dict[str, float]:
    """Measure bytes a second that cores read from memory, and the decoder's operations a second."""
    from engine.cpu.compiled.block_products import product
    from engine.cpu.compiled.simd_vectors import BLOCK
    from engine.cpu.compiler import compiled_for_cpu

    @compiled_for_cpu()
    def multiply(rows, weights, scales, bias, products):  # type: ignore[no-untyped-def]
        product(rows, weights, scales, bias, products, (0, len(weights)), (0, 1))

    num_rows, depth, num_columns = _PRODUCT
    rows = np.ones((num_rows, depth), np.float32)
    products = np.ones((num_rows, num_columns), np.float32)
    weights = np.ones((num_columns // BLOCK, depth, BLOCK), np.float32)
    scales = np.ones((len(weights), 0, BLOCK), np.float32)
    bias = np.zeros(num_columns, np.float32)
    numbers = torch.ones(_READ_BYTES // 4)
    before = torch.get_num_threads()
    torch.set_num_threads(num_cores)
    read_s = min(durations_s(numbers.sum, _RUNS))
    torch.set_num_threads(before)
    product_s = min(durations_s(lambda: multiply(rows, weights, scales, bias, products), _RUNS))
    num_operations = 2 * num_rows * depth * num_columns
    return {"bytes": _READ_BYTES / read_s, "operations": num_cores * num_operations / product_s}


def least_s(runner: ModelRunner, num_rows: int, context: int, machine: dict[str, float]) -> dict[str, float]:
    """Return the least seconds of a pass for reading weights and K/V, and for products."""
    config = runner.model.config
    layers = [module for module in runner.model.modules() if isinstance(module, nn.Linear)]
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    weight_bytes: int = runner.backend.weight_bytes  # type: ignore[attr-defined]
    num_bytes = weight_bytes + context * runner.storage.keys[:, 0].nbytes * 2
    head_dim = int(runner.storage.keys.shape[-1])
    attended = config.num_hidden_layers * config.num_attention_heads * head_dim * (context + num_rows / 2)
    return {
        "bytes": num_bytes / machine["bytes"],
        "arithmetic": num_rows * (2 * num_weights + 4 * attended) / machine["operations"],
    }


def new_pass(runner: ModelRunner, num_rows: int, context: int) -> Callable[[], object]:
    """Return a function that runs a pass of new tokens after a text that was never computed."""
    blocks = range(-(-(context + num_rows) // runner.block_size))
    inputs = [SequenceInput([0] * num_rows, context, blocks, NO_NODES, slice(0, None))]
    return lambda: runner.forward(inputs)


@torch.inference_mode()
def measure(engines: dict[int, Engine], contexts: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return a cell with durations of passes and steps for each length of the text and cores."""
    cells: list[dict[str, Any]] = [
        {
            "context": context,
            "cores": cores,
            "passes": {str(rows): [] for rows in ROWS},
            "steps": {shape: [] for shape in _SHAPES},
        }
        for context in contexts
        for cores in engines
    ]
    for turn in tqdm(range(repeats), desc="turns", unit="turn"):
        for cell in cells if turn % 2 == 0 else cells[::-1]:
            _add_turn(cell, engines[cell["cores"]])
    return cells


def _add_turn(cell: dict[str, Any], engine: Engine) -> None:
    context = cell["context"]
    torch.set_num_threads(1)
    for rows in ROWS:
        runs_s = durations_s(new_pass(engine.target, rows, context), _RUNS)
        cell["passes"][str(rows)].append(min(runs_s))
    plans = {name: synthetic_plan(engine, 1, context, shape) for name, shape in _SHAPES.items()}
    for name, seconds in measure_turn(engine, plans).items():
        cell["steps"][name].append(seconds)


def summary(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the medians of a cell: seconds of passes by rows, and of steps by part."""
    return {
        "passes": {rows: statistics.median(runs) for rows, runs in cell["passes"].items()},
        "steps": {
            shape: {name: statistics.median(part(turns, name)) for name in turns[0]}
            for shape, turns in cell["steps"].items()
        },
    }


def speedups(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the speedup of plain steps and passes from the fewest cores to more.

    In the same turns.
    """
    fewest = min(cell["cores"] for cell in cells)
    first = {cell["context"]: cell for cell in cells if cell["cores"] == fewest}
    compared = []
    for cell in cells:
        if cell["cores"] == fewest:
            continue
        before = first[cell["context"]]
        steps = [part(each["steps"]["plain"], "step") for each in (before, cell)]
        passes = [each["passes"]["1"] for each in (before, cell)]
        compared.append(
            {
                "context": cell["context"],
                "cores": cell["cores"],
                "over": fewest,
                "plain step": median_of_ratios(*steps)._asdict(),
                "pass of one row": median_of_ratios(*passes)._asdict(),
            }
        )
    return compared


def kept_gains(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the speedup of drafts at the longest text over that at the shortest, by cores.

    The number of tokens of a step depends on the pair and not on the length of the text.
    """

    def speedups(cell: dict[str, Any]) -> list[float]:
        steps_s = [part(cell["steps"][shape], "step") for shape in _SHAPES]
        return [plain_s / drafted_s for plain_s, drafted_s in zip(*steps_s, strict=True)]

    gains = []
    for cores in dict.fromkeys(cell["cores"] for cell in cells):
        same = sorted(
            (cell for cell in cells if cell["cores"] == cores),
            key=lambda cell: int(cell["context"]),
        )
        gain = median_of_ratios(speedups(same[-1]), speedups(same[0]))
        gains.append(
            {
                "cores": cores,
                "contexts": [same[0]["context"], same[-1]["context"]],
                **gain._asdict(),
            }
        )
    return gains


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per length of the text and number of cores, in milliseconds."""
    rows = []
    for cell in result["cells"]:
        row = [f"{cell['context']:,}", cell["cores"]]
        for num_rows, seconds in cell["median"]["passes"].items():
            least = cell["least"][num_rows]
            shares = f"{least['bytes'] / seconds:.0%}, {least['arithmetic'] / seconds:.0%}"
            row.append(f"{1000 * seconds:.2f} ({shares})")
        for step in cell["median"]["steps"].values():
            row.append(" + ".join(f"{1000 * step[name]:.2f}" for name in ("draft", "target", "around")))
        rows.append(row)
    head = ["text", "cores", *(f"{num} rows" if num > 1 else "1 row" for num in ROWS)]
    return table([*head, *(f"{shape}: draft + target + around" for shape in _SHAPES)], rows)


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all cells; a checkpoint for shorter texts is used as if it had the positions."""
    with tempfile.TemporaryDirectory() as place:
        room = max(options.contexts) + 2 * _PLACE
        folders = [
            lengthened(Path(name), room, Path(place) / model)
            for model, name in zip(("target", "draft"), names_of(options), strict=True)
        ]
        engines = {cores: build(options, cores, folders) for cores in options.cores}
    cells = measure(engines, options.contexts, options.repeats)
    machine = {cores: rates(cores) for cores in options.cores}
    for cell in cells:
        cores, context = cell["cores"], cell["context"]
        runner = engines[cores].target
        cell["median"] = summary(cell)
        cell["least"] = {str(rows): least_s(runner, rows, context, machine[cores]) for rows in ROWS}
    cores_chosen = {cores: engine.target.backend.cores for cores, engine in engines.items()}  # type: ignore[attr-defined]
    return document(
        "durations of passes and steps after texts, and their least durations by the machine's rates; in seconds",
        options,
        ("contexts", "cores", "draft_window", "repeats"),
        cores_chosen={str(cores): chosen for cores, chosen in cores_chosen.items()},
        rates_per_second={str(cores): measured for cores, measured in machine.items()},
        cells=cells,
        more_cores=speedups(cells),
        gain_at_longest_over_shortest=kept_gains(cells),
    )

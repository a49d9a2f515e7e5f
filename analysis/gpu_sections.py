"""Sections of a session on a device (`gpu_session.py`), each in a separate process.

A section writes its results after every item. Times are those of the device, synchronised.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis import arms
from analysis.fast_paths import fast_paths, steps_of, without
from analysis.load import Load
from demo import bench_pair
from engine.attention.attention import HOOK, register
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig, Weights
from engine.models.loading import adopt, load_pair
from engine.models.probe import find_kv_shape, probe
from engine.models.quantising import FORMATS
from engine.plan import Plan
from engine.step.building import assemble
from engine.step.calibration import measure_points, synthetic_plan
from engine.step.distribution_check import check_distribution
from engine.step.engine import Engine
from loadtest.statistics import median_of_ratios

_SHAPES = ("off", "block:1x2", "block:1x5", "bv_race:4x5", "adaptive")
_CACHE_BYTES = 48 << 30
_ACCEPTANCE = 0.75
_LEAST_RECORDED = 0.5
"""Least share of a lone request's steps that are recorded; the others read its prompt, or a plan that has no room."""


def has_cuda() -> bool:
    """Whether torch can use a CUDA device."""
    return torch.cuda.is_available()


class SectionResults:
    """Results of a section, written to disk after every item."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, Any] = {"failures": []}

    def add(self, name: str, value: Any) -> None:
        """Add an item."""
        self._found[name] = value
        self._write()
        print(f"{name}: {json.dumps(value)[:400]}", flush=True)

    def require(self, holds: bool, otherwise: str) -> None:
        """Record a failure if a condition does not hold."""
        if not holds:
            self._found["failures"].append(otherwise)
            self._write()
            print(f"FAILED: {otherwise}", flush=True)

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._found, indent=1) + "\n")


def build(options: argparse.Namespace, findings: SectionResults) -> Engine:
    """Build an engine around a pair that is created on the device; every fall-back is a failure."""
    register()
    began = time.monotonic()
    on_cuda = options.device == "cuda"
    target, draft, about = bench_pair.make(
        options.target,
        options.draft,
        options.vocabulary,
        _ACCEPTANCE,
        4096,
        device=options.device,
        dtype=torch.bfloat16 if on_cuda else torch.float32,
    )
    for model in (target, draft):
        model.set_attn_implementation(HOOK)
    config = EngineConfig(
        model=ModelConfig(target="target", draft="draft", device=options.device),
        cache=CacheConfig(memory_bytes=_CACHE_BYTES if on_cuda else 1 << 26),
        scheduler=SchedulerConfig(max_num_seqs=64 if on_cuda else 8),
        speculation=SpeculationConfig(
            num_drafts=8, draft_length=5, max_num_drafts=8, max_draft_length=8, observed_share=0.0
        ),
    )
    engine = assemble(config, adopt(target, "target"), adopt(draft, "draft"), lambda text: print(text, flush=True))
    findings.add("pair", about)
    findings.add("build_s", time.monotonic() - began)
    findings.add("memory_plan", engine.facts.memory_plan)
    found = fast_paths(engine)
    findings.add("ways", found)
    if on_cuda:
        require_all(findings, found)
    return engine


def require_all(findings: SectionResults, found: Mapping[str, bool]) -> None:
    """Require every fast path: a fall-back would be measured in its place."""
    for name, used in found.items():
        findings.require(used, f"{name}: not used")


def wait(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def middle_s(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Return the median time of synchronised runs over about this many seconds."""
    work()
    wait(device)
    runs: list[float] = []
    while len(runs) < 5 or (sum(runs) < seconds and len(runs) < 400):
        began = time.perf_counter()
        work()
        wait(device)
        runs.append(time.perf_counter() - began)
    return statistics.median(runs)


def plan_of(engine: Engine, name: str, num_rows: int = 1, context: int = 500) -> Plan:
    """Return a synthetic plan."""
    return synthetic_plan(engine, num_rows, context, arms.speculation_of(name))


def trace(options: argparse.Namespace, findings: SectionResults) -> None:
    """Measure ceilings, times of passes, and the parts of a step."""
    device = torch.device(options.device)
    findings.add("ceilings", ceilings(device, options.scale))
    engine = build(options, findings)
    times = {}
    for context in (300, 500, 1000):
        for name in ("off", "block:1x5", "bv_race:4x5", "bv_race:8x4"):
            plan = plan_of(engine, name, context=context)
            step = partial(engine.carry_out, plan)
            times[f"{name} behind {context}"] = middle_s(step, device, options.scale)
            findings.add("step_s", times)
    for name in ("off", "bv_race:4x5"):
        findings.add(f"profile {name}", profile(engine, plan_of(engine, name)))
    rows = {}
    for count in (1, 21):
        logits = synthetic(count, options.vocabulary, device)
        temperature = torch.ones(count, device=device)
        work = partial(engine.target.kernels.softmax, logits, temperature)
        rows[count] = middle_s(work, device, options.scale / 4)
    findings.add("distribution_of_rows_s", rows)


def synthetic(num_rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the same synthetic numbers every time, without a generator."""
    return torch.linspace(-3, 3, num_rows * width, device=device).view(num_rows, width)


def ceilings(device: torch.device, scale: float) -> dict[str, float]:
    """Measure copied bytes per second, and operations per second of a matrix product."""
    size = (1 << 30) if device.type == "cuda" else (1 << 24)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    width = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = synthetic(width, width, device).to(dtype)
    return {
        "copied_bytes_per_s": 2 * size / middle_s(lambda: target.copy_(source), device, scale / 2),
        "operations_per_s": 2 * width**3 / middle_s(lambda: left @ left, device, scale / 2),
    }


def profile(engine: Engine, plan: Plan, num_steps: int = 20) -> dict[str, Any]:
    """Return the 25 operations of a step that take longest, and the share of its time in which the device is idle."""
    from torch.profiler import ProfilerActivity

    on_cuda = engine.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    engine.carry_out(plan)
    wait(engine.target.device)
    began = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profiled:
        for _ in range(num_steps):
            engine.carry_out(plan)
        wait(engine.target.device)
    wall_s = time.perf_counter() - began
    key = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    found = profiled.key_averages()
    if on_cuda:  # a kernel's time also counts for the operation that launched it
        found = [event for event in found if event.device_type.name == "CUDA"]
    events = sorted(found, key=lambda event: getattr(event, key), reverse=True)
    busy_s = sum(getattr(event, key) for event in events) / 1e6
    return {
        "wall_s": wall_s / num_steps,
        "idle_share": max(0.0, 1 - busy_s / wall_s),
        "operations": [
            {"name": event.key[:80], "calls": event.count / num_steps, "us": getattr(event, key) / num_steps}
            for event in events[:25]
        ],
    }


def variants(options: argparse.Namespace, findings: SectionResults) -> None:
    """Measure how much longer a step takes without each fast path, in turns.

    A fast path cannot be removed from a recorded step, so it is compared without recording.
    """
    engine = build(options, findings)
    device = engine.target.device
    num_turns = max(5, round(60 * options.scale))
    apart = "whole steps"
    names = ("kernels for verification", "kernels for rows", "equal nodes apart", "kernels for layers")
    cases = [(apart,), *((apart, name) for name in names)]
    result = {}
    for name in ("off", "bv_race:4x5"):
        for num_rows in (1, 16 if device.type == "cuda" else 2):
            plan = plan_of(engine, name, num_rows)
            for case in cases:
                base = case[:-1]
                taken: dict[bool, list[float]] = {True: [], False: []}
                for number in range(2 * num_turns + 4):
                    is_without = number % 4 in (1, 2)
                    seconds = _timed(engine, plan, [*base, *(case[-1:] if is_without else ())])
                    if number >= 4:  # the first run compiles and allocates
                        taken[is_without].append(seconds)
                found = median_of_ratios(taken[True], taken[False])._asdict()
                also = f" (nor {', '.join(base)})" if base else ""
                result[f"{name}, {num_rows} requests, without {case[-1]}{also}"] = found
                findings.add("times_as_long", result)


def _timed(engine: Engine, plan: Plan, missing: Sequence[str]) -> float:
    """Return the synchronised duration of a step without some fast paths."""
    if missing:
        with without(engine, missing[0]):
            return _timed(engine, plan, missing[1:])
    began = time.perf_counter()
    engine.carry_out(plan)
    wait(engine.target.device)
    return time.perf_counter() - began


def law(options: argparse.Namespace, findings: SectionResults) -> None:
    """Compare the first tokens of many answers with the target's distribution, by a G-test."""
    engine = build(options, findings)
    chance = random.Random(7)
    # All but one token of the prompt fill blocks, which the answers share. So their first steps compute one token, as
    # all recorded steps do.
    prompt = [chance.randrange(3, options.vocabulary) for _ in range(2 * engine.facts.block_size + 1)]
    num_answers = max(200, round(4000 * options.scale))
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ("off", "block:1x5", "bv_race:4x5")]
    cases += [("bv_race:2x3", {"top_p": 0.8}), ("bv_race:2x3", {"top_k": 20, "min_p": 0.01, "top_p": 0.9})]
    for name, filters in cases:
        # Steps of few rows are recorded, or leave equal nodes separate; those of many rows do not. Here all steps are
        # of one type.
        for kind in ("recorded",) if filters else ("equal nodes merged", "equal nodes apart", "recorded"):
            few = max(200, num_answers // 8) if kind == "recorded" else num_answers
            with steps_of(engine, kind) as served:
                check = check_distribution(engine, name, arms.speculation_of(name), prompt, few, 1.0, **filters)
            key = ", ".join([name, kind, *filters])
            findings.add(key, {**asdict(check), "recorded_steps": sum(served), "steps": len(served)})
            findings.require(not check.rejected, f"{key}: not the target's distribution (p = {check.p_value:.2g})")
            if kind == "recorded" and engine.recorded.num_recorded:
                findings.require(sum(served) > len(served) / 2, f"{key}: most steps were not recorded")


def record(options: argparse.Namespace, findings: SectionResults) -> None:
    """Measure tokens per second of every shape in turns, cell by cell: the smallest number of requests first."""
    engine = build(options, findings)
    on_cuda = options.device == "cuda"
    points = measure_points(engine, arms.speculation_of("adaptive"))
    cells = []
    lengths = {1: (300, 1000), 4: (300, 1000), 16: (300, 1000), 64: (300,)} if on_cuda else {1: (40,), 2: (40,)}
    for concurrency, contexts in lengths.items():
        for length in contexts:
            chance = random.Random(length)
            prompts = [
                tuple(chance.randrange(3, options.vocabulary) for _ in range(length)) for _ in range(2 * concurrency)
            ]
            load = Load(prompts, 96 if on_cuda else 8, 1.0)
            arms.check_room(engine.facts, _SHAPES, load, concurrency)
            with tqdm(total=1, disable=True) as progress:
                make = partial(arms.make_arms, engine, _SHAPES, points, load)
                cell = arms.measure(make, load, concurrency, 6 * options.scale, progress, 2 * options.scale)
            cells.append({"context": length, **cell})
            findings.add("cells", cells)
            for name, arm in cell["arms"].items():
                # With more requests most steps also read a prompt, and such steps are not recorded.
                slow = on_cuda and concurrency == 1 and arm["share_of_recorded_steps"] < _LEAST_RECORDED
                findings.require(not slow, f"{name}, one request behind {length}: few of its steps were recorded")


def weights(options: argparse.Namespace, findings: SectionResults) -> None:
    """Serve a pair with its own weights, fp8 and int4, from files as a daemon does; report the probe's distance, the
    output's distribution and times.
    """
    on_cuda = options.device == "cuda"
    speculation = SpeculationConfig(rule="block", num_drafts=1, draft_length=5, observed_share=0.0)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if on_cuda else torch.float32
        sizes = options.target, options.draft, options.vocabulary
        target, draft, about = bench_pair.make(*sizes, _ACCEPTANCE, 4096, device=options.device, dtype=dtype)
        target.save_pretrained(f"{folder}/target")
        draft.save_pretrained(f"{folder}/draft")
        findings.add("pair", about)
        del target, draft
        names: tuple[Weights, ...] = ("auto", *FORMATS)
        for name in names:
            model = ModelConfig(target=f"{folder}/target", draft=f"{folder}/draft", device=options.device, weights=name)
            cache = CacheConfig(memory_bytes=(8 << 30) if on_cuda else 1 << 26)
            scheduler = SchedulerConfig(max_num_seqs=16)
            config = EngineConfig(model=model, cache=cache, scheduler=scheduler, speculation=speculation)
            try:
                engine = assemble(config, *load_pair(model, print), print)
                found[name] = _of_weights(options, engine)
            except Exception as error:  # one format fails, the others are measured
                findings.require(False, f"{name}: {type(error).__name__}: {error}")
                continue
            findings.add("weights", found)
            findings.require(not found[name]["check"]["rejected"], f"{name}: not the target's distribution")
            findings.require(not on_cuda or engine.recorded.num_recorded > 0, f"{name}: no recorded steps")
            del engine
            gc.collect()


def _of_weights(options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Return what is known of an engine's weights: their size, the probe's distance, times, and a G-test."""
    device, target = engine.target.device, adopt(engine.target.model, "target")
    is_paged = engine.target.fast_paths["paged attention"]
    distance = probe(target, find_kv_shape(target), engine.target.backend, is_paged)
    times = {
        f"{name}, {rows} requests": middle_s(
            partial(engine.carry_out, plan_of(engine, name, rows)), device, options.scale
        )
        for name in ("off", "block:1x5")
        for rows in (1, 16)
    }
    prompt = [random.Random(7).randrange(3, options.vocabulary) for _ in range(2 * engine.facts.block_size + 1)]
    num_answers = max(200, round(2000 * options.scale))
    check = check_distribution(engine, "block:1x5", arms.speculation_of("block:1x5"), prompt, num_answers, 1.0)
    return {
        "memory_plan": engine.facts.memory_plan,
        "probe_distance": distance,
        "step_s": times,
        "check": {**asdict(check), "rejected": check.rejected},
        "recorded_shapes": engine.recorded.num_recorded,
    }


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all sections."""
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu is a dry run")
    parser.add_argument("--target", default="8b", choices=bench_pair.SIZES, help="size of the made target (default 8b)")
    parser.add_argument("--draft", default="0.6b", choices=bench_pair.SIZES, help="of the draft model (default 0.6b)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="tokens (default 151936)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all durations; small for a dry run")


_SECTIONS = {"trace": trace, "variants": variants, "law": law, "record": record, "weights": weights}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one section."""
    what = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m analysis.gpu_sections", description=what)
    parser.add_argument("section", choices=_SECTIONS)
    parser.add_argument("output", type=Path, help="the JSON document")
    add_setting(parser)
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        _SECTIONS[options.section](options, SectionResults(options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())

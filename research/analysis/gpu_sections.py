"""Sections of a session on a device (`gpu_session.py`) that run an engine.

Each runs in a separate process.

A section writes its results after every item.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig, Weights
from engine.models.quantising import FORMATS
from engine.start.building import assemble
from engine.start.distribution_check import check_distribution
from engine.start.loading import adopt, load_pair
from engine.start.probe import find_kv_shape, probe
from engine.step.engine import Engine
from research.analysis import arms
from research.analysis.gpu_engine import (
    QWEN3_SAMPLING,
    NotRecorded,
    build,
    cells,
    check_output,
    load_of,
    make_pair,
    plan_of,
    profile,
    steps,
)
from research.analysis.gpu_exactness import check_exactness
from research.analysis.gpu_kernels import MEASURED, KernelTimes
from research.analysis.gpu_results import SectionResults, add_setting, ceilings, middle_s, wait, write_stacks

_FEW_SHAPES = ("off", "block:1x5", "bv_race:4x5", "adaptive")
_SHAPES = ("off", "block:1x3", "block:1x5", "bv_race:2x5", "bv_race:4x5", "adaptive")


def engine(options: argparse.Namespace, findings: SectionResults) -> None:
    """Check that steps are exact.

    Measure steps, distributions of the output, and speeds, each shortly; profile a step.
    """
    device = torch.device(options.device)
    on_cuda = options.device == "cuda"
    if on_cuda:
        free_bytes, num_bytes = torch.cuda.mem_get_info()
        findings.add("device", [torch.cuda.get_device_name(), free_bytes, num_bytes])
    found = ceilings(device, options.scale / 2)
    findings.add("ceilings", found)
    if not options.eager:  # else an earlier process has checked it
        findings.attempt("exactness", partial(check_exactness, options, findings))
        _free(options)
    built = build(options, findings, 32 << 30, options.eager)
    findings.attempt("steps", partial(steps, options, findings, built, found["copied_bytes_per_s"]))
    checked = [("off", {}), ("bv_race:4x5", {}), ("bv_race:4x5", QWEN3_SAMPLING)]
    findings.attempt("distributions", partial(check_output, options, findings, built, checked, 375))
    findings.attempt("speeds", partial(cells, options, findings, built, _FEW_SHAPES, 1.4))
    for name in ("off", "bv_race:4x5"):
        findings.attempt(f"profile {name}", partial(_profile, findings, built, name))


def _profile(findings: SectionResults, built: Engine, name: str) -> None:
    findings.add(f"profile {name}", found := profile(built, plan_of(built, name)), is_shown=False)
    largest = ", ".join(f"{one['name'][:30]} {one['us']:.0f} us" for one in found["operations"][:5])
    findings.show(f"profile {name}: {1e3 * found['wall_s']:.2f} ms, {found['idle_share']:.0%} idle; {largest}")


def _free(options: argparse.Namespace) -> None:
    """Free the memory of models and engines that have ended."""
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()


def generate(options: argparse.Namespace, findings: SectionResults) -> None:
    """Measure decoded tokens per second of transformers' `generate` on the same pair.

    Plain, and assisted by the draft model.
    """
    target, draft = make_pair(options, findings)
    on_cuda = options.device == "cuda"
    num_prompt, counts = (300, (1, 4, 16, 64)) if on_cuda else (40, (1, 2))
    cases: list[tuple[str, int, dict[str, Any]]] = [("plain", count, {}) for count in counts]
    cases.append(("assisted", 1, {"assistant_model": draft}))
    for name, count, more in cases:
        ids = torch.randint(3, options.vocabulary, (count, num_prompt), device=target.device)

        def seconds(num_tokens: int, ids: Any = ids, more: dict[str, Any] = more) -> float:
            began = time.perf_counter()
            lengths = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0}
            mask = torch.ones_like(ids)
            target.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **lengths, **sampling, **more)
            wait(target.device)
            return time.perf_counter() - began

        def measured(name: str = name, count: int = count, seconds: Callable[[int], float] = seconds) -> None:
            few, many = (4, 64) if on_cuda else (2, 10)
            seconds(few)  # it allocates
            decoding_s = -seconds(few) + seconds(many)
            findings.add(f"generate, {name}, {count} requests, tokens per second", count * (many - few) / decoding_s)

        findings.attempt(f"generate, {name}, {count} requests", measured)


def kernels(options: argparse.Namespace, findings: SectionResults) -> None:
    """Measure every kernel, each kind apart."""
    device = torch.device(options.device)
    findings.add("ceilings", ceilings(device, 0.5 * options.scale))
    for measure in MEASURED:
        findings.attempt(measure.__name__, partial(measure, KernelTimes(findings, device)))


def record(options: argparse.Namespace, findings: SectionResults) -> None:
    """Measure tokens per second of every shape."""
    built = build(options, findings, 48 << 30, options.eager)
    findings.attempt("speeds", partial(cells, options, findings, built, _SHAPES, 4.0))


def weights(options: argparse.Namespace, findings: SectionResults) -> None:
    """Serve a pair with its own weights, fp8 and int4, from files as a daemon does.

    Report the probe's distance, the output's distribution and times.
    """
    on_cuda = options.device == "cuda"
    speculation = SpeculationConfig(rule="block", num_drafts=1, draft_length=5, observed_share=0.0)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        target, draft = make_pair(options, findings)
        target.save_pretrained(f"{folder}/target")
        draft.save_pretrained(f"{folder}/draft")
        del target, draft
        names: tuple[Weights, ...] = ("auto", *FORMATS)
        for name in names:
            model = ModelConfig(target=f"{folder}/target", draft=f"{folder}/draft", device=options.device, weights=name)
            cache = CacheConfig(memory_bytes=(8 << 30) if on_cuda else 1 << 26)
            scheduler = SchedulerConfig(max_num_seqs=16)
            config = EngineConfig(model=model, cache=cache, scheduler=scheduler, speculation=speculation)
            if findings.attempt(name, partial(_measure_weights, options, config, found, name)):
                findings.add("weights", found)
                findings.require(not found[name]["check"]["rejected"], f"{name}: not the target's distribution")
                findings.require(not on_cuda or found[name]["recorded_shapes"] > 0, f"{name}: no recorded steps")
            gc.collect()  # the engine, which went when it was measured or failed


def _measure_weights(options: argparse.Namespace, config: EngineConfig, found: dict[str, Any], name: str) -> None:
    found[name] = _of_weights(options, assemble(config, *load_pair(config.model, print), print))


def _of_weights(options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Return an engine's size, the probe's distance, times, and a G-test."""
    device, target = engine.target.device, adopt(engine.target.model, "target")
    distance = probe(target, find_kv_shape(target), engine.target.backend, engine.target.paged_kernel)
    times = {
        f"{name}, {rows} requests": middle_s(
            partial(engine.carry_out, plan_of(engine, name, rows)), device, options.scale
        )
        for name in ("off", "block:1x5")
        for rows in (1, 16)
    }
    prompt = load_of(options, 1, 2 * engine.facts.block_size + 1, seed=7).prompts[0]
    num_answers = max(200, round(2000 * options.scale))
    check = check_distribution(engine, "block:1x5", arms.speculation_of("block:1x5"), prompt, num_answers, 1.0)
    return {
        "memory_plan": engine.facts.memory_plan,
        "probe_distance": distance,
        "step_s": times,
        "check": {**asdict(check), "rejected": check.rejected},
        "recorded_shapes": engine.recorded.num_recorded,
    }


_SECTIONS = {"engine": engine, "kernels": kernels, "generate": generate, "record": record, "weights": weights}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one section."""
    arguments = sys.argv[1:] if arguments is None else arguments
    what = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m research.analysis.gpu_sections", description=what)
    parser.add_argument("section", choices=_SECTIONS)
    parser.add_argument("output", type=Path, help="the JSON document")
    parser.add_argument("--eager", action="store_true", help="steps are not recorded; go on with the document")
    add_setting(parser)
    options = parser.parse_args(arguments)
    try:
        with torch.inference_mode():
            _SECTIONS[options.section](options, SectionResults(options.output, continues=options.eager))
    except NotRecorded:
        os.execv(sys.executable, [sys.executable, "-m", "research.analysis.gpu_sections", *arguments, "--eager"])
    return 0


if __name__ == "__main__":
    write_stacks()  # of this process alone, not of one that calls `main`
    sys.exit(main())

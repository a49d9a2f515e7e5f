"""Engine of a session on a device (`gpu_session.py`): how it is built, and what is measured of it.

Times are those of the device, synchronised.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from engine.attention.attention import HOOK, register
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.cuda.recorded.menu import distributions_on, menu
from engine.plan import Plan
from engine.start.building import assemble, recorded_drafts
from engine.start.distribution_check import check_distribution, check_power, is_blind
from engine.start.loading import adopt
from engine.start.measuring import measure_prices, synthetic_plan
from engine.step.engine import Engine
from research.analysis import arms
from research.analysis.gpu_exactness import fast_paths, steps_of
from research.analysis.gpu_results import SectionResults, described, middle_s, require_all, wait
from research.analysis.load import Load
from research.demo import bench_pair

_LEAST_RECORDED = 0.5
"""Least share of a lone request's steps that are recorded; other steps read its prompt, or no
recording has room for their plan.
"""
_BYTES_PER_S = {"h200": 4.8e12, "h100": 3.35e12, "a100": 2.04e12, "l40s": 0.864e12, "rtx4090": 1.008e12}
"""Bandwidths of data sheets."""
QWEN3_SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""Sampling of Qwen3's generation_config."""


class NotRecorded(Exception):
    """An engine with recorded steps cannot be built.

    A failed recording can leave torch's allocator unusable, so that an engine without recorded
    steps needs another process.
    """


def make_pair(options: argparse.Namespace, findings: SectionResults) -> tuple[Any, Any]:
    """Create the pair for speeds on the device."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    sizes = options.target, options.draft, options.vocabulary
    target, draft, about = bench_pair.make(*sizes, options.acceptance, 4096, device=options.device, dtype=dtype)
    findings.add("pair", about)
    return target, draft


def build(
    options: argparse.Namespace, findings: SectionResults, cache_bytes: int, enforce_eager: bool = False
) -> Engine:
    """Build an engine around a pair that is created on the device; every fall-back is a failure.

    cache_bytes: of K/V on a CUDA device. Raise NotRecorded if steps cannot be recorded.
    """
    register()
    findings.keep_warnings()
    began = time.monotonic()
    on_cuda = options.device == "cuda"
    target, draft = make_pair(options, findings)
    for model in (target, draft):
        model.set_attn_implementation(HOOK)
    start = {"the pair": round(time.monotonic() - began, 1)}
    config = EngineConfig(
        model=ModelConfig(target="target", draft="draft", device=options.device, enforce_eager=enforce_eager),
        cache=CacheConfig(memory_bytes=cache_bytes if on_cuda else 1 << 26),
        scheduler=SchedulerConfig(max_num_seqs=64 if on_cuda else 8),
        speculation=SpeculationConfig(
            num_drafts=8, draft_length=5, max_num_drafts=8, max_draft_length=8, observed_share=0.0
        ),
    )

    def tell(text: str) -> None:
        start[text] = round(time.monotonic() - began, 1)
        findings.add("seconds_until", start, is_shown=False)
        findings.show(f"{start[text]} s: {text}")

    try:
        engine = assemble(config, adopt(target, "target"), adopt(draft, "draft"), tell)
    # Of the first engine that a device builds: all else can still be measured.
    except Exception as error:
        if enforce_eager:
            raise
        traceback.print_exc()
        findings.require(False, f"an engine with recorded steps cannot be built: {described(error)}")
        raise NotRecorded from error
    tell("the engine is built")
    findings.add("memory_plan", engine.facts.memory_plan)
    findings.add("recorded_bytes", engine.recorded.num_bytes)
    found = fast_paths(engine)
    findings.add("ways", found)
    if on_cuda and not enforce_eager:
        require_all(findings, found)
        require_recorded(findings, engine, config)
    return engine


def require_recorded(findings: SectionResults, engine: Engine, config: EngineConfig) -> None:
    """Require a recording of every shape.

    Without one, steps of this shape would run unnoticed as they are.
    """
    drafts = recorded_drafts(config, adopt(engine.draft_runner.model, "draft") if engine.draft_runner else None)
    kernels = engine.target.kernels
    asked = menu(drafts, config.scheduler.max_num_seqs, distributions_on(engine.target.device, kernels))
    findings.add("recorded_shapes", f"{engine.recorded.num_recorded} of {len(asked)}")
    left_out = [one for one in asked if one not in engine.recorded.steps]
    shown = ", ".join(f"{one.sequences} requests of {one.num_drafts}x{one.draft_length}" for one in left_out[:4])
    findings.require(not left_out, f"{len(left_out)} of {len(asked)} shapes are not recorded: {shown}")


def plan_of(engine: Engine, name: str, num_rows: int = 1, context: int = 500) -> Plan:
    """Return a synthetic plan."""
    return synthetic_plan(engine, num_rows, context, arms.speculation_of(name))


def steps(options: argparse.Namespace, findings: SectionResults, engine: Engine, copied_bytes_per_s: float) -> None:
    """Measure steps of one request, and plain steps of more.

    Plain steps have shares of two rooflines: by the bandwidth of the data sheet (the measured one
    if it is not known), and by that of a copy.
    """
    on_cuda = options.device == "cuda"
    bandwidth = bytes_per_s(torch.cuda.get_device_name() if on_cuda else "", copied_bytes_per_s)
    num_weights, token_bytes = _read_by_a_pass(bench_pair.SIZES[options.target], options.vocabulary)
    shares: dict[str, float] = {}
    copy_shares: dict[str, float] = {}
    for num_rows in (1, 4, 16, 64) if on_cuda else (1, 2):
        plan = plan_of(engine, "off", num_rows, 300)
        needed = 2 * num_weights + num_rows * 300 * token_bytes
        reached = needed / _step_s(findings, engine, plan, options.scale / 3, on_cuda)
        shares[str(num_rows)], copy_shares[str(num_rows)] = reached / bandwidth, reached / copied_bytes_per_s
        findings.add("plain_share_of_roofline", shares)
        findings.add("plain_share_of_measured_copy", copy_shares)
    times: dict[str, float] = {}
    for context in (300, 1000):
        for name in ("off", "block:1x5", "bv_race:4x5", "bv_race:8x4"):
            plan = plan_of(engine, name, context=context)
            times[f"{name} after {context}"] = _step_s(findings, engine, plan, options.scale / 3, on_cuda)
        findings.add("step_s", times)
    if on_cuda:
        findings.add("step_s of other steps", _unrecorded_steps(engine, options.scale / 3))


def _unrecorded_steps(engine: Engine, seconds: float) -> dict[str, float]:
    """Return median times of steps that are not recorded as a whole.

    Steps with prompts, and with many drafts.
    """
    plans = {
        "1 prompt of 300": synthetic_plan(engine, 0, 0, num_prompt=300),
        "63 requests, prompt of 300": synthetic_plan(engine, 63, 300, num_prompt=300),
        "63 requests of block:1x3, prompt of 300": synthetic_plan(
            engine, 63, 300, arms.speculation_of("block:1x3"), num_prompt=300
        ),
        "16 requests of bv_race:4x5": plan_of(engine, "bv_race:4x5", 16, 300),
        "64 requests of block:1x3": plan_of(engine, "block:1x3", 64, 300),
    }
    return {
        name: middle_s(partial(engine.carry_out, plan), engine.target.device, seconds) for name, plan in plans.items()
    }


def _step_s(findings: SectionResults, engine: Engine, plan: Plan, seconds: float, must_record: bool) -> float:
    """Return the median time of a step, which must be a recorded one if the device has them."""
    is_recorded = engine.recorded.find(plan) is not None
    findings.require(is_recorded or not must_record, f"a step of {_named(plan)} is not a recorded one")
    return middle_s(partial(engine.carry_out, plan), engine.target.device, seconds)


def _named(plan: Plan) -> str:
    return f"{len(plan.rows)} requests that draft {plan.rows[0].fanout or 'nothing'}"


def bytes_per_s(device: str, copied_bytes_per_s: float) -> float:
    """Return the bandwidth on the data sheet of a device of this name.

    If it is not known, return what was measured.
    """
    known = [rate for name, rate in _BYTES_PER_S.items() if name in device.lower().replace(" ", "")]
    return known[0] if known else copied_bytes_per_s


def _read_by_a_pass(size: bench_pair.Size, vocabulary: int) -> tuple[int, int]:
    """Return the number of weights of a pass, and the bytes of a token's K/V.

    Weights of layers and output head; K/V in bfloat16.
    """
    width, dim, heads = size.hidden_size, size.head_dim, size.num_key_value_heads
    attention = width * dim * 2 * (size.num_attention_heads + heads)
    layer = attention + 3 * width * size.intermediate_size
    return size.num_hidden_layers * layer + width * vocabulary, 2 * size.num_hidden_layers * heads * dim * 2


def profile(engine: Engine, plan: Plan, num_steps: int = 20) -> dict[str, Any]:
    """Return the 25 operations of a step that take longest, and its idle share.

    The device is idle for this share of the step's time.
    """
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


def check_output(
    options: argparse.Namespace,
    findings: SectionResults,
    engine: Engine,
    cases: Sequence[tuple[str, Mapping[str, Any]]],
    num_answers: int,
) -> None:
    """Compare first tokens of recorded steps with the target's distribution, by a G-test.

    cases: (shape, fields of `Sampling`).
    """
    # All but one token of the prompt fill blocks, which the answers share. So their first steps
    # compute one token, as all recorded steps do.
    prompt = load_of(options, 1, 2 * engine.facts.block_size + 1, seed=7).prompts[0]
    for name, sampling in cases:
        with steps_of(engine) as served:
            fields = {"temperature": 1.0, **sampling}
            check = check_distribution(engine, name, arms.speculation_of(name), prompt, num_answers, **fields)
        key = ", ".join([name, *sampling])
        findings.add(key, {**asdict(check), "recorded_steps": sum(served), "steps": len(served)})
        findings.require(not check.rejected, f"{key}: not the target's distribution (p = {check.p_value:.2g})")
        if options.device == "cuda":
            findings.require(sum(served) > len(served) / 2, f"{key}: most steps were not recorded")
    power = check_power(engine, prompt, 2 * num_answers, 1.0)
    findings.add("a rule that is wrong", asdict(power))
    findings.require(not is_blind(power), "the check of distributions did not find a rule that is wrong")


def load_of(options: argparse.Namespace, count: int, length: int, seed: int) -> Load:
    """Return a load of random prompts of `length` tokens."""
    chance = random.Random(seed)
    prompts = [tuple(chance.randrange(3, options.vocabulary) for _ in range(length)) for _ in range(count)]
    return Load(prompts, 64 if options.device == "cuda" else 8, 1.0)


def cells(
    options: argparse.Namespace, findings: SectionResults, engine: Engine, names: Sequence[str], seconds: float
) -> None:
    """Measure tokens per second of arms in turns, by the number of requests.

    seconds: of plain decoding in a cell.
    """
    prices = measure_prices(engine, arms.speculation_of("adaptive"))
    found = []
    counts, length = ((1, 4, 16, 64), 300) if options.device == "cuda" else ((1, 2), 40)
    for concurrency in counts:
        load = load_of(options, 2 * concurrency, length, seed=length)
        arms.check_room(engine.facts, names, load, concurrency)
        durations = arms.Durations(seconds * options.scale, seconds / 3 * options.scale)
        make = partial(arms.make_arms, engine, names, prices, load)
        with tqdm(total=1, disable=True) as progress:
            cell = arms.measure(make, load, concurrency, durations, progress)
        found.append({"context": length, **cell})
        findings.add("cells", found, is_shown=False)
        for name, arm in cell["arms"].items():
            facts = f"{arm['tokens_per_second']:.0f} tokens/s, {arm['ratio_to_off']['ratio']:.2f} of plain"
            findings.show(f"{concurrency} requests, {name}: {facts}, {arm['share_of_recorded_steps']:.0%} recorded")
            # With more requests most steps also read a prompt, and such steps are not recorded.
            few = concurrency == 1 and arm["share_of_recorded_steps"] < _LEAST_RECORDED
            few &= options.device == "cuda"
            findings.require(not few, f"{name}, one request after {length} tokens: few of its steps were recorded")
        findings.add("goals", goals(found))


def goals(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the cells show of each goal: (found, aim, whether it is met).

    Goals hold for the first cell of each concurrency.
    """
    ratios: dict[int, dict[str, float]] = {}
    for cell in found:
        arm_ratios = {name: arm["ratio_to_off"]["ratio"] for name, arm in cell["arms"].items()}
        ratios.setdefault(cell["concurrency"], arm_ratios)
    result = {}
    for concurrency, aim in ((1, 2.0), (4, 1.6), (16, 1.2), (64, 0.98)):
        if (ratio := ratios.get(concurrency, {}).get("adaptive")) is not None:
            result[f"adaptive over plain, {concurrency} requests"] = (ratio, aim, ratio >= aim)
    shape_ratios = {name: ratio for name, ratio in ratios.get(1, {}).items() if ":" in name}
    single = [ratio for name, ratio in shape_ratios.items() if ":1x" in name]
    several = [ratio for name, ratio in shape_ratios.items() if ":1x" not in name]
    if single and several:
        ratio = max(several) / max(single)
        result["several drafts over the best chain, one request"] = (ratio, 1.15, ratio >= 1.15)
    return result

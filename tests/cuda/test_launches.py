"""Launches of a step on a device, counted on a CPU: each takes some microseconds, whatever it
computes.

Passes of the models are replayed as one launch; here they return synthetic logits.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("launches are counted in Triton's interpreter", allow_module_level=True)

from functools import partial
from pathlib import Path

import engine.step.eager as stepping
from engine.cuda import attention_kernel, lean_decoder
from engine.cuda.kernels import TritonKernels
from engine.cuda.lean_decoder import LeanDecoder
from engine.cuda.recorded import steps
from engine.cuda.recorded.steps import RecordedStep
from engine.kernels import transfer
from engine.models.runner import ModelRunner, Pass
from engine.request import Speculation
from engine.start.probe import find_kv_shape
from engine.step.engine import Engine
from tests.attention.test_groups import passes
from tests.cuda.test_attention_kernel import in_parts
from tests.cuda.test_lean_decoder import SIZES, randomised
from tests.cuda.test_recorded_heads import HEADS
from tests.engine import tiny
from tests.grid import grid
from tests.heads import folders
from tests.heads.recording import VOCABULARY
from tests.launches import counted_launches
from tests.wrong import instead

pytestmark = pytest.mark.slow  # test_dry_run.py counts the copies, reads and replays of recorded steps

PRODUCTS, KERNELS = 4, 6
"""Matrix products of a layer, and kernels between them."""
LEVEL_LAUNCHES, VERDICT_LAUNCHES, PLAIN_LAUNCHES = 5, 14, 8
"""Launches outside of passes, if a step is not recorded: of a drafted level, of a verdict over
drafts, of a plain step.
"""
RECORDED_LAUNCHES = 10
"""Launches of a whole recorded step: its copies, its replays, and the moves of accepted K/V."""
CHAIN = Speculation(rule="block", num_drafts=1, draft_length=5)
CHAINS = Speculation(rule="bv_race", num_drafts=4, draft_length=5)


def without_model(_: Any, runner: ModelRunner, prepared: Pass, _drawn_T: Tensor | None = None) -> Tensor:
    """Logits of a pass that launches nothing."""
    shape = len(prepared.tensors.wanted_N), runner.vocab_size
    return torch.linspace(0, 3, shape[0] * shape[1]).view(shape)


def launches_of(speculation: Speculation, num_requests: int, **sampling: Any) -> tuple[Counter[str], Counter[str]]:
    """Return the launches of drafting, and of verification, in a step whose requests all draft like
    this.
    """
    target = tiny.llama(1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.05))
    engine.limits = type(engine.limits)(observed_share=0.0)
    engine.unrecorded.most_unmerged = 1000
    for i in range(num_requests):
        wish = {"temperature": 1.0, "seed": i, **sampling}
        engine.submit(tiny.request(str(i), range(5 + i, 20 + i), speculation, 40, **wish))
    for _ in range(2):
        engine.run_step()
    found = []

    def counted(part: Any, *operands: Any) -> Any:
        with counted_launches() as launches:
            result = part(*operands)
        found.append(launches - Counter(linspace=launches["linspace"]))
        return result

    engine.target.kernels = TritonKernels()
    with (
        instead(stepping, "draw_chains", counted),
        instead(stepping, "verify_chains", counted),
        instead(ModelRunner, "run", without_model),
        instead(transfer, "are_here", lambda *_: False),
    ):
        engine.run_step()
    drafting, verification = found
    return drafting, verification


@pytest.mark.parametrize("num_requests", grid([1, 4], {4}))
@pytest.mark.parametrize("speculation", [CHAIN, CHAINS], ids=["chain", "chains"])
def test_a_drafted_level_costs_five_and_a_verdict_fourteen(speculation: Speculation, num_requests: int) -> None:
    """The distribution in two, the draw in two, tokens out in one: of however many requests and
    chains.

    Of a verdict's, four look for numbers that are not finite, and one packs everything for the
    host.
    """
    drafting, verification = launches_of(speculation, num_requests)
    assert drafting.total() <= 4 + LEVEL_LAUNCHES * speculation.draft_length, drafting
    assert verification.total() <= VERDICT_LAUNCHES, verification
    assert {"_walk", "sum_tiles", "_decide", "_race"} <= set(verification)


@contextlib.contextmanager
def counted_step() -> Iterator[Counter[str]]:
    """All that a step launches: replays, copies in both directions, kernels and operations."""
    with counted_launches() as launches, contextlib.ExitStack() as stack:

        def once(name: str, is_free: bool, run: Any, *operands: Any) -> Any:
            before = Counter(launches)
            result = run(*operands)
            if is_free:  # what is inside is part of it
                launches.clear()
                launches.update(before)
            launches[name] += 1
            return result

        for owner, name, is_free in (
            (RecordedStep, "_replay", True),
            (steps, "fill", True),
            (torch, "from_numpy", False),
            (Tensor, "cpu", False),
        ):
            stack.enter_context(instead(owner, name, partial(once, name.strip("_"), is_free)))
        yield launches


@pytest.fixture(scope="module")
def machine() -> Engine:
    """With recorded steps, and kernels that move accepted K/V."""
    target = tiny.llama(1, layers=1)
    with tiny.with_recorded_steps([(0, 0), (1, 5), (4, 5)]):
        engine = tiny.build(target, tiny.perturbed(target, 2, 0.05))
    engine.limits = type(engine.limits)(observed_share=0.0)
    assert engine.draft_runner is not None
    for runner in (engine.target, engine.draft_runner):
        runner.storage.kernels = TritonKernels()
    return engine


def recorded_step(
    machine: Engine, speculation: Speculation, num_requests: int, num_logprobs: int | None, **sampling: Any
) -> Counter[str]:
    """Return the launches of such a step in the middle of answers."""
    for i in range(num_requests):
        wish = {"temperature": 1.0, "seed": i, **sampling}
        one = tiny.request(str(i), range(5 + i, 20 + i), speculation, 40, **wish)
        machine.submit(msgspec.structs.replace(one, num_logprobs=num_logprobs))
    for _ in range(2):
        machine.run_step()
    with counted_step() as launches:
        machine.run_step()
    for i in range(num_requests):
        machine.abort(str(i))
    return launches


@pytest.mark.usefixtures("attention_in_torch")
@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize(
    "wish",
    grid([{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}, {"temperature": 0.0}], [{"top_p": 0.9}]),
    ids=str,
)
@pytest.mark.parametrize("speculation", [tiny.OFF, CHAIN, CHAINS], ids=["plain", "chain", "chains"])
def test_a_recorded_step_costs_ten_launches(
    machine: Engine, speculation: Speculation, wish: dict[str, Any], num_requests: int
) -> None:
    """One copy to the device, three replays, one copy back; and for the K/V of each model a copy
    and a kernel.
    """
    launches = recorded_step(machine, speculation, num_requests, None, **wish)
    assert launches["fill"] == launches["cpu"] == 1
    assert launches["replay"] == (3 if speculation.num_drafts else 2)
    assert launches.total() <= RECORDED_LAUNCHES == 10, launches


@pytest.mark.usefixtures("attention_in_torch")
@pytest.mark.parametrize("name", grid(HEADS, {"eagle3"}))
def test_a_recorded_step_with_a_head_costs_eight_launches(name: str, tmp_path: Path) -> None:
    """The head reads accepted tokens again in the next step, so that no K/V of it is moved."""
    written = HEADS[name](tmp_path / "head")
    target = folders.load_target(written) if name == "mtp" else folders.target(VOCABULARY, layers=2)
    speculation = msgspec.structs.replace(CHAINS, draft_length=3)
    with tiny.with_recorded_steps([(0, 0), (4, 3)]):
        engine = tiny.build(target, folders.load(written, target))
    engine.limits = type(engine.limits)(observed_share=0.0)
    engine.target.storage.kernels = TritonKernels()
    launches = recorded_step(engine, speculation, 1, None)
    assert launches["fill"] == launches["cpu"] == 1
    assert launches["replay"] == 3
    assert launches.total() <= 8, launches


@pytest.mark.usefixtures("attention_in_torch")
def test_logprobs_cost_a_few_more(machine: Engine) -> None:
    launches = recorded_step(machine, CHAINS, 1, 3)
    assert launches["replay"] == 3
    assert launches.total() <= 22, launches


def test_a_plain_step_has_at_most_eight_launches() -> None:
    drafting, verification = launches_of(tiny.OFF, 4)
    assert (drafting + verification).total() <= PLAIN_LAUNCHES, (drafting, verification)


def test_top_p_adds_eleven_launches_a_level() -> None:
    drafting, verification = launches_of(CHAIN, 1, top_p=0.9)
    # Memory for the search is cleared, distributions are copied for drafting; the parameters are
    # laid out once.
    assert drafting.total() <= 5 + (LEVEL_LAUNCHES + 11) * CHAIN.draft_length, drafting
    assert verification.total() <= VERDICT_LAUNCHES + 11, verification


def test_all_filters_cost_twenty_two_more_a_distribution() -> None:
    """Qwen3's own sampling; no operation sorts a row."""
    drafting, verification = launches_of(CHAIN, 1, temperature=0.6, top_k=20, top_p=0.95)
    assert drafting.total() <= 5 + (LEVEL_LAUNCHES + 22) * CHAIN.draft_length, drafting
    assert verification.total() <= VERDICT_LAUNCHES + 22, verification
    assert not {"topk", "sort"} & {*drafting, *verification}


def test_temperature_zero_is_not_much_dearer() -> None:
    drafting, verification = launches_of(CHAIN, 1, temperature=0.0)
    assert drafting.total() <= 4 + 7 * CHAIN.draft_length, drafting
    assert verification.total() <= 21, verification


def test_the_copy_that_stores_logits_converts_them(machine: Engine) -> None:
    """Converted before, they would be written and read once more."""
    step = next(step for shape, step in machine.recorded.steps.items() if not shape.num_drafts)
    logits_NV = torch.linspace(-2, 3, step._logits_NV.numel()).view_as(step._logits_NV).bfloat16()
    with (
        instead(ModelRunner, "run_on_device", lambda *_: logits_NV),
        torch.inference_mode(),
        counted_launches() as launches,
    ):
        step._target()
    assert launches == Counter(copy_=1)
    assert torch.equal(step._logits_NV, logits_NV.float())


def test_a_layer_of_few_rows_is_ten_kernels() -> None:
    """One of them merges the parts of a long text, which a short one has not. Besides layers, a
    pass has four.
    """
    counts = []
    for num_layers in (2, 3):
        loaded = randomised(transformers.Qwen3Config(**{**SIZES, "num_hidden_layers": num_layers}, head_dim=8), seed=3)
        with instead(lean_decoder, "use_kernels", lambda *_: True):
            decoder = LeanDecoder(loaded.model)
        shape = find_kv_shape(loaded)
        runner = ModelRunner(loaded.model, shape, 200, 4, loaded.vocab_size, decoder, paged_kernel=attention_kernel)
        (step,) = runner.prepare([passes()[1][:1]])
        with (
            counted_launches() as launches,
            in_parts(2),
        ):
            runner.run(step)
        counts.append(launches)
    of_layer = counts[1] - counts[0]
    assert of_layer == Counter(_rotate_and_write=1, _attend=1, _merge=1, _norm=2, _gate=1, linear=2, addmm_=2)
    assert of_layer.total() == PRODUCTS + KERNELS == 10
    assert counts[0] - of_layer - of_layer == Counter(embedding=1, _divide=1, _norm=1, index=1, linear=1)

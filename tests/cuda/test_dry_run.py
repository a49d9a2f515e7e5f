"""The path of a CUDA device, run on a device that is not there."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are replaced in Triton's interpreter", allow_module_level=True)

from engine.cuda import attention_kernel, layer_check
from engine.cuda.kernels import TritonKernels
from engine.cuda.lean_decoder import LeanDecoder
from engine.cuda.recorded import steps
from engine.kernels.transfer import to_device
from engine.request import Speculation
from engine.sampling import edits
from engine.speculation.verification import RULES
from engine.start import choosing, probe
from engine.start.architectures import RECURRENT_MODEL_TYPES
from engine.step import verify
from engine.step.engine import Engine
from tests.cuda import dry
from tests.dry_device import DEVICE, DryDevice, NotOnADevice
from tests.engine import tiny
from tests.grid import grid
from tests.kernel_arguments import check_launch
from tests.models import families
from tests.wrong import instead

CHAINS = Speculation(rule="bv_race", num_drafts=2, draft_length=2)
FILTERED = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
_PROBE = probe.probe


@pytest.fixture(scope="module")
def device() -> Iterator[DryDevice]:
    with dry.serving() as one:
        yield one


@pytest.fixture(scope="module")
def machine(device: DryDevice) -> Engine:
    target, draft = dry.pair()
    return tiny.build(target, draft, num_blocks=200, max_over_acceptance=0.3, max_copied_tokens=8)


@contextlib.contextmanager
def launched_one_by_one(engine: Engine) -> Iterator[None]:
    """Let the engine replay no whole step, temporarily."""
    engine.recorded.serves = False
    try:
        yield
    finally:
        engine.recorded.serves = True


class EvenTokens:
    """A grammar of even tokens."""

    def masks(self, _answer: Any, paths: Any) -> Callable[[], list[Any]]:
        return lambda: [np.arange(101) % 2 == 0 for _ in paths]

    def check_answer(self, *_: Any) -> None:
        """Refuse nothing."""


class Costs(msgspec.Struct):
    """Costs of one step."""

    reads: int
    """Times that the host reads from the device."""
    waits: int
    """Further times that it waits: copies that are waited for, and events."""
    pinned: int
    """Copies to the device from pinned memory, which are not waited for."""
    replays: int
    pageable: int = 0
    """Copies to the device that the driver stages, and may wait for."""


@contextlib.contextmanager
def asking(machine: Engine, speculation: Speculation, **wish: Any) -> Iterator[None]:
    """Two requests that go on for as long as the context is open."""
    more = {name: wish.pop(name) for name in list(wish) if name in ("num_logprobs", "num_prompt_logprobs")}
    min_tokens = wish.pop("min_tokens", 0)
    for number in range(2):
        sampling = {"temperature": 1.0, "seed": number, **wish}
        # All answers are zeros: something to look up.
        text = [*range(5 + number, 12 + number), 0, 0, 0, 0, 8, 0, 0, 0]
        one = tiny.request(str(number), text, speculation, 40, **sampling)
        limits = msgspec.structs.replace(one.limits, min_tokens=min_tokens)
        one = msgspec.structs.replace(one, limits=limits, **more)
        if one.sampling.grammar:
            machine.queue(one, EvenTokens())
        else:
            machine.submit(one)
    try:
        yield
    finally:
        for number in range(2):
            machine.abort(str(number))


def num_passes(speculation: Speculation) -> int:
    """Return the passes of a step that drafts this: the target's, and the draft model's."""
    return 1 + speculation.draft_length * bool(speculation.num_drafts)


def costs(device: DryDevice, machine: Engine) -> Costs:
    """Run a step."""
    device.counts.clear()
    machine.run_step()
    found = device.counts
    waits = found["blocking copy"] + found["wait"]
    return Costs(found["read"], waits, found["pinned copy"], found["replay"], found["pageable copy"])


@pytest.mark.sole("a recorded step, in the dry run")
@pytest.mark.parametrize(
    ("speculation", "wish"),
    [(tiny.OFF, {}), (CHAINS, {}), (CHAINS, FILTERED), (CHAINS, {"temperature": 0.0})],
    ids=["plain", "chains", "filters", "greedy"],
)
def test_a_recorded_step_copies_once_and_reads_once(
    device: DryDevice, machine: Engine, speculation: Speculation, wish: dict[str, Any]
) -> None:
    """All four kinds are captured: drafting, the target's pass and the verdict."""
    assert list(machine.recorded.steps) == dry.SHAPES
    assert isinstance(machine.target.backend, LeanDecoder)
    with asking(machine, speculation, **wish):
        assert costs(device, machine).replays == num_passes(speculation), "passes over prompts are replayed alone"
        for _ in range(2):
            replays = 3 if speculation.num_drafts else 2
            assert costs(device, machine) == Costs(reads=1, waits=0, pinned=1, replays=replays)
            kernels = device.counts.total() - device.counts["read"] - device.counts["pinned copy"] - replays
            assert kernels <= 2, "one kernel moves the K/V of each model"


def test_merging_equal_nodes_reads_the_drafted_tokens(device: DryDevice, machine: Engine) -> None:
    most_unmerged, machine.unrecorded.most_unmerged = machine.unrecorded.most_unmerged, 0
    try:
        with launched_one_by_one(machine), asking(machine, CHAINS):
            costs(device, machine)
            assert costs(device, machine).reads == 2
    finally:
        machine.unrecorded.most_unmerged = most_unmerged


BOTH = Speculation(rule="bv_race", num_drafts=2, draft_length=2, drafters=("model", "prompt_lookup"))
WISHES: dict[str, tuple[Speculation, dict[str, Any], int, int]] = {
    # Reads, and copies: the random numbers, and each model's passes.
    "plain": (tiny.OFF, {}, 1, 2),
    "chains": (CHAINS, {}, 1, 3),
    "filters": (CHAINS, FILTERED, 1, 3),
    "greedy": (CHAINS, {"temperature": 0.0}, 1, 3),
    "over-acceptance": (Speculation(rule="token", num_drafts=1, draft_length=3, over_acceptance=0.2), {}, 1, 3),
    # One copy more for the edits at each level and at the target's nodes; one for the places of
    # tokens in paths.
    "plain, penalties": (tiny.OFF, {"frequency_penalty": 0.5}, 1, 3),
    "bias": (CHAINS, {"logit_bias": ((7, 1.0),)}, 1, 6),
    "penalties": (CHAINS, {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((7, 1.0),)}, 1, 7),
    "allowed tokens": (CHAINS, {"allowed_token_ids": (0, 5, 6)}, 1, 6),
    "min_tokens": (CHAINS, {"min_tokens": 30}, 1, 6),
    # Two at each of these places.
    "seed-stable": (CHAINS, {"seed_stable": True}, 1, 9),
    # One more for the logprobs of all rows, and their places.
    "logprobs": (CHAINS, {"num_logprobs": 3}, 2, 5),
    "prompt logprobs": (CHAINS, {"num_prompt_logprobs": 3}, 2, 3),
    # The drafted tokens and the probabilities of the drafts come to the host before the verdict.
    "text drafts": (Speculation(drafters=("prompt_lookup",)), {}, 2, 7),
    "text drafts and chains": (BOTH, {}, 3, 8),
    # Paths come to the host: those below two levels, and all tokens before the target's pass.
    "bad words": (CHAINS, {"bad_words": ((4, 5),)}, 3, 5),
    "grammar": (CHAINS, {"grammar": "even"}, 3, 8),
    "plain, grammar": (tiny.OFF, {"grammar": "even"}, 1, 3),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", grid(WISHES, {"logprobs", "prompt logprobs", "penalties", "grammar", "text drafts"}))
def test_a_step_that_is_not_recorded_waits_and_copies_as_often_as_it_says(
    device: DryDevice, machine: Engine, name: str
) -> None:
    """The first step reads the prompts, and copies what is kept for later ones."""
    speculation, wish, reads, copies = WISHES[name]
    with launched_one_by_one(machine), asking(machine, speculation, **wish):
        for number in range(3):
            found = costs(device, machine)
            reads = 1 if number and name == "prompt logprobs" else reads
            assert (found.reads, found.waits, found.pageable) == (reads, 0, 0), device.places
            assert not number or found.pinned == copies


def in_two(to_device_at_once: Any, arrays: Any, of: torch.device) -> Any:
    return [*to_device_at_once(arrays[:1], of), *to_device_at_once(arrays[1:], of)]


WRONG_STEPS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a copy more": (edits, "to_device_at_once", in_two),
    "a copy of each": (edits, "to_device_at_once", lambda _, arrays, of: [to_device(one, of) for one in arrays]),
    "memory that is not pinned": (
        verify,
        "to_device",
        lambda _, one, of: torch.from_numpy(one).to(of, non_blocking=True),
    ),
    "a number is read": (edits, "_changed", lambda right, *of: (of[0].sum().item(), right(*of))[1]),
}


@pytest.mark.sole("a copy more in a recorded step")
@pytest.mark.sampled
@pytest.mark.parametrize("wrong", [None, *WRONG_STEPS])
def test_a_copy_or_a_wait_more_is_counted(device: DryDevice, machine: Engine, wrong: str | None) -> None:
    speculation, wish, reads, copies = WISHES["penalties"]
    with launched_one_by_one(machine), asking(machine, speculation, **wish):
        costs(device, machine)
        costs(device, machine)
        with instead(*WRONG_STEPS[wrong]) if wrong else contextlib.nullcontext():
            assert (costs(device, machine) == Costs(reads, 0, copies, num_passes(speculation))) == (wrong is None)


WAITING_RULES = frozenset({"traversal"})
"""They wait for the device while they verify, too."""


@pytest.mark.slow
@pytest.mark.parametrize("rule", grid([rule for rule in RULES if rule != "ot_lp"], {"spectr_gbv"}))
def test_a_rule_waits_for_its_verdict_alone(device: DryDevice, machine: Engine, rule: str) -> None:
    speculation = Speculation(rule=rule, num_drafts=min(2, RULES[rule].max_drafts or 2), draft_length=2)
    with launched_one_by_one(machine), asking(machine, speculation):
        costs(device, machine)
        costs(device, machine)  # what it keeps is on the device now
        found = costs(device, machine)
    assert found == Costs(found.reads, waits=0, pinned=3, replays=num_passes(speculation)), device.places
    assert (found.reads > 1) == (rule in WAITING_RULES), device.places


# -- models ----------------------------------------------------------------------------------------


def build(target: Any, draft: Any = None) -> Engine:
    return tiny.build(target, draft, num_blocks=100, max_num_seqs=4, max_model_len=64)


@pytest.fixture
def _experts_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """JetMoe's host reads how many rows each expert has: here the first has all."""
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    right = JetMoeParallelExperts.forward
    monkeypatch.setattr(
        JetMoeParallelExperts,
        "forward",
        lambda self, rows, counts: right(self, rows, [len(rows), *[0] * (len(counts) - 1)]),
    )


WAITING_FAMILIES = {
    "dbrx": r"modeling_dbrx\.py, line \d+ \(expert_hit = ",
    "jetmoe": r"modeling_jetmoe\.py, line \d+ \(expert_size = expert_size\.tolist\(\)\)",
    "longcat_flash": r"modeling_longcat_flash\.py, line \d+ \(expert_hit = ",
    "phimoe": r"modeling_phimoe\.py, line \d+ \(freqs = .*inv_freq\.to\(device=x\.device",
}

# The attention kernel has no masks of chunks, so Llama 4 is not recorded. Recurrent layers are not,
# because their work depends on the places of a pass.
RECORDED_FAMILIES = sorted({*families.NAMES} - {"llama4_text", *RECURRENT_MODEL_TYPES})


@pytest.mark.slow
@pytest.mark.usefixtures("_experts_by_count")
@pytest.mark.parametrize("name", grid(RECORDED_FAMILIES, {"afmoe", "gemma2", "mixtral", "phimoe"}))
def test_every_family_is_recorded_or_served_without_recordings(
    device: DryDevice, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Some families wait for the device in every pass; the start says where."""
    engine = build(dry.moved(families.family(name)))
    assert engine.target.fast_paths["paged attention"]
    waits = WAITING_FAMILIES.get(name)
    assert engine.recorded.num_recorded == (0 if waits else 2)
    assert bool(waits) == ("not recorded" in caplog.text)
    assert re.search(waits or "", caplog.text)
    with asking(engine, tiny.OFF):
        costs(device, engine)
        found = costs(device, engine)
    assert found.replays == (0 if waits else 2)
    assert waits or (found.reads, found.waits) == (1, 0), device.places


@pytest.mark.sole("recurrent layers, in the dry run")
@pytest.mark.parametrize("name", grid(sorted(RECURRENT_MODEL_TYPES), {"mamba2"}))
def test_recurrent_layers_copy_and_read_once_a_pass(device: DryDevice, name: str) -> None:
    """The indices of all layers go to the device in three copies; nothing is recorded."""
    engine = build(dry.moved(families.family(name)))
    assert engine.recorded.num_recorded == 0
    with asking(engine, tiny.OFF):
        costs(device, engine)
        found = costs(device, engine)
    has_turns = any(device.counts[kernel] for kernel in ("_walk_turns", "_multiply_turns"))
    assert has_turns or name.startswith("lfm")
    assert found == Costs(reads=1, waits=0, pinned=4 + has_turns, replays=0), device.places
    device.counts.clear()
    engine.target.storage.states.keep([(0, 3, 1)])
    assert device.counts == {"pinned copy": 1}


@pytest.mark.slow
def test_experts_in_another_type_than_bfloat16_are_served_without_recordings(
    device: DryDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """The host reads the groups of their products then."""
    engine = build(dry.moved(families.family("mixtral"), torch.float16))
    assert engine.recorded.num_recorded == 0
    assert "moe.py, line" in caplog.text


HEAD_COPIES = {
    **dict.fromkeys(("eagle3", "mtp", "peagle"), (1, 1, 5, 9, 11)),
    **dict.fromkeys(("dflash", "dflash2", "dspark"), (1, 1, 6, 10, 12)),
}
"""Copies of a step in each of the cases below; one more for the rows of blocks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(dry.HEADS, {"dflash"}))
def test_a_step_with_a_head_reads_once(device: DryDevice, name: str, tmp_path: Path) -> None:
    """Whether it is recorded, as drafting, the target's pass and the verdict, or not."""
    engine = build(*dry.with_head(device, name, tmp_path / "head"))
    assert engine.recorded.num_recorded == len(dry.SHAPES)
    wishes = (({}, 3), (FILTERED, 3), ({}, 1), ({"frequency_penalty": 0.5}, 1), ({"seed_stable": True}, 1))
    for (wish, replays), copies in zip(wishes, HEAD_COPIES[name.split()[0]], strict=True):
        engine.recorded.serves = replays > 1  # else the target's pass is replayed alone
        with asking(engine, CHAINS, **wish):
            for _ in range(2):
                costs(device, engine)
            found = costs(device, engine)
        assert found == Costs(1, 0, copies, replays), device.places


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_comparisons_of_a_start_run(device: DryDevice) -> None:
    """Kernels with plain operations, and models with transformers, in both types."""
    cases = choosing.cases

    def without_decide(_cases: Any, of: torch.device) -> Any:
        # No device is asked to.
        return {name: one for name, one in cases(of).items() if name != "decide"}

    # A thread would not have the checks of operations, which are those of this thread.
    one_by_one = instead(choosing, "in_threads", lambda _, *operands: map(*operands))
    with instead(choosing, "cases", without_decide), one_by_one:
        assert type(choosing.choose.__wrapped__(DEVICE)) is TritonKernels
    assert layer_check.find_fault(DEVICE, torch.bfloat16) is None
    with instead(probe, "probe", lambda _, *operands, **named: _PROBE(*operands, **named)):
        engine = build(*dry.pair())
        assert engine.target.fast_paths == {"fast decoder": True, "paged attention": True}
        for name in ("gemma2", "qwen3_5_text"):
            assert build(dry.moved(families.family(name))).target.fast_paths["paged attention"]


# -- wrong variants --------------------------------------------------------------------------------


def _reading(right: Any, values: Tensor) -> Tensor:
    float(values.sum())
    return right(values)


WRONG: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a number is read": (steps, "bits", _reading, "the host waits"),
    "numbers are listed": (steps, "bits", lambda right, one: (one.tolist(), right(one))[1], "the host waits"),
    "a tensor goes to the host": (steps, "bits", lambda right, one: right(one.cpu()), "the host waits"),
    "a decision": (steps, "bits", lambda right, one: right(one) if one.sum() > 0 else right(-one), "the host waits"),
    "a mask": (steps, "bits", lambda right, one: right(one[one > 0]), "nonzero"),
    "a tensor of the host": (steps, "bits", lambda right, one: right(one + torch.ones(len(one))), "of the host"),
    "a pageable copy": (
        steps,
        "bits",
        lambda right, one: right(one + torch.ones(len(one)).to(one.device, non_blocking=True)),
        "pageable copy",
    ),
    "a new tensor from a list": (
        steps,
        "bits",
        lambda right, one: right(one + torch.tensor([1.0], device=one.device)),
        "blocking copy",
    ),
    "an index from a list": (steps, "bits", lambda right, one: right(one[[0, *range(len(one) - 1)]]), "blocking copy"),
    "pinned memory": (steps, "bits", lambda right, one: right(one + torch.ones(1).pin_memory()), "pinned"),
    "a generator": (steps, "bits", lambda right, one: right(torch.rand_like(one)), "random generator"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_operation_that_a_capture_forbids_is_found(device: DryDevice, machine: Engine, name: str) -> None:
    owner, function, variant, message = WRONG[name]
    step = machine.recorded.steps[dry.SHAPES[3]]
    with (
        torch.inference_mode(),
        instead(owner, function, variant),
        pytest.raises(NotOnADevice, match=message),
        device.capturing(),
    ):
        step._verify()


WRONG_LAUNCHES: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "integers of another size": ("pages", Tensor.long, "pages has numbers of torch.int64"),
    "rows apart": ("pages", lambda pages: pages.repeat(1, 2)[:, ::2], "pages is not contiguous"),
    "a table of the host": ("pages", lambda pages: torch.zeros(pages.shape, dtype=pages.dtype), "pages is on cpu"),
}


@pytest.mark.parametrize("name", WRONG_LAUNCHES)
def test_a_launch_that_a_kernel_does_not_expect_is_found(device: DryDevice, machine: Engine, name: str) -> None:
    argument, variant, message = WRONG_LAUNCHES[name]

    def wrong(right: Any, paged: Any, *operands: Any) -> Any:
        return right(paged._replace(**{argument: variant(getattr(paged, argument))}), *operands)

    step = machine.recorded.steps[dry.SHAPES[3]]
    with (
        torch.inference_mode(),
        instead(attention_kernel, "attend_paged", wrong),
        pytest.raises(NotOnADevice, match=message),
    ):
        step._target()


def test_numbers_of_the_host_are_known_until_something_is_written(device: DryDevice) -> None:
    def kernel(tokens: Any) -> None:
        """Nothing."""

    grid: Any = SimpleNamespace(fn=kernel, grid=(1,))
    writes: list[Callable[[Tensor], Any]] = [
        lambda one: one.add_(1),
        lambda one: torch.add(one, 1, out=one),
        lambda one: device.launch(None, grid, one),
    ]
    for write in writes:
        copied = torch.tensor([3, 4]).to(DEVICE)
        assert copied.tolist() == [3, 4]
        write(copied)
        assert copied.tolist() == [0, 0]


def test_a_pointer_whose_type_no_table_names_is_found() -> None:
    def kernel(query: Any, others: Any) -> None:
        """Nothing."""

    fault = check_launch(kernel, (1,), [torch.zeros(2), torch.zeros(2)], {}, torch.device("cpu"))
    assert fault == "others is in no table of tests/kernel_arguments.py"

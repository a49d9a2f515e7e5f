"""Every kernel gives what plain torch gives, or is replaced at start."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.cuda.recorded import menu
from engine.cuda.recorded.inputs import DISTRIBUTIONS
from engine.errors import LoadError
from engine.kernels.checks import usable
from engine.kernels.protocol import ChainVerdict
from engine.kernels.torch_kernels import TORCH, Kernels
from engine.start import choosing
from engine.start.choosing import cases, choose, find_fault
from tests.engine import tiny
from tests.grid import grid
from tests.wrong import instead

DEVICE = tiny.DEVICE
CASES = cases(DEVICE)
OWN = {
    "Numba": ("distribution", "draw", "race", "decide", "recur", "uniform"),
    "Triton": (
        *("softmax", "truncated", "draw", "nucleus", "draw_residual", "race", "winners"),
        *("recur", "uniform", "move"),
    ),
}
EVERY = [(compiler, name) for compiler, names in OWN.items() for name in names]


def kernels_of(compiler: str) -> type[Kernels]:
    """The class of a compiler's kernels; Triton's run in the interpreter on a CPU."""
    if compiler == "Numba":
        if DEVICE.type != "cpu":
            pytest.skip("kernels of a CPU")
        return pytest.importorskip("engine.cpu.kernels").NumbaKernels  # type: ignore[no-any-return]
    return pytest.importorskip("engine.cuda.kernels").TritonKernels  # type: ignore[no-any-return]


def test_the_specification_and_the_cases_have_every_operation() -> None:
    names = {name for name, _ in inspect.getmembers(Kernels, inspect.isfunction) if not name.startswith("_")}
    assert names == {*CASES}
    assert all(callable(getattr(TORCH, name)) for name in names)


@pytest.mark.parametrize("compiler", OWN)
def test_compiler_operations_are_listed(compiler: str) -> None:
    kind = kernels_of(compiler)
    assert {name for name in CASES if getattr(kind, name) is not getattr(Kernels, name)} == set(OWN[compiler])


@pytest.mark.sampled
@pytest.mark.parametrize(("compiler", "name"), grid(EVERY, [case for case in EVERY if case[0] == "Numba"]))
def test_operations_equal_torch(compiler: str, name: str) -> None:
    assert find_fault(kernels_of(compiler)(), name, CASES[name]) is None


def scaled(found: Tensor) -> Tensor:
    return found * 1.01


def other(verdict: ChainVerdict, name: str) -> ChainVerdict:
    return replace(verdict, **{name: getattr(verdict, name).roll(1)})


WRONG: dict[str, dict[str, Callable[[Any], Any]]] = {
    "softmax": {"scaled": scaled},
    "distribution": {"scaled": scaled, "a token more": lambda found: found.clamp(min=1e-3)},
    "draw": {"next": lambda found: found + 1, "another row": lambda found: found.flip(0)},
    "nucleus": {"scaled": scaled, "a token more": lambda found: found.clamp(min=1e-3)},
    "truncated": {"scaled": scaled, "a token more": lambda found: found.clamp(min=1e-3)},
    "draw_residual": {"next": lambda found: found + 1, "another chain": lambda found: found.roll(1)},
    **{
        operation: {
            name: lambda found, name=name: other(found, name)  # type: ignore[misc]
            for name in ("chain_B", "accepted_B", "next_token_B")
        }
        for operation in ("race", "winners")
    },
    "recur": {"scaled": scaled, "another row": lambda found: found.roll(1, 0)},
    "uniform": {
        "another position": lambda found: np.roll(found, 1, 1),
        "another purpose": lambda found: np.roll(found, 1, 0),
        "nearly": lambda found: found + 1e-15,
    },
    "decide": {
        "another request": lambda found: (np.roll(found[0], 1, 1), found[1]),
        "no numbers": lambda found: (found[0], 0 * found[1]),
    },
}


@pytest.mark.parametrize(
    ("compiler", "name", "wrong"),
    grid(
        [(compiler, name, wrong) for compiler, name in EVERY for wrong in WRONG.get(name, ())],
        [("Numba", name, wrong) for name in OWN["Numba"] for wrong in WRONG[name]] + [("Triton", "nucleus", "scaled")],
    ),
)
def test_wrong_results_are_found(compiler: str, name: str, wrong: str) -> None:
    kind = kernels_of(compiler)
    right = getattr(kind, name)
    changed = type("Wrong", (kind,), {name: lambda *operands: WRONG[name][wrong](right(*operands))})
    assert find_fault(changed(), name, CASES[name]) == "results differ from those of plain operations"


def test_moves_one_after_the_other_are_found() -> None:
    """A move reads what another one of its sequence has written."""

    class InTurn(Kernels):
        def move(self, storages: Any, moves: Any) -> None:
            for move in [one for of_sequence in moves for one in of_sequence]:
                TORCH.move(storages, [[move]])

    assert find_fault(InTurn(), "move", CASES["move"]) is not None
    assert find_fault(TORCH, "move", CASES["move"]) is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_wrong_operation_is_replaced(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Some(Kernels):
        by_tiles = reads_no_filter = True

        def softmax(self, *operands: Any) -> Tensor:
            if fails:
                raise RuntimeError("it cannot be compiled")
            return scaled(TORCH.softmax(*operands))

        def draw(self, probs_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
            return TORCH.draw(probs_NV, row_C, uniform_C)

    with instead(choosing, "_compiled", lambda *_: Some()):
        found = choose.__wrapped__(DEVICE)
    assert isinstance(found, Some)
    assert (found.by_tiles, found.reads_no_filter) == (True, False), "torch makes filtered distributions by softmax"
    reason = "it cannot be compiled" if fails else "results differ from those of plain operations"
    assert f"softmax without Some: {reason}" in caplog.text
    logits_NV, one_N = torch.randn(2, 9, device=DEVICE), torch.ones(2, device=DEVICE)
    assert torch.equal(found.softmax(logits_NV, one_N), TORCH.softmax(logits_NV, one_N))
    assert type(found).draw is Some.draw


def test_operations_of_a_device_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    everyone = threading.Barrier(3)

    def work(name: str) -> str:
        everyone.wait(60)
        return f"{name} {torch.is_inference_mode_enabled()}"

    with torch.inference_mode():
        assert choosing.in_threads(work, "abc") == ["a True", "b True", "c True"]
    assert chosen == [3, 3, 3]


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("move", []),
        ("winners", []),
        ("decide", []),
        ("nucleus", ["reads_no_filter"]),
        ("race", ["by_tiles"]),
        ("draw_residual", ["by_tiles"]),
    ],
)
def test_a_wrong_operation_loses_only_the_properties_that_need_it(name: str, lost: list[str]) -> None:
    """Steps with filters are recorded although moves are torch's."""
    found = choosing.without(kernels_of("Triton")(), [name])
    assert [one for one in ("by_tiles", "reads_no_filter") if not getattr(found, one)] == lost
    recorded = menu.distributions_on(torch.device("cuda"), found)
    assert recorded == (DISTRIBUTIONS[:1] if "reads_no_filter" in lost else DISTRIBUTIONS)


def test_a_compiler_that_is_missing_leaves_plain_operations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "engine.cpu.kernels", None)
    monkeypatch.setitem(__import__("sys").modules, "engine.cuda.kernels", None)
    assert type(choose.__wrapped__(DEVICE)) is Kernels
    assert "plain operations instead of kernels" in caplog.text


def test_a_cpu_s_kernels_are_chosen_once() -> None:
    if DEVICE.type != "cpu":
        pytest.skip("kernels of a CPU")
    assert type(choose(DEVICE)) is kernels_of("Numba")
    assert choose(DEVICE) is choose(torch.device("cpu"))
    assert type(choose(torch.device("meta"))) is Kernels


class Failing(Kernels):
    def softmax(self, logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_device_that_computes_nothing_any_more_ends_the_start(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        if is_lost:
            raise RuntimeError("an illegal memory access was encountered")

    def failing(*_: Any) -> str | None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with FakeTensorMode():
        rows = torch.empty(2, 9, device="cuda"), torch.empty(2, device="cuda")
        tried = (
            lambda: find_fault(Failing(), "softmax", [rows]),
            lambda: None if usable.__wrapped__("rows are summed", failing, rows[0].device) else "",
        )
        for one in tried:
            if not is_lost:
                assert one() is not None
                continue
            with pytest.raises(LoadError, match="cuda:0 has failed and needs another process: an illegal memory"):
                one()

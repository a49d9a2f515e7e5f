"""Kernels of a session on a device are compared and timed in groups that fail apart; here in
Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.cuda import attention_kernel, block_kernels, layer_kernels, move_kernel, row_kernels
from research.analysis import gpu_attention, gpu_groups, gpu_kernels
from research.analysis.gpu_attention import Text
from research.analysis.gpu_groups import KernelGroup, run_group
from research.analysis.gpu_results import SectionResults
from tests.grid import grid
from tests.wrong import instead

CPU = torch.device("cpu")


class Sent:
    """The other end of a group's connection."""

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self.failures: list[str] = []

    def send(self, message: tuple[str, str, Any]) -> None:
        kind, text, value = message
        if kind == "item":
            self.items[text] = value
        else:
            self.failures.append(text)


def found_by(work: Callable[[KernelGroup], None]) -> Sent:
    """Run a group in this process."""
    torch.manual_seed(1)
    sent: Any = Sent()
    with torch.inference_mode():
        work(KernelGroup(sent, CPU))
    return sent  # type: ignore[no-any-return]


def text_check(num_nodes: int) -> Callable[[KernelGroup], None]:
    return partial(gpu_attention.measured, name="a text", texts=[Text(20, 1, num_nodes)])


def off_by_one_page(attend: Any, paged: Any, *rest: Any) -> Any:
    """Pages in another order."""
    return attend(paged._replace(pages=paged.pages.flip(1)), *rest)


def seeing_all(attend: Any, paged: Any, *rest: Any) -> Any:
    """Every row sees all nodes."""
    return attend(paged._replace(words=torch.full_like(paged.words, -1)), *rest)


def without_the_last_key(attend: Any, paged: Any, *rest: Any) -> Any:
    """No row sees the last token of the text."""
    return attend(paged._replace(limits=paged.limits - 1), *rest)


WRONG: dict[str, tuple[Callable[[KernelGroup], None], Any, str, Any]] = {
    "pages": (text_check(0), attention_kernel, "attend_paged", off_by_one_page),
    "ancestry": (text_check(20), attention_kernel, "attend_paged", seeing_all),
    "a key": (text_check(0), attention_kernel, "attend_paged", without_the_last_key),
    "merges": (gpu_kernels.layers, attention_kernel, "merged", lambda right, one, *rest: right(one.flip(0), *rest)),
    "norms": (gpu_kernels.layers, layer_kernels, "norm", lambda right, *rest: right(*rest) * 1.01),
    "gates": (gpu_kernels.layers, layer_kernels, "gate", lambda right, joined: right(joined.roll(1, 1))),
    "rotations": (
        gpu_kernels.layers, layer_kernels, "rotate_and_write",
        lambda right, joined, rotation, *rest: right(joined, rotation[::-1], *rest),
    ),
    "draws": (gpu_kernels.draws, row_kernels, "draw", lambda right, *rest: right(*rest) + 1),
    "verdicts": (
        gpu_kernels.verdicts, block_kernels, "winners",
        lambda right, chains, score, accepted, token: right(chains, -score, accepted, token),
    ),
    "moves": (gpu_kernels.moves, move_kernel, "keep", lambda right, storage, move: right(storage, move.flip(2))),
}  # fmt: skip


@pytest.mark.parametrize("wrong", grid(WRONG, {"a key"}))
def test_a_kernel_that_is_wrong_fails_its_section(wrong: str) -> None:
    work, *place = WRONG[wrong]
    assert found_by(work).failures == []
    with instead(*place):
        failures = found_by(work).failures
    assert failures
    assert all("differs from plain operations by" in failure for failure in failures)


def test_numbers_that_are_not_finite_are_a_failure() -> None:
    sent = found_by(lambda group: group.kernel("one", [list], 1, float("nan")))
    assert sent.failures == ["one: differs from plain operations by nan (at most 0.0001)"]


def test_an_exception_loses_its_item_alone() -> None:
    def work(group: KernelGroup) -> None:
        group.case("bad", lambda: 1 // 0)
        group.case("good", lambda: group.add("good", 1))

    sent = found_by(work)
    assert sent.items == {"good": 1}
    assert sent.failures[0].startswith("bad: ZeroDivisionError: ")


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        (lambda: None, None),
        (lambda: time.sleep(60), "a group: stopped after 2 s, after first"),
        (lambda: os._exit(9), "a group: ended with 9, after first"),
    ],
)
def test_a_group_that_ends_badly_leaves_what_it_had(end: Any, failure: str | None, tmp_path: Path) -> None:
    findings = SectionResults(tmp_path / "found.json")

    def work(group: KernelGroup) -> None:
        group.add("first", 1)
        end()

    run_group("a group", work, CPU, findings, 2)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["first"] == 1
    assert found["failures"] == ([failure] if failure else [])


@pytest.mark.slow
def test_nothing_that_is_imported_before_a_fork_uses_a_device() -> None:
    """A forked process could not use it then."""
    program = (
        "import importlib, torch\n"
        "def asked(): raise AssertionError('a device is used')\n"
        "torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = asked\n"
        "import research.analysis.gpu_kernels\n"
        "for name in ('cuda.attention_kernel', 'cuda.layer_kernels', 'cuda.kernels'):\n"
        "    importlib.import_module(f'engine.{name}')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


def test_runs_rotate_over_more_than_a_cache() -> None:
    assert gpu_groups.rotations(1 << 20) == 16
    assert gpu_groups.rotations(50 << 20) == 3
    assert gpu_groups.rotations(1 << 30) == 1


@pytest.mark.slow
def test_kernels_run_dry(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    assert gpu_kernels.main([str(output), "--device", "cpu"]) == 0
    found = json.loads(output.read_text())
    assert found["failures"] == []
    assert found["ceilings"]["copied_bytes_per_s"] > 0
    names = {name.partition(",")[0] for name, item in found.items() if isinstance(item, dict) and "us" in item}
    assert names == {
        "attention",
        "norm",
        "gate",
        "rotation",
        "merge",
        "distribution",
        "draw",
        "verdict",
        "moves",
        "product",
    }

"""Numba's kernels that are nearly right: the check of the rules that serve rejects each."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("numba")

from engine.cpu.compiled import block_loops
from tests.engine import tiny
from tests.speculation.test_served_rules import ALPHA, fits_of
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")

ROWS, BLOCK = "engine.cpu.compiled.row_loops", "engine.cpu.compiled.block_loops"
WRONG = {
    "a residual without its weight": (BLOCK, "np.float32(weights[stop])", "np.float32(1)"),
    "a residual behind a whole chain": (BLOCK, "np.float32(weights[stop]), stop < length", "np.float32(1), True"),
    "the weight in place of the acceptance": (BLOCK, "surplus / (surplus + 1 - weight)", "weight"),
    "a surplus without its weight": (BLOCK, "np.float32(weight), True, 0", "np.float32(1), True, 0"),
    "scores down to 0": (BLOCK, "lower = min(upper", "lower = min(0.0"),
    "the largest score": (BLOCK, "(is_first or score < smallest)", "(is_first or score > smallest)"),
    "a ceiling that rises again": (BLOCK, "min(log_ceiling, log_ratio)", "min(0.0, log_ratio)"),
    "the shortest prefix": (BLOCK, "range(length, 0, -1)", "range(1, length + 1)"),
    "the distribution of the next prefix": (
        BLOCK,
        "distribution = target[rows[stop]]",
        "distribution = target[rows[min(stop + 1, most)]]",
    ),
    "the target in place of the residual": (ROWS, "while True:", "while True:\n        uses_surplus = False"),
    "draws from the first token on": (ROWS, "bound = uniform * total", "bound = uniform * uniform * total"),
}


def kernels_with(module: str, old: str, new: str) -> ModuleType:
    """`block_loops` with a change in its source, or in that of the kernels it calls."""
    changed = {}
    for name in (ROWS, BLOCK):
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text()
        if name == module:
            assert source.count(old) == 1, "the change is not of one place"
            source = source.replace(old, new)
        changed[name] = ModuleType(name)
        with patch.dict("sys.modules", changed):
            exec(source, changed[name].__dict__)
    return changed[BLOCK]


@pytest.mark.sole("wrong operands of compiled kernels")
def test_wrong_operands_are_rejected() -> None:
    """One number draws a chain's residual and decides about its first token."""

    def race(right: Any, *operands: Any) -> Any:
        *others, accepts, _residuals, scores, verdict = operands
        return right(*others, accepts, accepts[:, 0].copy(), scores, verdict)

    with instead(block_loops, "race", race):
        assert min(found.p_value for found in fits_of("bv_race", "iid", "chains", 0)) < ALPHA


@pytest.mark.slow  # compiles the kernels
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_rejected(wrong: str) -> None:
    kernels = kernels_with(*WRONG[wrong])
    with instead(block_loops, "race", lambda _, *operands: kernels.race(*operands)):
        assert min(found.p_value for found in fits_of("bv_race", "iid", "chains", 0)) < ALPHA

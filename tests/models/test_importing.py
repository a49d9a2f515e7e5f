"""Loading a model imports no package that only other uses of transformers need."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from engine.models.importing import _absent

_PROGRAM = """
import sys
import torch
from engine.start.loading import load

torch.cuda.is_available = lambda: False
load("server/demo/draft", None, "auto", torch.device("cpu"))
print(*[name for name in ("triton", "scipy.optimize", "torchao") if name in sys.modules])
import scipy.optimize
"""
_QUANTISED = """
model = load("server/demo/draft", None, "auto", torch.device("cpu"), weights="fp8").model
print(type(model.model.layers[0].mlp.up_proj.weight).__module__)
model.save_pretrained(sys.argv[1])
"""


@pytest.mark.slow
def test_only_torchao_is_imported_and_only_for_its_weights(tmp_path: Path) -> None:
    """Plain weights are loaded first, without these packages."""
    program = [sys.executable, "-c", _PROGRAM + _QUANTISED, str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["", "torchao.quantization"]
    assert not [line for line in run.stderr.splitlines() if "torchao" in line or "pytree" in line], run.stderr


def test_packages_are_absent_for_a_time() -> None:
    before = sys.modules["numpy"]
    assert importlib.util.find_spec("colorsys")
    with _absent(["numpy", "colorsys"]):
        for name in ("numpy", "colorsys"):
            with pytest.raises(ImportError):
                importlib.import_module(name)
    assert sys.modules["numpy"] is before
    assert importlib.import_module("colorsys")


def test_packages_come_back_after_an_error() -> None:
    with pytest.raises(ImportError), _absent(["colorsys"]):
        importlib.import_module("colorsys")
    assert importlib.import_module("colorsys")

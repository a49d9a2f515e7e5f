"""Loading a model imports no package that only other uses of transformers need."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from engine.models.importing import _absent

_PROGRAM = """
import sys
import torch
from engine.models.loading import load

torch.cuda.is_available = lambda: False
load("demo/draft", None, "auto", torch.device("cpu"))
print(*[name for name in ("triton", "scipy.optimize") if name in sys.modules])
import scipy.optimize
"""


def test_loading_imports_neither_triton_nor_scipy() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert not run.stdout.split()


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

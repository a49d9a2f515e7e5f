"""Imports transformers without packages that no served model uses.

Transformers imports what it finds: SciPy for losses of object detection, torch's compiler, which
imports Triton, and torchao, which only weights in its layouts need.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def import_transformers() -> Any:
    """Return transformers, with what its models import; call it before other imports from it.

    Triton is used on CUDA devices only.
    """
    unused = ["scipy", "torchao"] if torch.cuda.is_available() else ["scipy", "torchao", "triton"]
    # If somebody has imported transformers, it knows already what is installed.
    if "transformers" in sys.modules:
        unused = []
    with _absent(unused):
        # Here only, while the unused packages are absent.
        import transformers.modeling_utils
    return transformers


@cache
def import_torchao() -> Any:
    """Return torchao, an optional package, and let transformers use it from now on."""
    transformers = import_transformers()
    transformers.utils.import_utils.is_torchao_available.cache_clear()
    # It warns of libraries for layouts that are not served, and torch of names that it registers.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        importlib.reload(transformers.quantizers.quantizer_torchao)
    finally:
        logging.disable(before)
    return importlib.import_module("torchao")


@contextmanager
def _absent(names: list[str]) -> Iterator[None]:
    """Let packages appear as not installed."""
    hidden = {name: module for name, module in sys.modules.items() if name in names}
    # Python's own mark of a module that cannot be imported.
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(hidden)

"""Further copies of the modules of a CPU's products: for other processors, and wrong variants."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest

from engine.cpu import compiler

NAMES = (
    "simd_vectors",
    "stored_words",
    "scale_vectors",
    "row_rounding",
    "dot_products",
    "tile_products",
    "block_products",
)
MODULES = tuple(f"engine.cpu.compiled.{name}" for name in NAMES)
"""Modules of the products; each imports those before it."""


def copy_of_products(
    monkeypatch: pytest.MonkeyPatch, features: str | None = None, changes: Mapping[str, str] | None = None
) -> ModuleType:
    """A copy of `block_products` and of what it imports; nothing of it is cached.

    features: of the processor, with commas; None is the one at hand. changes: of the source text,
    each of a text that it has once.
    """
    from numba import njit
    from numba.core.registry import cpu_target

    codegen = type(cpu_target.target_context.codegen())
    left = dict(changes or {})
    copy: Any = None
    with monkeypatch.context() as patched:
        if features is not None:
            patched.setattr(codegen, "magic_tuple", lambda _: ("", "", features))
        patched.setattr(compiler, "compiled_for_cpu", lambda **options: njit(**options))
        for name in MODULES:
            path = import_module(name).__file__
            assert path is not None
            spec = spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            source = spec.loader.get_data(path).decode()  # type: ignore[attr-defined]
            for old in [old for old in left if old in source]:
                assert source.count(old) == 1, old
                source = source.replace(old, left.pop(old))
            copy = module_from_spec(spec)
            patched.setitem(sys.modules, name, copy)
            exec(compile(source, path, "exec"), copy.__dict__)
    assert not left, "texts that no module has"
    found: ModuleType = copy
    return found

"""Engines on a CUDA device that is not there (`tests/dry_device.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.cuda import layer_check
from engine.cuda.kernels import TritonKernels
from engine.cuda.recorded import passes
from engine.cuda.recorded.inputs import DISTRIBUTIONS, StepShape
from engine.cuda.recorded.passes import PassRoom
from engine.models import kinds
from engine.start import building, choosing, probe
from engine.start.loading import LoadedModel
from tests.dry_device import DEVICE, DryDevice, dry_device
from tests.engine import tiny
from tests.heads import folders
from tests.wrong import instead

SHAPES = [StepShape(2, *drafts, kind) for drafts in ((0, 0), (2, 2)) for kind in DISTRIBUTIONS]
"""Steps that are recorded: further shapes of these kinds differ in sizes alone."""


@contextlib.contextmanager
def serving() -> Iterator[DryDevice]:
    """Let engines be built on the device, without comparisons of numbers."""
    with dry_device() as dry, contextlib.ExitStack() as stack:
        for owner, name, variant in (
            (building, "graphs_on", lambda *_: dry),
            (building, "menu_of_steps", _menu),
            (passes, "pass_rooms", _rooms),
            (building, "choose", lambda *_: TritonKernels()),
            (probe, "choose", lambda *_: TritonKernels()),
            (probe, "probe", lambda *_, **__: 0.0),
            (probe, "distance", lambda *_: 0.0),
            (choosing, "_agree", lambda *_, **__: True),
            (layer_check, "close", lambda *_: True),
            (LoadedModel, "weight_bytes", lambda *_: 0),  # it reads addresses
        ):
            stack.enter_context(instead(owner, name, variant))
        # A fake weight is of another class.
        stack.enter_context(instead(kinds, "is_plain", lambda _, module: type(module) is nn.Linear))
        yield dry


def _menu(_menu: Any, drafts: list[tuple[int, int]], *_: Any) -> list[StepShape]:
    return [shape for shape in SHAPES if not shape.num_drafts or len(drafts) > 1]


def _rooms(_rooms: Any, most_sequences: int) -> list[PassRoom]:
    return [PassRoom(64, 64, 4), PassRoom(64, 64, 64), PassRoom(256, most_sequences, 64)]


def moved(loaded: LoadedModel, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """Return the model on the device."""
    loaded.model.to(device=DEVICE, dtype=dtype)
    return loaded


def with_head(dry: DryDevice, name: str, folder: Path) -> tuple[LoadedModel, LoadedModel]:
    """Return a target and its head, loaded onto the device."""
    kind, *more = name.split()
    if kind == "mtp":
        written = folders.write_mtp(folder)
        target = folders.load_target(written)
    else:
        written = _written(folder, kind, *more)
        target = folders.target()
    moved(target)
    # The tokens of a smaller vocabulary are checked when a head is loaded: they differ.
    number_of, dry.number_of = dry.number_of, lambda one: torch.arange(one.numel()).view(one.shape)
    try:
        return target, folders.load(written, target)
    finally:
        dry.number_of = number_of


def _written(folder: Path, kind: str, more: str = "") -> folders.Written:
    if kind in ("eagle3", "peagle"):
        return folders.write_eagle(folder, kind=kind)
    if more == "windows":
        return folders.write_block(folder, kind, layer_types=("sliding_attention", "full_attention"))
    return folders.write_block(folder, kind, **({"markov_head_type": more} if more else {}))


HEADS = ("eagle3", "peagle", "dflash", "dflash windows", "dflash2", "dspark", "dspark gated", "dspark rnn", "mtp")


def pair(layers: int = 1) -> tuple[LoadedModel, LoadedModel]:
    """Return a target and a draft model on the device."""
    return moved(tiny.llama(1, layers=layers)), moved(tiny.llama(2, layers=layers))

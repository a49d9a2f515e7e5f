"""Times of the Triton kernels at the shapes of Qwen3-8B and Qwen3-0.6B, for `gpu_sections.py`.

A time is that of a replayed CUDA graph, whose runs rotate over more data than the device's cache
holds. On a CPU small shapes are a dry run in Triton's interpreter.

Not for: verdicts and moves, which the profile of a step shows (`gpu_engine.py`); numbers, which
tests compare with plain operations (`gpu_tests.py`), and `gpu_exactness.py` at these sizes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from engine.attention.groups import ScoreOptions
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, build
from engine.attention.paged import Paged, upload
from engine.attention.tensors import KVShape, KVTensors
from engine.kernels.protocol import Filters, RecurrentSteps
from engine.speculation.topology import drawn_tree
from research.analysis.gpu_results import SectionResults

_RUNS = 16
"""Least runs in a graph: its own launch is then a small share of its time."""
_ROTATED_BYTES = 192 << 20
"""Data over which the runs of a graph rotate: several times a device's cache."""
_VOCABULARY = 151_936
_ROWS = (1, 4, 21, 64, 336)
"""Rows of distributions: those of plain steps, a tree of 4x5 and sixteen of them."""
_SAMPLING = (0.6, 20, 0.95)
"""Temperature, top-k and top-p of Qwen3's generation_config."""
_PAGE = 16
_MOST_KEYS = 40_960
"""Longest text of Qwen3-8B."""
_TREE = (4, 1, 1, 1, 1)
"""Children of every node by depth: four chains of five tokens."""


class KernelTimes(NamedTuple):
    """Times of kernels on a device."""

    findings: SectionResults
    device: torch.device

    @property
    def on_cuda(self) -> bool:
        """Return whether it is no dry run."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of layers."""
        return torch.bfloat16 if self.on_cuda else torch.float32

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return random numbers on the device, by default in `dtype`."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def add(self, name: str, runs: Sequence[Callable[[], object]], num_bytes: float = 0, operations: float = 0) -> None:
        """Measure runs that do the same on different data; an exception is a failure.

        num_bytes, operations: the least that a run takes.
        """

        def measure() -> None:
            us = device_us(runs, self.device)
            rates = {"GBps": num_bytes / us / 1e3, "TFLOPs": operations / us / 1e6}
            self.findings.add(name, {"us": round(us, 2), **{unit: round(rate, 1) for unit, rate in rates.items()}})

        self.findings.attempt(name, measure)


def rotations(num_bytes: int) -> int:
    """Return on how many sets of data of this size a kernel is timed."""
    return max(1, min(_RUNS, _ROTATED_BYTES // max(1, num_bytes)))


def device_us(runs: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the microseconds of a run, in a replayed graph of all runs in turn.

    On a CPU, the times of the first run alone.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        runs[0]()
        return 1e6 * (time.perf_counter() - began)
    repeats = -(-_RUNS // len(runs))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for run in runs:
                run()
    times = []
    for _ in range(6):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)))
    return 1e3 * statistics.median(times[1:]) / (repeats * len(runs))


class Text(NamedTuple):
    """One sequence of a pass."""

    before: int
    """Tokens whose K/V is stored."""
    num_tokens: int
    """Tokens of the text that the pass computes."""
    num_nodes: int = 0
    """Drafted tokens after them, as `_TREE` lays them out."""


def make_pass(times: KernelTimes, texts: Sequence[Text], as_recorded: bool) -> tuple[Paged, KVTensors, Tensor]:
    """Return the layout of a pass over texts in pages in arbitrary order, their K/V, and queries.

    as_recorded: with room for the longest text, as recorded steps read.
    """
    num_heads, num_kv_heads, dim = (32, 8, 128) if times.on_cuda else (4, 2, 32)
    counts = [-(-sum(text) // _PAGE) for text in texts]
    order = random.Random(1).sample(range(sum(counts)), sum(counts))
    tree = drawn_tree(_TREE)
    nodes = NodeInput([1] * len(tree.depths), tree.depths, (), tree.ancestry())
    parts = []
    for text, count in zip(texts, counts, strict=True):
        blocks = [order.pop() for _ in range(count)]
        drafted = nodes if text.num_nodes else NO_NODES
        parts.append(SequenceInput([1] * text.num_tokens, text.before, blocks, drafted, slice(0)))
    layout = build(parts, _PAGE)
    paged = upload([layout], _PAGE, times.device)[0].paged
    assert paged is not None
    if as_recorded:
        paged = paged._replace(most_keys=_MOST_KEYS if times.on_cuda else paged.most_keys, is_padded=True)
    num_slots = sum(counts) * _PAGE
    num_layers = rotations(num_slots * KVShape.equal(1, num_kv_heads, dim, dim).layer_bytes(times.dtype))
    storage = KVTensors(KVShape.equal(num_layers, num_kv_heads, dim, dim), num_slots, times.dtype, times.device)
    storage.keys.normal_()
    storage.values.normal_()
    query = times.randn(len(layout.positions_T), num_heads, dim)
    return paged, storage, query.transpose(0, 1).unsqueeze(0)


def attention(times: KernelTimes) -> None:
    """Measure single tokens, trees of four chains of five tokens, and parts of prompts."""
    cases: list[tuple[str, list[Text], bool]] = [
        ("2 tokens after 50", [Text(50, 1)] * 2, True),
        ("2 trees 4x5 after 30", [Text(30, 1, 20)] * 2, True),
        ("40 of a prompt after 20, 3 tokens after 50", [Text(20, 40)] + [Text(50, 1)] * 3, False),
    ]
    if times.on_cuda:
        cases = [("1 token after 32000, 31 after 300", [Text(32_000, 1)] + [Text(300, 1)] * 31, True)]
        for count in (1, 4, 16, 64):
            for before in (300, 1000, 8000, 32_000):
                if count * before <= 200_000:
                    cases.append((f"{count} tokens after {before}", [Text(before, 1)] * count, True))
        for count, before in ((1, 300), (1, 8000), (4, 1000), (12, 1000)):
            cases.append((f"{count} trees 4x5 after {before}", [Text(before, 1, 20)] * count, True))
        for before in (0, 2000, 8000, 30_000):
            cases.append((f"2048 of a prompt after {before}", [Text(before, 2048)], False))
        for count in (512, 2048):
            beside = [Text(0, count)] + [Text(1000, 1)] * 63
            cases.append((f"{count} of a prompt, 63 tokens after 1000", beside, False))
    for name, texts, as_recorded in cases:
        times.findings.attempt(name, partial(_attention, times, name, texts, as_recorded))
    if times.on_cuda:
        query, keys = (times.randn(1, heads, 2048, 128) for heads in (32, 8))
        work = partial(scaled_dot_product_attention, query, keys, keys, is_causal=True, enable_gqa=True)
        times.add("torch's attention, 2048 of a prompt", [work])


def _attention(times: KernelTimes, name: str, texts: Sequence[Text], as_recorded: bool) -> None:
    from engine.cuda.attention_kernel import attend_paged

    paged, storage, query = make_pass(times, texts, as_recorded)
    num_layers, _, num_kv_heads, dim = storage.keys.shape
    scores = sum((text.num_tokens + text.num_nodes) * (text.before + text.num_tokens / 2) for text in texts)
    runs = [
        partial(attend_paged, paged, storage, layer, query, None, ScoreOptions(), None) for layer in range(num_layers)
    ]
    num_bytes = sum(map(sum, texts)) * 2 * num_kv_heads * dim * times.dtype.itemsize
    times.add(f"attention, {name}", runs, num_bytes, 4 * scores * query.shape[1] * dim)


def layers(times: KernelTimes) -> None:
    """Measure norms, gates, rotations with writes, rows in fp8, and merges of parts."""
    from engine.cuda import attention_kernel, layer_kernels

    size = times.dtype.itemsize
    widths = ((4096, 12_288, 32), (1024, 3072, 16)) if times.on_cuda else ((48, 40, 4),)
    for width, inner, num_heads in widths:
        num_kv_heads, dim = (8, 128) if times.on_cuda else (2, 16)
        for count in (1, 21, 64, 256) if times.on_cuda else (3,):
            norm = partial(layer_kernels.norm, times.randn(count, width), times.randn(width), 1e-6)
            times.add(f"norm, {count} x {width}", [norm], 2 * count * width * size)
            joined = times.randn(count, 2 * inner)
            times.add(f"gate, {count} x {inner}", [partial(layer_kernels.gate, joined)], 3 * count * inner * size)
            if times.on_cuda:  # the interpreter has no fp8
                times.add(
                    f"rows in fp8, {count} x {2 * inner}",
                    [partial(layer_kernels.round_rows, joined)],
                    3 * joined.numel(),
                )
            heads = times.randn(count, (num_heads + 2 * num_kv_heads) * dim)
            keys, values = (times.randn(4 * count, num_kv_heads, dim) for _ in range(2))
            place = torch.randperm(4 * count, device=times.device)[:count]
            rotation = times.randn(4 * count, dim), times.randn(4 * count, dim)
            norms = times.randn(dim), times.randn(dim)
            operands = (heads, rotation, place, norms, 1e-6, place, (keys, values))
            rotate = partial(layer_kernels.rotate_and_write, *operands)
            times.add(f"rotation, {count} x {num_heads} heads", [rotate], 2 * heads.numel() * size)
        for count, parts in ((1, 16), (21, 16), (64, 2)) if times.on_cuda else ((3, 4),):
            output = times.randn(parts, count, num_heads, dim, dtype=torch.float32)
            lse = times.randn(parts, count, num_heads, dtype=torch.float32)
            merge = partial(attention_kernel.merged, output, lse, None, times.dtype)
            times.add(f"merge, {count} x {num_heads} of {parts} parts", [merge], output.numel() * 4)


def products(times: KernelTimes) -> None:
    """Measure torch's largest product of each model, which reads its weights."""
    for width, depth in ((24_576, 4096), (6144, 1024)) if times.on_cuda else ((48, 40),):
        num_bytes = width * depth * times.dtype.itemsize
        rows = times.randn(1, depth)
        runs = [partial(linear, rows, times.randn(width, depth)) for _ in range(rotations(num_bytes))]
        times.add(f"product, 1 x {width} x {depth}", runs, num_bytes)


def sampling(times: KernelTimes) -> None:
    """Measure distributions and draws, with Qwen3's own sampling as recorded steps make it."""
    from engine.cuda.kernels import TritonKernels

    kernels, width = TritonKernels(), _VOCABULARY if times.on_cuda else 9005
    for count in _ROWS if times.on_cuda else (2,):
        logits = 3 * times.randn(count, width, dtype=torch.float32)
        temperature, top_k, top_p = (torch.full((count,), value, device=times.device) for value in _SAMPLING)
        all_filters = Filters(torch.zeros_like(top_p), top_k, top_p, width)
        for name, filters in (("", Filters()), (", all filters", all_filters), (", top-p", Filters(top_p_N=top_p))):
            run = partial(kernels.distribution, logits, temperature, filters)
            times.add(f"distribution, {count} rows{name}", [run], 2 * logits.numel() * 4)
        uniform = torch.rand(count, device=times.device, dtype=torch.float64)
        draw = partial(kernels.draw, logits.softmax(1), torch.arange(count, device=times.device), uniform)
        times.add(f"draw, {count} rows", [draw], logits.numel() * 4)


def recurrences(times: KernelTimes) -> None:
    """Measure a gated delta net in the sizes of Qwen3.5-9B: texts with or without trees."""
    from engine.cuda.kernels import TritonKernels

    groups, heads, dim = (16, 32, 128) if times.on_cuda else (1, 2, 16)
    tree = tuple(node - 1 if node % 5 else -1 for node in range(20))
    cases = ((1, 1, ()), (1, 1, tree), (16, 1, ()), (16, 4, tree), (1, 2048, ())) if times.on_cuda else ((2, 5, (-1,)),)
    for count, num_tokens, parents in cases:
        size = num_tokens + len(parents)
        columns = np.full((6, count, size), -1)
        columns[0] = columns[3] = np.arange(count * size).reshape(count, size)
        columns[1:3, :, num_tokens:] = np.array([parents, range(len(parents))], dtype=np.int64)[:, None]
        columns[4, :, num_tokens - 1] = np.arange(count)
        steps = RecurrentSteps(columns.reshape(6, -1), np.arange(count + 1) * size, np.arange(count))
        rows = count * size
        inputs = 0.1 * times.randn(rows, (groups + heads) * dim + 2 * heads, dtype=torch.float32)
        inputs[:, -2 * heads :].abs_()
        query, states = (
            times.randn(one, own, *shape, dtype=torch.float32)
            for one, own, shape in ((rows, groups, (dim,)), (count, heads, (dim, dim)))
        )
        scale = -torch.ones(heads, 1, device=times.device)
        run = partial(TritonKernels().recur, inputs, query, scale, True, states, steps)
        name = f"recurrence, {count} texts of {num_tokens} tokens with {len(parents)} nodes"
        times.add(name, [run], 2 * states.numel() * 4)


MEASURED = (attention, sampling, layers, products, recurrences)
"""Most telling first."""

"""The Triton attention kernel gives the plain path's numbers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers

attention_kernel = pytest.importorskip("engine.cuda.attention_kernel")


from engine.attention.attention import AttentionMetadata  # noqa: E402
from engine.attention.groups import ScoreOptions, _group  # noqa: E402
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, build  # noqa: E402
from engine.attention.paged import Paged, upload  # noqa: E402
from engine.attention.tensors import KVShape, KVTensors  # noqa: E402
from engine.models.runner import ModelRunner  # noqa: E402
from engine.speculation.topology import merge_chains  # noqa: E402
from engine.start.probe import find_kv_shape, probe  # noqa: E402
from tests.attention.test_groups import CONFIGS, passes  # noqa: E402
from tests.cuda import in_torch  # noqa: E402
from tests.cuda.test_lean_decoder import randomised  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.grid import grid  # noqa: E402
from tests.models import families  # noqa: E402
from tests.models.test_architectures import COMMON  # noqa: E402
from tests.wrong import calls_of, instead  # noqa: E402

PAGE = 4
ROOT = Path(__file__).parents[2]
CASES: dict[str, Any] = {
    **CONFIGS,
    "heads in threes": transformers.LlamaConfig(
        **{**COMMON, "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
    ),
    "latents": families.config("glm4_moe_lite"),
    "chunks": families.config("llama4_text"),
    "several shapes": families.config("gemma4_text"),
    "one key head": transformers.LlamaConfig(**{**COMMON, "num_key_value_heads": 1}),
}


def logits(loaded: Any, paged: bool) -> torch.Tensor:
    kernel = attention_kernel if paged else None
    model = ModelRunner(loaded.model, find_kv_shape(loaded), 200, PAGE, loaded.vocab_size, paged_kernel=kernel)
    prompts, steps = passes()
    model.forward(prompts)
    return model.forward(steps)


def paged_of(parts: list[SequenceInput]) -> Paged:
    paged = upload([build(parts, PAGE)], PAGE, tiny.DEVICE)[0].paged
    assert paged is not None
    return paged


@contextlib.contextmanager
def in_parts(count: int, num_keys: int = 16) -> Iterator[None]:
    """Read texts in up to a number of parts of so few keys that a short text has several."""
    with (
        instead(attention_kernel, "parts_of", lambda *_: count),
        instead(attention_kernel, "processors_of", lambda *_: 10_000),
        patch.object(attention_kernel, "_PART_KEYS", num_keys),
    ):
        yield


@pytest.mark.sole("windows and caps of the attention kernel")
@pytest.mark.parametrize("name", grid(CASES, {"window and softcap"}))
def test_models_get_the_numbers_of_the_plain_path(name: str) -> None:
    """Prompts, then single tokens and trees of nine sequences in scattered pages."""
    loaded = randomised(CASES[name], seed=5)
    assert torch.allclose(logits(loaded, False), logits(loaded, True), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_the_probe_runs_through_the_kernel_that_serves(block_size: int) -> None:
    """It is compiled for blocks of a size."""
    loaded = randomised(CASES["llama"], seed=5)
    with calls_of(attention_kernel, "attend_paged") as calls:
        assert probe(loaded, find_kv_shape(loaded), paged_kernel=attention_kernel, block_size=block_size) < 0.5
    assert {operands[0].page_size for operands, _ in calls} == {block_size}


@pytest.mark.slow
@pytest.mark.parametrize(("window", "parts"), grid([(None, 1), (None, 3), (50, 1), (50, 3)], {(50, 3)}))
def test_prompt_queries_read_no_keys_beyond_their_tile(window: int | None, parts: int) -> None:
    """NaN behind the tile would make the results NaN."""
    count, known, clean = 90, 40, 64
    blocks = list(range(-(-(known + count) // PAGE)))
    part = SequenceInput(list(range(count)), known, blocks, NO_NODES, slice(0))
    storage = KVTensors(KVShape.equal(1, 2, 24, 40), len(blocks) * PAGE, torch.float32, tiny.DEVICE)
    generator = torch.Generator().manual_seed(2)
    for tensor in (storage.keys, storage.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    query = torch.randn((1, 6, count, 24), generator=generator).to(tiny.DEVICE)
    expected = reference([part], storage, query, window, ScoreOptions())[:clean]
    for tensor in (storage.keys, storage.values):
        tensor[:, known + clean :] = torch.nan
    paged = paged_of([part])
    with in_parts(parts):
        found = attention_kernel.attend_paged(paged, storage, 0, query, None, ScoreOptions(), window)[0].cpu().double()
    assert attention_kernel.tile_queries_of(count, 3, torch.float32) == 8
    assert (found[:clean] - expected).abs().max() < 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_key_or_value_that_is_nan_is_not_hidden(parts: int, name: str) -> None:
    """Otherwise the request goes on with finite numbers that are wrong."""
    values = operands(torch.float32, 130, nodes=8)
    (first, _), storage = values[:2]
    getattr(storage, name)[:, first.block_ids[0] * PAGE + 3] = torch.nan
    with in_parts(parts):
        found = attention_kernel.attend_paged(paged_of(values[0]), storage, 0, values[2], None, ScoreOptions(), None)[0]
    count = len(build([first], PAGE).positions_T)
    assert found[:count].isnan().all()
    assert found[count:].isfinite().all()


def operands(
    dtype: torch.dtype, num_keys: int, window: int | None = None, first_key: int = 0, nodes: int = 70
) -> tuple[Any, ...]:
    """Return a tree of more nodes than a word has bits, after a long text, and a chunk."""
    chance = np.random.default_rng(1)
    tree = merge_chains(chance.integers(0, 8, (nodes // 4, 6)).tolist())
    blocks = chance.permutation(2 * (num_keys + 200) // PAGE).tolist()
    half = len(blocks) // 2
    parts = [
        SequenceInput(
            [1], num_keys, blocks[:half], NodeInput(tree.tokens, tree.depths, (), tree.ancestry()), slice(0), first_key
        ),
        SequenceInput(list(range(9)), num_keys - 20, blocks[half:], NO_NODES, slice(0), first_key),
    ]
    generator = torch.Generator().manual_seed(2)
    shape = KVShape.equal(1, 2, 24, 40)
    storage = KVTensors(shape, len(blocks) * PAGE, dtype, tiny.DEVICE)
    for tensor in (storage.keys, storage.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(dtype))
    count = len(build(parts, PAGE).positions_T)
    query = torch.randn((1, 6, count, 24), generator=generator).to(dtype).to(tiny.DEVICE)
    return parts, storage, query, window


def reference(
    parts: Any, storage: KVTensors, query: torch.Tensor, window: int | None, kind: ScoreOptions
) -> torch.Tensor:
    """In float64, with a mask for every pair of query and key."""
    host = build(parts, PAGE)
    outputs = []
    for group in (_group(host, np.array([number]), PAGE, torch.device("cpu")) for number in range(len(parts))):
        slots = torch.as_tensor(np.r_[group.slots] if isinstance(group.slots, slice) else group.slots)
        keys, values = (t[0].cpu()[slots].double().repeat_interleave(3, 1) for t in (storage.keys, storage.values))
        scores = torch.einsum("hqd,khd->hqk", query[0, :, group.rows].cpu().double(), keys) * 24**-0.5
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        visible = torch.ones(scores.shape[1:], dtype=torch.bool)
        if group.visible is not None:
            visible = group.visible[0]
        queries, keys = group.positions()
        if window is not None:
            visible = visible & (queries[0, :, None] - keys[0] < window)
        if kind.chunk is not None:
            visible = visible & (queries[0, :, None] // kind.chunk == keys[0] // kind.chunk)
        scores = scores.masked_fill(~visible, -torch.inf)
        if kind.sinks is not None:
            column = kind.sinks.cpu().double()[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : len(slots)]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("parts", grid([1, 3], {3}))
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    grid(
        [("float32", torch.float32, 1e-5), ("float16", torch.float16, 5e-3), ("bfloat16", torch.bfloat16, 3e-2)],
        {("bfloat16", torch.bfloat16, 3e-2)},
    ),
)
def test_attention_in_every_number_format_equals_torch(
    name: str, dtype: torch.dtype, tolerance: float, parts: int
) -> None:
    with in_parts(parts):
        check(operands(dtype, 150), ScoreOptions(), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "window", "parts"),
    grid(
        [
            *((kind, 5, parts) for kind in ("plain", "softcap", "sinks") for parts in (1, 3)),
            *((kind, None, 3) for kind in ("softcap", "sinks", "both")),
            ("plain", 100, 3),
            ("both", 100, 1),
        ],
        {("both", 100, 1)},
    ),
)
def test_softcaps_windows_and_sinks_equal_torch(kind: str, window: int | None, parts: int) -> None:
    sinks = torch.linspace(-1, 2, 6, device=tiny.DEVICE) if kind in ("sinks", "both") else None
    options = ScoreOptions(3.0 if kind in ("softcap", "both") else None, sinks)
    with in_parts(parts):
        check(operands(torch.float32, 130, window), options, 1e-5)


@pytest.mark.parametrize(("chunk", "parts"), grid([(9, 1), (9, 3), (32, 3), (1000, 1)], {(9, 1)}))
def test_chunks_equal_torch(chunk: int, parts: int) -> None:
    """The tree begins in a chunk and ends in the next one."""
    case = operands(torch.float32, 40, nodes=4)
    with in_parts(parts):
        check(case, ScoreOptions(chunk=chunk), 1e-5)
        sequences, storage, query, _ = case
        wrong = ScoreOptions(chunk=chunk + 1)
        found = attention_kernel.attend_paged(paged_of(sequences), storage, 0, query, None, wrong, None)[0]
    expected = reference(sequences, storage, query, None, ScoreOptions(chunk=chunk))
    assert chunk > 200 or not (found.cpu().double() - expected).abs().max() < 1e-3


def test_query_heads_of_a_key_head_are_divided_among_programs() -> None:
    """DeepSeek-V3 has 128: a tile with all of them does not fit the registers."""
    assert attention_kernel.heads_of_program(128, torch.bfloat16, 576) == 32
    assert attention_kernel.heads_of_program(20, torch.bfloat16, 576) == 20
    with instead(attention_kernel, "heads_of_program", lambda *_: 1):
        check(operands(torch.float32, 40, nodes=4), ScoreOptions(), 1e-5)


@pytest.mark.slow
def test_keys_before_the_first_are_not_seen() -> None:
    check(operands(torch.float32, 130, first_key=77), ScoreOptions(), 1e-5)


@pytest.mark.parametrize("parts", grid([1, 3], {1}))
def test_rows_of_recorded_steps_see_no_keys_before_a_draft_window(parts: int) -> None:
    """Every sequence has room for as many rows, as in recorded steps; it uses fewer."""
    sequences, storage, query, _ = operands(torch.float32, 130, first_key=77, nodes=4)
    paged = paged_of(sequences)
    most = paged.most_queries + 3
    rows = torch.cat([most * i + torch.arange(count) for i, count in enumerate(paged.counts.tolist())]).to(tiny.DEVICE)
    num_rows = most * len(sequences)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros((num_rows, *tensor.shape[1:])).index_copy(0, rows, tensor)

    paged = paged._replace(
        **{name: padded(getattr(paged, name)) for name in ("words", "limits", "positions")},
        starts=torch.arange(len(sequences), dtype=torch.int32, device=tiny.DEVICE) * most,
        most_queries=most, most_keys=400, total_keys=0, num_scores=0, is_padded=True,
    )  # fmt: skip
    queries = padded(query[0].transpose(0, 1)).transpose(0, 1)[None]
    expected = reference(sequences, storage, query, None, ScoreOptions())

    def error(paged: Paged) -> torch.Tensor:
        with in_parts(parts):
            found = attention_kernel.attend_paged(paged, storage, 0, queries, None, ScoreOptions(), None)[0]
        return (found[rows].cpu().double() - expected).abs().max()

    assert error(paged) < 1e-5
    assert not error(paged._replace(first_keys=torch.zeros_like(paged.first_keys))) < 1e-3


def check(case: tuple[Any, ...], kind: ScoreOptions, tolerance: float) -> None:
    parts, storage, query, window = case
    paged = paged_of(parts)
    expected = reference(parts, storage, query, window, kind)
    for attend in (attention_kernel.attend_paged, in_torch.attend):
        found = attend(paged, storage, 0, query, None, kind, window)[0].cpu().double()
        assert (found - expected).abs().max() < tolerance, attend


@pytest.mark.sole("wrong operands of the attention kernel")
@pytest.mark.sampled
@pytest.mark.parametrize("wrong", grid(["words", "limits", "node_positions", "pages", "ends"], {"words", "pages"}))
def test_wrong_variants_fail_the_comparison(wrong: str) -> None:
    parts, storage, query, window = operands(torch.float32, 130, window=40)
    paged = paged_of(parts)
    spoilt = getattr(paged, wrong)
    spoilt.copy_(spoilt.flip(-1) if wrong == "pages" else spoilt * 0 + (-1 if wrong == "words" else 3))
    found = attention_kernel.attend_paged(paged, storage, 0, query, None, ScoreOptions(), window)[0].cpu().double()
    difference = (found - reference(parts, storage, query, window, ScoreOptions())).abs().max()
    assert not difference < 1e-3


def unset_memory(outputs: list[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Let new tensors of floating point be NaN, and add them to `outputs`."""

    def unset(empty: Any, *size: Any, **kind: Any) -> torch.Tensor:
        found = empty(*size, **kind)
        if found.is_floating_point():
            outputs.append(found.fill_(torch.nan))
        return found

    return instead(torch, "empty", unset)


def test_a_long_text_has_parts_and_short_ones_beside_it_have_one() -> None:
    """Results of parts without keys are neither written nor read: they are NaN here."""
    outputs: list[torch.Tensor] = []
    blocks = np.random.default_rng(3).permutation(120).tolist()
    lengths = (300, 30, 130)
    parts = [
        SequenceInput(
            [1, 2], length, blocks[40 * i : 40 * i + 40] if length < 160 else list(range(200, 280)), NO_NODES, slice(0)
        )
        for i, length in enumerate(lengths)
    ]
    storage = KVTensors(KVShape.equal(1, 2, 24, 40), 280 * PAGE, torch.float32, tiny.DEVICE)
    generator = torch.Generator().manual_seed(4)
    for tensor in (storage.keys, storage.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    query = torch.randn((1, 6, 6, 24), generator=generator).to(tiny.DEVICE)
    with in_parts(4, 64), unset_memory(outputs):
        check((parts, storage, query, None), ScoreOptions(), 1e-5)
    written = outputs[0].isfinite().all(-1).all(-1)
    assert written.sum(0).tolist() == [3, 3, 1, 1, 2, 2]


class Launches:
    """Notes the grid of each launch of a kernel, and launches nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, launched: tuple[int, ...]) -> Any:
        self.grids.append(launched)
        return lambda *_, **__: None


@pytest.mark.parametrize(
    ("counts", "programs", "with_work"),
    [([1] * 63 + [512], 792, 760), ([1] * 63 + [2048], 1560, 1528), ([1] * 64, 640, 512), ([21] * 4, 72, 64)],
)
def test_few_programs_have_no_tile(counts: list[int], programs: int, with_work: int) -> None:
    """Sequences times tiles of the longest would be 16,384 and 65,536 programs."""
    blocks = [list(range(-(-count // PAGE))) for count in counts]
    paged = paged_of(
        [SequenceInput([1] * n, 0, own, NO_NODES, slice(0)) for n, own in zip(counts, blocks, strict=True)]
    )
    query = torch.empty((1, 32, sum(counts), 16), dtype=torch.bfloat16, device=tiny.DEVICE)
    storage = KVTensors(KVShape.equal(1, 8, 16, 16), PAGE, torch.bfloat16, tiny.DEVICE)
    launches = Launches()
    with (
        patch.object(attention_kernel, "_attend", launches),
        patch.object(attention_kernel, "_divide", Launches()),
        in_parts(1, 128),
    ):
        attention_kernel.attend_paged(paged, storage, 0, query, None, ScoreOptions(), None)
    assert np.prod(launches.grids[0]) == programs
    size = attention_kernel.tile_queries_of(max(counts), 4, torch.bfloat16)
    assert 8 * sum(-(-count // size) for count in counts) == with_work


@pytest.mark.slow
def test_every_tile_of_many_sequences_is_computed() -> None:
    """More sequences than are searched at once, some of several tiles."""
    chance = np.random.default_rng(5)
    counts = [*chance.integers(1, 4, 70).tolist(), 21, 9, 1, 40]
    blocks = iter(chance.permutation(400).tolist())
    parts = [
        SequenceInput(list(range(n)), 3, [next(blocks) for _ in range(-(-(n + 3) // PAGE))], NO_NODES, slice(0))
        for n in counts
    ]
    storage = KVTensors(KVShape.equal(1, 1, 24, 40), 400 * PAGE, torch.float32, tiny.DEVICE)
    generator = torch.Generator().manual_seed(4)
    for tensor in (storage.keys, storage.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    query = torch.randn((1, 3, sum(counts), 24), generator=generator).to(tiny.DEVICE)
    case = parts, storage, query, None
    check(case, ScoreOptions(), 1e-5)
    wrong = instead(attention_kernel, "tiles_of", lambda right, *sizes: right(*sizes) - 25)
    # What no program writes must not be the right result that lay there before.
    with wrong, unset_memory([]), pytest.raises(AssertionError):
        check(case, ScoreOptions(), 1e-5)


def test_tiles_have_few_sizes() -> None:
    """Each size is compiled separately: three for four heads that share keys."""
    sizes = {attention_kernel.tile_queries_of(count, 4, torch.bfloat16) for count in range(1, 500)}
    assert sizes == {4, 8, 16}
    assert {attention_kernel.tile_queries_of(count, 4, torch.float32) for count in range(1, 500)} == {4, 8}
    assert attention_kernel.tile_queries_of(21, 128, torch.bfloat16) == 1
    # Also of heads in groups whose number is no power of two.
    for groups in (3, 5, 6, 7):
        for dtype, rows in ((torch.bfloat16, 64), (torch.float32, 32)):
            assert (
                max(groups * attention_kernel.tile_queries_of(count, groups, dtype) for count in range(1, 99)) <= rows
            )


@pytest.mark.slow
def test_a_server_compiles_few_kernels() -> None:
    """Launches are distinguished as Triton does, over 400 steps of many sizes; needs no device."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel_kinds"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    attention, verification, distributions = map(int, done.stdout.split())
    # For three sizes of tiles, whole or in parts, what divides the work, and what merges parts.
    assert attention == 3 * 2 + 3 + 1
    assert verification == 4, "one of each kernel"
    assert distributions == 7 + 3, "one of each kernel, two of those that have edges or count"


def rerun_of_a_pass() -> bool:
    """Run a pass over buffers that another pass has used, and compare."""
    model = randomised(CASES["llama"], seed=5)
    shape = find_kv_shape(model)
    runner = ModelRunner(model.model, shape, 60, PAGE, model.vocab_size, paged_kernel=attention_kernel)
    blocks = list(range(1, 30))
    text = [SequenceInput(list(range(5, 45)), 0, blocks, NO_NODES, slice(-1, None))]
    runner.run(runner.prepare([text])[0])
    inputs = [[SequenceInput([7], length, blocks, NO_NODES, slice(0, None))] for length in (10, 40)]
    first, second = runner.prepare(inputs)
    runner.run(first)
    expected = runner.run(second)
    for into, numbers in ((first.tensors, second.tensors), (first.tensors.paged, second.tensors.paged)):
        for name, tensor in into._asdict().items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(getattr(numbers, name))
    return torch.equal(runner.run(first), expected)


@pytest.mark.slow
def test_a_pass_over_the_same_buffers_divides_its_work_again() -> None:
    """Recorded passes read other numbers from the same buffers each time."""
    with in_parts(1, 16):
        assert rerun_of_a_pass()
    shares: dict[int, dict[Any, torch.Tensor]] = {}

    def kept(_: object, metadata: AttentionMetadata) -> AttentionMetadata:
        assert metadata.paged is not None
        of_buffers = shares.setdefault(metadata.paged.starts.data_ptr(), {})
        return replace(metadata, paged=metadata.paged._replace(shares=of_buffers))

    with in_parts(1, 16), instead(AttentionMetadata, "begun", kept):
        assert not rerun_of_a_pass()

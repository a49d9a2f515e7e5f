"""Products on tiles: right numbers, the bits of a row in any company, systems that refuse tiles."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu import tiles as permission
from engine.cpu import weights
from engine.cpu.compiled.block_products import product_on_tiles
from engine.cpu.compiled.simd_vectors import BLOCK, GROUP
from engine.cpu.decoder import CpuDecoder
from engine.cpu.tiles import tiles_of_process
from engine.cpu.weights import Forms, Product
from tests.cpu.compiled_copies import copy_of_products
from tests.cpu.test_decoder import MODELS, numbers, randomised
from tests.cpu.test_dots import NUM_COLUMNS, agree, expected, laid_out, normal, products
from tests.engine import tiny
from tests.wrong import instead

IS_LINUX = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")
needs_tiles = pytest.mark.skipif(not weights.tiles().are_used, reason=weights.tiles().reason)
needs_linux = pytest.mark.skipif(not IS_LINUX, reason="requests to Linux")
ROOT = Path(__file__).resolve().parents[2]
MOST_ROWS = 200


def on_tiles(rows: Tensor, of: Product, blocks: slice = slice(None)) -> Tensor:
    return products(rows, of, product_on_tiles, blocks)


@needs_tiles
@pytest.mark.parametrize("depth", [2 * GROUP, 3 * GROUP + 5, 7])
def test_products_are_those_of_rounded_numbers(depth: int) -> None:
    weight = normal(NUM_COLUMNS, depth)
    of = laid_out(weight, "pairs")
    for num_rows in (1, 19, 33, 97):
        rows = normal(num_rows, depth, seed=num_rows)
        assert agree(on_tiles(rows, of), expected(rows, weight, "pairs"))


@needs_tiles
@pytest.mark.parametrize("depth", [GROUP, 3 * GROUP + 5])
def test_a_row_keeps_its_bits_among_up_to_200_rows(depth: int) -> None:
    """And for all parts of a weight."""
    rows = normal(MOST_ROWS, depth, seed=1) * torch.linspace(0.01, 100, MOST_ROWS).unsqueeze(1)
    of = laid_out(normal(NUM_COLUMNS, depth), "pairs")
    alone = torch.cat([on_tiles(row.unsqueeze(0), of) for row in rows])
    for count in range(2, MOST_ROWS + 1):
        assert torch.equal(on_tiles(rows[:count], of), alone[:count])
        assert torch.equal(on_tiles(rows[-count:], of), alone[-count:])
    for count in (13, 40):
        for first in range(5):
            for last in range(first + 1, 6):
                part = slice(first * BLOCK, last * BLOCK)
                found = on_tiles(rows[:count], of, slice(first, last))
                assert torch.equal(found[:, part], alone[:count, part])
                assert not found[:, : part.start].any()
                assert not found[:, part.stop :].any()


@needs_tiles
def test_blocks_may_alternate_with_others() -> None:
    of = laid_out(normal(3 * BLOCK, GROUP), "pairs")
    ((piece,),) = of.layers
    rows, bias = normal(5, GROUP, seed=1), np.repeat(of.bias[0].reshape(3, BLOCK), 2, 0).reshape(-1)
    found = np.zeros((5, 6 * BLOCK), np.float32)
    product_on_tiles(rows.numpy(), piece.words, piece.scales, bias, found, (0, 3), (1, 2))
    blocks = torch.from_numpy(found).view(5, 3, 2, BLOCK)
    assert torch.equal(blocks[:, :, 1].flatten(1), on_tiles(rows, of))
    assert not blocks[:, :, 0].any()


@needs_tiles
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_others_as_they_are(wrong: float) -> None:
    of, rows = laid_out(normal(NUM_COLUMNS, 3 * GROUP), "pairs"), normal(20, 3 * GROUP, seed=1)
    right = on_tiles(rows, of)
    rows[2, 40] = wrong
    found = on_tiles(rows, of)
    assert not found[2, :NUM_COLUMNS].isfinite().any()
    others = torch.arange(20) != 2
    assert torch.equal(found[others], right[others])


@needs_tiles
def test_a_pass_on_tiles_has_the_numbers_of_dot_products() -> None:
    """A process without permission runs the other function, from the same compiled files.

    Sums in another order round a few numbers of the next layer differently, so errors are averaged.
    """
    loaded = randomised(MODELS["llama"], seed=5)
    forms = Forms("pairs", "pairs")
    decoder = CpuDecoder(loaded.model, forms)
    assert "on tiles" in decoder.remark
    found = numbers(loaded, decoder)[0]
    with instead(weights, "tiles", lambda *_: permission.Tiles(False, "the system refuses tiles")):
        without = CpuDecoder(loaded.model, forms)
        assert "by dot products, because the system refuses tiles" in without.remark
        dots = numbers(loaded, without)[0]
    assert 0 < float((found - dots).square().mean()) < 1e-4 * float(dots.square().mean())


# Changes of the source that a product of 40 rows after one of 5 shows.
WRONG = {
    "a tail that is not padded": {"np.zeros(GROUP, np.float32)": "np.full(GROUP, np.nan, np.float32)"},
    "the configuration of other rows": {"if counts != (num_first": "if counts == (0, 0) != (num_first"},
    "tiles that keep earlier sums": {"self.load_tile(self._sums(tile, place), bias, long(0))": "pass"},
    "the rows of the first tile in both": {"builder.add(rows, second) if tile else rows": "rows"},
    "the first half of a block twice": {"long(LINE * vector)": "long(0)"},
    "the first block twice": {"builder.mul(block_size, long(block))": "long(0)"},
}


@needs_tiles
@pytest.mark.slow  # compiles seven copies
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_wrong_variants_are_noticed(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_of_products(monkeypatch, None, WRONG[wrong] if wrong else {})
    weight = normal(NUM_COLUMNS, 2 * GROUP + 5)
    of = laid_out(weight, "pairs")
    is_right = []
    for num_rows in (5, 41):
        rows = normal(num_rows, 2 * GROUP + 5, seed=1)
        is_right.append(agree(products(rows, of, copy.product_on_tiles), expected(rows, weight, "pairs")))
    assert all(is_right) == (wrong is None)


CHILD = """
import os
import sys
import threading
from engine.cpu.tiles import refusal, tiles_of_process, use_tile
from tests.cpu.refused_tiles import refuse, take_small_signal_stack
"""


def output_of_child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-S", "-c", CHILD + code], cwd=ROOT, capture_output=True, text=True)


@needs_linux
@pytest.mark.parametrize(("error", "text"), [(1, "Operation not permitted"), (38, "Function not implemented")])
def test_a_refusal_by_a_filter_is_named(error: int, text: str) -> None:
    child = output_of_child(f"refuse({error})\nprint(tiles_of_process(True).remark)")
    assert child.stdout == f"by dot products, because the system refuses tiles ({text})\n", child.stderr


@needs_tiles
@pytest.mark.parametrize("thread", ["take_small_signal_stack", "lambda: (take_small_signal_stack(), ready.wait())"])
def test_a_small_signal_stack_is_named(thread: str) -> None:
    """That of the thread that asks, or of another one."""
    start = "memory = thread()" if thread.startswith("take") else "threading.Thread(target=thread, daemon=True).start()"
    code = f"ready = threading.Event()\nthread = {thread}\n{start}\nprint(tiles_of_process(True).reason)"
    assert output_of_child(code).stdout == "a thread has a signal stack that is too small for tiles\n"


@needs_tiles
def test_threads_that_exist_and_forks_may_use_tiles() -> None:
    code = """
asked = threading.Event()
thread = threading.Thread(target=lambda: (asked.wait(), use_tile(), print("thread", flush=True)))
thread.start()
assert tiles_of_process(True).are_used
asked.set()
thread.join()
child = os.fork()
if child == 0:
    use_tile()
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    child = output_of_child(code)
    assert child.stdout == "thread\n0\n", child.stderr


@needs_tiles
def test_a_new_program_asks_again() -> None:
    """It has no permission, though this process has; without it an instruction ends the process."""
    assert output_of_child("use_tile()").returncode == -signal.SIGILL
    assert output_of_child("print(tiles_of_process(True).are_used)").stdout == "True\n"


@needs_linux
def test_a_child_that_tiles_end_is_named() -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"]
    assert "ended a child process with SIGILL" in permission._failure_of_child(command)
    assert "cannot try them" in permission._failure_of_child(["/no/program"])


def test_a_processor_without_tiles_is_named() -> None:
    assert tiles_of_process(False).remark == "by dot products, because the processor has no tiles"

"""Kernels of a CPU are right with AVX-512, with AVX2 and with neither.

Numba, oneDNN and torch read the processor's features when they are imported, so the tests of
the kernels run once more in a process that is limited to fewer of them. With the block width of
the machine, Numba is not limited: its kernels are those that are compiled already, for all
features of the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import pytest
import torch

from tests.cpu.compiled_copies import copy_of_products
from tests.engine import tiny

simd_vectors = pytest.importorskip("engine.cpu.compiled.simd_vectors")

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")
ROOT = Path(__file__).resolve().parents[2]
AVX512 = ["avx512f", "avx512bw", "avx512dq", "avx512vl"]
# By instruction set: the processor and its features for Numba, the limit for oneDNN, the one for
# torch.
PROCESSORS = {
    "AVX-512": ("skylake-avx512", [*AVX512, "avx2", "fma"], "AVX512_CORE", "avx512"),
    "AVX2": ("haswell", ["avx2", "fma"], "AVX2", "avx2"),
    "SSE": ("nehalem", ["sse4.2"], "SSE41", "default"),
}
# Every kernel of a CPU, and what chooses among them.
TESTS = [
    "tests/cpu/test_decoder.py",
    "tests/cpu/test_prompts.py",
    "tests/cpu/test_dots.py",
    "tests/cpu/test_products.py",
    "tests/cpu/test_row_loops.py",
    "tests/kernels/test_block_kernels.py",
]

# Wrong variants, which show that a comparison finds them, are compiled for the processor at hand
# alone.
RUN = """
import sys
import pytest
chosen = "not Triton and not wrong_filters and not teeth and not wrong_variants and not every_processor"
status = pytest.main(["-q", "-n0", "-pno:cacheprovider", "-m", "not slow", "-k", chosen, *sys.argv[1:]])
from engine.cpu.compiled.simd_vectors import BLOCK, MOST_ROWS
print("blocks", BLOCK, MOST_ROWS)
sys.exit(status)
"""


def limited_to(name: str, is_at_hand: bool) -> dict[str, str]:
    """Return the environment that limits kernels to a processor's features.

    is_at_hand: whether the machine's own kernels have blocks of this width; these run then, for all
    its features, and only oneDNN and torch are limited.
    """
    processor, features, onednn, torch_capability = PROCESSORS[name]
    limits = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features)}
    return (os.environ if is_at_hand else os.environ | limits) | {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": torch_capability,
        "MALLOC_PERTURB_": "1",  # new memory holds huge numbers, which a result must not depend on
    }


@pytest.mark.slow  # test_blocks_of_every_width_have_the_plain_numbers has the widths, by one kernel
@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels_are_right_on_this_processor(name: str) -> None:
    host = llvmlite.binding.get_host_cpu_features()
    missing = [feature for feature in PROCESSORS[name][1] if not host.get(feature)]
    if missing:
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    block, most_rows = {"AVX-512": (32, 12), "AVX2": (16, 6), "SSE": (8, 6)}[name]
    run = subprocess.run(
        [sys.executable, "-c", RUN, *TESTS],
        cwd=ROOT,
        env=limited_to(name, block == simd_vectors.BLOCK),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"with {name}:\n{run.stdout[-4000:]}{run.stderr[-2000:]}"
    *_, counts, blocks = run.stdout.splitlines()
    assert " passed" in counts
    # Kernels have the blocks of this class, whether Numba is limited to it or the machine is of it.
    assert blocks == f"blocks {block} {most_rows}"


@pytest.mark.sole("other processors")
@pytest.mark.sampled
@pytest.mark.parametrize(("feature", "width"), [("+avx512f,+avx512bw", 32), ("+avx2", 16), ("", 8)])
def test_blocks_of_every_width_have_the_plain_numbers(
    feature: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any processor: LLVM divides vectors that are wider than its own."""
    product = copy_of_products(monkeypatch, feature)
    assert width == product.BLOCK
    weight = torch.randn(3 * width, 40)
    blocks = aligned(weight.view(3, width, 40).transpose(1, 2).numpy())
    scales, bias = np.zeros((3, 0, width), np.float32), torch.randn(3 * width)
    for num_rows in (1, 2, 3, product.MOST_ROWS, product.MOST_ROWS + 1, 2 * product.MOST_ROWS + 1):
        rows, found = torch.randn(num_rows, 40), torch.zeros(num_rows, 3 * width)
        product.product(rows.numpy(), blocks, scales, bias.numpy(), found.numpy(), (0, 3), (0, 1))
        assert torch.allclose(found, rows @ weight.T + bias, atol=1e-4)


def aligned(numbers: Any) -> Any:
    """A copy that begins at a line of the cache."""
    piece = np.zeros(numbers.size + 16, np.float32)
    start = -piece.ctypes.data % 64 // 4
    found = piece[start : start + numbers.size].reshape(numbers.shape)
    found[:] = numbers
    return found


NUMBERS = """
import hashlib
import torch
import transformers
from engine.cpu.kernels import NumbaKernels
from engine.kernels.protocol import Filters
from engine.cpu.decoder import CpuDecoder
from tests.cpu.test_decoder import MODELS, numbers, randomised

loaded = randomised(MODELS["llama"], seed=5)
found = list(numbers(loaded, CpuDecoder(loaded.model)))
kernels, logits = NumbaKernels(), 3 * torch.randn(40, 5000, generator=torch.Generator().manual_seed(3))
distributions = kernels.distribution(logits, torch.full((40,), 0.8), Filters())
filters = Filters(top_k_N=torch.arange(40), top_p_N=torch.full((40,), 0.9), most_k=39)
found.append(kernels.distribution(logits, torch.full((40,), 0.8), filters))
draws = kernels.draw(distributions, torch.arange(40), torch.linspace(0, 0.99, 40, dtype=torch.float64))
found += [distributions, draws]
print("numbers", *(hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest() for one in found))
"""


@pytest.mark.slow  # compiles all kernels
def test_every_start_has_the_numbers_of_the_first(tmp_path: Path) -> None:
    """To the bit: the process that compiles the kernels, and the next one, which loads them."""
    starts = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", NUMBERS],
            cwd=ROOT,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        starts.append(run.stdout.splitlines()[-1])
    assert list(tmp_path.rglob("*.nbc"))
    assert starts[0].startswith("numbers ")
    assert starts[0] == starts[1]

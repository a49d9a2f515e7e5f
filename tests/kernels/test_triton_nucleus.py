"""Top-p without sorting keeps what sorting keeps: in Triton's interpreter on a CPU, compiled on a device."""

from __future__ import annotations

import pytest
import torch

triton_nucleus = pytest.importorskip("engine.kernels.triton_nucleus")

from engine.kernels.torch_kernels import TORCH  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.grid import grid  # noqa: E402

WIDTH = 128 + 69


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of a narrow row: the interpreter takes its time."""
    monkeypatch.setattr(triton_nucleus, "_TILE", 128)


def laws() -> torch.Tensor:
    """Flat and steep ones, ties, certainty, tokens without mass, tokens with next to none, half of the mass in one."""
    generator = torch.Generator().manual_seed(1)
    rows = [(spread * torch.randn(WIDTH, generator=generator)).softmax(0) for spread in (0.1, 3.0, 9.0)]
    rows.append(torch.randint(1, 4, (WIDTH,), generator=generator).float())
    rows.append(torch.zeros(WIDTH).index_fill_(0, torch.tensor([WIDTH - 1]), 1.0))
    rows.append(torch.where(torch.arange(WIDTH) % 3 == 0, rows[1], 0.0))
    rows.append(rows[1] * 1e-30)
    rows[-1][7] = 1.0
    rows.append(torch.full((WIDTH,), 0.5 / (WIDTH - 1)).index_fill_(0, torch.tensor([100]), 0.5))
    law_NV = torch.stack(rows)
    return (law_NV / law_NV.sum(1, keepdim=True)).to(tiny.DEVICE)


@pytest.mark.parametrize("top_p", grid([1e-6, 0.5, 0.95], {0.5}))
def test_it_keeps_what_sorting_keeps(top_p: float) -> None:
    law_NV = laws()
    top_p_N = torch.full((len(law_NV),), top_p, device=tiny.DEVICE)
    found, expected = triton_nucleus.nucleus(law_NV, top_p_N), TORCH.nucleus(law_NV.cpu(), top_p_N.cpu())
    assert torch.equal(found.cpu() > 0, expected > 0)
    assert torch.allclose(found.cpu(), expected, rtol=1e-6)
    assert torch.allclose(found.sum(1), torch.ones(len(law_NV), device=tiny.DEVICE))


def test_every_row_has_its_own() -> None:
    law_NV = laws()
    top_p_N = torch.linspace(0.2, 1, len(law_NV), device=tiny.DEVICE)
    whole = triton_nucleus.nucleus(law_NV, top_p_N)
    for row in (1, 5):
        assert torch.equal(triton_nucleus.nucleus(law_NV[row : row + 1], top_p_N[row : row + 1])[0], whole[row])
    assert triton_nucleus.nucleus(law_NV[:0], top_p_N[:0]).shape == (0, WIDTH)


@pytest.mark.slow
def test_rows_with_gaps_between_them() -> None:
    law_NV = laws()
    top_p_N = torch.full((len(law_NV),), 0.8, device=tiny.DEVICE)
    apart_NV = torch.cat([law_NV, law_NV], 1)[:, :WIDTH]
    assert torch.equal(triton_nucleus.nucleus(apart_NV, top_p_N), triton_nucleus.nucleus(law_NV, top_p_N))


def test_an_edge_that_is_known_to_fewer_digits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    law_NV = laws()
    top_p_N = torch.full((len(law_NV),), 0.5, device=tiny.DEVICE)
    right = triton_nucleus.nucleus(law_NV, top_p_N)
    monkeypatch.setattr(triton_nucleus, "_ROUNDS", 3)
    assert not torch.equal(triton_nucleus.nucleus(law_NV, top_p_N) > 0, right > 0)

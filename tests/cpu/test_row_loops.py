"""Numba's kernels over rows of the vocabulary give the plain operations' numbers, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

row_loops = pytest.importorskip("engine.cpu.compiled.row_loops")

from engine.cpu.kernels import NumbaKernels  # noqa: E402
from engine.kernels.draw import categorical  # noqa: E402
from engine.kernels.torch_kernels import TORCH  # noqa: E402
from engine.request import Sampling  # noqa: E402
from engine.sampling.distribution import DistributionParameters, distribution  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.sampling.test_distribution import reference  # noqa: E402
from tests.wrong import calls_of, instead  # noqa: E402

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")
KERNELS = NumbaKernels()
WIDTH = 2 * row_loops.TILE + 77


def both(logits: Tensor, *samplings: Sampling) -> tuple[Tensor, Tensor]:
    """Distributions by the kernels, and by plain operations."""
    kernels, plain = (
        distribution(logits, DistributionParameters.of(samplings, tiny.DEVICE, one)) for one in (KERNELS, TORCH)
    )
    return kernels, plain


def random_logits(num_rows: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(9 * np.random.default_rng(seed).standard_normal((num_rows, WIDTH))).float()


def test_distributions_are_those_of_the_plain_path() -> None:
    """Masked tokens and tiles, extreme temperatures, filters, a single last token."""
    logits = random_logits(7)
    logits[1, ::2] = -torch.inf
    logits[2, : row_loops.TILE] = -torch.inf
    logits[3, row_loops.TILE :] = -torch.inf
    logits[5, -1] = 90.0
    temperatures = (1, 1, 0.7, 1e-38, 50, 0.3, 0)
    found, plain = both(logits, *(Sampling(temperature=t, top_p=0.9 if t == 50 else 1) for t in temperatures))
    assert torch.allclose(found, plain, rtol=5e-6, atol=1e-12)
    assert found[5, -1] == 1
    assert (found[1, ::2] == 0).all(), "masked tokens have no probability at all"
    sums = found.double().sum(1)
    assert torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-6)


def test_a_row_has_the_same_bits_wherever_it_is_in_memory() -> None:
    """Also right before or after its distribution, where a compiled loop may take another form."""
    width = 101
    logits = np.random.default_rng(3).standard_normal((8, width)).astype(np.float32)
    for row in torch.from_numpy(logits):
        found = set()
        for gap in (0, 1, 8, 40):
            memory = torch.zeros(2 * width + gap)
            ends = memory[:width], memory[width + gap :]
            for source, target in (ends, ends[::-1]):
                source[:] = row
                parameters = DistributionParameters.of([Sampling()], tiny.DEVICE, KERNELS)
                KERNELS.distribution(source[None], torch.ones(1), parameters.filters, target[None])
                found.add(tuple(target.tolist()))
        assert len(found) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=WIDTH - 1)])
def test_small_probabilities_are_right_down_to_the_least(sampling: Sampling) -> None:
    """Tokens down to e^-87 of the likeliest one keep theirs; what is below has none."""
    logits = torch.linspace(0, -100, WIDTH).unsqueeze(0)
    logits[0, 9] = -87
    found, plain = both(logits, sampling)
    kept = logits >= -87
    assert torch.allclose(found[kept], plain[kept], rtol=1e-5, atol=0)
    assert (found[~kept] == 0).all()


@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=20), Sampling(top_p=0.9)])
def test_numbers_that_are_not_finite_stay_so(sampling: Sampling, number: float) -> None:
    """Their rows are reported, and the other rows stay right."""
    logits = random_logits(3)
    logits[1, 5] = number
    found, plain = both(logits, *[sampling] * 3)
    assert found[1].isnan().any()
    assert torch.allclose(found[::2], plain[::2], rtol=5e-6, atol=1e-12)
    nothing, _ = both(torch.full((1, WIDTH), -torch.inf), sampling)
    assert nothing.isnan().all()
    assert 0 <= int(KERNELS.draw(found, torch.tensor([1]), torch.tensor([0.5]).double())) < WIDTH


@pytest.mark.parametrize(
    ("least_log", "top_k", "top_p"), [(-np.inf, 0, 1.0), (-np.inf, 0, 0.9), (-2.0, 0, 1.0), (-np.inf, 9, 1.0)]
)
def test_the_largest_logit_of_a_row_is_returned(least_log: float, top_k: int, top_p: float) -> None:
    """NaN if a number is not finite: by this the host finds the row."""
    logits, out = random_logits(1)[0].numpy(), np.empty(WIDTH, np.float32)
    rest = np.float32(0.7), np.float32(least_log), top_k, np.float32(top_p), out
    assert row_loops.filtered_distribution(logits, *rest) == logits.max()
    for number in (np.nan, np.inf):
        logits[WIDTH - 2] = number
        assert np.isnan(row_loops.filtered_distribution(logits, *rest))


def test_the_likeliest_token_is_the_first_of_the_largest() -> None:
    for places, number in (([0], 50.0), ([7, 9], 50.0), ([WIDTH - 1], 50.0), ([WIDTH - 2, WIDTH - 1], 50.0)):
        logits = random_logits(1)[0].numpy()
        logits[places] = number
        assert row_loops.likeliest(logits) == (places[0], number)
        logits[WIDTH // 2] = np.nan
        assert np.isnan(row_loops.likeliest(logits)[1])
    zeros = np.array([-1.0, -0.0, 0.0], np.float32)
    assert row_loops.likeliest(zeros)[0] == 1, "zero has two signs"
    assert row_loops.likeliest(np.full(3, -np.inf, np.float32)) == (0, -np.inf)


def test_draws_are_the_inverse_of_the_cumulative_sum() -> None:
    """Numbers over a whole row: each token's share of draws is its probability."""
    distributions = (random_logits(3) / 3).softmax(1)
    count = 2500
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for row in range(3):
        rows = torch.full((count,), row)
        drawn = KERNELS.draw(distributions, rows, uniform)
        # Sums of another order may put a border on the other side of a number of the grid.
        assert (drawn != categorical(distributions[rows], uniform)).sum() <= 1
        assert (drawn[1:] >= drawn[:-1]).all()
        assert len(drawn.unique()) > 100


def test_draws_at_the_edges_of_rows_and_tiles_have_mass() -> None:
    """All mass in the last token, none in a tile, borders of tiles."""
    distributions = torch.zeros(3, WIDTH)
    distributions[0, -1] = 1.0
    distributions[1, [5, WIDTH - 2]] = 0.5
    distributions[2, row_loops.TILE - 1 : row_loops.TILE + 1] = torch.tensor([1e-38, 1.0])
    ends = torch.tensor([0, 2.0**-54, 1 - 2.0**-53], dtype=torch.float64)

    def draw(row: int) -> list[int]:
        drawn: list[int] = KERNELS.draw(distributions, torch.full((3,), row), ends).tolist()
        return drawn

    assert draw(0) == [WIDTH - 1] * 3
    assert draw(1) == [5, 5, WIDTH - 2]
    assert draw(2) == [row_loops.TILE - 1, row_loops.TILE, row_loops.TILE]


@pytest.mark.parametrize("width", [1, 5, row_loops.TILE, row_loops.TILE + 1, 2 * row_loops.TILE])
def test_a_draw_stays_in_its_row(width: int) -> None:
    """The last token has all mass; of a row without any the first is drawn."""
    distributions = torch.zeros(3, width)
    distributions[0, -1], distributions[2] = 1.0, torch.nan
    for uniform in (0.0, 0.5):
        uniforms = torch.full((3,), uniform, dtype=torch.float64)
        assert KERNELS.draw(distributions, torch.arange(3), uniforms).tolist() == [width - 1, 0, 0]


def test_a_number_on_the_border_of_a_tile_belongs_to_the_next() -> None:
    """Cumulative mass must exceed it."""
    distribution = torch.zeros(1, WIDTH)
    border = row_loops.TILE + 4
    distribution[0, [3, border]] = 0.5
    uniforms = torch.tensor([0.5 - 2.0**-53, 0.5], dtype=torch.float64)
    assert KERNELS.draw(distribution, torch.zeros(2, dtype=torch.long), uniforms).tolist() == [3, border]


def test_a_token_of_the_surplus_or_of_the_target() -> None:
    """A token of the surplus if it is wanted and not empty, else of the target's distribution."""
    target, draft = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    target[[3, 7]], draft[[3, 7]] = (0.5, 0.5), (0.75, 0.25)
    for uniform in (0.0, 0.4, 0.6, 0.999):
        assert row_loops.draw_from(target, draft, np.float32(1), True, uniform) == 7
        assert row_loops.draw_from(target, draft, np.float32(1), False, uniform) == (3 if uniform < 0.5 else 7)
        weighted = row_loops.draw_from(target, draft, np.float32(2), True, uniform)
        assert weighted == (3 if uniform < 0.25 else 7), "a surplus of a quarter, and of three"
        # Nothing is left: then the target's distribution.
        assert row_loops.draw_from(target, draft, np.float32(0.5), True, uniform) == (3 if uniform < 0.5 else 7)
        assert row_loops.draw_from(target, target, np.float32(1), True, uniform) == (3 if uniform < 0.5 else 7)


def test_rows_in_pieces_take_the_plain_path() -> None:
    distributions = (random_logits(3) / 3).softmax(1)
    rows, uniform = torch.tensor([2, 0, 2, 1]), torch.tensor([0.2, 0.8, 0.5, 0.4], dtype=torch.float64)
    expected = categorical(distributions[rows], uniform)
    with calls_of(row_loops, "draw") as calls:
        for one, count in ((distributions, 1), (distributions.double(), 1), (distributions.T.contiguous().T, 1)):
            assert torch.equal(KERNELS.draw(one, rows, uniform), expected)
            assert len(calls) == count


def nucleus(probs_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Each row's nucleus by the kernel; rows with top_p of 1 are unchanged."""
    probs_NV = probs_NV.clone()
    for row, top_p in zip(probs_NV.numpy(), top_p_N.numpy(), strict=True):
        if top_p < 1:
            row_loops.keep_nucleus(row, top_p)
    return probs_NV


def rows_of_nucleus() -> Tensor:
    """Flat and steep rows, ties, a certain token, tokens with little or no mass."""
    generator = torch.Generator().manual_seed(1)
    rows = [(spread * torch.randn(WIDTH, generator=generator)).softmax(0) for spread in (0.1, 3.0, 9.0)]
    rows.append(torch.randint(1, 4, (WIDTH,), generator=generator).float())
    rows.append(torch.zeros(WIDTH).index_fill_(0, torch.tensor([WIDTH - 1]), 1.0))
    rows.append(torch.where(torch.arange(WIDTH) % 3 == 0, rows[1], 0.0))
    rows.append((rows[1] * 1e-30).index_fill_(0, torch.tensor([7]), 1.0))
    rows.append(torch.full((WIDTH,), 0.5 / (WIDTH - 1)).index_fill_(0, torch.tensor([100]), 0.5))
    probs_NV = torch.stack(rows)
    return probs_NV / probs_NV.sum(1, keepdim=True)


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.5, 0.6, 0.9, 0.95, 0.998, 0.9999])
def test_a_nucleus_is_what_sorting_keeps(top_p: float) -> None:
    probs_NV = rows_of_nucleus()
    before_NV, top_p_N = probs_NV.clone(), torch.full((len(probs_NV),), top_p)
    found, expected = nucleus(probs_NV, top_p_N), TORCH.nucleus(probs_NV, top_p_N)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, rtol=1e-6)
    assert torch.equal(probs_NV, before_NV)


def test_every_row_has_its_own_nucleus() -> None:
    probs_NV = rows_of_nucleus()
    top_p_N = torch.linspace(0.2, 1, len(probs_NV))
    whole = nucleus(probs_NV, top_p_N)
    assert torch.equal(whole[-1], probs_NV[-1])
    for row in (1, 5):
        assert torch.equal(nucleus(probs_NV[row : row + 1], top_p_N[row : row + 1])[0], whole[row])
    assert not torch.equal(nucleus(probs_NV, top_p_N.roll(1)) > 0, whole > 0)


def test_a_row_that_is_not_finite_has_no_nucleus() -> None:
    probs_NV = torch.full((1, WIDTH), torch.nan)
    assert nucleus(probs_NV, torch.tensor([0.9])).isnan().all()


FILTERS = [
    Sampling(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    for temperature in (0.6, 1.7)
    for min_p in (0.0, 0.02, 1.0)
    for top_k in (0, 1, 20, 600, WIDTH - 1, WIDTH)
    for top_p in (0.0, 0.4, 0.95, 1.0)
    if min_p or top_k
]
"""Filters of logits, alone and before top_p. 600 is more than there are small tiles."""


def rows_of_filters() -> Tensor:
    """Random logits, ties at edges, one large tile, masked tokens, equal logits."""
    logits = random_logits(5, seed=3) / 2
    logits[1] = (logits[1] / 3).round()
    logits[2, 64:128] += 10
    logits[3, ::2] = -torch.inf
    logits[3, 100:] = -torch.inf
    logits[4] = 1.5
    return logits


def differing(compiled: Callable[..., None] = row_loops.distributions) -> list[tuple[int, Sampling]]:
    """Return the rows and filters for which the kernel's distributions differ from TORCH's."""
    found = []
    for number, logits in enumerate(rows_of_filters()):
        one = logits.unsqueeze(0).repeat(len(FILTERS), 1)
        parameters = DistributionParameters.of(FILTERS, tiny.DEVICE, TORCH)
        with instead(row_loops, "distributions", lambda _, *operands: compiled(*operands)):
            distributions = KERNELS.distribution(one, parameters.temperature_N, parameters.filters)
        plain = distribution(one, parameters)
        for probs_V, plain_V, sampling in zip(distributions, plain, FILTERS, strict=True):
            if not (torch.equal(probs_V > 0, plain_V > 0) and torch.allclose(probs_V, plain_V, rtol=1e-5, atol=1e-12)):
                found.append((number, sampling))
    return found


def test_filters_keep_what_plain_operations_keep() -> None:
    assert differing() == []


@pytest.mark.parametrize("needed", [4, 5, 6, 9])
def test_all_values_are_kept_if_their_weights_are_too_few(needed: int) -> None:
    values = np.array([0.5, 0.25000003, 0.2500001, 0.25], np.float32)
    assert row_loops.edge_of(values, np.ones(4), needed, 0) == np.float32(0.25)


def test_every_row_has_its_own_filters() -> None:
    logits, samplings = random_logits(5), [FILTERS[9], Sampling(), FILTERS[60], Sampling(top_p=0.5), FILTERS[33]]
    together, _ = both(logits, *samplings)
    for row, sampling in enumerate(samplings):
        assert torch.equal(both(logits[row : row + 1], sampling)[0][0], together[row])


WRONG_FILTERS = {
    "a token more at the edge": ("if through >= needed", "if through > needed"),
    "ties at the edge are dropped": ("if scaled < edge:", "if scaled <= edge:"),
    "no ties beyond the first k": ("kept += 1", "kept += kept < top_k"),
    "top_k by the largest tokens of tiles": ("edge = edge_of(likely[:count], np.ones(count), top_k, _LEAST_ORDER)", ""),
    "no min_p before top_k": ("    edge = least_log\n", "    edge = np.float32(-math.inf)\n"),
    "top_p without a sum of 1": ("likely[number] *= scale", "likely[number] *= np.float32(0.9) * scale"),
    "no top_p": ("keep_nucleus(likely[:kept], top_p)", "pass"),
    "another temperature for tiles": ("(peaks[tile] - most) / temperature", "(peaks[tile] - most) * np.float32(9)"),
}


Operands = tuple[np.ndarray, ...]
WRONG_OPERANDS: dict[str, Callable[..., Operands]] = {
    "a token more": lambda logits, t, least_log, top_k, top_p, out: (
        logits,
        t,
        least_log,
        top_k + (top_k > 0),
        top_p,
        out,
    ),
    "no min_p": lambda logits, t, least_log, *others: (logits, t, np.full_like(least_log, -np.inf), *others),
    "no top_p": lambda logits, t, least_log, top_k, top_p, out: (logits, t, least_log, top_k, np.ones_like(top_p), out),
    "no ties": lambda logits, *others: (logits + np.linspace(0, 1e-4, WIDTH, dtype=np.float32), *others),
}


@pytest.mark.sampled
@pytest.mark.parametrize("wrong", WRONG_OPERANDS)
def test_wrong_filters_are_found(wrong: str) -> None:
    right = row_loops.distributions
    assert differing(lambda *operands: right(*WRONG_OPERANDS[wrong](*operands)))


@pytest.mark.slow  # compiles the kernels
@pytest.mark.parametrize("wrong", WRONG_FILTERS)
def test_wrong_kernels_are_found(wrong: str) -> None:
    assert differing(rows_with(*WRONG_FILTERS[wrong]).distributions)


def rows_with(old: str, new: str) -> ModuleType:
    """Return `row_loops` with a change in its source."""
    source = Path(str(row_loops.__file__)).read_text()
    assert source.count(old) == 1, "the change is not of one place"
    changed = ModuleType("changed")
    exec(source.replace(old, new), changed.__dict__)
    return changed


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.6, top_k=20, top_p=0.95), Sampling(min_p=0.1)])
def test_tokens_are_drawn_in_proportion_to_the_filtered_distribution(sampling: Sampling) -> None:
    """All numbers of a fine grid: a token's count is its probability."""
    logits, num_points = random_logits(1), 1 << 16
    found, _ = both(logits, sampling)
    uniform = (torch.arange(num_points, dtype=torch.float64) + 0.5) / num_points
    tokens = KERNELS.draw(found, torch.zeros(num_points, dtype=torch.int64), uniform)
    expected = reference(logits[0].double().numpy(), sampling)
    counts = np.bincount(tokens.numpy(), minlength=WIDTH)
    assert (abs(counts - num_points * expected) < 1.1).all()
    assert (counts[expected == 0] == 0).all()

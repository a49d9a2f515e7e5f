"""Drafting of a step in one call (`draw_loop.py`).

`drafting.chains.draw_by_level` computes the same level by level, in Python, for any rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.inputs import SequenceInput, build
from engine.cpu.compiled import draw_loop
from engine.cpu.compiled.row_loops import arrays_of
from engine.cpu.decoder import CpuDecoder, parts_of
from engine.cpu.kernels import NumbaKernels
from engine.drafting.draft import Layout
from engine.drafting.tables import draft_rows_of
from engine.models.runner import ModelRunner
from engine.sampling.distribution import DistributionParameters

Ints = npt.NDArray[np.int64]
_NO_TOKENS = np.zeros(0, dtype=np.int64)


class _Chains(NamedTuple):
    """Chains of a layout, as the loop needs them."""

    probs_ends: Ints
    """[L] End of each level's distributions."""
    first_chains: Ints
    num_chains: Ints
    """[N] First chain through the node above each distribution, and their number."""
    leaders_LC: Ints
    """First chain through each chain's node."""
    parents: Ints
    """[N] Parent of each distribution, as an index into the level above."""


@lru_cache(maxsize=128)  # the size of the cache of layouts
def _chains_of(layout: Layout) -> _Chains:
    probs_row_CL = layout.probs_row_CL.numpy()
    chain_C = np.arange(layout.num_chains)
    drawn_CL = np.arange(layout.max_length) < layout.length_C[:, None]
    first_chains = torch.cat([torch.from_numpy(chain_C)[level.chain_N] for level in layout.levels]).numpy()
    leaders_LC = np.tile(chain_C, (layout.max_length, 1))
    if layout.leader_LC is not None:
        leaders_LC = layout.leader_LC.numpy()
    parents = np.zeros(layout.num_probs, dtype=np.int64)
    for depth in range(1, layout.max_length):
        distributions = layout.levels[depth].distributions
        above = layout.levels[depth - 1].distributions
        parents[distributions] = probs_row_CL[first_chains[distributions], depth - 1] - above.start
    return _Chains(
        np.array([level.distributions.stop for level in layout.levels]),
        first_chains,
        np.bincount(probs_row_CL[drawn_CL], minlength=layout.num_probs),
        leaders_LC,
        parents,
    )


@lru_cache(maxsize=128)
def _draft_row_of_distributions(layout: Layout) -> Ints:
    """Return [N] the draft row (`tables.DraftRows`) of each distribution."""
    chains = _chains_of(layout)
    depth_N = np.searchsorted(chains.probs_ends, np.arange(layout.num_probs), side="right")
    draft_row_N: Ints = draft_rows_of(layout).draft_row_CL.numpy()[chains.first_chains, depth_N]
    return draft_row_N


class Draws(NamedTuple):
    """Arrays of all draws; the loops get a plain tuple, which Numba takes faster."""

    distributions: npt.NDArray[np.float32]
    """[N, V] output: the distributions that the tokens were drawn from."""
    tokens: Ints
    """[L, C] output: the drafted tokens."""
    temperatures: npt.NDArray[np.float32]
    least_logs: npt.NDArray[np.float32]
    top_ks: Ints
    top_ps: npt.NDArray[np.float32]
    """[N] of each distribution."""
    uniforms: npt.NDArray[np.float64]
    """[L, C]"""
    first_chains: Ints
    num_chains: Ints
    leaders: Ints
    """Chains as in `_Chains`."""
    target_ids: Ints
    """Target's id of a head's tokens; empty for equal vocabularies."""
    spread: npt.NDArray[np.float32]
    """Working memory for a head's logits over the target's vocabulary."""


class _Bounds(NamedTuple):
    """Bounds of the passes of a step."""

    ends: Ints
    """[L, 4] ends of the rows, sequences, parts and distributions of each pass."""
    parts: Ints
    """[P, 3] the parts of attention of all passes, counted within each pass."""
    most_rows: int
    most_distributions: int
    num_later_rows: int
    """Rows after the first pass."""


@lru_cache(maxsize=256)
def _bounds_of(layout: Layout, num_sequences: tuple[int, ...], row_counts: bytes) -> _Bounds:
    """Return the bounds of passes of these numbers of sequences.

    row_counts: rows of each sequence, as 32-bit integers.
    """
    counts = np.frombuffer(row_counts, dtype=np.int32).astype(np.int64)
    sequence_ends = np.cumsum(num_sequences)
    stops = np.cumsum(counts)
    row_ends = stops[sequence_ends - 1]
    parts = parts_of(stops - counts, counts)
    number = np.searchsorted(sequence_ends, parts[:, 0], side="right")
    parts[:, 0] -= np.concatenate([[0], sequence_ends])[number]
    parts[:, 1:] -= np.concatenate([[0], row_ends])[number][:, None]
    part_ends = np.searchsorted(number, np.arange(len(sequence_ends)), side="right")
    probs_ends = _chains_of(layout).probs_ends
    return _Bounds(
        np.stack([row_ends, sequence_ends, part_ends, probs_ends], 1),
        parts,
        most_rows=int(np.diff(row_ends, prepend=0).max()),
        most_distributions=int(np.diff(probs_ends, prepend=0).max()),
        num_later_rows=int(row_ends[-1] - row_ends[0]),
    )


@lru_cache(maxsize=256)  # parameters of the same rows are one object
def _distribution_arrays(parameters: DistributionParameters, layout: Layout) -> tuple[Any, Any, Any, Any]:
    """Return ([N] temperatures, and the arrays of the filters, of the layout's distributions)."""
    selected = parameters.select(layout.probs_row_of_N)
    least_logs, top_ks, top_ps = arrays_of(selected.filters, layout.num_probs)
    return selected.temperature_N.numpy(), least_logs, top_ks, top_ps


class DrawTask(NamedTuple):
    """Chains to draw, and where their distributions go."""

    layout: Layout
    parameters: DistributionParameters
    """Parameters of the sampling rows."""
    uniform_LC: Tensor
    """Numbers for drafting."""
    probs_NV: Tensor
    """Output: the distributions that the tokens were drawn from."""


def levels_of(runner: ModelRunner) -> Levels | None:
    """Return the drafting in one call; None if backend or kernels do not allow it."""
    decoder = runner.backend
    # Another class if a kernel failed its check (`start/choosing.py`).
    if type(runner.kernels) is not NumbaKernels:
        return None
    if not isinstance(decoder, CpuDecoder) or not decoder.has_plain_logits:
        return None
    num_tokens = decoder.vocab_size
    if decoder.target_ids is not None:
        num_tokens = runner.vocab_size
    if min(num_tokens, runner.num_embeddings) < runner.vocab_size:
        return None
    return Levels(runner, decoder)


class Levels:
    """Draws all levels of a step in one call."""

    def __init__(self, runner: ModelRunner, decoder: CpuDecoder) -> None:
        self._runner, self._decoder = runner, decoder
        self.vocab_size = runner.vocab_size
        """V of the distributions."""

    def draw(self, passes: Sequence[Sequence[SequenceInput]], taps_TX: Tensor | None, task: DrawTask) -> Tensor:
        """Return [C, L] the drafted tokens.

        taps_TX: the target's states that the rows of the first pass read, for a head.
        """
        decoder, runner = self._decoder, self._runner
        whole = build([sequence for sequences in passes for sequence in sequences], runner.block_size)
        bounds = _bounds_of(task.layout, tuple(map(len, passes)), whole.counts.tobytes())
        draws = self._draws(task, bounds.most_distributions)
        states = decoder.states_of(taps_TX, bounds.most_distributions, are_target_states=taps_TX is not None)
        # All passes use one number of cores, which the average pass decides.
        num_keys_of_pass = int(whole.num_keys.sum()) // len(passes)
        num_wanted_first = len(whole.wanted_N) - bounds.num_later_rows
        draw_loop.draw_levels(
            *decoder.ready(runner.storage, runner.block_size, bounds.most_rows, num_keys_of_pass),
            draw_loop.draw().address, bounds.ends, whole.token_ids_T, whole.slots_T,
            whole.wanted_N[:num_wanted_first], bounds.parts, whole.seen, whole.positions_T,
            tuple(draws), _chains_of(task.layout).parents, states,
            decoder.room_for_logits(bounds.most_distributions),
        )  # fmt: skip
        return torch.from_numpy(np.ascontiguousarray(draws.tokens.T))

    def _draws(self, task: DrawTask, most: int) -> Draws:
        """Return the arrays of a step's draws. most: distributions of the largest level."""
        layout = task.layout
        chains = _chains_of(layout)
        target_ids = self._decoder.target_ids
        num_spread = most
        if target_ids is None:
            target_ids = _NO_TOKENS
            num_spread = 0
        return Draws(
            task.probs_NV.numpy(),
            np.zeros((layout.max_length, layout.num_chains), dtype=np.int64),
            *_distribution_arrays(task.parameters, layout),
            task.uniform_LC.numpy(),
            chains.first_chains,
            chains.num_chains,
            chains.leaders_LC,
            target_ids,
            np.empty((num_spread, self.vocab_size), dtype=np.float32),
        )

    @property
    def has_term(self) -> bool:
        """Return whether logits sum a draft row and a term of the previous token."""
        return self._decoder.embedded_term is not None

    def draw_below(self, base_SX: Tensor, last_R: Tensor, task: DrawTask) -> Tensor:
        """Return [C, L] the drafted tokens after the pass of a head with a term.

        base_SX: [S, draft vocabulary] the pass's products with the output head, by draft row
        (`tables.DraftRows`); last_R: the last tokens of the texts that draft.
        """
        decoder, runner = self._decoder, self._runner
        probs_ends = _chains_of(task.layout).probs_ends
        most = int(np.diff(probs_ends, prepend=0).max())
        draws = self._draws(task, most)
        shared, _, table = decoder.ready(runner.storage, runner.block_size, most, 0)
        draw_loop.draw_below(
            shared, draw_loop.below().address, table, probs_ends, last_R.numpy(), decoder.embedded_term,
            np.ascontiguousarray(base_SX.numpy()), _draft_row_of_distributions(task.layout),
            tuple(draws), decoder.room_for_logits(most),
        )  # fmt: skip
        return torch.from_numpy(np.ascontiguousarray(draws.tokens.T))

"""Inputs of a step's rules, and the results made of their verdicts, recomputed by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.drafting.draft import Draft, method_of
from engine.kernels.protocol import ChainNoise, Chains, ProbsTable
from engine.kernels.torch_kernels import TORCH
from engine.noise import Purpose, uniform
from engine.plan import Emission, Plan, Row, StepVerdict
from engine.sampling.edits import NodeContext
from engine.speculation.drafting import children
from engine.speculation.gap import acceptance_gap
from engine.speculation.verification import RULES, OverAcceptance
from engine.speculation.verification.text_drafts import walk
from engine.step import verify
from tests.sampling.test_distribution import reference
from tests.sampling.test_edits import VOCABULARY, by_hand

SHARE = 0.8
"""Share of steps whose gap is observed."""


@dataclass
class Checked:
    """Checks every step of an engine, and counts what it has seen."""

    target: Any
    draft: Any
    texts: dict[int, list[int]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def distributions(self, model: Any, row: Row, chain: Sequence[int]) -> list[np.ndarray]:
        """The distribution below each prefix of a chain, as the row samples."""
        text = self.texts[row.sequence_id]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*text, *chain]]), use_cache=False).logits[0, len(text) - 1 :]
        distributions = []
        for depth, logit in enumerate(logits.numpy()):
            path = tuple(chain[:depth])
            edited = logit if row.text is None else by_hand(logit, NodeContext(row.sampling, row.text, depth, path))
            distribution = reference(edited.astype(np.float64), row.sampling)
            if row.sampling.seed_stable:
                distribution = np.eye(VOCABULARY)[self.race(distribution, row, depth).argmax()]
            distributions.append(distribution)
        return distributions

    @staticmethod
    def race(distribution: np.ndarray, row: Row, depth: int) -> np.ndarray:
        clocks = -np.log(uniform(row.sampling.seed, row.end + depth, Purpose.CLOCK, 0, np.arange(VOCABULARY)))
        return distribution / clocks

    def plan(self, plan: Plan) -> None:
        for row in plan.rows:
            text = self.texts.setdefault(row.sequence_id, [])
            assert len(text) >= row.first_index
            text[row.first_index :] = row.input_ids
            assert row.text is None or list(row.text.tokens) == text[: len(row.text.tokens)]

    def step(self, plan: Plan, draft: Draft, logits_NV: Tensor, emissions: Sequence[Emission]) -> None:
        rows = plan.sampling_rows
        target = verify.target_distributions(rows, draft, logits_NV.clone())
        noise, chains = draft.noise, draft.chains
        assert chains.shape == (len(rows), max(max(1, row.num_drafts) for row in rows))
        assert (chains.leads_CL is not None) == any(max(row.fanout[1:], default=1) > 1 for row in rows)
        self.walks(draft, rows, target, emissions)
        first = 0
        for number, (row, emission) in enumerate(zip(rows, emissions, strict=True)):
            count, length = max(1, row.num_drafts), row.draft_length
            mine = slice(first, first + count)
            assert chains.request_C[mine].tolist() == [number] * count
            assert chains.length_C[mine].tolist() == [length] * count
            tokens = chains.tokens_CL[mine, :length].tolist()
            for chain, drafted in enumerate(tokens):
                q = self.distributions(self.draft, row, drafted)[:length]
                self.same(chains.draft.probs_NV[chains.draft.row_CX[first + chain, :length]], q)
                p = self.distributions(self.target, row, drafted)
                self.same(target.probs_NV[target.row_CX[first + chain, : length + 1]], p)
                self.numbers(noise, row, first + chain, chain)
            self.tokens_are_drawn(draft, row, first)
            self.shifts(draft, row, mine)
            self.tree(draft, row, number, tokens)
            self.emission(draft, row, number, emission)
            if not row.text_drafts:
                self.verdict(chains, target, noise, row, mine, emission)
            self.texts[row.sequence_id] += [*emission.accepted, emission.next_token]
            self.seen[f"{row.speculation.rule} {row.fanout} {len(row.text_drafts)}"] += 1
            first += count
        assert first == chains.num_chains

    def walks(self, draft: Draft, rows: Sequence[Row], target: ProbsTable, emissions: Sequence[Emission]) -> None:
        """Check that text drafts are followed by their distributions and numbers."""
        found = verify._walks(rows, draft, target.probs_NV)
        assert list(found) == [number for number, row in enumerate(rows) if row.text_drafts]
        for number, taken in found.items():
            row, tree, emission = rows[number], draft.trees[number], emissions[number]
            probability: dict[int, float] = {}
            for path in tree.paths[row.first_text_draft :]:
                tokens = [tree.tokens[node - 1] for node in path[1:]]
                distributions = self.distributions(self.target, row, tokens)
                probability |= {
                    node: float(distributions[i][token])
                    for i, (node, token) in enumerate(zip(path[1:], tokens, strict=True))
                }
            numbers = uniform(row.sampling.seed, row.end, Purpose.TEXT_DRAFT, 0, np.arange(row.longest_chain))
            assert taken == walk(tree, row.first_text_draft, probability, numbers.tolist()), "another walk"
            emitted = [*emission.accepted, emission.next_token]
            assert emitted[: taken.depth] == [tree.tokens[node - 1] for node in taken.path[1:]], "another walk"
            assert emitted[taken.depth] not in taken.refused, "another walk"
            begun = [tree.tokens[node - 1] for node in taken.path[1:]]
            drawn = [[tree.tokens[node - 1] for node in path[1:]] for path in tree.paths[: row.first_text_draft]]
            is_alive = any(chain[: taken.depth] == begun and len(chain) > taken.depth for chain in drawn)
            assert (emission.rank < row.first_text_draft) == is_alive, "drawn chains are verified below the walk"
            self.seen["walked"] += taken.depth > 0

    @staticmethod
    def same(found: Tensor, expected: Sequence[np.ndarray]) -> None:
        np.testing.assert_allclose(found.double().numpy(), np.array(expected).reshape(found.shape), atol=2e-5)

    @staticmethod
    def numbers(noise: Any, row: Row, at: int, rank: int) -> None:
        depths = np.arange(noise.accept_CL.shape[1])
        name = row.sampling.seed, row.end
        for found, purpose in ((noise.accept_CL, Purpose.ACCEPT), (noise.chosen_accept_CL, Purpose.CHOSEN_ACCEPT)):
            assert found[at].tolist() == uniform(*name, purpose, rank, depths).tolist()
        for found, purpose in (
            (noise.residual_C, Purpose.RESIDUAL),
            (noise.score_C, Purpose.SCORE),
            (noise.chosen_residual_C, Purpose.CHOSEN_RESIDUAL),
        ):
            assert float(found[at]) == float(uniform(*name, purpose, rank)[0])

    def tokens_are_drawn(self, draft: Draft, row: Row, first: int) -> None:
        """Check the children of nodes by method and numbers of their first chains."""
        chains = draft.chains
        for depth, width in enumerate(row.widths):
            count, apart = row.fanout[depth], row.num_drafts // width
            for parent in range(first, first + row.num_drafts, apart * count):
                leaders = [parent + apart * child for child in range(count)]
                numbers = uniform(
                    row.sampling.seed, row.end, Purpose.DRAFT, np.array(leaders) - first, np.full(count, depth)
                )
                weights = chains.draft.probs_NV[chains.draft.row_CX[parent, depth]]
                method = "iid" if count == 1 else method_of(row)
                if row.sampling.seed_stable or (row.sampling.is_greedy and method != "iid"):
                    order = self.order(row, chains.tokens_CL[parent, :depth].tolist())
                    expected = np.argsort(-order, kind="stable")[:count].tolist()
                else:
                    (expected,) = children(TORCH, method, weights[None], torch.from_numpy(numbers)[None]).tolist()
                for leader, token in zip(leaders, expected, strict=True):
                    assert chains.tokens_CL[leader : leader + apart, depth].tolist() == [token] * apart
                    if chains.leads_CL is not None:
                        assert chains.leads_CL[leader : leader + apart, depth].tolist() == [True] + [False] * (
                            apart - 1
                        )

    def order(self, row: Row, path: list[int]) -> np.ndarray:
        """Return the scores whose largest are a deterministic row's drafts."""
        text = self.texts[row.sequence_id]
        with torch.inference_mode():
            logit = self.draft(input_ids=torch.tensor([[*text, *path]]), use_cache=False).logits[0, -1].numpy()
        edited = (
            logit if row.text is None else by_hand(logit, NodeContext(row.sampling, row.text, len(path), tuple(path)))
        )
        if not row.sampling.seed_stable:
            return edited
        return self.race(reference(edited.astype(np.float64), row.sampling), row, len(path))

    @staticmethod
    def shifts(draft: Draft, row: Row, mine: slice) -> None:
        shifts = draft.chains.shifts
        if shifts is None:
            assert not row.shifts
            return
        assert shifts.remaining_CM.dtype == shifts.num_chains_CM.dtype == torch.int64
        for remaining, states, counts in zip(
            shifts.remaining_CM[mine].tolist(),
            shifts.state_CM4[mine].tolist(),
            shifts.num_chains_CM[mine].tolist(),
            strict=True,
        ):
            found = [(r, tuple(s), n) for r, s, n in zip(remaining, states, counts, strict=True) if r]
            assert found == [(shift.remaining, tuple(shift.state), shift.num_chains) for shift in row.shifts]

    @staticmethod
    def tree(draft: Draft, row: Row, number: int, tokens: list[list[int]]) -> None:
        """Its paths are the drawn chains, then the text drafts."""
        tree = draft.trees[number]
        paths = [[tree.tokens[node - 1] for node in path[1:]] for path in tree.paths]
        assert paths == [*tokens, *(list(one.tokens) for one in row.text_drafts)]

    def emission(self, draft: Draft, row: Row, number: int, emission: Emission) -> None:
        tree = draft.trees[number]
        path = tree.paths[emission.rank][: len(emission.accepted) + 1]
        assert [tree.tokens[node - 1] for node in path[1:]] == list(emission.accepted)
        distribution = self.distributions(self.target, row, emission.accepted)[-1]
        assert distribution[emission.next_token] > 0 or row.speculation.over_acceptance
        nodes = {tuple(path[: i + 1]) for path in tree.paths for i in range(1, len(path))}
        assert emission.num_nodes == tree.num_nodes == len(nodes)
        if emission.rank < row.first_text_draft:
            assert emission.num_draft_kept <= max(0, row.draft_length - 1)
            if not row.text_drafts:
                assert emission.num_draft_kept == min(len(emission.accepted), max(0, row.draft_length - 1))
        else:
            assert emission.num_draft_kept == 0
        self.text_drafts(draft, row, number, emission, path)

    @staticmethod
    def logprobs(plan: Plan, verdict: StepVerdict) -> None:
        for row, emission in zip(plan.sampling_rows, verdict.emissions, strict=True):
            assert len(emission.logprobs) == (0 if row.num_logprobs is None else len(emission.accepted) + 1)

    @staticmethod
    def verdict(
        chains: Chains, target: ProbsTable, noise: ChainNoise, row: Row, mine: slice, emission: Emission
    ) -> None:
        """Return the verdict of the row's rule about its chains alone."""
        index, asked = torch.arange(mine.start, mine.stop), row.speculation
        name = "nss" if row.sampling.is_certain else asked.rule if row.fanout else "block"
        lossy = OverAcceptance(asked.over_acceptance, asked.over_acceptance_residual)
        verify = lossy if asked.over_acceptance and row.fanout else RULES[name].verify
        alone = verify(chains.select(index, (1, len(index))), target.select(index), noise.select(index))
        rank, accepted = int(alone.chain_B[0]), int(alone.accepted_B[0])
        tokens = chains.tokens_CL[mine][rank, :accepted].tolist()
        shifts = alone.shifts
        assert (list(emission.accepted), emission.next_token) == (tokens, int(alone.next_token_B[0]))
        assert emission.bias == (0.0 if alone.bias_B is None else float(alone.bias_B[0]))
        parts = () if shifts is None else (shifts.remaining_CM[0], shifts.state_CM4[0], shifts.num_chains_CM[0])
        left = [(r, tuple(s), n) for r, s, n in zip(*(part.tolist() for part in parts), strict=True) if r]
        assert [(one.remaining, one.state, one.num_chains) for one in emission.shifts] == left

    @staticmethod
    def text_drafts(draft: Draft, row: Row, number: int, emission: Emission, path: list[int]) -> None:
        """Check that nodes count for the first text draft through them."""
        tree, seen = draft.trees[number], {0}
        assert [one.name for one in emission.text_draft_counts] == [one.source for one in row.text_drafts]
        for one, chain in zip(emission.text_draft_counts, tree.paths[row.first_text_draft :], strict=True):
            accepted = len(set(chain) & set(path) - seen)
            assert (one.num_chains, one.num_nodes) == (1, len(set(chain) - seen))
            assert one.num_accepted <= accepted
            assert row.fanout or one.num_accepted == accepted
            seen |= set(chain)

    def gap(self, plan: Plan, draft: Draft, step: int, before: StepVerdict, after: StepVerdict) -> None:
        """Check the gap of observed rows, from their distributions."""
        chance, choice = uniform(0, step, Purpose.OBSERVE, 0, np.arange(2))
        rows = plan.sampling_rows
        number = int(choice * len(rows))
        row, old, new = rows[number], before.emissions[number], after.emissions[number]
        others = [list(verdict.emissions) for verdict in (before, after)]
        assert others[0][:number] + others[0][number + 1 :] == others[1][:number] + others[1][number + 1 :]
        if chance >= SHARE or not row.fanout or row.sampling.is_certain or row.speculation.over_acceptance:
            assert new == old
            return
        tree = draft.trees[number]
        width, apart = row.fanout[0], row.num_drafts // row.fanout[0]
        drawn = [tree.tokens[tree.paths[apart * child][1] - 1] for child in range(width)]
        del self.texts[row.sequence_id][row.end :]
        p, q = (self.distributions(model, row, ())[0] for model in (self.target, self.draft))
        self.texts[row.sequence_id] += [*new.accepted, new.next_token]
        assert new == msgspec.structs.replace(old, gap=new.gap)
        if not row.shifts:
            expected = acceptance_gap(row.speculation.rule, method_of(row), p, q, drawn)
            assert new.gap == (expected if expected is None else pytest.approx(expected, abs=1e-4))
        self.seen["gap"] += 1

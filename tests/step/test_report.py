"""Results of a step belong to the right rows: logits, logprobs, broken numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.plan import Plan, Row, StepVerdict
from engine.step.report import StepLogits, report, split_prompts, with_logprobs
from engine.step.results import broken_rows
from tests.engine import tiny
from tests.speculation.test_served_steps import OFF, TEXT_DRAFTS, drafts, row_of, step

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a step on logits that are looked up")
TREE: dict[str, Any] = drafts("traversal", 2, 2)
RACE: dict[str, Any] = drafts("bv_race", 2, 1, 1)


def rows(times: int = 1) -> list[Row]:
    """Trees, chains, text drafts, and rows without drafts, all several times."""
    fields = (TREE, OFF, RACE, {**OFF, "text_drafts": TEXT_DRAFTS}, {**RACE, "text_drafts": TEXT_DRAFTS[:1]}, OFF)
    return [
        msgspec.structs.replace(row_of(number, one), sequence_id=10 + number)
        for number, one in enumerate(fields * times)
    ]


def test_a_number_that_is_not_finite_ends_the_row_that_it_belongs_to() -> None:
    """Each number alone, of the target's nodes and the draft's distributions."""
    plan = Plan(tuple(rows()))
    draft, _ = step(plan.rows)
    owners = [{10 + number} for number, tree in enumerate(draft.trees) for _ in range(1 + tree.num_nodes)]
    drafted = draft.chains.draft
    assert len(drafted.probs_NV) > 8
    for distribution in range(len(drafted.probs_NV)):
        chains = [
            chain
            for chain, length in enumerate(draft.layout.length_C.tolist())
            if distribution in drafted.row_CX[chain, :length].tolist()
        ]
        owners.append({10 + int(draft.layout.request_C[chain]) for chain in chains})
    assert all(len(owner) == 1 for owner in owners)
    for place, owner in enumerate(owners):
        for number in (np.nan, np.inf, -np.inf):
            largest = np.zeros(len(owners))
            largest[place] = number
            assert broken_rows(plan, draft, largest) == owner
    largest = np.zeros(len(owners))
    largest[[0, -1]] = np.nan
    assert broken_rows(plan, draft, largest) == owners[0] | owners[-1]
    assert broken_rows(plan, draft, np.zeros(len(owners))) == frozenset()
    assert broken_rows(plan, None, np.full(1, np.nan)) == frozenset()


@pytest.mark.parametrize(("num_rows", "fanout"), [(6, (1, 1, 1)), (6, (2,)), (3, (2, 1, 1)), (2, ())])
def test_chains_that_no_row_drafts_end_none(num_rows: int, fanout: tuple[int, ...]) -> None:
    """A recorded step has more chains than its rows draft, longer ones, and chains of no row."""
    asked = rows()[:num_rows]
    draft, _ = step(rows())
    asked = [msgspec.structs.replace(row, fanout=fanout) if row.sequence_id == 12 else row for row in asked]
    num_nodes = int(draft.starts[-1])
    used = [False] * len(draft.chains.draft.probs_NV)
    for chain, (number, rank) in enumerate(zip(draft.layout.request_C, draft.layout.rank_C, strict=True)):
        if number < num_rows and rank < asked[number].num_drafts:
            for distribution in draft.chains.draft.row_CX[chain, : asked[number].draft_length].tolist():
                used[distribution] = True
    assert 0 < sum(used) < len(used)
    for distribution, is_used in enumerate(used):
        largest = np.zeros(num_nodes + len(used))
        largest[num_nodes + distribution] = np.nan
        assert bool(broken_rows(Plan(tuple(asked)), draft, largest)) == is_used


def test_logits_of_prompts_are_split_from_those_of_nodes() -> None:
    """Rows that read without logprobs have no logits."""
    sampling = [row_of(0, TREE), row_of(1, OFF), row_of(2, RACE), row_of(3, OFF)]
    draft, _ = step(sampling)
    first, second, third, last = sampling
    second = msgspec.structs.replace(second, input_ids=(1, 2, 3), prompt_next=(2, 3))
    third = msgspec.structs.replace(third, input_ids=(1, 2))
    reading = msgspec.structs.replace(row_of(8, OFF), input_ids=(1, 2, 3), prompt_next=(2, 3, 1), emits=False)
    silent = msgspec.structs.replace(reading, prompt_next=())
    sizes = [1 + tree.num_nodes for tree in draft.trees]
    plan = Plan((first, reading, silent, second, third, last))
    kinds = [*"n" * sizes[0], *"ppp", *"pp", *"n" * sizes[1], *"n" * sizes[2], *"n" * sizes[3]]
    logits_NV = torch.arange(len(kinds)).unsqueeze(1).float()
    prompt_NV, node_NV = split_prompts(plan, draft, logits_NV)
    assert prompt_NV is not None
    assert prompt_NV.flatten().tolist() == [place for place, kind in enumerate(kinds) if kind == "p"]
    assert node_NV.flatten().tolist() == [place for place, kind in enumerate(kinds) if kind == "n"]
    prompt_NV, node_NV = split_prompts(Plan((silent, reading)), None, logits_NV[:3])
    assert prompt_NV is not None
    assert (prompt_NV.flatten().tolist(), len(node_NV)) == ([0, 1, 2], 0)
    prompt_NV, node_NV = split_prompts(Plan((first, silent, third)), draft, logits_NV)
    assert prompt_NV is None
    assert node_NV is logits_NV


def test_emitted_tokens_have_the_logprobs_of_their_nodes() -> None:
    wanted = [0, 2, None, 1, 3, None, 2, 9] * 3
    asked = [msgspec.structs.replace(row, num_logprobs=count) for row, count in zip(rows(4), wanted, strict=True)]
    draft, emissions = step(asked)
    chance = torch.Generator().manual_seed(1)
    logits_NV = torch.randn((sum(1 + tree.num_nodes for tree in draft.trees), 4), generator=chance)
    found = with_logprobs(asked, draft, logits_NV, tuple(emissions))
    assert sum(len(emission.accepted) for emission in emissions) > 8
    starts = np.cumsum([0, *(1 + tree.num_nodes for tree in draft.trees)]).tolist()
    for number, (before, after, count) in enumerate(zip(emissions, found, wanted, strict=True)):
        assert msgspec.structs.replace(after, logprobs=()) == before
        if count is None:
            assert after.logprobs == ()
            continue
        path = draft.trees[number].paths[before.rank]
        tokens = (*before.accepted, before.next_token)
        for depth, (entry, token) in enumerate(zip(after.logprobs, tokens, strict=True)):
            scores = logits_NV[starts[number] + path[depth]].log_softmax(0)
            likeliest = scores.argsort(descending=True)[:count].tolist()
            assert entry.logprob == pytest.approx(float(scores[token]))
            assert [one for one, _ in entry.top] == likeliest
            assert [score for _, score in entry.top] == pytest.approx(scores[likeliest].tolist())
    plain = [msgspec.structs.replace(row, num_logprobs=None) for row in asked]
    assert with_logprobs(plain, draft, logits_NV, tuple(emissions)) == tuple(emissions)


def test_prompts_have_the_logprobs_of_their_tokens() -> None:
    """A step without drafts has them, too."""
    wanted = [((2, 3), 1), ((), 0), ((0, 1, 2), 0)]
    plan = Plan(
        tuple(
            msgspec.structs.replace(row_of(number, RACE), prompt_next=tokens, num_prompt_logprobs=count)
            for number, (tokens, count) in enumerate(wanted)
        )
    )
    draft, emissions = step(plan.rows)
    before = StepVerdict(tuple(emissions))
    prompt_NV = torch.randn((5, 4), generator=torch.Generator().manual_seed(2))
    scores_NV = prompt_NV.log_softmax(1)
    for known in (draft, None):
        after = report(plan, known, StepLogits(prompt_NV, prompt_NV[:3]), before, 0, 0.0)
        assert after == replace(before, prompt_logprobs=after.prompt_logprobs)
        place = 0
        for entries, (tokens, count) in zip(after.prompt_logprobs, wanted, strict=True):
            for entry, token in zip(entries, tokens, strict=True):
                assert entry.logprob == pytest.approx(float(scores_NV[place, token]))
                assert [one for one, _ in entry.top] == scores_NV[place].argsort(descending=True)[:count].tolist()
                place += 1
        assert report(plan, known, StepLogits(None, prompt_NV[:3]), before, 0, 0.0) == before

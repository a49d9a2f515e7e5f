"""All chains of a one-pass head drawn at once, and the target's distribution."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu.head_decoder import ProductsHead
from engine.cpu.levels import Levels
from engine.drafting import one_pass, tables
from engine.drafting.draft import ChainShape, Draft, layout_of
from engine.fixed_edits import FixedEdits
from engine.heads.samplers import Tables
from engine.kernels.protocol import Filters
from engine.kernels.torch_kernels import TORCH
from engine.plan import LogitContext, Plan, Row
from engine.request import Sampling, Speculation
from engine.sampling.distribution import DistributionParameters
from engine.start import building
from engine.start.measuring import synthetic_plan
from engine.step.engine import Engine
from engine.text_counts import TextCounts
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.grid import grid
from tests.heads import folders
from tests.sampling.test_distribution import reference
from tests.speculation import test_served_steps as served
from tests.wrong import instead, level_by_level

TEXT = LogitContext((1,), 1, FixedEdits(Sampling(), ()), TextCounts(1))

KINDS: dict[str, Callable[..., folders.Written]] = {
    "peagle": lambda *of, **more: folders.write_eagle(*of, kind="peagle", **more),
    "dflash": lambda *of, **more: folders.write_block(*of, kind="dflash", **more),
    "dflash2": lambda *of, **more: folders.write_block(*of, kind="dflash2", **more),
    "dspark": lambda *of, **more: folders.write_block(*of, kind="dspark", **more),
}
SHAPES = (
    Speculation(rule="bv_race", num_drafts=3, draft_length=4),
    Speculation(),
    Speculation(rule="block", num_drafts=1, draft_length=2),
    Speculation(rule="traversal", draft_method="iid", num_drafts=4, draft_length=3, tree=(2, 1, 2)),
    Speculation(rule="bv_race", num_drafts=2, draft_length=1),
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
)
TREE = output_distribution.drafts("traversal", 4, draft_method="iid", tree=(2, 2))


def mixed_plan(engine: Engine) -> Plan:
    """Rows of all shapes behind different tokens, twice."""
    rows = []
    for number, (shape, sampling) in enumerate(zip(SHAPES * 2, SAMPLINGS * 2, strict=True)):
        row = synthetic_plan(engine, 1, 20 + number, shape).rows[0]
        rows.append(
            msgspec.structs.replace(
                row,
                input_ids=(number + 1,),
                draft_input_ids=(number + 1,) if shape.num_drafts else (),
                sampling=Sampling(seed=number, **sampling),
                block_ids=tuple(range(10 * number, 10 * number + 10)),
            )
        )
    return Plan(tuple(rows))


def laws_along(draft: Draft) -> list[Tensor]:
    """The distribution of every drawn token, chain by chain."""
    table = draft.chains.draft
    return [
        table.probs_NV[row_L[:length]]
        for row_L, length in zip(table.row_CX, draft.layout.length_C.tolist(), strict=True)
    ]


def drawn_both_ways(engine: Engine) -> tuple[Draft, Draft]:
    """Draw a plan at once, and level by level."""
    plan = mixed_plan(engine)
    at_once = engine.unrecorded.draw(plan)
    with level_by_level(), instead(one_pass, "may_draw_at_once", lambda *_: False):
        by_level = engine.unrecorded.draw(plan)
    assert at_once is not None
    assert by_level is not None
    return at_once, by_level


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_distributions_are_those_drawn_level_by_level(tmp_path: Path, kind: str) -> None:
    target = folders.target()
    engine = tiny.build(target, folders.load(KINDS[kind](tmp_path / "head", scale=0.5), target), num_blocks=120)
    assert engine.target.storage.hidden is not None
    torch.manual_seed(3)
    engine.target.storage.hidden.normal_()
    at_once, by_level = drawn_both_ways(engine)
    lengths = at_once.layout.length_C.tolist()
    for mine, others, length in zip(at_once.chains.tokens_CL, by_level.chains.tokens_CL, lengths, strict=True):
        assert mine[:length].tolist() == others[:length].tolist()
    for mine, others in zip(laws_along(at_once), laws_along(by_level), strict=True):
        assert torch.allclose(mine, others, atol=1e-6)
    assert len({tuple(chain) for chain in at_once.chains.tokens_CL.tolist()}) > len(lengths) // 2
    assert [tree.tokens for tree in at_once.trees] == [tree.tokens for tree in by_level.trees]


def test_the_term_that_is_stored_once_serves_draws_at_once_and_level_by_level(tmp_path: Path) -> None:
    """To the bit: there is one product."""
    target = folders.target()
    head = folders.load(KINDS["dspark"](tmp_path / "head", scale=0.5, draft_vocabulary=40), target)
    engine = tiny.build(target, head, num_blocks=120)
    assert engine.draft_runner is not None
    assert engine.draft_runner.fast_paths["fast decoder"]
    assert engine.target.storage.hidden is not None
    engine.draft_runner.backend.prepare()
    assert not head.model.markov_head.markov_w2.weight.numel()
    engine.target.storage.hidden.normal_(generator=torch.Generator().manual_seed(3))
    at_once, by_level = drawn_both_ways(engine)
    for mine, others in zip(laws_along(at_once), laws_along(by_level), strict=True):
        assert torch.equal(mine, others)


def drawn_rows(with_trees: bool) -> list[Row]:
    """Rows of other lengths with other samplings, and rows that draft nothing, the last one too."""
    shapes = [served.drafts("bv_race", 3, 1, 1, 1), served.OFF, served.drafts("block", 1, 1), served.OFF]
    if with_trees:
        shapes.insert(1, served.drafts("traversal", 2, 1, 2, draft_method="iid"))
    samplings = itertools.cycle(SAMPLINGS)
    return [served.row_of(number, {**shape, "sampling": next(samplings)}) for number, shape in enumerate(shapes * 2)]


@pytest.mark.parametrize("with_trees", [True, False])
@pytest.mark.parametrize("few", [True, False])
def test_tokens_and_distributions_are_those_of_the_draft_rows(few: bool, with_trees: bool) -> None:
    """For tokens that depend on the one before, and for others."""
    rows, vocabulary, chance = drawn_rows(with_trees), 9, np.random.default_rng(4)
    layout, cpu = layout_of(tuple(map(ChainShape.of, rows)), torch.device("cpu")), torch.device("cpu")
    firsts = np.cumsum([0, *(row.draft_length for row in rows)]).tolist()
    num_tokens = 5 if few else vocabulary
    logits_SPX = 2 * chance.standard_normal((firsts[-1], num_tokens if few else 1, num_tokens)).astype(np.float32)
    known = np.sort([chance.permutation(vocabulary)[:num_tokens] for _ in range(firsts[-1])], 1)
    uniform_LC = chance.random((layout.max_length, layout.num_chains))
    draft_rows = tables.draft_rows_of(layout)
    assert draft_rows.first_R.tolist() == [first for first, row in zip(firsts, rows, strict=False) if row.fanout]
    assert draft_rows.row_S.tolist() == [number for number, row in enumerate(rows) for _ in row.fanout]
    assert (draft_rows.leader_LC is not None) == with_trees
    drawn_CL, table = tables.draw_from(
        Tables(torch.from_numpy(logits_SPX), torch.from_numpy(known) if few else None),
        draft_rows,
        DistributionParameters.of([row.sampling for row in rows], cpu, TORCH),
        torch.from_numpy(uniform_LC),
        vocabulary,
    )
    assert table.kernels is TORCH
    for chain, number in enumerate(layout.request_C.tolist()):
        place = 0
        for depth in range(rows[number].draft_length):
            draft_row, leader_C = firsts[number] + depth, layout.levels[depth].leader_C
            probs_X = reference(logits_SPX[draft_row, place if few else 0].astype(np.float64), rows[number].sampling)
            uniform = uniform_LC[depth, chain if leader_C is None else leader_C[chain]]
            place = int(np.flatnonzero(probs_X.cumsum() > uniform * probs_X.sum())[0])
            expected_V = np.zeros(vocabulary)
            expected_V[known[draft_row] if few else slice(None)] = probs_X
            assert drawn_CL[chain, depth] == (known[draft_row, place] if few else place)
            np.testing.assert_allclose(table.probs_NV[table.row_CX[chain, depth]], expected_V, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([served.drafts("bv_race", 3, 1)], True),
        ([served.OFF, served.drafts("block", 1)], True),
        ([served.OFF], False),
        ([served.drafts("bv_race", 3, 1), {**served.OFF, "text": TEXT}], False),
        ([served.drafts("bv_race", 3, 1), {**served.OFF, "sampling": {"seed_stable": True}}], False),
        ([served.drafts("bv_race", 3, 1), served.drafts("spechub", 2, 1)], False),
    ],
)
def test_draws_that_depend_on_more_are_made_level_by_level(fields: list[dict[str, Any]], expected: bool) -> None:
    rows = tuple(served.row_of(number, one) for number, one in enumerate(fields))
    layout = layout_of(tuple(map(ChainShape.of, rows)), torch.device("cpu"))
    assert tables.may_draw_at_once(Plan(rows), layout) is expected


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "shares"), [("eagle3", True), ("dspark", False), ("dflash2", False)])
def test_weights_in_blocks_give_the_same_logits(tmp_path: Path, kind: str, shares: bool) -> None:
    target = folders.target()
    if kind == "eagle3":
        shared = ("embed_tokens", "lm_head")
        written = folders.write_eagle(
            tmp_path / "head", width=folders.TARGET_WIDTH, shares=shared, draft_vocabulary=target.vocab_size
        )
    else:
        written = folders.write_block(tmp_path / "head", kind=kind)
    head = folders.load(written, target)
    with instead(building, "find_spec", lambda *_: None):  # without Numba
        engine = tiny.build(target, head, num_blocks=120)
    assert engine.draft_runner is not None
    assert not engine.draft_runner.fast_paths["fast decoder"]
    assert engine.target.storage.hidden is not None
    assert engine.drafter is not None
    engine.target.storage.hidden.normal_(generator=torch.Generator().manual_seed(3))
    plan = Plan((mixed_plan(engine).rows[0],))
    plain_NV = engine.drafter.begin(plan)
    plain_bytes = head.weight_bytes
    bytes_in_blocks = ProductsHead(head.model).prepare()
    # The target's output head is laid out besides, and its plain weights are the target's.
    of_target = head.model.weight.nbytes if shares else 0
    assert bytes_in_blocks - of_target >= plain_bytes - head.weight_bytes > 0
    assert torch.allclose(engine.drafter.begin(plan), plain_NV, atol=1e-4)


def sampled(tmp_path: Path, kind: str, speculation: Speculation, sampling: str, num_answers: int = 2000) -> float:
    """p-value of the served output."""
    target = folders.target(output_distribution.VOCABULARY, layers=2, spread=0.25)
    more = {} if kind == "dflash2" else {"draft_vocabulary": 3}
    written = KINDS[kind](tmp_path / "head", vocabulary=output_distribution.VOCABULARY, taps=(0, 1, 2), **more)
    pair = target, folders.load(written, target)
    runner = tiny.build(*pair).draft_runner
    assert runner is not None
    assert tiny.DEVICE.type != "cpu" or runner.fast_paths["fast decoder"]
    counts = output_distribution.sample(pair, speculation, output_distribution.SAMPLINGS[sampling], num_answers)
    return output_distribution.g_test(
        counts, output_distribution.exact_distribution(target, output_distribution.SAMPLINGS[sampling])
    )


@pytest.mark.sole("sampled answers with trees of a head of one pass")
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "sampling"),
    grid(
        [(kind, sampling) for kind in KINDS for sampling in ("plain", "filtered")],
        {("dflash2", "filtered"), ("dspark", "plain")},
    ),
)
def test_output_of_trees_has_the_target_s_distribution(tmp_path: Path, kind: str, sampling: str) -> None:
    assert sampled(tmp_path, kind, TREE, sampling) > output_distribution.ALPHA


def of_another_row(draw_from: Any, *of: Any) -> Any:
    tokens_CL, distributions = draw_from(*of)
    return tokens_CL, replace(distributions, row_CX=distributions.row_CX.flip(1))


def without_filters(draw_from: Any, tables: Any, *of: Any) -> Any:
    tokens_CL, distributions = draw_from(tables, *of)
    return tokens_CL, replace(distributions, probs_NV=tables.logits_SPX[:, 0].softmax(-1))


def one_number_for_all(draw_from: Any, tables: Any, draft_rows: Any, parameters: Any, uniform_LC: Any, *of: Any) -> Any:
    """Chains that are not independent, raced as if they were."""
    first_C = torch.arange(uniform_LC.shape[1]) // 4 * 4
    return draw_from(tables, draft_rows, parameters, uniform_LC[:, first_C], *of)


def term_of_another_token(draw_below: Any, levels: Any, base_SX: Any, last_R: Any, *of: Any) -> Any:
    """Drawn from other distributions than those that are verified."""
    tokens_CL = draw_below(levels, base_SX, last_R, *of)
    draw_below(levels, base_SX, (last_R + 1) % output_distribution.VOCABULARY, *of)
    return tokens_CL


def base_of_another_row(draw_below: Any, levels: Any, base_SX: Any, *of: Any) -> Any:
    tokens_CL = draw_below(levels, base_SX, *of)
    draw_below(levels, base_SX.flip(0), *of)
    return tokens_CL


def terms_without_filters(draw_below: Any, *of: Any) -> Any:
    *before, task = of
    tokens_CL = draw_below(*of)
    draw_below(*before, task._replace(parameters=replace(task.parameters, filters=Filters())))
    return tokens_CL


def one_number_for_all_terms(draw_below: Any, *of: Any) -> Any:
    *before, task = of
    first_C = torch.arange(task.uniform_LC.shape[1]) // 4 * 4
    return draw_below(*before, task._replace(uniform_LC=task.uniform_LC[:, first_C].contiguous()))


WRONG_TERMS = {
    "the term of another token": (term_of_another_token, "plain"),
    "the base of another row": (base_of_another_row, "plain"),
    "no filters": (terms_without_filters, "filtered"),
    "one number for all chains": (one_number_for_all_terms, "plain"),
}


@pytest.mark.slow
@pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a decoder of CPUs")
@pytest.mark.parametrize("name", grid(WRONG_TERMS, {"the term of another token", "one number for all chains"}))
def test_wrong_variants_of_terms_are_rejected(tmp_path: Path, name: str) -> None:
    wrong, sampling = WRONG_TERMS[name]
    with instead(Levels, "draw_below", wrong):
        found = sampled(tmp_path, "dspark", output_distribution.SPECULATIONS["bv_race 4"], sampling, num_answers=3000)
    assert found < output_distribution.ALPHA


WRONG = {
    "the distribution of another draft row": (of_another_row, "dflash", "plain"),
    "no filters": (without_filters, "dflash", "filtered"),
    "one number for all chains": (one_number_for_all, "dflash2", "plain"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(WRONG, {"the distribution of another draft row", "no filters"}))
def test_wrong_variants_are_rejected(tmp_path: Path, name: str) -> None:
    wrong, kind, sampling = WRONG[name]
    with instead(one_pass, "draw_from", wrong):
        found = sampled(tmp_path, kind, output_distribution.SPECULATIONS["bv_race 4"], sampling, num_answers=3000)
    assert found < output_distribution.ALPHA

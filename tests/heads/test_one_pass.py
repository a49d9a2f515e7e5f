"""Heads that draft in one pass, behind the engine: P-EAGLE, DFlash, DSpark and DFlash2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.cpu.decoder import CpuDecoder
from engine.drafting import head, one_pass, reading
from engine.drafting.one_pass import BlockDrafter
from engine.heads import dflash, samplers
from engine.request import Speculation
from engine.start.loading import LoadedModel
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.grid import grid
from tests.heads import folders, oracles
from tests.heads.recording import SPECULATIONS, VOCABULARY, Oracle, Recorder, largest_error, served
from tests.heads.test_eagle import of_another_token, of_the_first_parent, one_layer_off
from tests.wrong import calls_of, instead

SLIDING, FULL = "sliding_attention", "full_attention"
FLAT = {"layout": "z-lab"}
HEADS: dict[str, dict[str, Any]] = {
    "peagle": {"kind": "peagle"},
    "peagle, two layers, norms": {
        "kind": "peagle",
        "layers": 2,
        "norm_before_fc": True,
        "draft_vocabulary": VOCABULARY,
    },
    "dflash": {},
    "dflash, z-lab": FLAT,
    "dflash, sliding layers are causal": {**FLAT, "layer_types": (SLIDING, FULL)},
    "dflash, sliding layers are not causal": {"layer_types": (SLIDING, FULL), "sliding_window_non_causal": True},
    "dflash, all layers are causal": {**FLAT, "inner": {"causal": True}},
    "dflash, no layer is causal": {**FLAT, "layer_types": (SLIDING, SLIDING), "is_causal": False},
    "dflash, from the anchor": {"sample_from_anchor": True},
    "dflash, bounded logits": {**FLAT, "inner": {"output_multiplier": 0.4, "final_logit_softcapping": 2.0}},
    "dspark": {"kind": "dspark"},
    "dspark, gated": {"kind": "dspark", "markov_head_type": "gated"},
    "dspark, recurrent": {"kind": "dspark", "markov_head_type": "rnn"},
    "dspark, recurrent, behind the anchor": {
        "kind": "dspark",
        "markov_head_type": "rnn",
        "sample_from_anchor": False,
    },
    "dflash2": {"kind": "dflash2", "layout": "z-lab", "is_causal": False, "inner": {"input_embedding_scale": 0.5}},
    "dflash2, speculators": {"kind": "dflash2", "layer_types": (SLIDING, FULL)},
}
USUAL = ("peagle", "dflash, sliding layers are causal", "dspark, recurrent", "dflash2")
"""One of each type."""


def write(folder: Path, name: str, **more: Any) -> folders.Written:
    given = {**HEADS[name], **more}
    if given.get("kind") == "peagle":
        return folders.write_eagle(folder, **given)
    return folders.write_block(folder, **given)


def oracle(written: folders.Written, target: LoadedModel) -> Oracle:
    return oracles.Masked(written, target) if "kind" not in written.extra else oracles.Block(written, target)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return folders.target(VOCABULARY)


@pytest.mark.sampled
@pytest.mark.parametrize("name", grid(HEADS, {*USUAL, "dflash, z-lab", "dflash, from the anchor"}))
def test_logits_are_those_of_the_formulas(target: LoadedModel, tmp_path: Path, name: str) -> None:
    """At the roots and below tokens that were drafted."""
    written = write(tmp_path / "head", name)
    recorder, texts = served(target, written, SPECULATIONS["chains"], few=True)
    assert largest_error(target, written, oracle(written, target), recorder, texts, most=20) < 1e-3


@pytest.mark.parametrize("name", USUAL)
def test_texts_are_read_in_passes_of_bounded_size(target: LoadedModel, tmp_path: Path, name: str) -> None:
    num_cut = 0

    def short(readings: Any, rows: Any, ends_wanted: bool) -> Any:
        nonlocal num_cut
        passes = readings(rows, ends_wanted, most_rows=2)
        num_cut += bool(rows) and bool(rows[0].fanout) and len(passes) > 1
        return passes

    written = write(tmp_path / "head", name)
    with instead(head, "readings", short):
        recorder, texts = served(target, written, SPECULATIONS["chains"], few=True)
    assert num_cut > 0
    assert largest_error(target, written, oracle(written, target), recorder, texts, most=12) < 1e-3


FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {"sample_from_anchor": True}),
    ("dflash, sliding layers are causal", {"is_causal": False}),
    ("dflash, sliding layers are causal", {"layer_types": (FULL, FULL)}),
    ("dflash, z-lab", {"inner": {"output_multiplier": 0.5}}),
    ("dflash, z-lab", {"inner": {"final_logit_softcapping": 1.0}}),
    ("dflash, z-lab", {"inner": {"input_embedding_scale": 0.5}}),
    ("dflash, z-lab", {"inner": {"causal": True}}),
    ("dspark", {"sample_from_anchor": False}),
    ("dflash2", {"inner": {"selector_top_k": 3}}),
]


@pytest.mark.parametrize(("name", "flag"), grid(FLAGS, [FLAGS[3], FLAGS[8]]))
def test_every_flag_changes_the_logits(target: LoadedModel, tmp_path: Path, name: str, flag: dict[str, Any]) -> None:
    plain = write(tmp_path / "plain", name, **({"inner": {}} if "inner" in flag else {}))
    changed = write(tmp_path / "changed", name, **flag)
    recorder, texts = served(target, changed, SPECULATIONS["chains"], few=True)
    assert largest_error(target, changed, oracle(changed, target), recorder, texts, most=12) < 1e-3
    assert largest_error(target, plain, oracle(plain, target), recorder, texts, most=12) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    grid([(name, shape) for name in USUAL for shape in SPECULATIONS], {("dspark, recurrent", "tree")}),
)
def test_logits_do_not_depend_on_what_came_before(target: LoadedModel, tmp_path: Path, name: str, shape: str) -> None:
    """Logits are those of a fresh text."""
    written = write(tmp_path / "head", name, draft_vocabulary=83, scale=0.3)
    recorder, texts = served(target, written, SPECULATIONS[shape])
    assert largest_error(target, written, oracle(written, target), recorder, texts, most=30) < 1e-3


@pytest.mark.slow  # test_recorded_heads.py attends with the kernel's operands, in torch
@pytest.mark.parametrize("name", ["eagle", *USUAL])
def test_attention_by_the_kernel_of_devices_gives_the_same_logits(
    target: LoadedModel, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("triton")
    written = folders.write_eagle(tmp_path / "head") if name == "eagle" else write(tmp_path / "head", name)
    recorder, texts = served(target, written, SPECULATIONS["tree"], few=True, paged=True)
    expected = oracles.Eagle(written, target) if name == "eagle" else oracle(written, target)
    assert largest_error(target, written, expected, recorder, texts, most=20) < 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("attention_in_torch")
def test_a_convolution_left_out_is_found_out(target: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    written = write(tmp_path / "head", "dflash2")
    with instead(dflash.Convolution, "convolve", lambda _, self, side, kernel, state: state):
        recorder, texts = served(target, written, SPECULATIONS["chains"], few=True, paged=True)
        assert largest_error(target, written, oracle(written, target), recorder, texts, most=20) > 1e-2


@pytest.mark.parametrize("name", grid(["eagle", *USUAL], {"dspark, recurrent"}))
def test_tokens_accepted_from_text_drafts_are_read_too(target: LoadedModel, tmp_path: Path, name: str) -> None:
    if name == "eagle":
        written = folders.write_eagle(tmp_path / "head", draft_vocabulary=83, scale=0.3)
        expected: Oracle = oracles.Eagle(written, target)
    else:
        written = write(tmp_path / "head", name, draft_vocabulary=83, scale=0.3)
        expected = oracle(written, target)
    engine = tiny.build(target, folders.load(written, target), budget=64, max_copied_tokens=8)
    recorder = Recorder(engine)
    both = Speculation(rule="bv_race", num_drafts=2, draft_length=3, drafters=("model", "prediction"))
    prompts = [tiny.prompts(VOCABULARY, [10], seed=number)[0] * 3 for number in range(4)]
    plain = [tiny.request(str(number), prompt, tiny.OFF, max_tokens=15) for number, prompt in enumerate(prompts)]
    begun = tiny.run(tiny.build(target, None, budget=64), plain).tokens
    requests = [
        replace(tiny.request(str(number), prompt, both, max_tokens=30), prediction=tuple(begun[str(number)]))
        for number, prompt in enumerate(prompts)
    ]
    run = tiny.run(engine, requests)
    outcomes = [one for of_request in run.outcomes.values() for one in of_request]
    assert any(count.num_accepted for one in outcomes for count in one.text_draft_counts)
    texts = [prompt + run.tokens[str(number)] for number, prompt in enumerate(prompts)]
    assert largest_error(target, written, expected, recorder, texts, most=25) < 1e-3


def draft_row_before(places_of: Any, *operands: Any) -> Any:
    places = places_of(*operands)
    return places._replace(draft_rows=tuple(row_N - int(depth > 0) for depth, row_N in enumerate(places.draft_rows)))


def without_previous(below: Any, sampler: Any, draft_row_N: Any, previous_N: Any, parent_N: Any) -> Any:
    return below(sampler, draft_row_N, previous_N * 0, parent_N)


def all_causal(nodes: Any, tokens: Any, _is_causal: bool) -> Any:
    return nodes(tokens, True)


WRONG: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "states of one layer before": ("dflash, z-lab", CpuDecoder, "_place_of", one_layer_off),
    "states of another token": ("dflash, z-lab", reading, "_slots_before", of_another_token),
    "another draft row": ("dflash, z-lab", "engine.drafting.head", "places_of", draft_row_before),
    "a block that is causal": ("dflash, z-lab", one_pass, "mask_nodes", all_causal),
    "no token before": ("dspark", samplers.Markov, "below", without_previous),
    "memory of another parent": ("dspark, recurrent", "engine.drafting.head", "places_of", of_the_first_parent),
    "no predecessor": ("dflash2", samplers.Selected, "below", without_previous),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", grid(WRONG, {"no token before", "memory of another parent"}))
def test_wrong_variants_are_found_out(target: LoadedModel, tmp_path: Path, name: str) -> None:
    head, *variant = WRONG[name]
    written = write(tmp_path / "head", head, scale=0.3)
    with instead(*variant):
        recorder, texts = served(target, written, SPECULATIONS["chains"])
    assert largest_error(target, written, oracle(written, target), recorder, texts, most=30) > 1e-2


def in_the_pool(_table_of: Any, _: BlockDrafter, row: Any, _number: int) -> tuple[int, ...]:
    """Blocks reach into those of others instead of spare ones."""
    return (*row.block_ids, *range(4))


@pytest.mark.sampled
@pytest.mark.parametrize("is_wrong", [False, True])
def test_blocks_that_reach_beyond_a_text_s_own_leave_the_others_alone(
    target: LoadedModel, tmp_path: Path, is_wrong: bool
) -> None:
    written = write(tmp_path / "head", "dflash, z-lab", size=14, scale=0.3)
    one_chain = Speculation(rule="block", num_drafts=1, draft_length=3)
    with instead(BlockDrafter, "table_of", in_the_pool) if is_wrong else nullcontext():
        recorder, texts = served(target, written, one_chain)
    error = largest_error(target, written, oracle(written, target), recorder, texts, most=30)
    assert (error > 1e-2) == is_wrong


def test_several_chains_cost_no_further_pass(target: LoadedModel, tmp_path: Path) -> None:
    written = write(tmp_path / "head", "dflash2")
    passes = []
    for speculation in (SPECULATIONS["chains"], SPECULATIONS["tree"]):
        engine = tiny.build(target, folders.load(written, target))
        assert engine.draft_runner is not None
        runner = type(engine.draft_runner)
        with calls_of(runner, "store") as stored, calls_of(runner, "block") as blocks:
            found = tiny.run(engine, [tiny.request("a", [1, 2, 3], speculation, temperature=1.0, max_tokens=20)])
        # One pass reads the text and drafts; the prompt's step only reads.
        assert len(blocks) == sum(outcome.num_nodes > 0 for outcome in found.outcomes["a"])
        passes.append(len(stored))
    assert passes[0] == passes[1] <= 3


# -- the output ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    """A target whose output can be enumerated."""
    return folders.target(output_distribution.VOCABULARY, layers=2, spread=0.25)


@pytest.mark.slow  # test_tables.py has wrong rows and wrong terms in the gate
def test_verifying_with_the_distribution_of_another_path_is_rejected(small: LoadedModel, tmp_path: Path) -> None:
    """Tokens that depend on the one before, verified as if they did not."""
    from engine.drafting import chains

    written = write(
        tmp_path / "head",
        "dspark, gated",
        vocabulary=output_distribution.VOCABULARY,
        taps=(0, 1, 2),
        draft_vocabulary=3,
    )
    pair = small, folders.load(written, small)

    def of_the_first_node(
        node_distributions: Any, rows: Any, nodes: Any, logits_NV: Any, parameters: Any, probs_NV: Any
    ) -> Any:
        drawn_from, order = node_distributions(rows, nodes, logits_NV, parameters)
        same = logits_NV[:1].expand_as(logits_NV)
        node_distributions(rows, nodes, same.contiguous(), parameters, probs_NV)
        return drawn_from, order

    with instead(chains, "node_distributions", of_the_first_node):
        counts = output_distribution.sample(
            pair, output_distribution.SPECULATIONS["bv_race 4"], output_distribution.SAMPLINGS["plain"]
        )
    assert (
        output_distribution.g_test(
            counts, output_distribution.exact_distribution(small, output_distribution.SAMPLINGS["plain"])
        )
        < output_distribution.ALPHA
    )

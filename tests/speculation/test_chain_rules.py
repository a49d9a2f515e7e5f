"""Every rule is exact: by enumeration at 1e-11, and golden vectors at 1e-9."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, ProbsTable, TargetShifts
from engine.kernels.torch_kernels import TORCH
from engine.plan import TargetShift
from engine.speculation.target_shift import effective_laws
from engine.speculation.verification import RULES
from engine.speculation.verification.greedy_block import greedy_blocks, next_token_weights, selection_at, shifts_after
from tests.oracles import bounds
from tests.oracles.enumeration import (
    EveryChain,
    TabularModel,
    block_outcomes,
    expected_accepted,
    first_block_law,
    joint,
    race,
    rule_outcomes,
)
from tests.speculation.exact import (
    BLOCK_NAMES,
    GOLDEN,
    distance_from_target,
    from_prefix,
    golden_model,
    golden_rows,
    outcomes_of,
    random_model,
    stream_distance,
)
from tests.speculation.wrong import WRONG, bias, published_spectr_gbv

BLOCK_CASES = GOLDEN["block"]


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["64", "32"])
@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda c: f"V{c['V']}L{c['L']}K{c['K']}-{c['kind']}")
def test_golden_block_law_and_expected_length(case: dict, dtype: torch.dtype, precision: float) -> None:
    model = replace(golden_model(case), dtype=dtype)
    for rule, name in BLOCK_NAMES.items():
        outcomes = outcomes_of(rule, model, case["K"])
        assert expected_accepted(outcomes) == pytest.approx(case["E_tau"][name], abs=precision), rule
        law = first_block_law(outcomes)
        assert sum(law.values()) == pytest.approx(1, abs=precision)
        for key, probability in case["first_block_law"].get(name, {}).items():
            assert law.get(key, 0.0) == pytest.approx(probability, abs=precision), (rule, key)


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda c: f"V{c['V']}L{c['L']}K{c['K']}-{c['kind']}")
def test_golden_changed_targets(case: dict) -> None:
    """The law that holds right after a greedy block, at the node the next step begins with."""
    model = golden_model(case)
    for rule, name in (("greedy_block", "gbv"), ("spectr_gbv", "race_select_gbv")):
        ends = {(*o.accepted, o.next_token): o.shifts for o in outcomes_of(rule, model, case["K"]) if o.shifts}
        for key, row in case["modified_target_next_row"][name].items():
            prefix = tuple(int(token) for token in key.split(","))
            after = from_prefix(model, prefix, model.length - len(prefix), ends[prefix])
            laws = EveryChain.of(after).target.rows_at(0)
            np.testing.assert_allclose(laws[0].numpy(), row, atol=1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda c: f"V{c['V']}L{c['L']}K{c['K']}-{c['kind']}")
def test_golden_theory_of_blocks(case: dict) -> None:
    """Bounds, and the law of the chain that the score race selects, node by node."""
    model, stored, size = golden_model(case), case["theory"], (case["V"], case["L"], case["K"])

    def laws(prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(model.target[prefix]), np.asarray(model.draft[prefix])

    assert bounds.selected_block_bound(laws, *size) == pytest.approx(stored["spectrgbv_bound"], abs=1e-9)
    bound = bounds.block_length_bound(laws, *size)
    assert bound == pytest.approx(stored["sum_alpha_star_levels"], abs=1e-9)
    race_length = expected_accepted(outcomes_of("bv_race", model, case["K"]))
    assert race_length == pytest.approx(stored["bv_race_formula"], abs=1e-9)
    for rule in BLOCK_NAMES:
        length = expected_accepted(outcomes_of(rule, model, case["K"]))
        assert length <= stored.get("ot_optimum_LP", bound) + 1e-7
    every = EveryChain.of(model)
    known = greedy_blocks(every.chains, every.target, torch.full_like(every.chains.length_C, case["K"]))
    for i, path in enumerate(every.paths):
        for depth in range(1, model.length + 1):
            if (mass := joint(model.target, path[:depth])) > 0 and joint(model.draft, path[:depth]) > 0:
                gamma = float(known.state_CX4[i, depth, 3])
                assert gamma * mass == pytest.approx(case["qGamma"][",".join(map(str, path[:depth]))], abs=1e-9)


@pytest.mark.parametrize("case", BLOCK_CASES, ids=lambda c: f"V{c['V']}L{c['L']}K{c['K']}-{c['kind']}")
def test_closed_forms_of_expected_lengths(case: dict) -> None:
    """Means over the target's own paths are what the rules' outcomes give, enumerated."""
    model = golden_model(case)
    paths = list(itertools.product(range(case["V"]), repeat=case["L"]))
    mass = np.array([joint(model.target, path) for path in paths])
    with np.errstate(divide="ignore"):
        log_p, log_q = (
            np.log([[float(laws[path[:i]][token]) for i, token in enumerate(path)] for path in paths])
            for laws in (model.target, model.draft)
        )
    reached = mass > 0
    known: dict[str, float] = {}
    for rule, verification in (("token", "token"), ("block", "block"), ("greedy_block", "greedy")):
        lengths = bounds.expected_block_length(log_p[reached], log_q[reached], 1, verification)
        known[rule] = float((mass[reached] * lengths).sum())
        assert known[rule] == pytest.approx(expected_accepted(outcomes_of(rule, model, 1)), abs=1e-9)
    race_length, selected = (
        float(mass[reached] @ bounds.expected_block_length(log_p[reached], log_q[reached], case["K"], verification))
        for verification in ("block", "greedy")
    )
    assert race_length == pytest.approx(case["theory"]["bv_race_formula"], abs=1e-9)
    assert selected == pytest.approx(case["theory"]["spectrgbv_bound"], abs=1e-9)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["64", "32"])
@pytest.mark.parametrize("case", GOLDEN["layers"], ids=lambda c: f"V{c['V']}L{c['L']}K{c['K']}")
def test_golden_nested_layers(case: dict, dtype: torch.dtype, precision: float) -> None:
    """Forced trajectories through several windows: active shifts, effective rows and residuals."""
    target, draft = golden_rows(case["rows"], "p"), golden_rows(case["rows"], "q")
    shifts: tuple[TargetShift, ...] = ()
    for step in case["steps"]:
        prefix, accepted, token = tuple(step["prefix"]), tuple(step["accepted"]), step["residual_token"]
        assert [len(prefix) + shift.remaining for shift in shifts] == [a["end"] for a in step["active_layers"]]
        for shift, stored in zip(shifts, step["active_layers"], strict=True):
            np.testing.assert_allclose(
                shift.state, [stored[k] for k in ("r", "ubar", "carry", "gamma")], atol=precision
            )
        # Only the rows on the forced path are stored; the chain's other rows do not matter.
        path = (*accepted, token)
        rows = [prefix + path[:i] for i in range(len(accepted) + 1)]
        chains = Chains(
            torch.tensor([[*path, *[0] * case["L"]][: case["L"]]]),
            torch.tensor([case["L"]]),
            torch.tensor([0]),
            ProbsTable(
                torch.tensor(np.array([draft[row] for row in rows]), dtype=dtype),
                torch.tensor([[min(i, len(accepted)) for i in range(case["L"])]]),
                TORCH,
            ),
            (1, 1),
            shifts=shift_tensors(shifts),
        )
        plain = ProbsTable(
            torch.tensor(np.array([target[row] for row in rows]), dtype=dtype),
            torch.tensor([[min(i, len(accepted)) for i in range(case["L"] + 1)]]),
            TORCH,
        )
        laws, states = effective_laws(chains, plain)
        np.testing.assert_allclose(laws.rows_at(0)[0].numpy(), step["effective_target_row"], atol=precision)
        count, tau = torch.tensor([case["K"]]), torch.tensor([len(accepted)])
        known = greedy_blocks(chains, laws, count)
        selection = selection_at(chains, laws, known, count, tau)
        weights = next_token_weights(chains, selection, tau)[0]
        np.testing.assert_allclose((weights / weights.sum()).numpy(), step["residual_row"], atol=precision)
        after = shifts_after(chains, plain, states, selection, count, tau, torch.tensor([token]))
        rows_of = zip(after.remaining_CM[0].tolist(), after.state_CM4[0].tolist(), strict=True)
        shifts = tuple(TargetShift(left, tuple(state), case["K"]) for left, state in rows_of if left > 0)


def shift_tensors(shifts: tuple[TargetShift, ...]) -> TargetShifts | None:
    if not shifts:
        return None
    return TargetShifts(
        torch.tensor([[shift.remaining for shift in shifts]]),
        torch.tensor([[shift.state for shift in shifts]], dtype=torch.float64),
        torch.tensor([[shift.num_chains for shift in shifts]]),
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]), st.sampled_from(["any", "equal"]))
def test_chain_rules_emit_the_target_law(seed: int, num_chains: int, kind: str) -> None:
    model = random_model(seed, kind=kind)
    for rule in ("token", "block", "bv_race"):
        assert distance_from_target(model, outcomes_of(rule, model, num_chains)) < 1e-11


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([("greedy_block", 1), ("spectr_gbv", 2), ("traversal", 2), ("block", 1), ("weighted_race", 3)]),
    st.sampled_from(["any", "equal", "dense"]),
)
def test_streams_over_any_laws(seed: int, rule: tuple[str, int], kind: str) -> None:
    """Zeros, ties, equal laws, disjoint supports, one-hot rows: three tokens over all steps."""
    world = random_model(seed, vocabulary=2, length=4, kind=kind)
    step = lambda model: outcomes_of(rule[0], model, rule[1])  # noqa: E731
    assert stream_distance(world, step, num_tokens=3, length=2) < 1e-11


STREAMS = [
    (rule, method, drafts)
    for rule in RULES
    for method in RULES[rule].draft_methods
    for drafts in (1, 2, 3, 4)
    if drafts <= (2 if method == "spechub" else RULES[rule].max_drafts or drafts)
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["any", "dense", "equal"])
@pytest.mark.parametrize(("rule", "method", "drafts"), STREAMS)
def test_the_stream_of_several_steps_has_the_target_law(rule: str, method: str, drafts: int, kind: str) -> None:
    """Three tokens over all steps, every rule with its draft methods."""
    world = random_model(3 + drafts, vocabulary=2, length=4, kind=kind)
    step = lambda model: outcomes_of(rule, model, drafts, method)  # noqa: E731
    assert stream_distance(world, step, num_tokens=3, length=2) < 1e-11


TREES_THAT_BRANCH_LATER = [
    ("rrs_without_replacement", "without_replacement", (2, 2)),
    ("rrs_without_replacement", "iid", (2, 2)),
    ("traversal", "without_replacement", (2, 2)),
    ("traversal", "without_replacement", (1, 3)),
    ("traversal", "iid", (2, 2)),
    ("weighted_race", "iid", (2, 2)),
    ("ot_lp", "iid", (2, 2)),
    ("rrs", "iid", (2, 2)),
    ("spechub", "spechub", (2, 2)),
    ("kseq", "iid", (1, 3)),
    ("greedy", "greedy", (2, 2)),
    ("greedy", "greedy", (1, 3)),
    ("nss", "spechub", (2, 2)),
    ("nss", "most_likely", (2, 2)),
    ("nss", "most_likely", (1, 3)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("rule", "method", "tree"), TREES_THAT_BRANCH_LATER)
def test_trees_that_branch_later_keep_the_target_law(rule: str, method: str, tree: tuple[int, ...]) -> None:
    for seed in range(4):
        world = random_model(seed, vocabulary=3, length=3, kind="any" if seed % 2 else "dense")
        step = lambda model: rule_outcomes(rule, model, tree, method)  # noqa: E731
        assert stream_distance(world, step, num_tokens=2, length=2) < 1e-11


@pytest.mark.sampled
@pytest.mark.parametrize(("rule", "drafts"), [("greedy_block", 1), ("spectr_gbv", 2), ("spectr_gbv", 4)])
def test_nested_target_changes_keep_the_target_law(rule: str, drafts: int) -> None:
    """Blocks of three tokens over five: a block begins inside the window of another."""
    world = random_model(8, vocabulary=2, length=7, kind="dense")
    step = lambda model: outcomes_of(rule, model, drafts)  # noqa: E731
    assert stream_distance(world, step, num_tokens=5, length=3) < 1e-11
    without = lambda model: [replace(o, shifts=()) for o in outcomes_of(rule, model, drafts)]  # noqa: E731
    assert stream_distance(world, without, num_tokens=5, length=3) > 1e-3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3))
def test_inequalities_between_rules(seed: int, drafts: int) -> None:
    """Sum min(P, Q) is what greedy block verification keeps."""
    model = random_model(seed, vocabulary=2, length=3)
    nodes = [path for depth in (1, 2, 3) for path in model.paths(depth)]
    pairs = [(joint(model.target, node), joint(model.draft, node)) for node in nodes]
    kept = expected_accepted(outcomes_of("greedy_block", model, 1))
    assert kept == pytest.approx(sum(min(pair) for pair in pairs), abs=1e-10)
    bound = sum(p * (1 - (1 - min(1.0, q / p)) ** drafts) for p, q in pairs if p > 0)
    assert expected_accepted(outcomes_of("spectr_gbv", model, drafts)) >= bound - 1e-10
    block, token = (expected_accepted(outcomes_of(rule, model, 1)) for rule in ("block", "token"))
    assert kept + 1e-10 >= block >= token - 1e-10
    assert expected_accepted(outcomes_of("traversal", model, 1)) == pytest.approx(block, abs=1e-10)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_race_of_unlike_chains_emits_the_target_law(seed: int) -> None:
    """Chains from different draft models may race each other."""
    model = random_model(seed)
    other = TabularModel(model.target, random_model(seed + 1).draft, model.vocabulary, model.length)
    short = TabularModel(model.target, other.draft, model.vocabulary, 1)
    outcomes = race([block_outcomes(EveryChain.of(m)) for m in (model, other, short)])
    assert distance_from_target(model, outcomes) < 1e-11


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_caught(name: str) -> None:
    """The enumeration finds rules that are nearly right: it is a test that can fail."""
    model = random_model(11, kind="dense")
    for rule in ("block", "bv_race", "traversal", "rrs", "greedy"):
        own = RULES[rule].draft_methods[0]
        assert distance_from_target(model, outcomes_of(rule, model, 2, own)) < 1e-12
    assert bias(name, model) > 1e-3


@pytest.mark.parametrize("case", GOLDEN["author_code_not_lossless"], ids=lambda c: f"V{c['V']}L{c['L']}-{c['kind']}")
def test_the_published_acceptance_of_spectr_gbv_is_caught(case: dict) -> None:
    """It is biased by what the referee found, where the exact rule is not."""
    model = golden_model(case)
    outcomes = published_spectr_gbv(model, case["K"])
    assert sum(o.probability for o in outcomes) == pytest.approx(1, abs=1e-9)
    assert expected_accepted(outcomes) == pytest.approx(case["E_tau"], abs=1e-9)
    if case["L"] == case["T"] == 1:
        law = np.zeros(case["V"])
        for outcome in outcomes:
            first = outcome.accepted[0] if outcome.accepted else outcome.next_token
            law[first] += outcome.probability
        distance = 0.5 * np.abs(law - model.target[()]).sum()
        assert distance == pytest.approx(case["TV_output_vs_target"], abs=1e-9)
        assert distance > 1e-2
    assert distance_from_target(model, outcomes) > 1e-3


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_float32_edges_give_a_token_with_mass(name: str, uniform: float) -> None:
    """u = 0, just below 1, zero rows, sums that miss 1, ratios of e^50."""
    torch.manual_seed(0)
    vocabulary, length = RULES[name].max_vocabulary or 50, 4
    target_NV = torch.rand(length + 1, vocabulary).softmax(-1) * (1 + 3e-7)
    draft_NV = torch.rand(length, vocabulary).softmax(-1) * (1 - 3e-7)
    target_NV[:, 7] = 0
    target_NV[1] = 0
    target_NV[1, 3] = 1
    draft_NV[2] = target_NV[2]
    draft_NV[3] = 1e-22
    draft_NV[3, 5] = 1
    tokens_CL = torch.tensor([[1, 3, 4, 5], [7, 3, 4, 5], [1, 2, 4, 9]])
    if RULES[name].max_drafts == 1:
        tokens_CL = tokens_CL[:1]
    count = len(tokens_CL)
    steps = torch.arange(length + 1).expand(count, -1)
    chains = Chains(
        tokens_CL,
        torch.full((count,), length),
        torch.zeros(count, dtype=torch.int64),
        ProbsTable(draft_NV, steps[:, :length], TORCH),
        (1, count),
    )
    target = ProbsTable(target_NV, steps, TORCH)
    full = torch.full((count,), uniform, dtype=torch.float64)
    each = full.unsqueeze(1).expand(count, length)
    noise = ChainNoise(each, full, full, each, full)
    verdict = RULES[name].verify(chains, target, noise)
    accepted, token = int(verdict.accepted_B[0]), int(verdict.next_token_B[0])
    chain = tokens_CL[int(verdict.chain_B[0])]
    for depth in range(accepted):
        assert target_NV[depth, chain[depth]] > 0
    assert target_NV[accepted, token] > 0


def test_ragged_chains_ignore_what_lies_beyond_their_end() -> None:
    """A chain of length 0 is plain decoding; garbage beyond a chain's end changes nothing."""
    torch.manual_seed(1)
    target_NV, draft_NV = torch.rand(8, 6).softmax(-1), torch.rand(8, 6).softmax(-1)
    numbers = torch.rand(2, 9, dtype=torch.float64)
    noise = ChainNoise(numbers[:, :3], numbers[:, 3], numbers[:, 4], numbers[:, 5:8], numbers[:, 8])

    def verdict(beyond: int) -> tuple[list[int], list[int]]:
        chains = Chains(
            torch.tensor([[1, beyond, beyond], [beyond, beyond, beyond]]),
            torch.tensor([1, 0]),
            torch.tensor([0, 1]),
            ProbsTable(draft_NV, torch.tensor([[0, beyond, beyond], [beyond] * 3]), TORCH),
            (2, 1),
        )
        target = ProbsTable(target_NV, torch.tensor([[0, 1, beyond, beyond], [2, beyond, beyond, beyond]]), TORCH)
        result = RULES["bv_race"].verify(chains, target, noise)
        return result.accepted_B.tolist(), result.next_token_B.tolist()

    assert verdict(2) == verdict(5)
    accepted, tokens = verdict(0)
    assert accepted[1] == 0
    assert tokens[1] == int(categorical(target_NV[2:3], noise.residual_C[1:2]))


@pytest.mark.slow
def test_golden_monte_carlo() -> None:
    """The whole batched rule, noise included, on the largest golden case."""
    case = max(BLOCK_CASES, key=lambda c: c["V"] ** c["L"] * c["K"])
    model, count = golden_model(case), 60_000
    rng = np.random.default_rng(5)
    prefixes = {prefix: i for i, prefix in enumerate(model.target)}
    target_NV = torch.tensor([list(row) for row in model.target.values()], dtype=torch.float32)
    draft_NV = torch.tensor([list(row) for row in model.draft.values()], dtype=torch.float32)
    child = torch.tensor([[prefixes.get((*p, t), 0) for t in range(model.vocabulary)] for p in prefixes])
    num_chains = count * case["K"]
    node = torch.zeros(num_chains, dtype=torch.int64)
    nodes, tokens = [node], []
    for _ in range(model.length):
        token = categorical(draft_NV[node], torch.from_numpy(rng.random(num_chains)))
        node = child[node, token]
        tokens.append(token)
        nodes.append(node)
    node_CX = torch.stack(nodes, 1)
    chains = Chains(
        torch.stack(tokens, 1),
        torch.full((num_chains,), model.length),
        torch.arange(count).repeat_interleave(case["K"]),
        ProbsTable(draft_NV, node_CX[:, : model.length], TORCH),
        (count, case["K"]),
    )
    numbers = torch.from_numpy(rng.random((num_chains, 2 * model.length + 3)))
    parts = numbers.split([model.length, 1, 1, model.length, 1], 1)
    noise = ChainNoise(parts[0], parts[1][:, 0], parts[2][:, 0], parts[3], parts[4][:, 0])
    for rule in ("bv_race", "spectr_gbv", "traversal"):
        verdict = RULES[rule].verify(chains, ProbsTable(target_NV, node_CX, TORCH), noise)
        mean = float(verdict.accepted_B.double().mean())
        error = float(verdict.accepted_B.double().std()) / count**0.5
        assert mean == pytest.approx(case["E_tau"][BLOCK_NAMES[rule]], abs=4 * error)

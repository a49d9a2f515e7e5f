"""Inputs of a step's rules, and the results made of their verdicts, recomputed by hand.

Requests of many kinds run together. In every step each drafted chain is compared with what the plan asked for; each
distribution along it with plain transformers, edited and filtered by hand; each uniform number with its name; and each
emission with the chain it comes from. What the rules decide is tested elsewhere (tests/speculation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from engine.drafting.draft import Draft, method_of, with_tokens
from engine.kernels.protocol import ChainNoise, Chains, ProbsTable
from engine.kernels.torch_kernels import TORCH
from engine.models.loading import LoadedModel
from engine.plan import Emission, Plan, Row, StepVerdict
from engine.request import Request, Speculation
from engine.sampling.edits import NodeContext
from engine.sampling.noise import Purpose, uniform
from engine.speculation.drafting import children
from engine.speculation.gap import acceptance_gap
from engine.speculation.verification import RULES, OverAcceptance
from engine.speculation.verification.text_drafts import walk
from engine.step import eager, report, verify
from engine.step.engine import Engine
from tests.engine import tiny
from tests.sampling.test_distribution import reference
from tests.sampling.test_edits import VOCABULARY, by_hand
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="the same by hand is computed on a CPU")

EDITS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "logit_bias": ((3, 0.7),),
    "bad_words": ((4, 5),),
}
SHARE = 0.8
"""Share of steps whose gap is observed."""
# So that text drafts are followed now and then.
FEW: dict[str, Any] = {"allowed_token_ids": (5, 11)}
WISHES: list[tuple[Speculation, dict[str, Any]]] = [
    (Speculation(rule="block", num_drafts=1, draft_length=3), {}),
    (Speculation(rule="bv_race", num_drafts=4, draft_length=3), {"temperature": 0.7, "top_k": 5}),
    (Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 2, 1)), EDITS),
    (Speculation(rule="greedy", num_drafts=3, draft_length=2, tree=(1, 3)), {"min_p": 0.02}),
    (Speculation(rule="rrs_without_replacement", num_drafts=4, draft_length=2, tree=(2, 2)), {"seed_stable": True}),
    (Speculation(rule="bv_race", num_drafts=3, draft_length=2), {"temperature": 0.0}),
    (Speculation(rule="rrs_without_replacement", num_drafts=3, draft_length=2), {"temperature": 0.0}),
    (Speculation(rule="token", num_drafts=1, draft_length=3, over_acceptance=0.3), {}),
    (tiny.OFF, EDITS),
    (Speculation(rule="bv_race", num_drafts=2, draft_length=3, drafters=("model", "prompt_lookup")), FEW),
    (Speculation(drafters=("prompt_lookup", "prediction")), FEW),
    (Speculation(drafters=("prompt_lookup",)), {"seed_stable": True, **FEW}),
    *[(Speculation(drafters=("prompt_lookup",)), FEW)] * 4,
    (Speculation(rule="spectr_gbv", num_drafts=3, draft_length=3), {}),
    (Speculation(rule="spechub", num_drafts=2, draft_length=1), {}),
]


EDITED = {str(number) for number, (_, more) in enumerate(WISHES) if more is EDITS or "allowed_token_ids" in more}


def plain_copy(model: LoadedModel) -> Any:
    model.model.set_attn_implementation("eager")
    return model.model


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any]:
    """Target and draft, as transformers runs them."""
    target = tiny.llama(1, VOCABULARY)
    return plain_copy(target), plain_copy(tiny.perturbed(target, 2, 0.1))


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
        """Text drafts are followed by their distributions and numbers; what was refused is not emitted."""
        starts = np.cumsum([0, *(1 + tree.num_nodes for tree in draft.trees)]).tolist()
        found = verify._walks(rows, draft, target.probs_NV, starts)
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
            assert taken == walk(tree, row.first_text_draft, probability, numbers.tolist())
            emitted = [*emission.accepted, emission.next_token]
            assert emitted[: taken.depth] == [tree.tokens[node - 1] for node in taken.path[1:]]
            assert emitted[taken.depth] not in taken.refused
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
        """Children of a node by its method and by the numbers of the first chains through them, which lead them."""
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
        """Return the scores whose largest are a deterministic row's drafts: its logits, or the race of its tokens."""
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
        alone = verify(chains.select(index), target.select(index), noise.select(index))
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
        """A node counts for the first text draft through it; with drawn chains, some of the path may be theirs."""
        tree, seen = draft.trees[number], {0}
        assert [one.name for one in emission.text_draft_counts] == [one.source for one in row.text_drafts]
        for one, chain in zip(emission.text_draft_counts, tree.paths[row.first_text_draft :], strict=True):
            accepted = len(set(chain) & set(path) - seen)
            assert (one.num_chains, one.num_nodes) == (1, len(set(chain) - seen))
            assert one.num_accepted <= accepted
            assert row.fanout or one.num_accepted == accepted
            seen |= set(chain)

    def gap(self, plan: Plan, draft: Draft, step: int, before: StepVerdict, after: StepVerdict) -> None:
        """On a share of the steps that of one row, from its distributions at the root and the first drafted tokens."""
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


def known(draft: Draft) -> Draft:
    """With its tokens, wherever they are."""
    return draft if draft.tokens_M is None else with_tokens(draft, draft.tokens_M.tolist())


@pytest.fixture
def checked(plain: tuple[Any, Any]) -> Iterator[Checked]:
    """An engine that is built now has its steps checked."""
    one = Checked(*plain)

    def verifying_checked(decide: Any, plan: Plan, draft: Draft | None, logits_NV: Tensor) -> StepVerdict:
        one.plan(plan)
        verdict = decide(plan, draft, logits_NV)
        if draft is not None:
            one.seen["not merged"] += draft.tokens_M is not None
            one.step(plan, known(draft), logits_NV, verdict.emissions)
        return verdict

    def observing_checked(
        observe: Any, plan: Plan, draft: Draft, logits_NV: Tensor, verdict: StepVerdict, step: int, _: float
    ) -> StepVerdict:
        one.logprobs(plan, verdict)
        for number in range(10 * step, 10 * step + 5):
            found = observe(plan, draft, logits_NV, verdict, number, SHARE)
            one.gap(plan, known(draft), number, verdict, found)
        return verdict

    with instead(eager, "verify_chains", verifying_checked), instead(report, "observe_gap", observing_checked):
        yield one


def requests() -> list[Request]:
    prompts = tiny.prompts(VOCABULARY, [9 + i for i in range(len(WISHES))])
    made = []
    for i, (speculation, more) in enumerate(WISHES):
        prompt = [(5, 11)[token % 2] for token in prompts[i]] if "allowed_token_ids" in more else prompts[i]
        request = tiny.request(str(i), prompt * 2, speculation, 12, **{"temperature": 1.0, "seed": 100 + i, **more})
        prediction = tuple(prompt[:8]) if "prediction" in (speculation.drafters or ()) else ()
        made.append(replace(request, num_logprobs=3 if i == 3 else None, prediction=prediction))
    return made


def build() -> Engine:
    target = tiny.llama(1, VOCABULARY)
    return tiny.build(target, tiny.perturbed(target, 2, 0.1), max_copied_tokens=16, max_over_acceptance=0.3)


def run_all() -> tiny.Run:
    return tiny.run(build(), requests())


def test_every_step_is_what_the_plan_asks_for(checked: Checked) -> None:
    run = run_all()
    assert all(len(tokens) == 12 for tokens in run.tokens.values())
    assert checked.seen["gap"] > 3
    assert checked.seen["walked"] > 3
    assert len(checked.seen) > 20


def test_every_step_is_so_where_equal_nodes_stay_apart(checked: Checked) -> None:
    """The host learns the tokens with the verdict; what is emitted is the same as with merged trees."""
    wanted = [one for one in requests() if one.speculation.drafters == ("model",) and one.request_id not in EDITED]
    engine = build()
    engine.eager.most_unmerged = 1000
    run = tiny.run(engine, wanted)
    assert checked.seen["not merged"] > 5
    assert run.tokens == tiny.run(build(), wanted).tokens


TREE = Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 2, 1))


def penalised(speculation: Speculation = TREE) -> Request:
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    return tiny.request("0", tiny.prompts(VOCABULARY, [9])[0], speculation, 12, temperature=1.0, seed=4, **penalties)


@pytest.mark.parametrize("speculation", [TREE, Speculation(rule="bv_race", num_drafts=2, draft_length=1)])
def test_penalties_count_drafted_tokens_where_they_are(checked: Checked, speculation: Speculation) -> None:
    """Without the host, for every node along its own path."""
    engine = build()
    engine.eager.most_unmerged = 1000
    tiny.run(engine, [penalised(speculation)])
    assert checked.seen["not merged"] > 3


@pytest.mark.parametrize("module", ["engine.drafting.chains", "engine.step.verify"])
@pytest.mark.usefixtures("checked")
def test_distributions_that_forget_a_node_s_path_are_found_out(module: str) -> None:
    with (
        instead(module, "node_distributions", tiny.distributions_at_the_root),
        pytest.raises(AssertionError, match="Not equal to tolerance"),
    ):
        run_all()


@pytest.mark.parametrize("most_unmerged", [0, 1000])
@pytest.mark.usefixtures("checked")
def test_penalties_of_another_node_s_path_are_found_out(most_unmerged: int) -> None:
    def of_the_neighbour(paths: Any, *operands: Any) -> Tensor | None:
        path_ND = paths(*operands)
        return None if path_ND is None else path_ND.roll(1, 0)

    engine = build()
    engine.eager.most_unmerged = most_unmerged
    with (
        instead(verify, "_tokens_above", of_the_neighbour),
        pytest.raises(AssertionError, match="Not equal to tolerance"),
    ):
        tiny.run(engine, [penalised()])


@pytest.mark.usefixtures("checked")
def test_numbers_of_another_purpose_are_found_out() -> None:
    with (
        instead("engine.drafting.chains", "draw_numbers", lambda right, *names: np.roll(right(*names), 1, 0)),
        pytest.raises(AssertionError),
    ):
        run_all()

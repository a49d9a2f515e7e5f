"""Inputs of a step's rules, and the results made of their verdicts, recomputed by hand.

Requests of many kinds run together. In every step each drafted chain is compared with what the plan
asked for; each distribution along it with plain transformers, edited and filtered by hand; each
uniform number with its name; and each emission with the chain it comes from. What the rules decide
is tested elsewhere (tests/speculation).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from torch import Tensor

from engine.drafting.draft import Draft, with_tokens
from engine.plan import Plan, StepVerdict
from engine.request import Request, Speculation
from engine.start.loading import LoadedModel
from engine.step import eager, report, verify
from engine.step.engine import Engine
from tests.engine import tiny
from tests.sampling.test_edits import VOCABULARY
from tests.step.steps_by_hand import SHARE, Checked
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="the same by hand is computed on a CPU")

EDITS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "logit_bias": ((3, 0.7),),
    "bad_words": ((4, 5),),
}
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


@pytest.mark.sole("inputs of steps")
def test_steps_follow_the_plan(checked: Checked) -> None:
    run = run_all()
    assert all(len(tokens) == 12 for tokens in run.tokens.values())
    assert checked.seen["gap"] > 3
    assert checked.seen["walked"] > 3
    assert len(checked.seen) > 20


@pytest.mark.slow
def test_steps_without_merging_emit_the_same(checked: Checked) -> None:
    """What is emitted is the same as with merged trees."""
    wanted = [one for one in requests() if one.speculation.drafters == ("model",) and one.request_id not in EDITED]
    engine = build()
    engine.unrecorded.most_unmerged = 1000
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
    engine.unrecorded.most_unmerged = 1000
    tiny.run(engine, [penalised(speculation)])
    assert checked.seen["not merged"] > 3


@pytest.mark.parametrize("module", ["engine.drafting.chains", "engine.step.verify"])
@pytest.mark.usefixtures("checked")
def test_distributions_that_forget_a_node_s_path_are_found_out(module: str) -> None:
    with (
        instead(module, "node_distributions", tiny.distributions_at_the_root),
        pytest.raises(AssertionError, match=r"Not equal to tolerance|another walk"),
    ):
        run_all()


@pytest.mark.parametrize("most_unmerged", [0, 1000])
@pytest.mark.usefixtures("checked")
def test_penalties_of_another_node_s_path_are_found_out(most_unmerged: int) -> None:
    def of_the_neighbour(paths: Any, *operands: Any) -> Tensor | None:
        path_ND = paths(*operands)
        return None if path_ND is None else path_ND.roll(1, 0)

    engine = build()
    engine.unrecorded.most_unmerged = most_unmerged
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

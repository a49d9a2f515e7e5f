"""Values of several requests and children share arrays: each has its own place.

Every test here samples the running engine, or compares a batch with the same requests alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest
from torch import Tensor

from engine.errors import NOTHING_LEFT
from engine.kernels.protocol import Chains
from engine.request import Request, Speculation
from engine.speculation.conditions import WHOLE_BLOCKS
from engine.speculation.verification import RULES, node
from engine.start.loading import LoadedModel
from engine.step.engine import Engine
from tests.engine import test_output_distribution, tiny
from tests.engine.test_output_distribution import ALPHA, drafts, exact_distribution, g_test
from tests.grid import grid
from tests.wrong import instead

VOCABULARY = 8
"""More tokens than usual: several drafts of a node then differ."""
ALL = ("model", "prompt_lookup", "prediction")


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    target, draft = (tiny.llama(seed, VOCABULARY, spread=0.25) for seed in (1, 2))
    return target, draft


def p_value(
    pair: tuple[LoadedModel, LoadedModel],
    speculation: Speculation,
    num_answers: int = 2000,
    draft_window: int = 0,
    **sampling: Any,
) -> float:
    """Return the p-value of three tokens; rare continuations are pooled."""
    limits = {"max_num_drafts": 6, "max_draft_length": 5, "max_num_seqs": 400, "budget": 8192, "max_model_len": 32}
    engine = tiny.build(*pair, draft_window=draft_window, **limits)
    tiny.draft_without_turns(engine)
    sampling = {"temperature": 1.0, **sampling}
    requests = [
        tiny.request(str(seed), test_output_distribution.PROMPT, speculation, 8, seed=seed, **sampling)
        for seed in range(num_answers)
    ]
    distribution = exact_distribution(pair[0], sampling)
    rare = {path: () for path, probability in distribution.items() if 0 < probability < 5 / num_answers}
    expected: dict[tuple[int, ...], float] = defaultdict(float)
    for path, probability in distribution.items():
        expected[rare.get(path, path)] += probability
    counts: Counter[tuple[int, ...]] = Counter()
    for tokens in tiny.run(engine, requests, enough=3).tokens.values():
        counts[rare.get(tuple(tokens[:3]), tuple(tokens[:3]))] += 1
    return g_test(counts, expected)


SPECHUB_TREE = drafts("spechub", 4, tree=(2, 2))


@pytest.mark.slow
def test_a_node_of_a_tree_finds_its_own_children(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The second child of a tree's root leads a later chain than the second."""
    assert p_value(pair, SPECHUB_TREE) > ALPHA
    with instead(node, "packed", lambda _, *drafted: drafted):
        assert p_value(pair, SPECHUB_TREE) < ALPHA


TOP_2, NUCLEUS = ({name: value, "logit_bias": ((0, 3.0),)} for name, value in (("top_k", 2), ("top_p", 0.55)))
FEWER = [
    (drafts("greedy", 3), TOP_2),
    (drafts("greedy", 6, tree=(3, 2)), TOP_2),
    (drafts("spechub", 2), NUCLEUS),
    (SPECHUB_TREE, NUCLEUS),
    (drafts("rrs_without_replacement", 3), TOP_2),
    (drafts("rrs_without_replacement", 6, tree=(3, 2)), TOP_2),
    (drafts("traversal", 6, tree=(3, 2)), TOP_2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("speculation", "sampling"), grid(FEWER, FEWER[-1:]))
def test_fewer_likely_tokens_than_drafts(
    pair: tuple[LoadedModel, LoadedModel], speculation: Speculation, sampling: dict[str, Any]
) -> None:
    assert p_value(pair, speculation, **sampling) > ALPHA


@pytest.mark.slow
def test_equal_greedy_children_are_rejected(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The wrong variant: a child without probability takes another child's token."""
    from engine.kernels.draw import categorical
    from engine.speculation import drafting

    def drawn(_right: Any, weights_NV: Tensor, uniform_N: Tensor, _: Tensor) -> Tensor:
        return categorical(weights_NV, uniform_N).unsqueeze(1)

    with instead(drafting, "_drawn_or", drawn):
        assert p_value(pair, drafts("greedy", 3), **TOP_2) < ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculation",
    [
        drafts("greedy_block", 1, length=5),
        pytest.param(drafts("spectr_gbv", 3, length=5), marks=pytest.mark.slow),
    ],
    ids=lambda one: one.rule,
)
def test_rules_that_change_later_targets_beside_a_draft_window(
    pair: tuple[LoadedModel, LoadedModel], speculation: Speculation
) -> None:
    assert p_value(pair, speculation, 4000, draft_window=2) > ALPHA


@pytest.mark.slow
def test_a_window_that_moves_below_a_changed_target_is_rejected(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The wrong variant: the draft model forgets the beginning of the text from step to step."""

    def windowed(submit: Any, engine: Engine, request: Request) -> None:
        forgetful = {name: msgspec.structs.replace(rule, needs=()) for name, rule in engine.facts.rules.items()}
        engine.facts = msgspec.structs.replace(engine.facts, rules=forgetful)
        submit(engine, request)

    with instead(Engine, "submit", windowed):
        assert p_value(pair, drafts("greedy_block", 1, length=5), 4000, draft_window=2) < ALPHA


RULES_BY_NAME = {
    name: drafts(name, 1 if rule.max_drafts == 1 else 2 if rule.max_drafts == 2 else 3, length=3)
    for name, rule in RULES.items()
}


def neighbours(rule: str, seed: int, **sampling: Any) -> list[Request]:
    """Two requests: the first may emit token 0 only, the second predicts otherwise."""
    speculation = RULES_BY_NAME[rule]
    sampling = {"temperature": 1.0, **sampling}
    name, others = f"{rule}-{seed}", tuple(range(1, VOCABULARY))
    first = tiny.request(f"zero-{name}", (1, 2, 3), speculation, 6, seed=seed, allowed_token_ids=(0,), **sampling)
    copying = msgspec.structs.replace(speculation, drafters=("model", "prompt_lookup", "prediction"))
    second = tiny.request(name, (1, 3, 0, 2, 5), copying, 6, seed=seed + 10**6, allowed_token_ids=others, **sampling)
    return [first, msgspec.structs.replace(second, prediction=(seed % 7 + 1, seed % 5 + 1, 2, 3))]


def forbidden(answers: dict[str, list[int]]) -> list[str]:
    """Requests that emitted token 0 without being allowed to."""
    return [name for name, tokens in answers.items() if 0 in tokens and not name.startswith("zero")]


@pytest.mark.sole("requests that share a step")
@pytest.mark.sampled
@pytest.mark.parametrize("seed_stable", [False, True])
def test_requests_emit_no_token_of_a_neighbour(pair: tuple[LoadedModel, LoadedModel], seed_stable: bool) -> None:
    """Every rule that allows text drafts, together with every other, and the same answers alone."""
    engine = tiny.build(*pair, max_copied_tokens=8)
    rules = [name for name, rule in RULES.items() if WHOLE_BLOCKS not in rule.needs]
    requests = [one for seed in range(16) for rule in rules for one in neighbours(rule, seed, seed_stable=seed_stable)]
    together = tiny.run(engine, requests).tokens
    assert not forbidden(together)
    for one in requests[: 4 * len(rules)]:
        assert tiny.run(engine, [one]).tokens[one.request_id] == together[one.request_id], one.request_id


def test_chains_of_another_request_are_rejected(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """The wrong variant: chains keep their numbers when those before them have gone."""

    def shifted(chain_table: Any, chains: Chains) -> tuple[Tensor, Tensor]:
        chain_BK, exists_BK = chain_table(chains)
        chain_BK = chain_BK.clone()
        chain_BK[:, 0] = 0
        return chain_BK, exists_BK

    engine = tiny.build(*pair, max_copied_tokens=8)
    with instead(node, "chain_table", shifted):
        requests = [one for seed in range(16) for one in neighbours("greedy", seed)]
        failed = tiny.run(engine, requests, can_fail=True).failed
    assert {error.code for error in failed.values()} == {NOTHING_LEFT}
    assert all(name.startswith("greedy") for name in failed)

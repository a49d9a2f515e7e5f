"""The engine's output has the target's distribution: G-tests on three tokens.

The exact distribution comes from plain transformers forwards over all continuations of the prompt.
Seeds are fixed, so the tests are deterministic; each has a wrong rule that it must reject.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from scipy.stats import chi2

from engine.attention.attention import HOOK
from engine.control.step_time import StepTimes
from engine.drafting.drafter import DrafterKind
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.torch_block import blocks, stop_chains, winners
from engine.kernels.torch_kernels import TORCH
from engine.noise import uniform
from engine.request import Limits, Request, Sampling, Speculation, Thinking
from engine.sampling.distribution import DistributionParameters, distribution
from engine.speculation.verification import RULES, Verify
from engine.start.choosing import choose
from engine.start.loading import LoadedModel
from tests.engine import tiny
from tests.grid import grid
from tests.models import families
from tests.wrong import instead, wrong_rule

VOCABULARY = 4
PROMPT = (1, 3, 0, 2, 2)
NUM_TOKENS = 3
NUM_ANSWERS = 1000
ALPHA = 1e-6


def drafts(rule: str, num_drafts: int, length: int = 2, **more: object) -> Speculation:
    """Drafts have two tokens, so that three emitted ones span several steps."""
    return Speculation(rule=rule, num_drafts=num_drafts, draft_length=length, **more)  # type: ignore[arg-type]


SPECULATIONS = {
    "off": tiny.OFF,
    "token": drafts("token", 1),
    "block": drafts("block", 1),
    "bv_race 1": drafts("bv_race", 1),
    "bv_race 2": drafts("bv_race", 2),
    "bv_race 4": drafts("bv_race", 4),
    "greedy_block": drafts("greedy_block", 1, length=3),
    "spectr_gbv 1": drafts("spectr_gbv", 1, length=3),
    "spectr_gbv 3": drafts("spectr_gbv", 3, length=3),
    "traversal 4": drafts("traversal", 4),
    "traversal iid": drafts("traversal", 3, draft_method="iid"),
    "traversal tree": drafts("traversal", 4, tree=(2, 2)),
    "nss 4": drafts("nss", 4),
    "rrs 2": drafts("rrs", 2),
    "rrs 4": drafts("rrs", 4),
    "rrs tree": drafts("rrs", 4, tree=(2, 2)),
    "rrs_without_replacement 4": drafts("rrs_without_replacement", 4),
    "rrs_without_replacement tree": drafts("rrs_without_replacement", 4, tree=(2, 2)),
    "kseq 4": drafts("kseq", 4),
    "spechub 2": drafts("spechub", 2),
    "spechub tree": drafts("spechub", 4, tree=(2, 2)),
    "greedy 3": drafts("greedy", 3),
    "greedy late": drafts("greedy", 3, tree=(1, 3)),
    "weighted_race 2": drafts("weighted_race", 2),
    "weighted_race 4": drafts("weighted_race", 4),
    "weighted_race late": drafts("weighted_race", 3, tree=(1, 3)),
    "ot_lp 2": drafts("ot_lp", 2),
}
EDITS: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.3,
    "logit_bias": ((1, 0.8), (2, -0.5)),
    "bad_words": ((3, 3), (0, 1, 2)),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
    "edited": {"temperature": 1.0, **EDITS},
    "penalties": {"temperature": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "grammar": {"temperature": 1.0, "grammar": "no token twice in a row", "presence_penalty": 0.4},
    "seed-stable": {"temperature": 1.0, "seed_stable": True},
    "thoughts": {"temperature": 1.0, "thinking": Thinking(opens=(3,), closes=2, is_begun=True, budget=1)},
    "thoughts, grammar": {
        "temperature": 1.0,
        "grammar": "no token twice in a row",
        "thinking": Thinking(opens=(3,), closes=2, is_begun=False, budget=0),
        "presence_penalty": 0.4,
    },
    "edited and filtered": {"temperature": 0.8, "top_p": 0.95, "allowed_token_ids": (0, 1, 3), **EDITS},
}


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    target = tiny.llama(seed=21, vocabulary=VOCABULARY, layers=1, spread=0.25)
    return target, tiny.llama(seed=22, vocabulary=VOCABULARY, layers=1, spread=0.25)


def exact_distribution(
    target: LoadedModel, sampling: dict[str, float], prompt: tuple[int, ...] = PROMPT
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of NUM_TOKENS tokens, by plain transformers."""
    paths = list(itertools.product(range(target.vocab_size), repeat=NUM_TOKENS))
    ids = torch.tensor([[*prompt, *path] for path in paths], device=tiny.DEVICE)
    target.model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = target.model(input_ids=ids, use_cache=False).logits.float().cpu()
    target.model.set_attn_implementation(HOOK)
    parameters = DistributionParameters.of([Sampling(**sampling)] * len(paths), torch.device("cpu"), TORCH)
    result = torch.ones(len(paths), dtype=torch.float64)
    for depth in range(NUM_TOKENS):
        rows = logits[:, len(prompt) - 1 + depth].clone()
        for row, path in zip(rows, paths, strict=True):
            edited_by_hand(row, path[:depth], sampling, prompt)
        rows = distribution(rows, parameters).double()
        result *= rows[torch.arange(len(paths)), torch.tensor([path[depth] for path in paths])]
    return dict(zip(paths, result.tolist(), strict=True))


def edited_by_hand(
    row: torch.Tensor, answer: tuple[int, ...], sampling: dict[str, Any], prompt: tuple[int, ...]
) -> None:
    """Bias, penalties and masks in the plainest way, token by token."""
    for token, added in sampling.get("logit_bias", ()):
        row[token] += added
    for token in range(len(row)):
        if token in prompt or token in answer:
            factor = sampling.get("repetition_penalty", 1.0)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= sampling.get("frequency_penalty", 0.0) * answer.count(token)
        row[token] -= sampling.get("presence_penalty", 0.0) * (token in answer)
        if sampling.get("allowed_token_ids") and token not in sampling["allowed_token_ids"]:
            row[token] = -torch.inf
        if not may_follow_thoughts(token, answer, sampling):
            row[token] = -torch.inf
        text = (*prompt, *answer, token)
        if any(text[-len(word) :] == word for word in sampling.get("bad_words", ())):
            row[token] = -torch.inf


def may_follow_thoughts(token: int, answer: tuple[int, ...], sampling: dict[str, Any]) -> bool:
    """Whether the budget of thoughts allows a token, and behind them the grammar `NoTokenTwice`."""
    thinking = sampling.get("thinking")
    if thinking is not None:
        before, has_begun = (0, True) if thinking.is_begun else (1, answer[:1] == thinking.opens)
        if has_begun and thinking.closes not in answer:
            return token == thinking.closes or len(answer) - before < thinking.budget
        answer = answer[answer.index(thinking.closes) + 1 :] if has_begun else answer
    return "grammar" not in sampling or answer[-1:] != (token,)


class NoTokenTwice:
    """A grammar that can be followed by hand."""

    failure = None

    def start(self, grammar: str) -> NoTokenTwice:
        assert grammar == SAMPLINGS["grammar"]["grammar"]
        return NoTokenTwice()

    def is_ready(self) -> bool:
        return True

    def seconds_read(self) -> float:
        return 0.0

    def check_answer(self, emitted: list[int]) -> None:
        pass

    def end(self) -> None:
        pass

    def masks(self, answer: tuple[int, ...], paths: list[tuple[int, ...]]) -> Callable[[], list[np.ndarray]]:
        masks = []
        for path in paths:
            allowed = np.ones(VOCABULARY, dtype=bool)
            allowed[list((*answer, *path)[-1:])] = False
            masks.append(allowed)
        return lambda: masks


def sample(
    pair: tuple[LoadedModel, LoadedModel],
    speculation: Speculation,
    sampling: dict[str, float],
    num_answers: int = NUM_ANSWERS,
    kind: DrafterKind | None = None,
    most_unmerged: int = 0,
    prompt: tuple[int, ...] = PROMPT,
    times: StepTimes | None = None,
    **more: Any,
) -> Counter[tuple[int, ...]]:
    """Sample the first three tokens of longer answers.

    times: for drafts that the load decides on; `more` are fields of the requests.
    """
    engine = tiny.build(
        *pair, max_model_len=32, max_draft_length=3, max_num_seqs=400, budget=8192, max_copied_tokens=8, kind=kind
    )
    tiny.draft_without_turns(engine)
    engine.unrecorded.most_unmerged = most_unmerged
    engine.scheduler.times = times
    engine.grammar_queue.source = NoTokenTwice()  # type: ignore[assignment]
    # An end token that no answer has: a grammar needs one.
    engine.facts = msgspec.structs.replace(engine.facts, eos_token_ids=[VOCABULARY])
    requests = [
        tiny.request(str(seed), prompt, speculation, max_tokens=NUM_TOKENS + 3, **{**sampling, "seed": seed})
        for seed in range(num_answers)
    ]
    requests = [msgspec.structs.replace(one, **more) for one in requests]
    answers = tiny.run(engine, requests, enough=NUM_TOKENS).tokens.values()
    return Counter(tuple(tokens[:NUM_TOKENS]) for tokens in answers)


def g_test(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return the p-value of counts; 0 when something impossible happened."""
    if any(expected[path] == 0 for path in counts):
        return 0.0
    total = counts.total()
    cells = {path: probability for path, probability in expected.items() if probability > 0}
    statistic = 2 * sum(n * torch.log(torch.tensor(n / (total * cells[path]))).item() for path, n in counts.items())
    return float(chi2.sf(statistic, len(cells) - 1))


# Filters change the distributions, not the rules: one rule of each family is enough for them.
FILTERED = ("off", "token", "block", "bv_race 4", "spectr_gbv 3", "traversal tree", "greedy 3", "weighted_race 4")


EDITED = ("off", "token", "block", "bv_race 4", "spectr_gbv 3", "traversal tree", "greedy late", "weighted_race late")
CASES = [
    *((name, "plain") for name in SPECULATIONS),
    *((name, "filtered") for name in FILTERED),
    *((name, "edited") for name in EDITED),
    *((name, "grammar") for name in ("off", "token", "block", "bv_race 4", "traversal tree", "spectr_gbv 3")),
    *((name, "thoughts") for name in ("off", "spectr_gbv 3")),
    *((name, "thoughts, grammar") for name in ("off", "token", "bv_race 4", "traversal tree")),
    *((name, "seed-stable") for name in ("off", "token", "bv_race 4", "spectr_gbv 3", "traversal tree")),
    ("bv_race 4", "edited and filtered"),
    ("traversal tree", "edited and filtered"),
]
# `make test` has one rule of each family, and one that is not plain (a tree where edits and filters
# meet); `make test-all` has the others.
FAMILIES = ("off", "block", "bv_race 4", "spectr_gbv 3", "traversal tree", "rrs 4", "weighted_race late")
IN_THE_GATE = {(name, "plain") for name in FAMILIES}
# Penalties alone are sampled where a wrong variant forgets them, and filters where equal nodes stay
# apart.
TOGETHER = SAMPLINGS.keys() - {"edited", "grammar", "thoughts", "penalties", "filtered"}
IN_THE_GATE |= {("bv_race 4", sampling) for sampling in TOGETHER} | {("traversal tree", "edited and filtered")}


@pytest.mark.sole("sampled answers with a draft model")
@pytest.mark.sampled("sampling")
@pytest.mark.parametrize(("name", "sampling"), grid(CASES, IN_THE_GATE))
def test_joint_distribution_of_three_tokens(pair: tuple[LoadedModel, LoadedModel], name: str, sampling: str) -> None:
    counts = sample(pair, SPECULATIONS[name], SAMPLINGS[sampling])
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS[sampling])) > ALPHA


def shifted_by(probs: np.ndarray, total_variation: float) -> np.ndarray:
    """Return another distribution at exactly this total variation: every second cell grows."""
    sign = np.where(np.arange(len(probs)) % 2, 1, -1)
    direction = probs * (sign - (probs * sign).sum() / probs.sum())
    return probs / probs.sum() + direction * 2 * total_variation / np.abs(direction).sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4_text", "glm4_moe_lite"])
def test_layers_of_several_shapes_and_latents_keep_the_distribution(name: str) -> None:
    """Enough answers are drawn to show a total variation of 0.03."""
    sizes = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "initializer_range": 0.3}
    target, draft = (tiny.load_model(families.config(name, **sizes), seed) for seed in (21, 22))
    expected = exact_distribution(target, SAMPLINGS["plain"])
    num_answers, alpha = 20_000, 1e-3
    counts = sample((target, draft), SPECULATIONS["bv_race 4"], SAMPLINGS["plain"], num_answers)
    assert g_test(counts, expected) > alpha
    shifted = shifted_by(np.array(list(expected.values())), 0.03)
    drawn = np.random.default_rng(1).multinomial(num_answers, shifted)
    assert g_test(Counter(dict(zip(expected, drawn.tolist(), strict=True))) + Counter(), expected) < alpha


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sampling"),
    grid(
        [
            *((name, "filtered") for name in ("block", "bv_race 4", "spectr_gbv 3", "traversal tree", "greedy late")),
            *((name, "penalties") for name in ("bv_race 4", "traversal tree")),
        ],
        {("bv_race 4", "filtered")},
    ),
)
def test_the_distribution_is_the_same_where_equal_nodes_stay_apart(
    pair: tuple[LoadedModel, LoadedModel], name: str, sampling: str
) -> None:
    """The target's pass reads drafted tokens on the device."""
    counts = sample(pair, SPECULATIONS[name], SAMPLINGS[sampling], most_unmerged=10**6)
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS[sampling])) > ALPHA


def always_longest(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """A wrong rule: race by acceptance length, which looks at the tokens it chooses between."""
    accepted_C, next_token_C = stop_chains(chains, target, blocks(chains, target), noise)
    return winners(chains, -accepted_C.double(), accepted_C, next_token_C)


def reused_uniform(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """A wrong rule: one uniform number decides both the acceptance and the next token."""
    same = replace(noise, residual_C=noise.accept_CL[:, 0])
    return RULES["token"].verify(chains, target, same)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wrong", "name", "num_drafts"), [(always_longest, "bv_race", 4), (reused_uniform, "token", 1)]
)
def test_a_wrong_rule_is_rejected(
    pair: tuple[LoadedModel, LoadedModel], wrong: Verify, name: str, num_drafts: int
) -> None:
    with wrong_rule(name, wrong):
        counts = sample(pair, drafts(name, num_drafts), SAMPLINGS["plain"])
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS["plain"])) < ALPHA


def test_drafting_from_another_distribution_is_rejected(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Draft tokens drawn at one temperature and verified as drawn at another."""
    with tiny.with_drafts_of_another_distribution():
        counts = sample(pair, drafts("bv_race", 2), SAMPLINGS["plain"])
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS["plain"])) < ALPHA


@pytest.mark.slow
def test_noise_reused_between_steps_is_rejected(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Keying noise by the token's own index would bias the output."""

    def by_index(
        _right: Any, _kernels: Any, seed_C: Any, position_C: Any, purpose_P: Any, rank_C: Any, length: int
    ) -> Any:
        position_CL = position_C[:, None] + np.arange(length)
        return uniform(seed_C[:, None], position_CL, purpose_P[:, None, None], rank_C[:, None])

    with instead(type(choose(tiny.DEVICE)), "uniform", by_index):
        counts = sample(pair, drafts("block", 1), SAMPLINGS["plain"], num_answers=6000)
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS["plain"])) < ALPHA


@pytest.mark.slow
def test_penalties_that_forget_the_nodes_path_are_rejected(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """Counts of the text alone, not of the drafted tokens below it."""
    strong = {"temperature": 1.0, "frequency_penalty": 2.0}
    distribution_of_text = exact_distribution(pair[0], strong)
    right = sample(pair, SPECULATIONS["bv_race 2"], strong)
    assert g_test(right, distribution_of_text) > ALPHA
    for forgetful in ("engine.step.verify", "engine.drafting.chains"):
        with instead(forgetful, "node_distributions", tiny.distributions_at_the_root):
            counts = sample(pair, SPECULATIONS["bv_race 2"], strong)
        # Drafting without the penalties is no bias: any draft distribution will do that is also
        # verified with.
        assert (g_test(counts, distribution_of_text) > ALPHA) == ("drafting" in forgetful)


def test_min_tokens_holds_every_end_back(pair: tuple[LoadedModel, LoadedModel]) -> None:
    for speculation in (tiny.OFF, SPECULATIONS["bv_race 4"], SPECULATIONS["traversal tree"]):
        engine = tiny.build(*pair, max_model_len=32, max_draft_length=3)
        requests = [
            Request(
                request_id=str(seed),
                prompt_token_ids=PROMPT,
                sampling=Sampling(seed=seed),
                limits=Limits(max_tokens=8, min_tokens=4, stop_token_ids=(0, 1)),
                speculation=speculation,
            )
            for seed in range(60)
        ]
        answers = tiny.run(engine, requests).tokens.values()
        assert all(len(answer) > 4 for answer in answers)
        assert not any({0, 1} & set(answer[:4]) for answer in answers)
        assert any(len(answer) == 5 for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(["greedy_block", "spectr_gbv 3"], {"spectr_gbv 3"}))
def test_forgetting_the_changed_target_is_rejected(pair: tuple[LoadedModel, LoadedModel], name: str) -> None:
    """Greedy block verification without the change that it owes the next positions."""
    with instead("engine.step.results", "_shifts", lambda *_: ()):
        counts = sample(pair, SPECULATIONS[name], SAMPLINGS["plain"], num_answers=2000)
    assert g_test(counts, exact_distribution(pair[0], SAMPLINGS["plain"])) < ALPHA


def test_over_acceptance_is_as_biased_as_it_says(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """One drafted token has Theorem 4's distribution; the stream stays within the bound."""
    speculation = drafts("token", 1, length=1, over_acceptance=0.3)
    expected = exact_distribution(pair[0], SAMPLINGS["plain"])
    engine = tiny.build(*pair, max_model_len=32, max_over_acceptance=0.5)
    requests = [
        tiny.request(str(seed), PROMPT, speculation, max_tokens=NUM_TOKENS, temperature=1.0, seed=seed)
        for seed in range(NUM_ANSWERS)
    ]
    run = tiny.run(engine, requests)
    counts = Counter(tuple(answer) for answer in run.tokens.values())
    bound = sum(outcome.bias for outcomes in run.outcomes.values() for outcome in outcomes) / NUM_ANSWERS
    distance = 0.5 * sum(abs(counts[path] / counts.total() - p) for path, p in expected.items())
    assert g_test(counts, expected) < ALPHA
    noise = 0.5 * (len(expected) / NUM_ANSWERS) ** 0.5
    assert 0.02 < distance < bound + noise

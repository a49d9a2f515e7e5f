"""Random requests in random company, in combinations that no other test names.

Each answer in float32 is the same alone and among others that arrive at random steps, are
aborted, preempted and cut into chunks, and share beginnings. Answers that depend on no draft are
those of plain decoding. Masks, logprobs and counts are compared with plain transformers and with
the fields of the request.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.attention.attention import HOOK
from engine.drafting import eagle, head
from engine.errors import RequestError
from engine.plan import Row
from engine.request import Limits, Request, Sampling, Speculation, Thinking
from engine.scheduling.outcome import Outcome, read_logprobs
from engine.scheduling.request_checks import check_requests
from engine.scheduling.store import BlockStore
from engine.speculation.rule_facts import RULE_FACTS
from engine.start.loading import LoadedModel
from engine.step.engine import Engine
from tests.engine import tiny
from tests.engine.test_output_distribution import edited_by_hand
from tests.grid import grid
from tests.heads import folders
from tests.scheduling.test_scheduler import Whims
from tests.wrong import instead

Pair = tuple[LoadedModel, LoadedModel]
VOCABULARY, END, MODEL_LEN = 23, 2, 48
THINKING: dict[str, Any] = {"opens": (3,), "closes": 4}
CAPS = ((8, 5, 16), (4, 3, 4), (2, 2, 2), (2, 1, 1))
"""Most drafts, their length, and that of text drafts."""


def with_end(model: LoadedModel) -> LoadedModel:
    return replace(model, eos_token_ids=frozenset({END}))


@pytest.fixture(scope="module", params=grid(["pair", "window", "eagle3", "dspark", "mtp"], {"pair"}))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(request.param, tmp_path_factory.mktemp(request.param) / "head")


def make(kind: str, folder: Path) -> Pair:
    """A target and what drafts for it."""
    if kind == "pair":
        target = with_end(tiny.llama(seed=5, vocabulary=VOCABULARY, spread=0.2))
        return target, tiny.perturbed(target, 6, 0.04)
    if kind == "window":
        import transformers

        sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        config = transformers.MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            sliding_window=6,
            initializer_range=0.2,
            **sizes,
        )
        target = with_end(tiny.load_model(config, 5))
        return target, tiny.perturbed(target, 6, 0.04)
    small: dict[str, Any] = {"vocabulary": VOCABULARY, "draft_vocabulary": 17, "taps": (0, 1, 2)}
    if kind == "mtp":
        written = folders.write_mtp(folder, VOCABULARY, layers=2)
        target = with_end(folders.load_target(written))
    else:
        is_eagle = kind == "eagle3"
        written = folders.write_eagle(folder, **small) if is_eagle else folders.write_block(folder, "dspark", **small)
        target = with_end(folders.target(VOCABULARY, 2, 0.2))
    return target, folders.load(written, target)


def build(pair: Pair, caps: tuple[int, int, int], **more: Any) -> Engine:
    fixed = {"max_num_drafts": caps[0], "max_draft_length": caps[1], "max_copied_tokens": caps[2]}
    return tiny.build(*pair, max_model_len=MODEL_LEN, max_over_acceptance=0.5, **fixed, **more)


def speculation(r: random.Random) -> Speculation:
    """Any rule with any shape and method; `check_requests` knows which go together."""
    drafters = r.choice([("model",)] * 3 + [("model", "prompt_lookup", "prediction"), ("prompt_lookup", "prediction")])
    if "model" not in drafters:
        return Speculation(drafters=drafters)
    rule, length = r.choice(list(RULE_FACTS)), r.choice([1, 2, 3, 5])
    tree = tuple(r.choice([1, 1, 2, 3]) for _ in range(length)) if r.random() < 0.4 else ()
    method = r.choice(["", r.choice(RULE_FACTS[rule].draft_methods)])
    lossy = 0.3 if rule == "token" and r.random() < 0.2 else 0.0
    num_drafts = prod(tree) if tree else r.choice([1, 1, 2, 3, 4, 8])
    return Speculation(
        rule=rule, num_drafts=num_drafts, draft_length=length, draft_method=method, tree=tree, drafters=drafters,
        over_acceptance=lossy,
    )  # fmt: skip


def sampling(r: random.Random) -> Sampling:
    """A temperature and a few other fields."""
    thinking = Thinking(**THINKING, is_begun=r.random() < 0.5, budget=r.choice([0, 1, 4]))
    words = tuple(tuple(r.randrange(VOCABULARY) for _ in range(r.choice([1, 2, 2, 3]))) for _ in range(6))
    fields: dict[str, Sequence[Any]] = {
        "top_k": [1, 3, VOCABULARY + 9],
        "top_p": [0.0, 0.3, 0.9],
        "min_p": [0.05, 1.0],
        "repetition_penalty": [0.7, 1.3, 10.0],
        "frequency_penalty": [-0.5, 2.0],
        "presence_penalty": [-0.5, 0.5],
        "logit_bias": [((r.randrange(VOCABULARY), 5.0), (r.randrange(VOCABULARY), -100.0))],
        "allowed_token_ids": [tuple(r.sample(range(VOCABULARY), 12))],
        "bad_words": [words],
        "thinking": [thinking],
        "seed_stable": [True],
    }
    chosen = {name: r.choice(fields[name]) for name in r.sample(list(fields), r.choice([0, 1, 1, 2, 4]))}
    temperature = r.choice([0.0, 0.0, 1e-5, 0.3, 1.0, 1.0, 1.0, 2.0])
    return Sampling(temperature=temperature, seed=r.choice([1, -r.getrandbits(63), r.getrandbits(63)]), **chosen)


def some_request(r: random.Random, name: str, beginning: Sequence[int]) -> Request:
    size = r.choice([1, r.randrange(1, 20), r.randrange(1, 30), r.randrange(1, MODEL_LEN)])
    prompt = ([*beginning[: r.randrange(size + 1)], *(r.randrange(VOCABULARY) for _ in range(size))])[:size]
    room = MODEL_LEN - size
    most = r.choice([room, *(min(room, count) for count in (0, 1, 2, 9, 20))])
    asked = speculation(r)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=sampling(r),
        limits=Limits(
            max_tokens=most,
            min_tokens=r.choice([0, 0, min(most, 4), most]),
            stop_token_ids=tuple(r.sample(range(VOCABULARY), r.choice([0, 0, 2]))),
            ignore_eos=r.random() < 0.7,
        ),
        speculation=asked,
        prediction=tuple(r.choices(range(VOCABULARY), k=12)) if "prediction" in asked.drafters else (),
        num_logprobs=r.choice([None, 0, 3]),
        num_prompt_logprobs=r.choice([None, None, None, 2]),
        priority=r.choice([0, 0, -1, 2]),
        cache_salt=r.choice(["", "", "a"]),
        reports_drafts=r.random() < 0.3,
    )


def some_requests(r: random.Random, engine: Engine, count: int) -> list[Request]:
    """Valid requests, most of them with the same beginning."""
    beginning = r.choices(range(VOCABULARY), k=MODEL_LEN)
    requests: list[Request] = []
    while len(requests) < count:
        one = some_request(r, str(len(requests)), beginning if r.random() < 0.8 else ())
        try:
            check_requests([one], engine.facts, engine.limits)
        except RequestError:
            continue
        requests.append(one)
    return requests


class Answers:
    """Outcomes and errors by request."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self.failed: dict[str, RequestError] = {}

    def tokens(self, name: str) -> tuple[int, ...]:
        return tuple(token for outcome in self.outcomes[name] for token in outcome.token_ids)

    def steps(self, name: str) -> list[Any]:
        """Everything of the outcomes that the company must not change."""
        return [
            (o.token_ids, o.finish_reason, o.num_accepted, o.num_nodes, o.num_chains, o.drafts, o.num_predicted)
            for o in self.outcomes[name]
        ]


def run(engine: Engine, requests: Sequence[Request], r: random.Random, aborted: Iterable[str] = ()) -> Answers:
    """Let requests arrive at random steps and abort some; each ends once, and nothing is left."""
    answers, waiting, to_abort, live = Answers(), list(requests), set(aborted), set[str]()
    while waiting or engine.scheduler.has_work:
        for _ in range(r.choice([0, 1, len(waiting)])):
            if waiting:
                live.add(waiting[-1].request_id)
                engine.submit(waiting.pop())
        for name in sorted(live & to_abort):
            if r.random() < 0.3:
                assert engine.abort(name)
                live.remove(name)
        if not engine.scheduler.has_work:
            continue
        step = engine.run_step()
        for name, error in step.failed:
            live.remove(name)
            answers.failed[name] = error
        for outcome in step.outcomes:
            assert outcome.request_id in live
            answers.outcomes[outcome.request_id].append(outcome)
            if outcome.finish_reason is not None:
                live.remove(outcome.request_id)
        engine.scheduler.check_invariants()
    assert not live, live
    assert engine.scheduler.tables.target.num_used == 0
    return answers


def check_counts(request: Request, outcomes: Sequence[Outcome]) -> None:
    """Counts of each step fit its tokens, and the answer its limits."""
    for number, outcome in enumerate(outcomes):
        count, is_last = len(outcome.token_ids), number == len(outcomes) - 1
        assert (outcome.finish_reason is not None) == is_last
        assert outcome.num_accepted <= min(count, outcome.draft_length, outcome.num_nodes)
        assert count == outcome.num_accepted + 1 or (is_last and count <= outcome.num_accepted + 1)
        assert len(outcome.logprobs) == (0 if request.num_logprobs is None else count)
        if request.reports_drafts:
            accepted = tuple(outcome.token_ids[: outcome.num_accepted])
            assert len(outcome.drafts) == outcome.num_chains
            assert not accepted or any(chain[: len(accepted)] == accepted for chain in outcome.drafts)
    limits, tokens = request.limits, [token for outcome in outcomes for token in outcome.token_ids]
    ends = {*limits.stop_token_ids, *(() if limits.ignore_eos else (END,))}
    assert not ends & set(tokens[:-1])
    if outcomes[-1].finish_reason == "stop":
        assert tokens[-1] in ends
        assert len(tokens) > limits.min_tokens or request.sampling.thinking
    else:
        assert len(tokens) == limits.max_tokens


def check_by_transformers(target: LoadedModel, request: Request, outcomes: Sequence[Outcome]) -> None:
    """Logprobs are those of a plain pass, and no token is one that the fields exclude."""
    tokens = tuple(token for outcome in outcomes for token in outcome.token_ids)
    text, num_prompt = [*request.prompt_token_ids, *tokens], len(request.prompt_token_ids)
    target.model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits_TV = target.model(input_ids=torch.tensor([text], device=tiny.DEVICE), use_cache=False).logits[0].cpu()
    target.model.set_attn_implementation(HOOK)
    expected = logits_TV.log_softmax(-1)[range(len(text) - 1), text[1:]]
    of_prompt = [one.logprob for one in read_logprobs(outcomes[0].prompt_logprobs)]
    of_answer = [one.logprob for outcome in outcomes for one in outcome.logprobs]
    assert len(of_prompt) == (0 if request.num_prompt_logprobs is None else num_prompt - 1)
    assert np.allclose(of_prompt, expected[: len(of_prompt)], atol=2e-3)
    assert np.allclose(of_answer, expected[num_prompt - 1 :][: len(of_answer)], atol=2e-3)
    fields = {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__ if name != "grammar"}
    for place, token in enumerate(tokens):
        row_V = logits_TV[num_prompt - 1 + place].clone()
        edited_by_hand(row_V, tokens[:place], fields, request.prompt_token_ids)
        assert row_V[token] > -torch.inf
        if (
            request.sampling.is_greedy
            and not request.speculation.over_acceptance
            and place >= request.limits.min_tokens
        ):
            assert row_V[token] > row_V.max() - 1e-3


def build_crowded(pair: Pair, caps: tuple[int, int, int], r: random.Random, **more: Any) -> Engine:
    """An engine with few blocks, and sometimes a small budget and few requests at once."""
    size = r.choice([3, 8])
    needed = -(-(MODEL_LEN + caps[0] * caps[1] + 2 * caps[2]) // size) + 1
    budget = r.choice([caps[0] * caps[1] + 2 * caps[2] + 2, 130])
    rows = r.choice([3, 64])
    return build(pair, caps, num_blocks=needed, block_size=size, budget=budget, max_num_seqs=rows, **more)


def differing(pair: Pair, seed: int) -> list[Request]:
    """Return requests whose answers in company differ from those alone."""
    r = random.Random(seed)
    caps = r.choice(CAPS)
    engine = build(pair, caps)
    requests = some_requests(r, engine, 14)
    alone = Answers()
    for request in requests:
        engine.scheduler.tables.forget_all()
        answer, plain = run(engine, [request], random.Random(0)), msgspec.structs.replace(request, prediction=())
        outcomes = answer.outcomes[request.request_id]
        if request.request_id not in answer.failed:
            check_counts(request, outcomes)
            check_by_transformers(pair[0], request, outcomes)
            if request.sampling.is_certain and not request.speculation.over_acceptance:
                undrafted = run(engine, [msgspec.structs.replace(plain, speculation=tiny.OFF)], random.Random(0))
                assert undrafted.tokens(request.request_id) == answer.tokens(request.request_id), request
        alone.outcomes |= answer.outcomes
        alone.failed |= answer.failed
    crowded = build_crowded(pair, caps, r)
    aborted = r.sample([one.request_id for one in requests], 2)
    found = []
    for some in (aborted, []):
        together = run(crowded, r.sample(requests, len(requests)), r, some)
        for request in requests:
            name = request.request_id
            steps, expected = together.steps(name), alone.steps(name)
            if name in some:
                expected = expected[: len(steps)]
            elif name in together.failed and name in alone.failed:
                # A step that ends with an error sends nothing, so it depends on how steps begin.
                continue
            if steps != expected or (name not in some and (name in together.failed) != (name in alone.failed)):
                found.append(request)
    return found


@pytest.mark.sole("random traffic")
@pytest.mark.sampled
@pytest.mark.parametrize("seed", grid(range(4), {1, 2}))
def test_concurrent_requests_change_no_answer(pair: Pair, seed: int) -> None:
    assert differing(pair, seed) == []


@pytest.mark.parametrize("seed", grid(range(4), {1}))
def test_a_draft_window_changes_no_certain_answer(tmp_path: Path, seed: int) -> None:
    """Drafts depend on the company then."""
    r = random.Random(seed)
    pair, caps = make("pair", tmp_path), r.choice(CAPS)
    plain = build(pair, caps)
    certain = [
        one
        for one in some_requests(r, plain, 30)
        if one.sampling.is_certain and not one.speculation.over_acceptance and not one.reports_drafts
    ]
    undrafted = [msgspec.structs.replace(one, speculation=tiny.OFF, prediction=()) for one in certain]
    expected = run(plain, undrafted, r)
    crowded = build_crowded(pair, caps, r, draft_window=r.choice([1, 2, 3]))
    together = run(crowded, certain, r)
    assert any(outcome.num_accepted for outcomes in together.outcomes.values() for outcome in outcomes)
    for one in certain:
        assert together.tokens(one.request_id) == expected.tokens(one.request_id), one


class RandomShapes(Whims):
    """A controller that changes its choice at random steps."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self._random = r

    def choose(self, *_: object) -> None:
        if self._random.random() < 0.4:
            shape = self._random.choice([(0, 0), (0, 0), (1, 2), (2, 2), (4, 3)])
            self.tell(*shape, beside=self._random.random() < 0.5)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.usefixtures("attention_in_torch")
@pytest.mark.parametrize(
    ("kind", "is_recorded", "seed"),
    grid(product(["eagle3", "dspark", "mtp"], [False, True], range(3)), {("dspark", False, 0), ("eagle3", True, 1)}),
)
def test_changing_shapes_change_no_certain_answer(tmp_path: Path, kind: str, is_recorded: bool, seed: int) -> None:
    """Heads read what they have missed when their requests draft again."""
    r, pair, caps = random.Random(seed), make(kind, tmp_path / "head"), (4, 3, 4)
    plain = build(pair, caps)
    asked = Speculation(num_drafts=4, draft_length=3, adaptive=True)
    certain = [
        msgspec.structs.replace(one, speculation=asked, prediction=())
        for one in some_requests(r, plain, 40)
        if one.sampling.is_certain and not one.reports_drafts
    ]
    expected = run(plain, [msgspec.structs.replace(one, speculation=tiny.OFF) for one in certain], r)
    num_cut, most_rows = 0, r.choice([2, 7])

    def short(readings: Any, rows: Sequence[Row], ends_wanted: bool) -> Any:
        nonlocal num_cut
        passes = readings(rows, ends_wanted, most_rows)
        num_cut += len(passes) > 1 and bool(rows[0].fanout)
        return passes

    with ExitStack() as patches:
        if is_recorded:
            patches.enter_context(tiny.with_recorded_steps([(0, 0), (1, 2), (4, 3)]))
        crowded = build_crowded(pair, caps, r)
        crowded.scheduler.controller = RandomShapes(r)
        for module in (head, eagle):
            patches.enter_context(instead(module, "readings", short))
        together = run(crowded, certain, r)
    assert num_cut > 0
    assert any(outcome.num_nodes for outcomes in together.outcomes.values() for outcome in outcomes)
    for one in certain:
        assert together.tokens(one.request_id) == expected.tokens(one.request_id), one


@pytest.mark.slow
def test_blocks_without_the_draft_model_s_keys_are_found_out(tmp_path: Path) -> None:
    """The wrong variant: every cached block counts as one that has the draft model's K/V."""

    def publish(right: Any, store: BlockStore, block: int, key: bytes, _drafted: bool) -> None:
        right(store, block, key, True)

    with instead(BlockStore, "publish", publish):
        assert differing(make("pair", tmp_path), 1)

"""A drafter that reads the target's states at several taps, by the protocol alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.attention import HOOK
from engine.attention.inputs import SequenceInput
from engine.attention.tensors import NORMED, KVMoves, KVTensors
from engine.cpu.decoder import CpuDecoder
from engine.drafting.chains import draw_by_level
from engine.drafting.drafter import DrafterKind
from engine.drafting.model import ModelDrafter
from engine.kernels.protocol import ProbsTable
from engine.models.runner import ModelRunner
from engine.plan import Plan, Row
from engine.request import Sampling, Speculation
from engine.start.loading import LoadedModel
from engine.step.engine import Engine
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.grid import grid
from tests.wrong import instead

VOCABULARY = 101
TAPS = (1, 0, 2, NORMED)
"""Two layers, not in order: 2 is the output of the last one."""
SPECULATIONS = {
    "chains": Speculation(rule="bv_race", num_drafts=4, draft_length=3),
    "tree": Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 2, 1)),
}


class HiddenDrafter:
    """The draft model's logits, plus a linear function of the target's last state.

    No `ModelDrafter`, so that a CPU draws level by level.
    """

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        self._model = ModelDrafter(runner)
        self.runner = runner
        self.below = self._model.below
        self.keep = self._model.keep
        self.target = target
        shape = len(TAPS) * target.model.config.hidden_size, target.vocab_size
        self.head_DV = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(tiny.DEVICE)
        self.read: list[tuple[int, int, Tensor]] = []
        """(sequence, index, hidden state) of all that was read."""

    def draw(self, *operands: Any) -> tuple[Tensor, ProbsTable]:
        return draw_by_level(self, *operands)

    def begin(self, plan: Plan) -> Tensor:
        logits_NV = self._model.begin(plan)
        drawing = [row for row in plan.sampling_rows if row.fanout]
        kept = self.target.storage.hidden
        assert kept is not None
        for logits_V, row in zip(logits_NV, drawing, strict=True):
            # The target computes the root in this step, and all of a prompt's last chunk.
            index, size = row.first_index - 1, self.target.block_size
            if index < 0:
                continue
            hidden_D = kept[row.block_ids[index // size] * size + index % size]
            self.read.append((row.sequence_id, index, hidden_D.clone()))
            logits_V += 0.02 * hidden_D @ self.head_DV
        return logits_NV


KIND = DrafterKind(HiddenDrafter, taps=TAPS)


@pytest.fixture(scope="module", params=["llama", "gpt_neox"])
def pair(request: pytest.FixtureRequest) -> tuple[LoadedModel, LoadedModel]:
    """One that runs by the fast decoder, and one that runs by transformers."""
    if request.param == "llama":
        target = tiny.llama(seed=31)
    else:
        import transformers

        target = tiny.load_model(
            transformers.GPTNeoXConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=256,
                initializer_range=0.3,
            ),
            seed=31,
        )
    return target, tiny.perturbed(target, seed=3, amount=0.03)


def by_transformers(target: LoadedModel, tokens: Sequence[int]) -> Tensor:
    """[tokens, taps * D] the hidden states of a text, by a plain pass."""
    body = target.model.base_model
    before_norm: list[Tensor] = []
    last_norm = body.norm if hasattr(body, "norm") else body.final_layer_norm
    hook = last_norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    target.model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=tiny.DEVICE)
        output = body(input_ids=ids, use_cache=False, output_hidden_states=True)
    hook.remove()
    target.model.set_attn_implementation(HOOK)
    states = {0: output.hidden_states[0], 1: output.hidden_states[1], 2: before_norm[0], NORMED: output[0]}
    return torch.cat([states[tap][0] for tap in TAPS], 1)


def drafted(pair: tuple[LoadedModel, LoadedModel], speculation: Speculation) -> tuple[Engine, dict[int, list[int]]]:
    """Return (an engine after texts with a common beginning, the texts by sequence)."""
    engine = tiny.build(*pair, num_blocks=30, budget=48, kind=KIND)
    shared = tiny.prompts(VOCABULARY, [20])[0]
    prompts = [shared + rest for rest in tiny.prompts(VOCABULARY, [3, 30, 9, 5, 60, 2], seed=1)]
    requests = [
        tiny.request(str(number), prompt, speculation, max_tokens=40, temperature=1.0, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    run = tiny.run(engine, requests)
    assert run.num_preemptions > 0
    assert engine.scheduler.num_cache_hits > 0
    assert run.num_accepted > run.num_outcomes / 2, "too few drafts are accepted to move anything"
    # Sequences are numbered as requests are queued.
    return engine, {number: prompt + run.tokens[str(number)] for number, prompt in enumerate(prompts)}


def largest_error(engine: Engine, pair: tuple[LoadedModel, LoadedModel], texts: dict[int, list[int]]) -> float:
    """Return the largest difference between read states and the texts' hidden states."""
    assert isinstance(engine.drafter, HiddenDrafter)
    expected = {number: by_transformers(pair[0], text) for number, text in texts.items()}
    assert len(engine.drafter.read) > 20
    return max(float((found - expected[number][index]).abs().max()) for number, index, found in engine.drafter.read)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SPECULATIONS)
def test_the_target_s_hidden_states_are_where_a_drafter_looks(pair: tuple[LoadedModel, LoadedModel], name: str) -> None:
    """In steps of prompt chunks and trees, behind shared beginnings and after preemption."""
    engine, texts = drafted(pair, SPECULATIONS[name])
    assert largest_error(engine, pair, texts) < 1e-3


def test_hidden_states_that_stay_where_they_were_drafted_are_found_out(
    pair: tuple[LoadedModel, LoadedModel],
) -> None:
    def without_hidden(keep: Any, tensors: KVTensors, moves: Sequence[KVMoves]) -> None:
        if tensors.hidden is None:
            keep(tensors, moves)
            return
        before = tensors.hidden.clone()
        keep(tensors, moves)
        tensors.hidden.copy_(before)

    with instead(KVTensors, "keep", without_hidden):
        engine, texts = drafted(pair, SPECULATIONS["chains"])
    assert largest_error(engine, pair, texts) > 0.1


def test_taps_one_layer_off_are_found_out(pair: tuple[LoadedModel, LoadedModel]) -> None:
    def one_off(store: Any, tensors: KVTensors, tap: int, **state: Any) -> None:
        store(tensors, tap if tap == NORMED else tap - 1, **state)

    def another_place(place_of: Any, of: CpuDecoder, number: int) -> int:
        last = pair[0].model.config.num_hidden_layers + 1
        found: int = place_of(of, number if number == last else (number + 1) % last)
        return found

    with instead(KVTensors, "store", one_off), instead(CpuDecoder, "_place_of", another_place):
        engine, texts = drafted(pair, SPECULATIONS["chains"])
    assert largest_error(engine, pair, texts) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(["bv_race 4", "traversal tree"], {"bv_race 4"}))
def test_output_has_the_target_s_distribution(name: str) -> None:
    target = tiny.llama(seed=21, vocabulary=output_distribution.VOCABULARY, layers=2, spread=0.25)
    models = target, tiny.llama(seed=22, vocabulary=output_distribution.VOCABULARY, layers=1, spread=0.25)
    plain = output_distribution.SAMPLINGS["plain"]
    counts = output_distribution.sample(models, output_distribution.SPECULATIONS[name], plain, kind=KIND)
    assert (
        output_distribution.g_test(counts, output_distribution.exact_distribution(target, plain))
        > output_distribution.ALPHA
    )


def test_nothing_is_kept_where_no_drafter_reads_it(pair: tuple[LoadedModel, LoadedModel]) -> None:
    plain, reading = tiny.build(*pair), tiny.build(*pair, kind=KIND)
    assert plain.target.storage.hidden is None
    assert reading.draft_runner is not None
    assert reading.draft_runner.storage.hidden is None
    num_slots = reading.facts.num_blocks * reading.facts.block_size
    width = len(TAPS) * pair[0].model.config.hidden_size
    bytes_of_hidden = num_slots * width * 4
    assert reading.facts.memory_plan["kv_cache"] - plain.facts.memory_plan["kv_cache"] == bytes_of_hidden
    assert np.prod(reading.target.storage.hidden.shape) * 4 == bytes_of_hidden  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("draft_window", "draft_kv_first", "draft_first_index", "first_key"),
    [
        # All of the text that the draft model has K/V of.
        (0, 0, 45, 0),
        (0, 30, 45, 30),
        # As many tokens before the drafts, and at least all it computes now.
        (10, 0, 45, 40),
        (10, 0, 36, 36),
        (10, 42, 45, 42),
    ],
)
def test_a_draft_model_sees_its_window_in_every_pass(
    draft_window: int, draft_kv_first: int, draft_first_index: int, first_key: int
) -> None:
    passes: list[list[SequenceInput]] = []
    runner = MagicMock(prepare=lambda made: passes.extend(made) or made)
    end = 50
    row = Row(
        sequence_id=0,
        input_ids=(1,),
        first_index=end - 1,
        draft_input_ids=(1,) * (end - draft_first_index),
        draft_first_index=draft_first_index,
        draft_kv_first=draft_kv_first,
        draft_window=draft_window,
        block_ids=(0, 1),
        emits=True,
        sampling=Sampling(),
        speculation=SPECULATIONS["chains"],
        fanout=(2, 1, 1),
    )
    ModelDrafter(runner).begin(Plan((row,)))
    assert [len(made) for made in passes] == [1, 1, 1]
    assert [made[0].first_key for made in passes] == [first_key] * 3


def test_without_anything_to_read_there_are_no_logits() -> None:
    runner = MagicMock(vocab_size=7, device=tiny.DEVICE)
    assert ModelDrafter(runner).begin(Plan(())).shape == (0, 7)

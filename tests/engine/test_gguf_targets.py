"""Answers of GGUF targets have their distribution, with every type of drafter.

The exact distribution is that of transformers with the numbers of the blocks, whose
layers round their rows.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from engine.models.gguf.blocks import BlockTensor
from engine.models.gguf.folder import folder_of
from engine.start.loading import LoadedModel, load
from tests.cpu.small_weights import SPECULATIONS, check_any_company, on_a_cpu, rows_rounded
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.engine.test_output_distribution import ALPHA, VOCABULARY, exact_distribution, g_test
from tests.grid import slow_fixture
from tests.heads import folders, oracles, recording
from tests.models.gguf_models import write_model

pytestmark = on_a_cpu

TYPES = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q5_0", "token_embd": "Q6_K", "": "Q4_K"}
"""Those of files of Q4_K_M, and gate and up of two types."""
WIDTH = 256
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 3.0},
    "filtered": {"temperature": 2.0, "top_k": 3, "top_p": 0.95, "min_p": 0.02},
}
CASES = {
    f"{drafter}, {name}, {sampling}": (drafter, name, sampling)
    for drafter, name, sampling in (
        ("model", "off", "plain"),
        ("model", "block", "filtered"),
        ("model", "bv_race 3", "plain"),
        ("model", "bv_race 3", "filtered"),
        ("model", "traversal tree", "plain"),
        ("head", "bv_race 3", "plain"),
        ("head", "traversal tree", "filtered"),
        ("sharing head", "block", "plain"),
        ("sharing head", "bv_race 3", "filtered"),
    )
}


@pytest.fixture(scope="module")
@slow_fixture
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    """Load a small file with the first tokens of its vocabulary."""
    place = tmp_path_factory.mktemp("gguf")
    file = write_model(place / "model.gguf", "llama", TYPES)

    def found(num_tokens: int = VOCABULARY, dtype: str = "auto") -> LoadedModel:
        loaded = load(str(folder_of(file, str(place / "cache"))), None, dtype, tiny.DEVICE)
        model, weight = loaded.model, loaded.model.lm_head.weight
        few = weight.rows(slice(num_tokens)) if isinstance(weight, BlockTensor) else weight[:num_tokens]
        model.lm_head.weight = model.model.embed_tokens.weight = nn.Parameter(few, requires_grad=False)
        model.config.vocab_size = num_tokens
        return replace(loaded, vocab_size=num_tokens, eos_token_ids=frozenset())

    return found


def head_of(target: LoadedModel, folder: Path, shares: bool, **sizes: int) -> folders.Written:
    shared: dict[str, Any] = {"width": WIDTH, "shares": ("embed_tokens", "lm_head")} if shares else {}
    taps = (0, 1, 2)
    return folders.write_eagle(folder, vocabulary=target.vocab_size, taps=taps, target_width=WIDTH, **sizes, **shared)


def drafter_of(name: str, target: LoadedModel, plain: LoadedModel, folder: Path) -> LoadedModel:
    if name == "model":
        return tiny.perturbed(plain, 2, 0.1)
    shares = name == "sharing head"
    return folders.load(head_of(target, folder, shares, draft_vocabulary=VOCABULARY if shares else 3), target)


def exact(target: LoadedModel, sampling: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The distribution of dequantised weights whose products round their rows."""
    with rows_rounded(target.model, "q8_0"):
        return exact_distribution(target, sampling)


def counted(pair: tuple[LoadedModel, LoadedModel], name: str, sampling: str) -> Counter[tuple[int, ...]]:
    return output_distribution.sample(pair, SPECULATIONS[name], SAMPLINGS[sampling])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_answers_have_the_distribution_of_the_file(
    case: str, target_of: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    drafter, name, sampling = CASES[case]
    target, plain = target_of(), target_of(dtype="float32")
    expected = exact(plain, SAMPLINGS[sampling])
    draft = drafter_of(drafter, target, plain, tmp_path / "head")
    assert g_test(counted((target, draft), name, sampling), expected) > ALPHA


@pytest.mark.slow
def test_wrong_targets_and_drafts_are_noticed(target_of: Callable[..., LoadedModel], tmp_path: Path) -> None:
    """Answers of another file, and drafts of another distribution than they are verified with."""
    target, plain = target_of(), target_of(dtype="float32")
    pair = target, tiny.perturbed(plain, 2, 0.1)
    right = exact(plain, SAMPLINGS["plain"])
    other = exact(tiny.perturbed(plain, 3, 0.05), SAMPLINGS["plain"])
    assert g_test(counted(pair, "bv_race 3", "plain"), other) < ALPHA
    with tiny.with_drafts_of_another_distribution():
        assert g_test(counted(pair, "bv_race 3", "plain"), right) < ALPHA


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("shares", [False, True], ids=["own weights", "weights of the file"])
def test_logits_of_a_head_are_those_of_the_formulas(
    shares: bool, target_of: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    """The CPU's decoder shares the file's embeddings and output head.

    The median of every fourth node is compared: attention with random weights amplifies the
    rounding of some states.
    """
    target, plain = target_of(recording.VOCABULARY), target_of(recording.VOCABULARY, "float32")
    written = head_of(target, tmp_path / "head", shares, draft_vocabulary=recording.VOCABULARY if shares else 41)
    recorder, texts = recording.served(target, written, recording.SPECULATIONS["chains"], few=True)
    oracle = oracles.Eagle(written, plain)
    with rows_rounded(plain.model, "q8_0"):
        states = [oracles.target_states(plain, text, written.taps) for text in texts]

    def share_of_spread(node: recording.Node, text: list[int]) -> float:
        expected_V = oracle.logits(text, states[node.sequence], node.path)
        spread = float(expected_V[expected_V.isfinite()].std())
        return oracles.largest_error([(node.logits, expected_V)]) / spread

    nodes = [(node, texts[node.sequence][: node.length]) for node in recorder.nodes[::4]]
    assert len(nodes) > 20
    right = [share_of_spread(node, text) for node, text in nodes]
    assert statistics.median(right) < 0.05
    other = [share_of_spread(node, [*text[:-1], text[-1] ^ 1]) for node, text in nodes]
    assert statistics.median(other) > 0.5


@pytest.mark.slow
def test_answers_of_a_seed_are_the_same_in_any_company(target_of: Callable[..., LoadedModel]) -> None:
    check_any_company(target_of(97), tiny.perturbed(target_of(97, "float32"), 2, 0.02))


def test_the_types_of_the_file_are_facts(target_of: Callable[..., LoadedModel]) -> None:
    assert set(tiny.build(target_of(), None).facts.dtype.split("+")) == {"Q4_K", "Q5_0", "Q6_K"}

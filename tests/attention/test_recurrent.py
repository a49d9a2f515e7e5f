"""Recurrent layers and short convolutions: each row reads along its own path, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from engine.attention.paths import Paths
from engine.attention.states import States
from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.errors import ConfigError, LoadError
from engine.request import Speculation
from engine.start.architectures import RECURRENT_MODEL_TYPES, check_ranks
from engine.start.limits import check_outlines
from engine.start.outlines import outline_of
from engine.start.probe import find_kv_shape, probe
from tests.engine import test_output_distribution as oracle
from tests.engine import tiny
from tests.models import families
from tests.wrong import instead

KINDS = {"GDN": "qwen3_5_text", "Mamba 2": "mamba2", "short convolution": "lfm2"}
PLAIN = {"temperature": 1.0}
VOCABULARY = 12


def siblings(right: Callable[..., Any], paths: Paths, *operands: Any) -> Any:
    """A wrong variant: the nodes before a node are its ancestors."""
    nodes_TD = np.broadcast_to(np.arange(paths._nodes.shape[1]), paths._nodes.shape)
    paths.__dict__["_nodes"] = nodes_TD
    return right(paths, *operands)


def unmoved(_right: Callable[..., Any], _states: States, _moves: Any) -> None:
    """A wrong variant: inputs of rejected nodes stay behind the text."""


@pytest.mark.parametrize("kind", KINDS)
def test_tree_and_acceptance_compute_what_transformers_does(kind: str) -> None:
    """Two chunks, a tree, an acceptance with moves, and one more token; wrong variants fail."""
    model = families.family(KINDS[kind])
    shape = find_kv_shape(model)
    assert probe(model, shape, block_size=8) < 1
    for owner, name, variant in ((Paths, "_windows_of", siblings), (States, "keep", unmoved)):
        with instead(owner, name, variant), pytest.raises(LoadError, match="logits through the paged path differ"):
            probe(model, shape, block_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["bv_race", "block", "traversal"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_sampled_answers_have_the_distribution_of_the_target(name: str, rule: str) -> None:
    """The third token; enough answers are drawn to show a total variation of 0.03."""
    target, draft = (tiny.load_model(families.config(name, vocab_size=VOCABULARY), seed) for seed in (21, 22))
    speculation = Speculation(rule=rule, num_drafts=1 if rule == "block" else 4, draft_length=2)
    expected = third(oracle.exact_distribution(target, PLAIN))
    num_answers, alpha = 15_000, 1e-3
    counts = Counter(third(oracle.sample((target, draft), speculation, PLAIN, num_answers)))
    assert oracle.g_test(counts, expected) > alpha
    shifted = oracle.shifted_by(np.array(list(expected.values())), 0.03)
    drawn = np.random.default_rng(1).multinomial(num_answers, shifted)
    assert oracle.g_test(Counter(dict(zip(expected, drawn.tolist(), strict=True))) + Counter(), expected) < alpha


def third(values: Mapping[tuple[int, ...], Any]) -> dict[tuple[int, ...], Any]:
    """Sum counts or probabilities of three tokens by the last one."""
    result: dict[tuple[int, ...], Any] = {}
    for tokens, value in values.items():
        result[tokens[-1:]] = result.get(tokens[-1:], 0) + value
    return result


def test_recurrent_layers_are_not_split() -> None:
    for name in RECURRENT_MODEL_TYPES:
        check_ranks("name", families.config(name), 1)
        with pytest.raises(ConfigError, match="not split"):
            check_ranks("name", families.config(name), 2)
    check_ranks("name", families.config("llama"), 2)


def test_window_of_a_recurrent_draft_model_is_refused() -> None:
    """A state reads the whole text; a model that attends may have a window."""
    config = EngineConfig(
        model=ModelConfig(target="target", draft="draft"), speculation=SpeculationConfig(draft_window=16)
    )
    target = outline_of("target", families.config("llama"))
    check_outlines(config, [target, outline_of("draft", families.config("llama"))])
    with pytest.raises(ConfigError, match="--draft-window 16: draft has recurrent layers"):
        check_outlines(config, [target, outline_of("draft", families.config("lfm2"))])

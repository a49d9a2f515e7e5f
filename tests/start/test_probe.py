"""The probe at start finds faults; rounding alone is not a fault."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers

from engine.attention import groups, inputs
from engine.config import ModelConfig
from engine.errors import LoadError
from engine.models import runner
from engine.models.backend import TransformersBackend
from engine.start import plain_passes, probe
from engine.start.loading import LoadedModel, load, load_share
from tests.engine import tiny
from tests.start.test_loading import SMALL, saved
from tests.wrong import calls_of, instead

NOT_FINITE = (runner.ModelRunner, "forward", lambda forward, *operands: forward(*operands) * torch.nan)


WITHOUT_COMPACTION = (runner.ModelRunner, "keep", lambda *_: None)


@pytest.mark.parametrize("fault", ["causal", "positions", "compaction", "window", "not finite"])
@pytest.mark.filterwarnings("ignore")
def test_probe_rejects_a_wrong_path(fault: str) -> None:
    """Each part of the paged path that could be wrong makes the probe refuse."""
    if fault == "window":
        config = transformers.MistralConfig(**SMALL, sliding_window=6)
    else:
        config = transformers.LlamaConfig(**SMALL)
    config.initializer_range = 0.3
    loaded = tiny.load_model(config, seed=1)
    shape = probe.find_kv_shape(loaded)
    assert probe.probe(loaded, shape) < 0.05

    def causal(visible, batch, numbers, is_row_BQ, num_keys):  # type: ignore[no-untyped-def]
        """Nodes see those of other branches that lie before them."""
        found = visible(batch, numbers, is_row_BQ, num_keys)
        (number,) = numbers
        known, end = batch.num_inputs_B[number], batch.ends[number]
        size = num_keys - end
        found[0, known : known + size, end:] = np.tri(size, dtype=np.bool_)
        return found

    def flat(place, end, offset, depth):  # type: ignore[no-untyped-def]
        """Tree nodes numbered one after the other instead of by their depth."""
        return place(end, offset, offset + 1)

    faults: dict[str, Any] = {
        "not finite": NOT_FINITE,
        "causal": (groups, "_visible", causal),
        "positions": (inputs, "place", flat),
        "compaction": WITHOUT_COMPACTION,
        "window": (groups.Group, "bias", lambda bias, group, _window, *rest: bias(group, None, *rest)),
    }
    with instead(*faults[fault]), pytest.raises(LoadError, match="differ from plain transformers"):
        probe.probe(loaded, shape)


def test_all_ranks_decide_alike_whether_passes_are_recorded(tmp_path: Path) -> None:
    """Rank 0 alone would wait for the others in passes that only they make."""
    name = saved(tmp_path)

    def whole(from_pretrained: Any, name: str, tp_plan: str | None = None, **more: Any) -> Any:
        return from_pretrained(name, **more)

    with instead(transformers.AutoModelForCausalLM, "from_pretrained", whole):
        share = load_share(ModelConfig(target=name, dtype="float32"), torch.device("cpu"))
    others = load(name, None, "float32", torch.device("cpu"))
    by_kernel = probe.BackendChoice(MagicMock(), MagicMock())
    on_cuda = MagicMock()
    on_cuda.device.type = "cuda"
    first, second = replace(share, model=on_cuda, ranks=MagicMock()), replace(share, model=on_cuda)
    assert not probe.is_replayed(first, by_kernel)
    assert not probe.is_replayed(second, by_kernel)
    assert probe.is_replayed(replace(others, model=on_cuda), by_kernel)
    assert not probe.is_replayed(replace(others, model=on_cuda), probe.BackendChoice(MagicMock(), None))
    assert not probe.is_replayed(others, by_kernel)


@pytest.mark.parametrize("is_share", [False, True])
def test_a_rank_without_memory_does_not_go_on_alone(tmp_path: Path, is_share: bool) -> None:
    """A whole model tries the next backend."""
    loaded = replace(load(saved(tmp_path), None, "float32", torch.device("cpu")), is_share=is_share)
    shape, tried = probe.find_kv_shape(loaded), []

    def short(right: Any, *operands: Any, **options: Any) -> float:
        tried.append(operands)
        if len(tried) == 1:
            raise torch.cuda.OutOfMemoryError("no memory")
        found: float = right(*operands, **options)
        return found

    with instead(probe, "probe", short):
        if is_share:
            with pytest.raises(torch.cuda.OutOfMemoryError):
                probe.choose_backend(loaded, shape)
        else:
            probe.choose_backend(loaded, shape)
    assert len(tried) == (1 if is_share else 2)


def test_large_logits_may_differ_by_their_rounding() -> None:
    """In bfloat16 a logit of 13 has neighbours 1/16 away."""
    plain = torch.linspace(-0.3, 0.3, 1000).sin()[None] + 12.9
    neighbour, far = plain.clone(), plain.clone()
    neighbour[0, 500] += 1 / 16
    far[0, 500] += 3 / 16
    assert probe.distance(neighbour, plain, plain, torch.bfloat16) < 0.5
    assert probe.distance(far, plain, plain, torch.bfloat16) > 1
    assert probe.distance(neighbour, plain, plain, torch.float32) > 10


def test_a_backend_may_round_twice_as_much_as_plain_transformers() -> None:
    exact = torch.linspace(-3, 3, 1000).sin()[None]
    plain, ours = exact.clone(), exact.clone()
    plain[0, 7] += 0.5
    for amount, allowed in ((0.9, True), (1.1, False)):
        ours[0, 900] = exact[0, 900] + amount
        assert (probe.distance(ours, plain, exact, torch.bfloat16) <= 1) is allowed
    plain[0, 7] = torch.inf
    assert probe.distance(ours, plain, exact, torch.bfloat16) > 1, "plain transformers overflowed"


def in_bfloat16(seed: int) -> LoadedModel:
    loaded = tiny.llama(seed, layers=3)
    loaded.model.to(torch.bfloat16)
    return loaded


def test_float32_passes_use_the_same_weights_and_leave_them() -> None:
    model, tokens = in_bfloat16(3).model, list(range(5, 25))
    model.set_attn_implementation("eager")
    widened = copy.deepcopy(model).float()

    def logits(of: Any, token_ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = of(input_ids=torch.tensor([token_ids]), use_cache=False).logits
        return found

    with torch.inference_mode():
        plain = logits(model, tokens)
        with probe.widened(model):
            assert torch.equal(logits(model, tokens), logits(widened, tokens))
        assert torch.equal(logits(model, tokens), plain)
        with probe.widened(model), pytest.raises(IndexError):
            logits(model, [1000])
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert not model.lm_head._forward_hooks


def test_faults_of_models_in_bfloat16_are_found(caplog: pytest.LogCaptureFixture) -> None:
    """Also if they only warn, and numbers that are not finite are refused even then."""
    loaded = in_bfloat16(3)
    shape = probe.find_kv_shape(loaded)
    with calls_of(probe, "widened") as passes:
        assert 0 < probe.probe(loaded, shape) < 0.9
    assert len(passes) == 1
    with instead(*WITHOUT_COMPACTION), pytest.raises(LoadError, match="differ from plain transformers"):
        probe.probe(loaded, shape)
    assert not caplog.records
    config = ModelConfig(target="t", dtype="bfloat16", probe="warn")
    served = probe.BackendOption("plain", lambda _: True, lambda model, *_: TransformersBackend(model.bfloat16()))
    with instead(*WITHOUT_COMPACTION):
        probe.choose_backend(loaded, shape, config=config, backends=[served])
    assert "served all the same, as --probe warn asks" in caplog.text
    with instead(*NOT_FINITE), pytest.raises(LoadError, match="differ from plain transformers"):
        probe.probe(loaded, shape, only_warns=True)


def without_memory(*_: Any, **__: Any) -> None:
    raise RuntimeError("no memory")


def test_a_model_that_cannot_run_in_float32_is_compared_without(caplog: pytest.LogCaptureFixture) -> None:
    loaded = in_bfloat16(3)
    with caplog.at_level("INFO"), instead(plain_passes.nn, "Parameter", without_memory):
        assert 0 < probe.probe(loaded, probe.find_kv_shape(loaded)) < 1
    assert "probed without float32: no memory" in caplog.text
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}

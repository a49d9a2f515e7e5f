"""Length-dependent rotary embeddings: one table, by the served context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.attention.inputs import NO_NODES, SequenceInput
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.errors import ConfigError
from engine.models.rope import depends_on_length, fix_rope
from engine.models.runner import ModelRunner
from engine.request import Speculation
from engine.start.building import build_engine
from engine.start.loading import load
from engine.start.outlines import outline_pair
from engine.start.probe import BACKENDS, find_kv_shape
from tests.engine import tiny
from tests.models.test_architectures import COMMON

ORIGINAL, REACH = 64, 256
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
    "short_mscale": 1.1,
    "long_mscale": 1.4,
    "original_max_position_embeddings": ORIGINAL,
    "rope_theta": 10000.0,
}
SIZES: dict[str, Any] = {**COMMON, "max_position_embeddings": REACH, "eos_token_id": None}
CHAINS = Speculation(rule="bv_race", num_drafts=2, draft_length=3)


def longrope(family: str, original: int = ORIGINAL, **changes: Any) -> Any:
    """A configuration with longrope; `original`: positions of the short factors."""
    rope = {**LONGROPE, "original_max_position_embeddings": original, **changes}
    more = {"original_max_position_embeddings": original} if family == "phi3" else {}
    return transformers.AutoConfig.for_model(family, **SIZES, **more, rope_parameters=rope)


def saved(folder: Path, config: Any, noise: float = 0.0) -> Any:
    """Save a model with random weights, and return it with transformers' own attention."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        weight.data += noise * torch.randn(weight.shape)
    model.save_pretrained(folder)
    return model


def engine_config(folder: Path, context: int, **more: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(target=str(folder / "target"), draft=str(folder / "draft"), device="cpu"),
        scheduler=SchedulerConfig(max_model_len=context),
        cache=CacheConfig(**{"num_blocks": 64, **more}),
        speculation=SpeculationConfig(num_drafts=2, draft_length=3, max_num_drafts=2, max_draft_length=3),
    )


def continued(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return transformers' greedy continuation without a cache."""
    text = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("context", "chosen"), [(ORIGINAL, "short"), (REACH, "long")])
@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, family: str, context: int, chosen: str) -> None:
    """Short texts have short factors if the context does; so has the draft model."""
    plain = saved(tmp_path / "target", longrope(family))
    saved(tmp_path / "draft", longrope(family, 32), noise=0.01)
    lengths = (3, 17, 40) if chosen == "short" else (ORIGINAL + 1, 90, 120)
    texts = tiny.prompts(101, lengths)
    expected = {str(number): continued(plain, text, 16) for number, text in enumerate(texts)}
    lines: list[str] = []
    engine = build_engine(engine_config(tmp_path, context), lines.append)
    run = tiny.run(engine, [tiny.request(str(i), text, CHAINS, 16) for i, text in enumerate(texts)])
    assert run.tokens == expected
    assert run.num_accepted > 0
    of_target, of_draft = (line for line in lines if "rotary embedding" in line)
    assert f"target: rotary embedding: {chosen} factors" in of_target
    assert "draft: rotary embedding: long factors" in of_draft


@pytest.mark.filterwarnings("ignore")
def test_short_texts_in_a_long_context_have_the_long_factors(tmp_path: Path) -> None:
    """Their K/V would otherwise change when they grow."""
    saved(tmp_path / "target", longrope("phi3"))
    saved(tmp_path / "draft", longrope("phi3"))
    all_long = saved(tmp_path / "long", longrope("phi3", short_factor=LONGROPE["long_factor"]))
    text = tiny.prompts(101, (20,))[0]
    answers = {}
    for context in (ORIGINAL, ORIGINAL + 1):
        run = tiny.run(build_engine(engine_config(tmp_path, context)), [tiny.request("0", text, CHAINS, 16)])
        answers[context] = run.tokens["0"]
    assert answers[ORIGINAL + 1] == continued(all_long, text, 16) != answers[ORIGINAL]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_every_backend_reads_the_same_table(tmp_path: Path, kind: str) -> None:
    """Also the pass at the last position, with positions of drafts after it."""
    rope = LONGROPE if kind == "longrope" else {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    reach = REACH if kind == "longrope" else ORIGINAL
    config = transformers.LlamaConfig(**{**SIZES, "max_position_embeddings": reach}, rope_parameters=rope)
    plain = saved(tmp_path, config)
    text = tiny.prompts(101, (ORIGINAL,))[0]
    with torch.inference_mode():
        expected_TV = plain(torch.tensor([text]), use_cache=False).logits[0]
    loaded = load(str(tmp_path), None, "float32", torch.device("cpu"), context=ORIGINAL)
    # Last, because the decoders read weights that they share with the model.
    for option in reversed(BACKENDS):
        assert option.takes(loaded.model)
        backend = option.make(loaded.model, ModelConfig(target=""), 0)
        runner = ModelRunner(loaded.model, find_kv_shape(loaded), 10, 8, 101, backend)
        runner.forward([SequenceInput(text + [1] * 9, 0, range(10), NO_NODES, slice(0, 0))])
        found_TV = runner.forward([SequenceInput(text, 0, range(10), NO_NODES, slice(0, len(text)))])
        assert torch.allclose(found_TV, expected_TV, atol=1e-3, rtol=1e-3), option.name


@pytest.mark.filterwarnings("ignore")
def test_the_factor_of_attention_follows_the_choice() -> None:
    for context, mscale in ((ORIGINAL, 1.1), (ORIGINAL + 1, 1.4)):
        config = longrope("phimoe")
        fix_rope("model", config, context)
        assert config.rope_parameters["short_mscale"] == config.rope_parameters["long_mscale"] == mscale
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config).model.rotary_emb
        tables = [model(torch.zeros(1), torch.arange(length).unsqueeze(0))[0][0, :8] for length in (8, ORIGINAL + 9)]
        assert torch.equal(*tables)
        assert float(tables[0][0, 0]) == pytest.approx(mscale)


@pytest.mark.filterwarnings("ignore")
def test_embeddings_of_single_layer_types_are_fixed() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
    ropes = {"full_attention": dynamic, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    config = transformers.Gemma3TextConfig(**SIZES, rope_parameters=ropes)
    assert depends_on_length(config)
    assert "'dynamic' scaling begins after" in fix_rope("model", config, REACH)
    assert not depends_on_length(config)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1000.0
    assert fix_rope("model", config, REACH) == ""


def test_a_context_that_dynamic_scaling_would_need_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for name in ("target", "draft"):
        saved(tmp_path / name, transformers.LlamaConfig(**SIZES, rope_parameters=rope))
    with pytest.raises(ConfigError, match=r"'dynamic' rotary embedding would let .*; lower it to 256"):
        build_engine(engine_config(tmp_path, REACH + 1))
    assert [outline.max_positions for outline in outline_pair(engine_config(tmp_path, 0).model)] == [REACH, REACH]


@pytest.mark.filterwarnings("ignore")
def test_a_pool_that_shortens_the_context_names_the_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The factors are chosen before the pool is known."""
    for name in ("target", "draft"):
        saved(tmp_path / name, longrope("phi3", 2048, factor=2.0))
    reach = 4096
    for name in ("target", "draft"):
        file = tmp_path / name / "config.json"
        file.write_text(
            file.read_text().replace(f'"max_position_embeddings": {REACH}', f'"max_position_embeddings": {reach}')
        )
    facts = build_engine(engine_config(tmp_path, 0, num_blocks=100)).facts
    assert facts.max_model_len < 2048
    assert f"set --max-model-len {facts.max_model_len}" in caplog.text

"""Models that would be served wrongly are refused, with one line that says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.config_check import check_settings
from engine.errors import SERVER_FAULTS, ConfigError, LoadError, RequestError
from engine.start.architectures import check_config
from engine.start.building import assemble, build_engine
from engine.start.loading import load
from engine.start.number_formats import choose_device
from tests.engine import tiny
from tests.heads import folders
from tests.wrong import instead

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def saved(folder: Path, vocabulary: int = 64, words: dict[str, int] | None = None) -> str:
    """A tiny Llama checkpoint, with a tokenizer of `words` where given."""
    config = transformers.LlamaConfig(**{**SMALL, "vocab_size": vocabulary})
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    if words is not None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        Tokenizer(WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))
    return str(folder)


def engine_config(target: str, draft: str | None = None, **parts: object) -> EngineConfig:
    return EngineConfig(model=ModelConfig(target=target, draft=draft, device="cpu"), **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.RwkvConfig(), "missing is recurrent layers of another kind"),
        (transformers.BertConfig(), "missing is a causal language model"),
        (transformers.ZambaConfig(), "the nearest served type is zamba2"),
        (transformers.T5Config(), "encoder-decoder"),
    ],
    ids=["rwkv", "bert", "zamba", "t5"],
)
@pytest.mark.filterwarnings("ignore")
def test_architectures_that_would_be_wrong_are_refused(config: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refusal:
        check_config("model", config)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "missing")):
        with pytest.raises(ConfigError):
            build_engine(engine_config(name))


@pytest.mark.parametrize(
    ("draft", "parts", "reason"),
    [
        ("missing", {}, "missing: no such model folder"),
        ("rwkv", {}, "architecture 'rwkv'"),
        ("swapped", {}, "different vocabularies"),
        ("bare", {}, "this folder has no weights"),
        ("draft", {"speculation": SpeculationConfig(rule="nonsense")}, "--spec-rule nonsense: unknown; choose"),
        ("draft", {"speculation": SpeculationConfig(num_drafts=17)}, "--num-drafts 17: .* or raise --max-num-drafts"),
        ("draft", {"speculation": SpeculationConfig(draft_length=17)}, "or raise --max-draft-length"),
        ("draft", {"speculation": SpeculationConfig(draft_method="nonsense")}, "--draft-method nonsense: unknown"),
        ("draft", {"speculation": SpeculationConfig(tree=(2, 2))}, "--draft-tree 2,2: rule 'bv_race' would be biased"),
        ("draft", {"speculation": SpeculationConfig(rule="rrs", num_drafts=4, draft_method="x")}, "--draft-method x"),
        ("draft", {"scheduler": SchedulerConfig(max_model_len=40)}, "draft reaches 32 positions; lower it to 32"),
        (None, {"scheduler": SchedulerConfig(max_model_len=300)}, "target reaches 64 positions; lower it to 64"),
    ],
)
def test_faults_are_found_before_weights_are_read(
    tmp_path: Path, draft: str | None, parts: dict[str, object], reason: str
) -> None:
    """Loading a large target first would take minutes."""
    words = {"a": 0, "b": 1, "c": 2}
    target = saved(tmp_path / "target", words=words)
    saved(tmp_path / "draft", words=words)
    shorten(tmp_path / "draft" / "config.json")
    saved(tmp_path / "swapped", words={"a": 0, "c": 1, "b": 2})
    transformers.RwkvConfig().save_pretrained(tmp_path / "rwkv")
    shutil.copytree(tmp_path / "draft", tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    config = engine_config(target, str(tmp_path / draft) if draft else None, **parts)
    fault = "weights are read"
    with instead("engine.start.building", "load_pair", folders.refused):
        with pytest.raises((ConfigError, LoadError), match=reason) as refusal:
            build_engine(config)
        assert "\n" not in str(refusal.value)
        with pytest.raises(AssertionError, match=fault):
            build_engine(engine_config(target, str(tmp_path / "draft")))


def shorten(config: Path) -> None:
    """Make a model reach 32 positions."""
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 32}))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match="lacks 1 of the model's weights"):
        load(name, None, "float32", torch.device("cpu"))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_weights_that_a_wrapper_has_renamed_are_read(tmp_path: Path, prefix: str) -> None:
    """If all have its prefix; a fault otherwise names the other names, and not a download."""
    from safetensors.torch import load_file, save_file

    name, device = saved(tmp_path), torch.device("cpu")
    expected = load(name, None, "float32", device).model.state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({prefix + key: value for key, value in tensors.items()}, tmp_path / "model.safetensors")
    found = load(name, None, "float32", device).model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    renamed = {f"inner.{key}": value for key, value in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"tensors with other names \(inner\.") as refusal:
        load(name, None, "float32", device)
    assert "download" not in str(refusal.value)


ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("key", "outcome"),
    [
        (f"{ATTENTION}.q_proj.weight_scale", "refused"),
        (f"{ATTENTION}.q_proj.bias", "refused"),
        (f"{ATTENTION}.k_scale", "refused"),
        ("model.norm.bias", "refused"),
        ("lm_head.lora_A", "refused"),
        ("model.layers.2.mlp.up_proj.weight", "named"),
        ("model.vision_tower.weight", "named"),
        ("mtp.0.weight", "named"),
        (f"{ATTENTION}.rotary_emb.inv_freq", "silent"),
        (f"{ATTENTION}.attn.bias", "silent"),
    ],
)
def test_unplaced_tensors_are_refused_or_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, outcome: str
) -> None:
    """Tensors that change an existing module are refused; others are named once."""
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, key: torch.ones(16)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    device = torch.device("cpu")
    if outcome == "refused":
        with pytest.raises(LoadError, match="would change its numbers") as caught:
            load(folder, None, "float32", device)
        assert key in str(caught.value)
        return
    assert load(folder, None, "float32", device).vocab_size == 64
    ours = [record.getMessage() for record in caplog.records if record.name == "polydraft"]
    assert any(key in line for line in ours) == (outcome == "named")


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    name = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(LoadError, match="cannot be loaded"):
        load(name, None, "float32", torch.device("cpu"))


def test_the_end_that_only_the_tokenizer_names_ends_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Engine, grammars and facts have the same ends; a model without any is named."""
    name = saved(tmp_path, words={"a": 0, "b": 1, "end": 2})
    progress: list[str] = []
    assert build_engine(engine_config(name)).facts.eos_token_ids == []
    assert "no file names an end token" in caplog.text
    structured = tiny.request("0", [1], grammar="start: /a/")
    with pytest.raises(RequestError, match="cannot end") as refusal:
        build_engine(engine_config(name)).submit(structured)
    assert refusal.value.code in SERVER_FAULTS
    caplog.clear()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "end"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    engine = build_engine(engine_config(name), progress.append)
    assert engine.facts.eos_token_ids == [1, 2]
    assert "answers end with 1 'b' (generation_config.json), 2 'end' (tokenizer_config.json)" in progress
    assert caplog.text == ""
    result = tiny.run(engine, [tiny.request(str(end), [0], logit_bias=((end, 100.0),)) for end in (1, 2, 3)])
    assert {name: len(tokens) for name, tokens in result.tokens.items()} == {"1": 1, "2": 1, "3": 24}
    assert result.finish_reasons == {"1": "stop", "2": "stop", "3": "length"}


def test_unlike_vocabularies_are_refused(tmp_path: Path) -> None:
    words = {"a": 0, "b": 1, "c": 2}
    target = saved(tmp_path / "target", words=words)
    same_size = saved(tmp_path / "swapped", words={"a": 0, "c": 1, "b": 2})
    other_size = saved(tmp_path / "small", vocabulary=32)
    for draft in (same_size, other_size):
        with pytest.raises(ConfigError, match="same family"):
            build_engine(engine_config(target, draft))


def test_a_draft_with_a_padded_head_is_served(tmp_path: Path) -> None:
    """The draft's distribution is cut or filled to the target's."""
    words = {"a": 0, "b": 1, "c": 2}
    target = saved(tmp_path / "target", words=words)
    for size in (48, 80):
        draft = saved(tmp_path / f"draft{size}", vocabulary=size, words=words)
        engine = build_engine(engine_config(target, draft))
        from engine.request import Speculation

        speculation = Speculation(rule="bv_race", num_drafts=2, draft_length=2)
        result = tiny.run(engine, [tiny.request("0", [1, 2], speculation, temperature=1.0, seed=1)])
        assert len(result.tokens["0"]) == 24


def test_incomplete_target_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not-a-model"}))
    with pytest.raises(ConfigError, match="no readable transformers config"):
        build_engine(engine_config(str(tmp_path)))


def test_settings_that_cannot_work_are_refused() -> None:
    bad = {
        "unknown": SpeculationConfig(rule="nonsense"),
        "num-drafts": SpeculationConfig(num_drafts=17),
        "draft-length": SpeculationConfig(draft_length=0),
    }
    for reason, speculation in bad.items():
        with pytest.raises(ConfigError, match=reason):
            check_settings(engine_config("t", "d", speculation=speculation))
    with pytest.raises(ConfigError, match="max-num-batched-tokens"):
        check_settings(engine_config("t", "d", scheduler=SchedulerConfig(max_num_batched_tokens=100)))
    target = tiny.llama(seed=1)
    for scheduler, cache, reason in (
        (SchedulerConfig(max_model_len=1000), CacheConfig(), "256 positions"),
        (SchedulerConfig(max_model_len=256), CacheConfig(num_blocks=2), "room for 2 blocks"),
    ):
        with pytest.raises(ConfigError, match=reason):
            assemble(engine_config("t", scheduler=scheduler, cache=cache), target, None)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            choose_device("cuda")

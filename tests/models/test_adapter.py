"""LoRA adapters that are merged into the target: the numbers of peft, and refusals by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError, LoadError
from engine.models import adapter as adapters
from engine.models.adapter import merge, read_adapter
from engine.request import Speculation
from engine.start.building import build_engine
from engine.start.loading import load
from tests.engine import tiny
from tests.wrong import instead

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
CHAINS = Speculation(rule="bv_race", num_drafts=2, draft_length=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model, whose weights are those of a plain Llama."""
    folder = tmp_path_factory.mktemp("base")
    tiny.llama(1, layers=2).model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an adapter, for copies."""
    return write_adapter(base, tmp_path_factory.mktemp("written"))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the adapter, which a test may change."""
    return Path(shutil.copytree(written, tmp_path / "adapter"))


@pytest.fixture(scope="module")
def unchanged(base: Path) -> Any:
    """Return the small model, to which no adapter may be added."""
    return load(str(base), None, "float32", CPU).model


def write_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """Write an adapter by peft, large enough to change answers."""
    model = load(str(base), None, "float32", CPU).model
    wanted = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**wanted))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return [T, V] logits by transformers alone."""
    model.set_attn_implementation("eager")
    result: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return result


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"layers.0.*q_proj": 2}, "alpha_pattern": {"down_proj": 5}},
    "head": {"target_modules": ["lm_head", "k_proj"]},
    **{f"init {start}": {"init_lora_weights": start} for start in adapters.INITS if start is not None},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_merged_weights_have_the_numbers_of_peft(base: Path, tmp_path: Path, name: str) -> None:
    folder = write_adapter(base, tmp_path / "adapter", **OPTIONS[name])
    ids = torch.randint(3, 100, (1, 30), generator=torch.Generator().manual_seed(1))
    plain = load(str(base), None, "float32", CPU).model
    before = logits(plain, ids)
    expected = logits(peft.PeftModel.from_pretrained(load(str(base), None, "float32", CPU).model, folder), ids)
    assert merge(plain, read_adapter(str(folder))) > 0
    assert torch.allclose(logits(plain, ids), expected, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)


def test_greedy_answers_are_those_of_peft(base: Path, tmp_path: Path) -> None:
    """With drafts of the base model, through the engine that serves."""
    folder = write_adapter(base, tmp_path / "adapter")
    adapted = peft.PeftModel.from_pretrained(load(str(base), None, "float32", CPU).model, folder)
    adapted.base_model.model.set_attn_implementation("eager")
    prompts = [list(range(5 + number, 15 + number)) for number in range(3)]
    answers = {"adapter": str(folder), "base": ""}
    for name, adapter in answers.items():
        config = EngineConfig(model=ModelConfig(target=str(base), draft=str(base), device="cpu", adapter=adapter))
        requests = [
            tiny.request(str(number), prompt, CHAINS, 12, temperature=0.0) for number, prompt in enumerate(prompts)
        ]
        answers[name] = tiny.run(build_engine(config), requests).tokens
    expected = {}
    for number, prompt in enumerate(prompts):
        ids = adapted.generate(input_ids=torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
        expected[str(number)] = ids[0, len(prompt) :].tolist()
    assert answers["adapter"] == expected
    assert answers["base"] != expected


def changed_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def changed_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def shorten(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = tensors[name][:, :-1].contiguous()


def rename(old: str, new: str) -> Callable[[Path], None]:
    """Return a change of the first tensor whose name has a text."""

    def change(tensors: dict[str, Any]) -> None:
        name = next(name for name in tensors if old in name)
        tensors[name.replace(old, new)] = tensors.pop(name)

    return lambda folder: changed_tensors(folder, change)


def add(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: changed_tensors(folder, lambda tensors: tensors.update({name: tensor}))


def fields(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: changed_config(folder, **changed)


TABLE = "base_model.model.model.embed_tokens.weight"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another type": (fields(peft_type="IA3"), "'IA3'; LORA alone"),
    "rank": (fields(r=8), "rank 8"),
    "no rank": (fields(r=None), "r = None"),
    "alpha": (fields(lora_alpha="16"), "lora_alpha = '16'"),
    "pattern": (fields(rank_pattern={"(": 1}), "rank_pattern = {'(': 1}"),
    "pattern's value": (fields(alpha_pattern={"q_proj": "4"}), "alpha_pattern"),
    "width": (lambda folder: changed_tensors(folder, shorten), "is it for another model"),
    "names": (rename("layers.", "blocks."), "is it for another model"),
    "half": (lambda folder: changed_tensors(folder, lambda tensors: tensors.popitem()), "one of its two parts"),
    "checkpoint": (rename("lora_A.weight", "lora_A.default.weight"), "checkpoint of a training"),
    "table": (add(TABLE, torch.zeros(3, 3)), "a whole weight that differs"),
    "embedding": (
        add("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(3)),
        "another layer or method",
    ),
    "no linear layer": (rename("self_attn.q_proj", "input_layernorm"), "no plain linear layer"),
    "not finite": (add("odd", torch.tensor([float("nan")])), "odd has numbers that are not finite"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "damaged": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"no tensors"), "cannot be read"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused_by_name(folder: Path, unchanged: Any, name: str) -> None:
    """Before any weight is changed."""
    spoil, message = REFUSED[name]
    spoil(folder)
    before = {name: tensor.clone() for name, tensor in unchanged.state_dict().items()}
    with pytest.raises((ConfigError, LoadError)) as refused:
        merge(unchanged, read_adapter(str(folder)))
    assert message in str(refused.value)
    assert str(folder) in str(refused.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in unchanged.state_dict().items())


STARTS_ELSEWHERE = ("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "nobody knows it")
METHODS: dict[str, Any] = {
    **dict.fromkeys("use_dora use_qalora fan_in_fan_out lora_bias".split(), True),
    **{name: {"rank": 1} for name in "velora_config monteclora_config use_bdlora arrow_config kasa_config".split()},
    **{name: ["embed_tokens"] for name in ("modules_to_save", "target_parameters")},
    "bias": "lora_only",
    "alora_invocation_tokens": [1],
    "trainable_token_indices": [1],
    "layer_replication": [[0, 1]],
    "megatron_config": {"rank": 1},
    "a_method_of_tomorrow": "on",
}


@pytest.mark.parametrize(
    ("field", "value"), [*(("init_lora_weights", start) for start in STARTS_ELSEWHERE), *METHODS.items()]
)
def test_initialisations_and_methods_that_are_not_plain_are_refused_by_name(
    tmp_path: Path, field: str, value: Any
) -> None:
    """Everything but what is known: a field of tomorrow, too, unless it is off."""
    (tmp_path / "adapter_model.safetensors").touch()
    stored = peft.LoraConfig(r=4).to_dict() | {"a_method_of_tomorrow": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(stored, default=list))
    assert read_adapter(str(tmp_path)).rank == 4
    changed_config(tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=f"{field} = {re.escape(repr(value))}.*merge it with peft"):
        read_adapter(str(tmp_path))


LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
ALIKE = {"target_modules": ["q_proj"]}
MERGED, ANOTHER_TYPE, STARTED = "", "LORA alone is served", "has changed the model's own weights"
SAVED: dict[str, tuple[Any, str]] = {
    "init eva": (peft.LoraConfig(**LORA, init_lora_weights="eva", eva_config=peft.EvaConfig()), MERGED),
    "init mica": (peft.LoraConfig(**LORA, init_lora_weights="mica"), MERGED),
    **{f"init {start}": (peft.LoraConfig(**LORA, init_lora_weights=start), STARTED)
       for start in ("pissa", "pissa_niter_4", "olora")},
    **{f"converted {kind}": (peft.LoraConfig(**LORA, init_lora_weights=kind), MERGED) for kind in ("pissa", "olora")},
    "rslora": (peft.LoraConfig(**LORA, use_rslora=True), MERGED),
    **{field: (peft.LoraConfig(**LORA, **{field: value}), f"{field} = ") for field, value in {
        "use_dora": True, "lora_bias": True, "bias": "all", "modules_to_save": ["lm_head"],
        "trainable_token_indices": [1], "layer_replication": [[0, 2], [1, 2]], "target_parameters": ["o_proj.weight"],
    }.items()},
    "AdaLora": (peft.AdaLoraConfig(**ALIKE, total_step=9), ANOTHER_TYPE),
    "IA3": (peft.IA3Config(**ALIKE, feedforward_modules=[]), ANOTHER_TYPE),
    "OFT": (peft.OFTConfig(**ALIKE, oft_block_size=8), ANOTHER_TYPE),
    "prompts": (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), ANOTHER_TYPE),
    **{kind: (getattr(peft, f"{kind}Config")(**ALIKE), ANOTHER_TYPE)
       for kind in ("Vera", "LoHa", "LoKr", "BOFT", "HRA", "FourierFT")},
}  # fmt: skip
"""Adapters by peft's initialisation or method, each with the reason if it is refused."""


def trained(base: Path, config: Any, folder: Path, is_converted: bool) -> Any:
    """Return a model of peft after a training that changed every trained number, and save it."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(load(str(base), None, "float32", CPU).model, copy.deepcopy(config))
    adapted.get_base_model().set_attn_implementation("eager")
    started = None
    if getattr(config, "init_lora_weights", None) == "eva":
        texts = [{"input_ids": torch.randint(3, 100, (4, 12))} for _ in range(4)]
        peft.initialize_lora_eva_weights(adapted, texts, show_progress_bar=False)
    if is_converted:
        started = str(folder / "started")
        adapted.peft_config["default"].init_lora_weights = True
        adapted.save_pretrained(started)
        adapted.peft_config["default"].init_lora_weights = config.init_lora_weights
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    adapted.save_pretrained(folder, path_initial_model_for_weight_conversion=started)
    return adapted.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
@torch.no_grad()
def test_what_peft_saves_is_served_as_it_computes_or_refused(base: Path, tmp_path: Path, name: str) -> None:
    config, reason = SAVED[name]
    adapted = trained(base, config, tmp_path, name.startswith("converted"))
    if reason:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            read_adapter(str(tmp_path))
        return
    ids = torch.randint(3, 100, (1, 30))
    model = load(str(base), None, "float32", CPU).model
    before = logits(model, ids)
    assert merge(model, read_adapter(str(tmp_path))) == 6
    expected = adapted(input_ids=ids, use_cache=False).logits[0]
    assert torch.allclose(logits(model, ids), expected, atol=1e-4)
    assert not torch.allclose(before, expected, atol=1e-2)


def test_the_page_names_what_peft_saves() -> None:
    rows = [line.split("|") for line in PAGE.read_text().lower().splitlines() if line.startswith("|")]
    for name, (_, reason) in SAVED.items():
        word = name.removeprefix("init ").partition(" ")[0].replace("niter_4", "niter_n").lower()
        assert word in " ".join(row[2 if reason else 1] for row in rows), name


def test_every_variant_of_peft_is_among_the_refused_methods() -> None:
    """A new version of peft may add one."""
    variants = {field.name for field in dataclasses.fields(peft.LoraConfig) if field.metadata.get("is_lora_variant")}
    assert variants <= METHODS.keys()


def test_a_copy_of_the_models_own_table_is_harmless(base: Path, folder: Path) -> None:
    """Peft stores it with adapters of models whose vocabulary was changed."""
    model = load(str(base), None, "float32", CPU).model
    add(TABLE, model.get_input_embeddings().weight.detach().clone())(folder)
    assert merge(model, read_adapter(str(folder))) > 0


def test_merged_weights_beyond_their_type_are_the_adapters_fault(base: Path, folder: Path) -> None:
    changed_config(folder, lora_alpha=10**7)
    model = load(str(base), None, "float32", CPU).model.half()
    with pytest.raises(LoadError, match="merged weights exceed"):
        merge(model, read_adapter(str(folder)))


def test_the_comparison_finds_a_wrong_scale(base: Path, tmp_path: Path) -> None:
    with (
        instead(adapters.Adapter, "scale", lambda right, *operands: right(*operands) / 2),
        pytest.raises(AssertionError),
    ):
        test_merged_weights_have_the_numbers_of_peft(base, tmp_path, "plain")

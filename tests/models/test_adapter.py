"""LoRA adapters that are merged into the target: the numbers of peft, and refusals by name."""

from __future__ import annotations

import json
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
CHAINS = Speculation(rule="bv_race", num_drafts=2, draft_length=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model, whose weights are those of a plain Llama."""
    folder = tmp_path_factory.mktemp("base")
    tiny.llama(1, layers=2).model.save_pretrained(folder)
    return folder


def write_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """Write an adapter by peft, whose low-rank parts are random and large enough to change
    answers.
    """
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


def rename(tensors: dict[str, Any]) -> None:
    name = next(iter(tensors))
    tensors[name.replace("layers.", "blocks.")] = tensors.pop(name)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another type": (lambda folder: changed_config(folder, peft_type="IA3"), "'IA3'; LORA alone"),
    "dora": (lambda folder: changed_config(folder, use_dora=True), "use_dora = True"),
    "bias": (lambda folder: changed_config(folder, bias="all"), "bias = 'all'"),
    "modules": (lambda folder: changed_config(folder, modules_to_save=["embed_tokens"]), "modules_to_save"),
    "rank": (lambda folder: changed_config(folder, r=8), "rank 8"),
    "no rank": (lambda folder: changed_config(folder, r=None), "r = None"),
    "width": (lambda folder: changed_tensors(folder, shorten), "is it for another model"),
    "names": (lambda folder: changed_tensors(folder, rename), "blocks"),
    "half": (lambda folder: changed_tensors(folder, lambda tensors: tensors.popitem()), "one of its two parts"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    "damaged": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"no tensors"), "cannot be read"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused_by_name(base: Path, tmp_path: Path, name: str) -> None:
    """Before any weight is changed."""
    folder = write_adapter(base, tmp_path / "adapter")
    spoil, message = REFUSED[name]
    spoil(folder)
    model = load(str(base), None, "float32", CPU).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((ConfigError, LoadError)) as refused:
        merge(model, read_adapter(str(folder)))
    assert message in str(refused.value)
    assert str(folder) in str(refused.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_comparison_finds_a_wrong_scale(base: Path, tmp_path: Path) -> None:
    with (
        instead(adapters.Adapter, "scale", lambda right, *operands: right(*operands) / 2),
        pytest.raises(AssertionError),
    ):
        test_merged_weights_have_the_numbers_of_peft(base, tmp_path, "plain")

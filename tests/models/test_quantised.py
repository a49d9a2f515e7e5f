"""Quantised checkpoints are loaded as transformers loads them, and give the numbers it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.models.kinds import is_lean
from engine.models.loading import load
from engine.models.packing import is_plain
from tests.engine import tiny
from tests.models.test_architectures import COMMON

CPU = torch.device("cpu")
BLOCK = tiny.Speculation(rule="block", num_drafts=1, draft_length=3)


@pytest.mark.filterwarnings("ignore")
def test_an_int8_checkpoint_is_served(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    config = transformers.LlamaConfig(**{**COMMON, "hidden_size": 64, "intermediate_size": 128}, eos_token_id=None)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain",
        quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig()),
        dtype=torch.float32,
    )
    quantised.save_pretrained(tmp_path / "int8")
    loaded = load(str(tmp_path / "int8"), None, "float32", CPU)
    assert "Int8" in type(loaded.model.model.layers[0].mlp.up_proj.weight).__name__
    assert not is_lean(loaded.model), "joining weights would undo the quantisation"
    prompt = list(range(5, 20))
    whole = torch.tensor([prompt])
    expected = quantised.generate(whole, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = load(str(tmp_path / "plain"), None, "float32", CPU)
    assert loaded.weight_bytes < 0.75 * plain.weight_bytes
    assert len([module for module in loaded.model.modules() if is_plain(module)]) <= 1, "only the head is plain"
    requests = [tiny.request("off", prompt, max_tokens=16), tiny.request("block", prompt, BLOCK, max_tokens=16)]
    engine = tiny.build(loaded, plain)
    run = tiny.run(engine, requests)
    assert run.tokens["off"] == run.tokens["block"] == expected[0, len(prompt) :].tolist()
    assert run.num_accepted > 0

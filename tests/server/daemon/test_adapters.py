"""A daemon with an adapter in its target's weights."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import save_file

from tests.server.daemon_process import Daemons
from tests.server.tiny_models import TinyModels

PROMPT = list(range(5, 25))


@pytest.fixture
def adapter(tmp_path: Path, models: TinyModels) -> Path:
    """Return a folder with an adapter that changes answers."""
    config = json.loads((models.target / "config.json").read_text())
    hidden = config["hidden_size"]
    num_values = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = "base_model.model.model.layers.0.self_attn.v_proj"
    generator = torch.Generator().manual_seed(1)
    shapes = {"A": (4, hidden), "B": (num_values, 4)}
    tensors = {f"{layer}.lora_{part}.weight": torch.randn(shape, generator=generator) for part, shape in shapes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    stored = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(stored))
    return tmp_path


@pytest.mark.slow
def test_the_adapter_is_the_model(
    daemons: Daemons, pair_arguments: list[str], models: TinyModels, adapter: Path
) -> None:
    """It has the base as its parent, and the base cannot be asked for."""
    target, draft = str(models.target), str(models.draft)
    plain = daemons.get(*pair_arguments, "--no-calibrate")
    adapted = daemons.get(target, "--draft-model", draft, "--no-calibrate", "--lora-modules", f"polite={adapter}")
    answers = []
    for daemon in (plain, adapted):
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:
            (card,) = client.models.list().data
            answers.append(client.completions.create(model=card.id, prompt=PROMPT, max_tokens=20, temperature=0))
    assert answers[0].choices[0].text != answers[1].choices[0].text
    assert card.model_dump().items() >= {"id": "polite", "root": str(adapter), "parent": target}.items()
    with openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none") as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model=target, prompt=PROMPT)
    assert "merged the adapter" in adapted.log


@pytest.mark.slow
def test_an_adapter_that_cannot_be_merged_ends_the_start(daemons: Daemons, models: TinyModels) -> None:
    """`test_start_failures.py` has refusals that need no model."""
    daemon = daemons.start(str(models.target), "--lora-modules", "a=/nowhere")
    assert daemon.process.wait(60) == 2
    assert "/nowhere" in daemon.log

"""A daemon that serves a file as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.converted import write_converted
from tests.server.daemon_process import Daemons

PROMPT = list(range(100, 340))  # longer than the windows of the model


@pytest.mark.slow
def test_answers_of_a_gemma_are_those_of_transformers(daemons: Daemons, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    model = write_converted(file, "gemma3-4b")
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    daemon = daemons.start(str(file), "--no-calibrate", "--served-model-name", "gemma", "--num-threads", "1")
    daemon.wait_ready()
    body = {"model": "gemma", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with daemon.client() as client:
        answer = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    assert answer["choices"][0]["token_ids"] == expected[0, len(PROMPT) :].tolist()

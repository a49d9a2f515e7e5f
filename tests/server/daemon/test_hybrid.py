"""A daemon whose target and draft model have recurrent layers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine import tiny
from tests.models import families
from tests.server.daemon_process import Daemons
from tests.server.scraped_metrics import samples_of
from tests.server.tiny_models import MAX_POSITIONS, TOKENIZER, TOKENIZER_FILES, VOCAB_SIZE

PROMPT = [number % 700 + 5 for number in range(0, 70 * 13, 13)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hybrid_answers_as_transformers_does_and_starts_from_cached_states(daemons: Daemons, tmp_path: Path) -> None:
    config = families.config("qwen3_5_text", vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_POSITIONS)
    target = tiny.load_model(config, seed=3)
    draft = tiny.perturbed(target, seed=4, amount=0.01)
    for folder, loaded in ((tmp_path / "target", target), (tmp_path / "draft", draft)):
        loaded.model.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(TOKENIZER / name, folder / name)
    expected = families.generated(target, PROMPT, 24)
    daemon = daemons.start(
        str(tmp_path / "target"), "--draft-model", str(tmp_path / "draft"), "--max-num-seqs", "3", "--no-calibrate"
    )
    daemon.wait_ready()
    body = {"model": str(tmp_path / "target"), "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True, "speculation": {"num_drafts": 4, "draft_length": 3}}
    with daemon.client() as http:
        answers = [http.post("/v1/completions", json=body).json() for _ in range(2)]
        samples = {sample.name: sample.value for sample in samples_of(http.get("/metrics").text)}
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected, expected]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert samples["polydraft_states_max"] == 12  # a seat and a cached state for three requests, of two models
    assert 0 < samples["polydraft_states_used"] <= 6
    assert samples["polydraft_state_cache_hits_total"] == 2
    assert samples["polydraft_spec_decode_num_accepted_tokens_total"] > 0
    assert "12 places for states" in daemon.log

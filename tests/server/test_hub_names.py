"""A model named as on the hub, at a revision: weights, tokenizer, defaults and grammars are all of that one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from engine.errors import ConfigError
from engine.files import model_file
from loadtest.daemon import running_daemon
from tests.server.tiny_models import TOKENIZER_FILES, TinyModels, write_pair

NAME = "polydraft/tiny"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModels:
    """A hub's cache with two revisions: the first has no tokenizer, the second is greedy by default."""
    pair = write_pair(tmp_path)
    repository = tmp_path / "hub" / "models--polydraft--tiny"
    for revision, commit in COMMITS.items():
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        shutil.copytree(pair.target, repository / "snapshots" / commit)
    for name in TOKENIZER_FILES:
        (repository / "snapshots" / COMMITS["main"] / name).unlink()
    (repository / "snapshots" / COMMITS["v2"] / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return pair


def test_everything_is_of_the_revision(models: TinyModels) -> None:
    words = [NAME, "--revision", "v2", "--draft-model", str(models.draft), "--no-calibrate"]
    with running_daemon(words) as url:

        def answer(**fields: object) -> str:
            body = {"model": NAME, "prompt": "Once", "max_tokens": 8, **fields}
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            return str(found["choices"][0]["text"])

        greedy = answer(temperature=0)
        assert [answer() for _ in range(3)] == [greedy] * 3, "the default temperature is the revision's"
        assert len({answer(temperature=1) for _ in range(4)}) > 1
        assert answer(structured_outputs={"choice": ["left", "right"]}) in ("left", "right")


def test_a_revision_without_a_tokenizer_is_refused(models: TinyModels) -> None:
    words = [NAME, "--draft-model", str(models.draft), "--no-calibrate"]
    with pytest.raises(RuntimeError, match="no tokenizer could be loaded"), running_daemon(words):
        pass


def test_files_of_models(models: TinyModels) -> None:
    found = model_file(NAME, "config.json", "v2")
    assert found is not None
    assert found.parent.name == COMMITS["v2"]
    assert model_file(NAME, "generation_config.json") is None
    assert model_file(NAME, "generation_config.json", "v2") is not None
    assert model_file(str(models.target), "generation_config.json") is None
    assert model_file(str(models.target), "config.json") == models.target / "config.json"
    with pytest.raises(ConfigError, match=r"not/a/name: config\.json cannot be fetched"):
        model_file("not/a/name", "config.json")

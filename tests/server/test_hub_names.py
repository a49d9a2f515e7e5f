"""A model named as on the hub, at a revision: weights, tokenizer, defaults and grammars are all of that one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.errors import ConfigError
from engine.files import model_file
from loadtest.daemon import running_daemon
from server.settings import Serve
from tests.server.tiny_models import TOKENIZER_FILES, TinyModels, write_pair

NAME = "polydraft/tiny"
COMMITS = {"main": "a" * 40, "v2": "b" * 40, "bare": "c" * 40}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModels:
    """A hub's cache: its main revision has another vocabulary, `v2` is greedy by default, `bare` has no tokenizer."""
    pair = write_pair(tmp_path)
    repository = tmp_path / "hub" / "models--polydraft--tiny"
    for revision, commit in COMMITS.items():
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        shutil.copytree(pair.target, repository / "snapshots" / commit)
    for name in TOKENIZER_FILES:
        (repository / "snapshots" / COMMITS["bare"] / name).unlink()
    vocabulary = repository / "snapshots" / COMMITS["main"] / "tokenizer.json"
    described = json.loads(vocabulary.read_text())
    described["model"]["vocab"]["one token more"] = 5000
    vocabulary.write_text(json.dumps(described))
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


@pytest.mark.parametrize(
    ("revision", "fault"), [("bare", "no tokenizer could be loaded"), ("main", "have different vocabularies")]
)
def test_a_revision_that_cannot_be_served_is_refused(models: TinyModels, revision: str, fault: str) -> None:
    words = [NAME, "--revision", revision, "--draft-model", str(models.draft), "--no-calibrate"]
    with pytest.raises(RuntimeError, match=fault), running_daemon(words):
        pass


def test_a_tokenizer_that_is_the_targets_is_of_its_revision() -> None:
    def revision(tokenizer: str | None) -> str | None:
        return Serve(model=NAME, revision="v2", tokenizer=tokenizer).tokenizer_revision()

    assert [revision(tokenizer) for tokenizer in (None, NAME, "other/name")] == ["v2", "v2", None]


def test_files_of_models(models: TinyModels) -> None:
    found = model_file(NAME, "config.json", "v2")
    assert found is not None
    assert found.parent.name == COMMITS["v2"]
    assert model_file(NAME, "generation_config.json") is None
    assert model_file(NAME, "generation_config.json", "v2") is not None
    assert model_file(str(models.target), "generation_config.json") is None
    assert model_file(str(models.target), "config.json") == models.target / "config.json"
    assert model_file(NAME, "generation_config.json") is None, "offline, what is not in the cache is not there"
    with pytest.raises(ConfigError, match=r"not/a/name: config\.json cannot be fetched"):
        model_file("not/a/name", "config.json")


@pytest.mark.parametrize("known", [None, "a mark that it does not exist"])
def test_a_hub_that_does_not_answer(models: TinyModels, monkeypatch: pytest.MonkeyPatch, known: object) -> None:
    """Is no model without the file, unless it is known that it has none."""

    def download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("the network is unavailable")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: known)
    if known is not None:
        assert model_file(NAME, "generation_config.json") is None
        return
    with pytest.raises(ConfigError, match="the network is unavailable"):
        model_file(NAME, "generation_config.json")

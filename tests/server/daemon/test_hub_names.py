"""A hub's model at a revision: weights, tokenizer, defaults and grammars."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.errors import ConfigError
from engine.models.files import check_source, model_file
from loadtest.daemon import running_daemon
from server.settings.settings import Serve
from tests.grid import grid
from tests.server.hub_processes import NO_HUB, run_python
from tests.server.tiny_models import TOKENIZER_FILES, TinyModels, write_pair

NAME = "polydraft/tiny"
COMMITS = {"main": "a" * 40, "v2": "b" * 40, "bare": "c" * 40}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModels:
    """A hub's cache: `v2` is greedy by default, `bare` has no tokenizer."""
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


@pytest.mark.slow  # the other tests here refuse and explain revisions without a daemon that serves one
def test_all_files_are_of_the_revision(models: TinyModels) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("revision", "fault"),
    grid(
        [("bare", "no tokenizer could be loaded"), ("main", "have different vocabularies")],
        {("bare", "no tokenizer could be loaded")},
    ),
)
def test_a_revision_that_cannot_be_served_is_refused(models: TinyModels, revision: str, fault: str) -> None:
    words = [NAME, "--revision", revision, "--draft-model", str(models.draft), "--no-calibrate"]
    with pytest.raises(RuntimeError, match=fault), running_daemon(words):
        pass


@pytest.mark.slow
def test_a_draft_has_a_revision_of_its_own(models: TinyModels) -> None:
    """`main` has one token more than the target; `v2` has the same words."""
    words = [str(models.target), "--draft-model", NAME, "--no-calibrate"]
    with pytest.raises(RuntimeError, match="have different vocabularies"), running_daemon(words):
        pass
    with running_daemon([*words, "--draft-revision", "v2"]) as url:
        assert httpx.get(f"{url}/ready").status_code == 200


def test_a_tokenizer_that_is_the_targets_is_of_its_revision() -> None:
    def revision(tokenizer: str | None) -> str | None:
        return Serve(model=NAME, revision="v2", tokenizer=tokenizer).engine_config().model.tokenizer_source[1]

    assert [revision(tokenizer) for tokenizer in (None, NAME, "other/name")] == ["v2", "v2", None]


def test_hub_names_resolve_to_files(models: TinyModels) -> None:
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
def test_unreachable_hub_is_explained(models: TinyModels, monkeypatch: pytest.MonkeyPatch, known: object) -> None:
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


class HubAnswers(BaseHTTPRequestHandler):
    """A hub with `X-Error-Code` by the owner's name; `silent` gets no answer."""

    def do_HEAD(self) -> None:
        owner = self.path.split("/")[1]
        if owner == "silent":
            self.server.is_over.wait()  # type: ignore[attr-defined]
            return
        codes = {
            "nobody": "RepoNotFound",
            "gated": "GatedRepo",
            "somebody": "RevisionNotFound",
            "bare": "EntryNotFound",
        }
        self.send_response(404 if owner in codes else 500)
        self.send_header("X-Error-Code", codes.get(owner, ""))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def hub_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HubAnswers) as server:
        server.is_over = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.is_over.set()  # type: ignore[attr-defined]
        server.shutdown()


SERVE = "import sys; from server.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"


def refusal(cache: Path, endpoint: str, *words: str) -> str:
    """The one line that `polydraft serve` prints before it exits 2."""
    done = run_python(SERVE, cache, endpoint, *words)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("polydraft serve: ")
    return lines[0]


@pytest.mark.slow
def test_a_name_without_a_network_is_explained_at_once(tmp_path: Path, models: TinyModels) -> None:
    """In one line, with what was tried; also for the draft model, before the target is loaded."""
    for words in (["somebody/model"], [str(models.target), "--draft-model", "somebody/model"]):
        line = refusal(tmp_path / "empty", NO_HUB, *words)
        assert f"somebody/model: no such folder here, and the hub ({NO_HUB}) does not answer (" in line
        assert "Connection refused" in line
        assert "check the name and the network" in line


@pytest.mark.sole("errors of the hub")
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("nobody/model", "has no such model, or shows it to its owner only; check the name, or set HF_TOKEN"),
        ("gated/model", "ask for it there, and set HF_TOKEN"),
        ("somebody/model", "has no revision 'v9' of it; check --revision, or --draft-revision"),
        ("bare/model", "has it without config.json"),
        ("broken/model", "does not answer (Server error '500 Internal Server Error'"),
    ],
)
def test_errors_of_the_hub_are_explained(tmp_path: Path, hub_url: str, name: str, fault: str) -> None:
    line = refusal(tmp_path / "empty", hub_url, name, "--revision", "v9")
    assert name in line
    assert fault in line


def test_silent_hub_times_out(tmp_path: Path, hub_url: str) -> None:
    """However long its address takes, or its answer."""
    code = (
        "import engine.models.files as files; files.PROBE_S, files._PATIENCE_S = 60, 0.2\n"
        "try: files.check_source('silent/model')\n"
        "except files.ConfigError as error: print(error)"
    )
    done = run_python(code, tmp_path / "empty", hub_url)
    assert "silent/model: no such folder here, and the hub" in done.stdout, done.stderr
    assert "does not answer (nothing in 0 s)" in done.stdout


@pytest.mark.sampled
@pytest.mark.parametrize("knows_defaults", [True, False])
def test_a_hub_that_does_not_answer_is_not_needed_for_a_cached_model(
    models: TinyModels, tmp_path: Path, knows_defaults: bool
) -> None:
    """It is asked once; a cache without the model's defaults is no whole model."""
    code = (
        "import os; from engine.models.files import check_source, model_file\n"
        "import logging; logging.basicConfig()\n"
        f"check_source('{NAME}', '{'v2' if knows_defaults else 'main'}')\n"
        f"print(os.environ['HF_HUB_OFFLINE'], model_file('{NAME}', 'tokenizer.json', 'v2'))"
    )
    done = run_python(code, tmp_path / "hub", NO_HUB)
    if knows_defaults:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("1 ")
        assert COMMITS["v2"] in done.stdout
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert f"does not answer ([Errno 111] Connection refused); {NAME} is taken from its cache" in done.stderr
    else:
        assert "check the name and the network" in done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama3.2:3b", "a name of Ollama's library"),
        ("hf.co/owner/model-GGUF:Q4_K_M", "named without its address: owner/model-GGUF:Q4_K_M"),
        ("https://huggingface.co/owner/model", "named without its address: owner/model"),
        ("s3://bucket/model", "download the model"),
    ],
)
def test_names_of_other_servers_are_explained(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_source(name)


def test_offline_names_that_are_not_cached_are_explained(models: TinyModels) -> None:
    with pytest.raises(ConfigError, match=r"nobody/model: .*which alone is asked with HF_HUB_OFFLINE; name a folder"):
        check_source("nobody/model")
    check_source(NAME, "v2")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "models/", "README.md", "a b"])
def test_a_path_that_does_not_exist_is_named_as_such(name: str) -> None:
    """Without asking the hub: no model there is called like this."""
    with pytest.raises(ConfigError, match=r"(no such model folder|a file); name a folder with"):
        check_source(name)


def test_a_folder_without_a_model_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this folder has no config\.json"):
        check_source(str(tmp_path))
    check_source(str(tmp_path), is_model=False)

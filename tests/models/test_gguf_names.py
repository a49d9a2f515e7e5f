"""A name of GGUF files selects a file, here or on the hub."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.models.gguf.folder import folder_of
from engine.models.gguf.names import hub_file, local_file, with_folders
from engine.models.importing import import_transformers
from engine.start.outlines import outline_pair
from server.cli import main
from server.settings.settings import Serve
from tests.models.gguf_models import DEMO, tokenizer_keys, write_model
from tests.server.hub_processes import NO_HUB, run_python

# Before other tests import parts of it with packages that it is to be imported without.
import_transformers()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models."""
    folder = tmp_path_factory.mktemp("gguf")
    for architecture in ("llama", "qwen2", "qwen3"):
        write_model(folder / f"{architecture}.gguf", architecture)
    write_model(folder / "parts.gguf", parts=2)
    return folder


def test_names_of_files_and_folders(models: Path, tmp_path: Path) -> None:
    shutil.copy(models / "llama.gguf", tmp_path / "sha256-0a1b")
    alone = tmp_path / "alone"
    alone.mkdir()
    for part in (1, 2):
        shutil.copy(models / f"parts-0000{part}-of-00002.gguf", alone)
    (alone / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert local_file(str(models / "llama.gguf")) == models / "llama.gguf"
    assert local_file(str(tmp_path / "sha256-0a1b")) == tmp_path / "sha256-0a1b", "whatever a GGUF file is called"
    assert local_file(str(alone)) == alone / "parts-00001-of-00002.gguf"
    assert folder_of(alone / "parts-00002-of-00002.gguf", "off") == folder_of(
        alone / "parts-00001-of-00002.gguf", "off"
    )
    assert [local_file(str(name)) for name in (tmp_path, DEMO, "owner/model", "README.md")] == [None] * 4
    (alone / "config.json").write_text("{}")
    assert local_file(str(alone)) is None, "a folder in transformers format"


def test_names_that_mean_no_model_or_several(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.gguf: no such file; check the name"):
        local_file("nowhere.gguf")
    with pytest.raises(ConfigError) as refused:
        local_file(str(models))
    names = "llama.gguf, parts-00001-of-00002.gguf, qwen2.gguf, qwen3.gguf"
    assert f"this folder has 4 GGUF models ({names}); name one of the files" in str(refused.value)
    (tmp_path / "mmproj.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"are no models \(mmproj\.gguf\); name a model's file"):
        local_file(str(tmp_path))


FILES = {
    "owner/several": ["a.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_XS.gguf", "m-UD-Q4_K_M.gguf", "mmproj.gguf"],
    "owner/parts": ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"],
    "owner/two": ["m-Q8_0.gguf", "m-F16.gguf"],
    "owner/twins": ["a-Q8_0.gguf", "b-Q8_0.gguf"],
    "owner/none": ["README.md"],
}  # fmt: skip
CHOSEN = [
    ("owner/several:Q4_K_M", "m-Q4_K_M.gguf"),
    ("owner/several:q4_k_s", "m-Q4_K_S.gguf"),
    ("owner/several:IQ4", "m-IQ4_XS.gguf"),
    ("owner/several:UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
    ("owner/several:m-IQ4_XS.gguf", "m-IQ4_XS.gguf"),
    ("owner/several", "m-Q4_K_M.gguf"),
    ("owner/parts:Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
    ("owner/parts", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
]
UNCHOSEN = [
    ("owner/several:Q5_0", "no GGUF file there has 'Q5_0' in its name; types: IQ4_XS, Q4_K_M, Q4_K_S, UD-Q4_K_M"),
    ("owner/several:Q4_K", "3 GGUF models there fit (m-Q4_K_M.gguf, m-Q4_K_S.gguf, m-UD-Q4_K_M.gguf); name one: "),
    ("owner/two", "2 GGUF models; name a type, as in owner/two:Q8_0; types: F16, Q8_0"),
    ("owner/twins:Q8_0", "2 GGUF models there fit (a-Q8_0.gguf, b-Q8_0.gguf); name one: owner/twins:FILE"),
    ("owner/none:Q8_0", "owner/none has no GGUF models; leave :Q8_0 out, or check the name"),
    ("owner/unknown:Q8_0", "does not have it; download the file and name it"),
]


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with GGUF files, of which the revision `old` has another."""
    cache = tmp_path / "hub"
    for repository, names in FILES.items():
        at = cache / f"models--{repository.replace('/', '--')}"
        for revision, commit in {"main": "a" * 40, "old": "b" * 40}.items():
            (at / "refs").mkdir(parents=True, exist_ok=True)
            (at / "refs" / revision).write_text(commit)
            for name in names:
                file = at / "snapshots" / commit / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"GGUF")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize(("name", "file"), CHOSEN)
def test_a_type_selects_a_file_of_the_cache(name: str, file: str, hub_cache: Path) -> None:
    for revision, commit in {None: "a" * 40, "old": "b" * 40}.items():
        found = hub_file(name, revision, has_type=":" in name)
        assert found is not None
        assert found.relative_to(hub_cache).parts[1:] == ("snapshots", commit, *file.split("/"))


@pytest.mark.parametrize(("name", "words"), UNCHOSEN)
def test_types_that_select_no_file_are_explained(name: str, words: str, hub_cache: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        hub_file(name, None, has_type=":" in name)
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["owner/model", "model:Q8_0", "./owner/model:Q8_0", "demo/target", "a/b/c:Q8_0"])
def test_other_names_are_not_asked_for_types(name: str) -> None:
    assert hub_file(name, None) is None


class GgufHub(BaseHTTPRequestHandler):
    """A hub with one repository of GGUF files, `owner/parts`, whose revision is `v2`."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.partition("/owner/parts/resolve/v2/")[2]
        listing = {"id": "owner/parts", "sha": "c" * 40, "siblings": [{"rfilename": one} for one in self.files]}
        body = self.files.get(name, b"")
        if self.path.startswith("/api/models/owner/parts/revision/v2"):
            body = json.dumps(listing).encode()
        self.send_response(200 if body else 404)
        for header, value in {"ETag": f'"{name}"', "X-Repo-Commit": "c" * 40, "Content-Length": len(body)}.items():
            self.send_header(header, str(value))
        if not body:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub_url(models: Path) -> Iterator[str]:
    paths = [models / f"parts-0000{part}-of-00002.gguf" for part in (1, 2)]
    GgufHub.files = {path.name.replace("parts", "m-Q8_0"): path.read_bytes() for path in paths} | {
        "README.md": b"words"
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), GgufHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["owner/parts:Q8_0", "owner/parts"])
def test_all_parts_are_downloaded(name: str, hub_url: str, tmp_path: Path) -> None:
    code = (
        "from engine.models.gguf.names import source_of; from engine.models.gguf.file import open_file\n"
        "from engine.models.gguf.folder import file_of; from pathlib import Path\n"
        f"source = source_of({name!r}, 'v2', {str(tmp_path / 'derived')!r})\n"
        "file = open_file(file_of(Path(source.name)))\n"
        "print(source.revision, len(file.paths), len(file.tensors))"
    )
    done = run_python(code, tmp_path / "hub", hub_url)
    assert done.stdout == "None 2 20\n", done.stderr


@pytest.mark.slow
def test_a_cached_file_is_served_without_an_answer_of_the_hub(hub_cache: Path) -> None:
    code = (
        "import logging; logging.basicConfig()\n"
        "from engine.models.gguf.names import hub_file; print(hub_file('owner/parts:Q8_0', None))"
    )
    done = run_python(code, hub_cache, NO_HUB)
    assert done.stdout.strip().endswith(f"{'a' * 40}/Q8_0/m-Q8_0-00001-of-00002.gguf"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "owner/parts:Q8_0 is taken from its cache" in line
    unknown = run_python(code.replace("owner/parts", "owner/other"), hub_cache, NO_HUB)
    assert "MissingConfig: owner/other:Q8_0: the hub (http://127.0.0.1:1) is not asked or does not" in unknown.stderr


def test_people_see_the_names_of_the_command_line(
    models: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In errors, and as the served name; the draft here has another token."""
    keys = tokenizer_keys()
    tokens, merges = [*keys["tokenizer.ggml.tokens"][:-1], "another token"], keys["tokenizer.ggml.merges"][:9]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    other = write_model(tmp_path / "other.gguf", changes=changes)
    target = str(models / "llama.gguf")
    assert main(["serve", target, "--draft-model", str(other), "--profile-cache", "off"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"polydraft serve: {other} and {target} have different vocabularies (4096 and 4096 tokens, ")
    assert main(["serve", target, "--quantization", "awq", "--profile-cache", "off"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"polydraft serve: --quantization awq: {target} is quantised by gguf; leave the flag out")
    assert Serve(model=target).served_names() == [target]


@pytest.mark.parametrize("target", ["llama.gguf", "demo"])
def test_pairs_of_both_formats(target: str, models: Path) -> None:
    """A GGUF draft of a transformers model, and the reverse."""
    names = {"demo": str(DEMO), "llama.gguf": str(models / "llama.gguf")}
    draft = next(name for name in names if name != target)
    given = ModelConfig(target=names[target], draft=names[draft], tokenizer=names["llama.gguf"], device="cpu")
    config = with_folders(EngineConfig(model=given, profile_cache="off")).model
    assert [outline.vocab_size for outline in outline_pair(config)] == [4096, 4096]
    derived = {name for name in (config.target, config.draft, config.tokenizer) if name not in names.values()}
    assert config.given_names == dict.fromkeys(derived, names["llama.gguf"])
    assert config.shown(f"{config.target} {config.draft} {config.tokenizer}") == " ".join(
        (names[target], names[draft], names["llama.gguf"])
    )

"""A file that is not what its name says is named, before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.errors import ConfigError, LoadError, PolydraftError
from engine.models.files import check_source
from engine.models.weight_files import check_weight_files
from tests.wrong import instead

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"
PAGE = "<!DOCTYPE html>\n<html><body>404</body></html>"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder of two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number, name in enumerate(SHARDS):
        save_file({f"w{number}": np.ones((8, 8), np.float32)}, folder / name)
    weight_map = {f"w{number}": name for number, name in enumerate(SHARDS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def without_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def into(folder: Path, deeper: str) -> None:
    inner = folder / deeper
    inner.mkdir(parents=True)
    (folder / "config.json").rename(inner / "config.json")


SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (lambda at: (at / "config.json").write_text(POINTER), "config.json: this is a git-lfs pointer, not "
                "the file itself; run in its folder: git lfs pull"),
    "other pointer": (lambda at: (at / "chat_template.jinja").write_text(POINTER), "jinja: this is a git-lfs pointer"),
    "page": (lambda at: (at / "config.json").write_text(PAGE), "config.json: this is a web page"),
    "empty": (lambda at: (at / "config.json").write_text(""), "config.json: the file is empty"),
    "link": (lambda at: (without_config(at) / "config.json").symlink_to("../blobs/gone"), "config.json: a link to "
             "../blobs/gone, which is gone"),
    "deeper": (lambda at: into(at, "inner"), "did you mean"),
    "hub cache": (lambda at: into(at, "snapshots/5f0b"), "snapshots/5f0b?"),
    "nothing": (without_config, "this folder has no config.json; name a folder with config.json and safetensors, or a "
                "GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SOURCES)
def test_folder_without_a_model_is_explained(fault: str, model: Path) -> None:
    check_source(str(model))
    spoil, words = SOURCES[fault]
    spoil(model)
    with pytest.raises(ConfigError) as refusal:
        check_source(str(model))
    assert words in str(refusal.value)
    assert str(model) in str(refusal.value)


@pytest.mark.parametrize(
    ("begin", "words"), [("GGUF", "this is a GGUF file; to serve it, name it as"), ("PK", "a file; name")]
)
def test_file_in_place_of_a_folder_is_named(begin: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_text(begin)
    with pytest.raises(ConfigError, match=words):
        check_source(str(tmp_path / "m.bin"))


def test_a_tokenizer_that_was_not_fetched_is_named(model: Path) -> None:
    check_source(str(model), is_model=False)
    (model / "tokenizer.json").write_text(POINTER)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: this is a git-lfs pointer"):
        check_source(str(model), is_model=False)


def forbidden(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_file_of_another_user_is_named(model: Path) -> None:
    """The tests may run as a user who may read everything."""
    with (
        instead(Path, "open", forbidden),
        pytest.raises(ConfigError, match=r"config\.json: cannot be read \(Permission denied\); let the user"),
    ):
        check_source(str(model))


def removed(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda at: removed(at, *SHARDS, "model.safetensors.index.json"), "this folder has no weights (model."),
    "no index": (lambda at: removed(at, "model.safetensors.index.json"), "no weights that transformers finds"),
    "other files": (lambda at: (removed(at, *SHARDS, "model.safetensors.index.json"),
                                (at / "training_args.bin").write_bytes(b"x")), "only training_args.bin"),
    "gguf": (lambda at: (removed(at, *SHARDS, "model.safetensors.index.json"), (at / "m-q4.gguf").write_bytes(b"GGUF")),
             "this folder's weights are in GGUF files; serve one by naming it: polydraft serve "),
    "renamed gguf": (lambda at: (at / SHARDS[0]).write_bytes(b"GGUF"), f"{SHARDS[0]}: this is a GGUF file"),
    "shard": (lambda at: removed(at, SHARDS[1]), f"1 of the 2 files that model.safetensors.index.json names are "
              f"missing ({SHARDS[1]}); download the model again"),
    "pointer": (lambda at: (at / SHARDS[0]).write_text(POINTER), f"{SHARDS[0]}: this is a git-lfs pointer"),
    "page": (lambda at: (at / SHARDS[0]).write_text(PAGE), f"{SHARDS[0]}: this is a web page"),
    "empty": (lambda at: (at / SHARDS[0]).write_text(""), f"{SHARDS[0]}: the file is empty"),
    "link": (lambda at: (removed(at, SHARDS[0]), (at / SHARDS[0]).symlink_to("gone")), "a link to gone, which is gone"),
    "cut": (lambda at: cut(at / SHARDS[1]), "the file is cut off, or no safetensors file ("),
    "cut early": (lambda at: (at / SHARDS[1]).write_bytes(b"\x40" + bytes(7)), "cut off, or no safetensors file"),
    "no header": (lambda at: (at / SHARDS[1]).write_bytes(b"\x04" + bytes(20)), "cut off, or no safetensors file"),
    "index": (lambda at: (at / "model.safetensors.index.json").write_text(PAGE), "index.json: this is a web page"),
    "no map": (lambda at: (at / "model.safetensors.index.json").write_text("{}"), "the file has no weight_map"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WEIGHTS)
def test_truncated_weights_are_named(fault: str, model: Path) -> None:
    check_weight_files(model)
    spoil, words = WEIGHTS[fault]
    spoil(model)
    with pytest.raises((LoadError, ConfigError)) as refusal:
        check_weight_files(model)
    assert words in str(refusal.value)
    assert isinstance(refusal.value, PolydraftError)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, ", ...")])
def test_missing_files_are_named(count: int, more: str, model: Path) -> None:
    """Three of the missing files, and of those that exist instead."""
    names = [f"{number}.bin" for number in range(count)]
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(enumerate(names))}))
    named = f"0.bin, 1.bin, 2.bin{more}"
    with pytest.raises(LoadError) as refusal:
        check_weight_files(model)
    told = f"{count} of the {count} files that {index.name} names are missing ({named}); download the model again"
    assert str(refusal.value) == f"{model}: {told}"
    removed(model, *SHARDS, index.name)
    whole = "model.safetensors, pytorch_model.bin"
    with pytest.raises(LoadError) as refusal:
        check_weight_files(model)
    assert str(refusal.value) == f"{model}: this folder has no weights ({whole}); download the model again"
    for name in names:
        (model / name).write_text("")
    with pytest.raises(LoadError) as refusal:
        check_weight_files(model)
    whole += ", model.safetensors.index.json, pytorch_model.bin.index.json"
    told = f"this folder has no weights that transformers finds ({whole}), only {named}; download the model again"
    assert str(refusal.value) == f"{model}: {told}"


@pytest.mark.parametrize(
    ("header", "is_whole"),
    [
        (b"{}", True),
        (b'{"__metadata__": {"format": "pt"}}', True),
        (b'{"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}', True),
        (b'{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', False),
        (b'{"w": {}}', False),
        (b"[]", False),
        (b"3", False),
        (None, False),
    ],
)
def test_truncated_file_is_found_by_its_header(header: bytes | None, is_whole: bool, model: Path) -> None:
    """None: the length of the header is the largest number."""
    length = b"\xff" * 8 if header is None else len(header).to_bytes(8, "little")
    (model / SHARDS[1]).write_bytes(length + (header or b"{}"))
    if is_whole:
        check_weight_files(model)
        return
    with pytest.raises(
        LoadError, match=r": the file is cut off, or no safetensors file \(.*header.*\); download it again$"
    ):
        check_weight_files(model)


def test_pickled_weights_are_not_opened(model: Path) -> None:
    removed(model, *SHARDS, "model.safetensors.index.json")
    (model / "pytorch_model.bin").write_bytes(b"PK")
    check_weight_files(model)

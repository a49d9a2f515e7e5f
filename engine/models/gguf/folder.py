"""Derives transformers' folder of a GGUF file, but for the weights.

The rest of the daemon then works on this folder as on any model's. It is written once for a file of
a name, size and time of change, next to the daemon's measurements in the user's cache.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, LoadError, PolydraftError, first_line
from engine.models.files import WEIGHTS_ELSEWHERE, read_object
from engine.models.gguf.config import config_of, vocab_size
from engine.models.gguf.file import GgufFile, open_file
from engine.models.gguf.parts import parts_of
from engine.models.gguf.tokenizer import TokenizerFiles, tokenizer_files

log = logging.getLogger("polydraft")

_FORMAT = 3
"""Version of the derivation; increased if a folder of the same file would differ."""
CACHE = "~/.cache/polydraft"
_SUBFOLDER, _PARTIAL = "gguf", ".partial-"
_LONGEST_STEM = 100
"""Characters of a file's name in the name of its folder, which people may see."""
_SAMPLING = "general.sampling."
_RENAMED = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Sampling defaults of a file whose names in generation_config.json differ."""


def folder_of(path: Path, cache: str = CACHE, needs_tokenizer: bool = True) -> Path:
    """Return the folder of a GGUF file; raise ConfigError or LoadError.

    path: the file, or any of its parts. cache: folder in which it is stored, of `EngineConfig`;
    "off" stores it until this process ends. needs_tokenizer: else a tokenizer that cannot be used
    is left out, because another one is served.
    """
    paths = [one.absolute() for one in parts_of(path)]
    stored = _stored(cache)
    folder = (stored or _temporary()) / f"{paths[0].stem[:_LONGEST_STEM]}-{_digest(paths, needs_tokenizer)}"
    if _is_whole(folder):
        return folder
    file = open_file(paths[0])
    _check_kind(file)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
    try:
        _write(partial, file, needs_tokenizer)
        partial.chmod(0o755)
        return _moved(partial, folder)
    except OSError as error:
        raise ConfigError(f"{partial}: cannot be written ({error.strerror}); make room there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def file_of(folder: Path) -> Path | None:
    """Return the GGUF file that has a folder's weights; None if the weights are in the folder."""
    stated = folder / WEIGHTS_ELSEWHERE
    if not stated.is_file():
        return None
    return Path(str(read_object(stated)["file"]))


def _digest(paths: list[Path], needs_tokenizer: bool) -> str:
    """Return a name for the present state of files."""
    try:
        stated = [(str(path), facts.st_size, facts.st_mtime_ns) for path in paths for facts in [path.stat()]]
    except OSError:
        stated = []  # opening the file reports what is wrong
    versions = [_FORMAT, *map(version, ("gguf", "tokenizers", "transformers"))]
    return hashlib.sha256(json.dumps([stated, versions, needs_tokenizer]).encode()).hexdigest()[:16]


def _stored(cache: str) -> Path | None:
    """Return the folder of all derived folders; None if there is none that can be written."""
    if cache == "off":
        return None
    try:
        folder = Path(cache).expanduser() / _SUBFOLDER
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    # No home folder, a system of files that is only read, a full disk.
    except (OSError, RuntimeError) as error:
        log.warning(
            "what is derived from GGUF files cannot be stored (%s), so the next start derives it again; name a folder "
            "with --profile-cache",
            error,
        )
        return None
    return folder


@functools.cache
def _temporary() -> Path:
    """Return a folder that is removed when this process ends."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="polydraft-gguf-"))
    except OSError as error:
        raise ConfigError(
            f"what is derived from GGUF files cannot be stored ({error}); name a folder with --profile-cache"
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder still has all files that were written."""
    try:
        names = read_object(folder / WEIGHTS_ELSEWHERE)["files"]
    except (PolydraftError, KeyError, OSError):
        return False
    return isinstance(names, list) and all((folder / str(name)).is_file() for name in names)


def _moved(partial: Path, folder: Path) -> Path:
    """Give a complete folder its name, unless another process was faster."""
    if not _is_whole(folder):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            partial.rename(folder)
        except OSError:
            if not _is_whole(folder):
                raise
    return folder


def _check_kind(file: GgufFile) -> None:
    """Raise LoadError for a file that is no language model."""
    kind = file.metadata.get("general.type", "model")
    if file.architecture == "clip" or kind == "mmproj":
        raise LoadError(f"{file.path}: a projector of images or sounds (mmproj), not a model; name the model's file")
    if kind == "adapter":
        raise LoadError(
            f"{file.path}: an adapter (LoRA), not a model; adapters are not served: merge it into its model "
            "(llama-export-lora of llama.cpp) and name that file"
        )
    if kind != "model":
        raise LoadError(f"{file.path}: a GGUF file of type {kind!r}, not a model; name the model's file")


def _write(folder: Path, file: GgufFile, needs_tokenizer: bool) -> None:
    """Write the files of a model's folder."""
    config = config_of(file)
    roles = _write_tokenizer(folder, file, needs_tokenizer)
    config |= roles
    generation = {**_sampling(file.metadata), **roles}
    for name, content in {"config.json": config, "generation_config.json": generation}.items():
        (folder / name).write_text(json.dumps(content, indent=2))
    names = sorted(path.name for path in folder.iterdir())
    (folder / WEIGHTS_ELSEWHERE).write_text(json.dumps({"file": str(file.path), "files": names}))


def _write_tokenizer(folder: Path, file: GgufFile, is_needed: bool) -> dict[str, Any]:
    """Write the tokenizer's files, and return the tokens with a role."""
    try:
        tokens = _tokenizer(file)
    except PolydraftError as error:
        if is_needed:
            raise
        log.warning("%s; its tokenizer is left out, because --tokenizer names another", error)
        named = {role: file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
        return {f"{role}_token_id": token for role, token in named.items()}
    tokens.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens.config, indent=2))
    if tokens.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokens.chat_template)
    return {"bos_token_id": tokens.begin_id, "eos_token_id": list(tokens.end_ids)}


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return all sampling defaults of a file. The daemon names those that it does not apply.

    A penalty on no tokens is none, and a penalty on all tokens is that of generation_config.json.
    """
    found = {key.removeprefix(_SAMPLING): value for key, value in metadata.items() if key.startswith(_SAMPLING)}
    if found.get("penalty_last_n") == 0:
        found.pop("penalty_repeat", None)
    if found.get("penalty_last_n") == -1:
        del found["penalty_last_n"]
    is_plain = (int, float, str)
    return {
        _RENAMED.get(name, name): value if isinstance(value, is_plain) else str(value) for name, value in found.items()
    }


def _tokenizer(file: GgufFile) -> TokenizerFiles:
    """Return a file's tokenizer; raise ConfigError or LoadError if unusable."""
    vocab_size(file)
    try:
        return tokenizer_files(file.metadata)
    except ConfigError as error:
        way_out = "" if "--tokenizer" in str(error) else "; or serve the tokenizer of a folder by --tokenizer"
        raise ConfigError(f"{file.path}: {error}{way_out}") from error
    except Exception as error:  # the library has no class of its own for it
        raise LoadError(
            f"{file.path}: the file's tokenizer cannot be used ({first_line(error)}); convert the model again"
        ) from error

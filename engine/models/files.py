"""Files of a model, in its folder or on the hub."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.errors import ConfigError, first_line

log = logging.getLogger("polydraft")

PROBE_S, _PATIENCE_S = 5.0, 8.0
"""Longest wait for the hub's answer, and for the exchange with address look-up."""
_GGUF = b"GGUF"
_LFS = b"version https://git-lfs.github.com/spec/"
_RIGHT_FOLDER = "name a folder with config.json and safetensors, or a GGUF file"
INFILL_MARKS = "infill_marks"
"""Key of tokenizer_config.json with the marks for filling gaps that a GGUF file names."""
WEIGHTS_ELSEWHERE = "gguf.json"
"""File of a derived folder that names the GGUF file with its weights (`gguf/folder.py`)."""
_ADAPTER = "adapter_config.json"
_TEXTS = ("text_config", "llm_config")
"""Fields of config.json with a text model's configuration; the second is Nemotron's."""
_FLOAT = "__float__"
"""Key of a number without a name in JSON, which transformers stores as an object."""
_FILES_READ = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Files besides weights; a git-lfs pointer may change answers without an error."""


class MissingConfig(ConfigError):
    """A model on the hub, or in its cache, has no config.json; it may have GGUF files."""


def check_source(name: str, revision: str | None = None, is_model: bool = True) -> None:
    """Raise ConfigError, with a way out, if `name` is no folder and not on the hub.

    Takes seconds without a network: the hub is asked once, for one file. If it does not answer
    and the cache has the model, this process and its children do not ask again. is_model: else
    it is a tokenizer.
    """
    file = "config.json" if is_model else "tokenizer.json"
    try:
        is_folder = Path(name).is_dir()
    except PermissionError as error:
        raise ConfigError(f"{name}: this process's user may not look into a folder above it; grant access") from error
    except OSError as error:
        raise ConfigError(f"{name}: no such model folder ({error.strerror}); {_RIGHT_FOLDER}") from error
    if is_folder:
        _check_folder(Path(name), file, is_model)
        return
    if Path(name).is_file():
        raise ConfigError(f"{name}: {file_fault(Path(name)) or f'a file; {_RIGHT_FOLDER}'}")
    if advice := _foreign_name(name):
        raise ConfigError(f"{name}: {advice}")
    if _is_path(name):
        raise ConfigError(f"{name}: no such model folder; {_RIGHT_FOLDER}")
    _check_hub(name, revision, file, is_model)


def _foreign_name(name: str) -> str:
    """Return advice about a name of a model as other servers spell it; "" for other names."""
    if on_hub := re.match(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/([^/]+/[^/]+)", name):
        return f"models of the hub are named without its address: {on_hub[1]}"
    if "://" in name:
        return "an address; download the model, and name its folder or file"
    if ":" in name and "/" not in name:
        return (
            "a name of Ollama's library, which is not asked here; name a model of the hub (OWNER/REPOSITORY, or "
            f"OWNER/REPOSITORY:TYPE for a GGUF file), or the file that `ollama show --modelfile {name}` has after FROM"
        )
    return ""


def hub_client() -> ModuleType:
    """Return the client of the hub.

    Importing it takes 0.15 s, for httpx, which the HTTP process needs for no model in a folder. It
    also reads HF_HUB_OFFLINE, which the engine process sets after its first imports.
    """
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def _check_hub(name: str, revision: str | None, file: str, is_model: bool) -> None:
    """Raise ConfigError if neither the hub nor its cache has the file."""
    hub = hub_client()
    files = [file] if is_model else [file, "config.json"]
    cached = [hub.try_to_load_from_cache(name, file, revision=revision) for file in files]
    is_cached = any(isinstance(path, str) for path in cached)
    if hub.is_offline_mode():
        if not is_cached:
            raise MissingConfig(
                f"{name}: no such folder here, and the hub's cache ({hub.constants.HF_HUB_CACHE}) does not have it, "
                "which alone is asked with HF_HUB_OFFLINE; name a folder, or unset HF_HUB_OFFLINE to ask the hub"
            )
        return
    fault = _ask_hub(name, revision, file, is_model)
    if fault is None:
        return
    # The client must know whether the model has generation defaults: without them it would be
    # served with others.
    if is_cached and hub.try_to_load_from_cache(name, "generation_config.json", revision=revision) is not None:
        log.warning(
            "the hub (%s) does not answer (%s); %s is taken from its cache", hub.constants.ENDPOINT, fault, name
        )
        os.environ["HF_HUB_OFFLINE"] = "1"
        hub.constants.HF_HUB_OFFLINE = True
        return
    raise ConfigError(
        f"{name}: no such folder here, and the hub ({hub.constants.ENDPOINT}) does not answer ({fault}); check the "
        "name and the network (HF_ENDPOINT, HTTPS_PROXY), or download the model elsewhere and name its folder"
    )


def _check_folder(folder: Path, file: str, must_exist: bool) -> None:
    """Raise ConfigError for a folder without a usable file; the message names the likely reason."""
    there = [path for path in map(folder.joinpath, _FILES_READ) if path.is_file() or path.is_symlink()]
    for path in there:
        if fault := file_fault(path):
            raise ConfigError(f"{path}: {fault}")
    if folder / file in there or not must_exist:
        return
    if (folder / _ADAPTER).is_file():
        raise ConfigError(f"{folder}: {_of_adapter(folder)}")
    # A download may have put the model one folder deeper; the hub's cache has it two folders
    # deeper.
    inner = sorted(found.parent for pattern in ("*", "snapshots/*") for found in folder.glob(f"{pattern}/{file}"))
    if inner:
        raise ConfigError(f"{folder}: this folder has no {file}; did you mean {inner[-1]}?")
    raise ConfigError(f"{folder}: this folder has no {file}; {_RIGHT_FOLDER}")


def _of_adapter(folder: Path) -> str:
    """Return the message about a folder that holds an adapter only."""
    base = read_object(folder / _ADAPTER).get("base_model_name_or_path")
    named = base if isinstance(base, str) and base else "another model"
    return f"an adapter (LoRA) of {named}, not a model; serve {named} with --lora-modules NAME={folder}"


def warn_of_adapter(name: str) -> None:
    """Warn of an adapter in the folder of a whole model, which is not applied."""
    if (Path(name) / _ADAPTER).is_file() and (Path(name) / "config.json").is_file():
        log.warning(
            "%s: the adapter in the model's folder (%s) is not applied; name it by --lora-modules if answers need it",
            name,
            _ADAPTER,
        )


def file_fault(path: Path) -> str:
    """Return why a file cannot be what its name says, and a way out; "" if it can."""
    try:
        with path.open("rb") as file:
            begin = file.read(64)
    except FileNotFoundError:
        return f"a link to {os.readlink(path)}, which is gone; download the model again"
    except OSError as error:
        return f"cannot be read ({error.strerror}); let the user of this process read it"
    if not begin:
        return "the file is empty; download it again"
    if begin.startswith(_LFS):
        return "this is a git-lfs pointer, not the file itself; run in its folder: git lfs pull"
    if begin.startswith(_GGUF):
        return f"this is a GGUF file; to serve it, name it as the model: polydraft serve {path}"
    if begin.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "this is a web page (HTML), not the file itself; download it again"
    return ""


def begins_as_gguf(path: Path) -> bool:
    """Whether a file that can be read is a GGUF file, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF)) == _GGUF
    except OSError:
        return False


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise ConfigError with the reason if there is none.

    Numbers may be Infinity and NaN, as in the files of Mamba 2 and Nemotron-H.
    """
    if fault := file_fault(path):
        raise ConfigError(f"{path}: {fault}")
    try:
        stored = json.loads(path.read_bytes(), object_hook=_number_or_object)
        json.dumps(stored, ensure_ascii=False).encode()  # raises ValueError for half characters
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be used ({first_line(error)})") from error
    if not isinstance(stored, dict):
        raise ConfigError(f"{path}: cannot be used (it has no JSON object)")
    return stored


def _number_or_object(stored: dict[str, Any]) -> Any:
    return float(stored[_FLOAT]) if list(stored) == [_FLOAT] else stored


def inner_object(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields that config.json nests for a text model; None if it nests none."""
    nested = (raw.get(field) for field in _TEXTS)
    return next((fields for fields in nested if isinstance(fields, dict)), None)


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first names for a message, with dots if there are more than `most`."""
    shown = ", ".join(names[:most])
    return f"{shown}, ..." if len(names) > most else shown


def is_hub_name(name: str) -> bool:
    """Whether this can be the name of a repository with an owner, and is no folder here."""
    return "/" in name and not _is_path(name)


def _is_path(name: str) -> bool:
    """Whether this cannot be a name on the hub, which is `model` or `owner/model`."""
    hub = hub_client()
    try:
        hub.utils.validate_repo_id(name)
    except hub.errors.HFValidationError:
        return True
    return name.startswith((".", "~")) or Path(name).exists()


def _ask_hub(name: str, revision: str | None, file: str, is_model: bool) -> str | None:
    """Ask for a file; return None, or why the hub did not answer; raise if refused."""
    hub = hub_client()
    url = hub.hf_hub_url(name, file, revision=revision)
    answer, fault = ask_hub(name, revision, lambda: hub.get_hf_file_metadata(url, timeout=PROBE_S))
    # Tokenizers have other formats, too.
    if is_model and isinstance(answer, hub.errors.EntryNotFoundError):
        raise MissingConfig(
            f"{name}: the hub ({hub.constants.ENDPOINT}) has it without {file}; choose a model in transformers format, "
            "or one with GGUF files"
        )
    return fault


def ask_hub(name: str, revision: str | None, question: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return (the hub's answer about a repository, why there is none or None).

    That a file does not exist is an answer (EntryNotFoundError). Raise ConfigError for a refusal.
    """
    hub = hub_client()
    errors = hub.errors
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:  # the hub client raises exceptions of many types
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    answer = answers[0] if answers else TimeoutError(f"nothing in {_PATIENCE_S:.0f} s")
    where = f"the hub ({hub.constants.ENDPOINT})"
    if isinstance(answer, errors.GatedRepoError):
        raise ConfigError(f"{name}: {where} gives it to those with access only; ask for it there, and set HF_TOKEN")
    if isinstance(answer, errors.RepositoryNotFoundError):
        raise ConfigError(
            f"{name}: no such folder here, and {where} has no such model, or shows it to its owner only; check the "
            "name, or set HF_TOKEN"
        )
    if isinstance(answer, errors.RevisionNotFoundError):
        raise ConfigError(f"{name}: {where} has no revision {revision!r} of it; check --revision, or --draft-revision")
    if isinstance(answer, Exception) and not isinstance(answer, errors.EntryNotFoundError):
        return None, first_line(answer)
    return answer, None


def model_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """Return a model's file, downloaded if needed; None if it has no such file.

    revision: of the hub's repository; folders have none. If the hub must not be contacted
    (`HF_HUB_OFFLINE`), a model has the files that are in the cache. Raise ConfigError if the
    hub does not answer.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    hub = hub_client()
    try:
        return Path(hub.hf_hub_download(name, file, revision=revision))
    except hub.errors.LocalEntryNotFoundError as error:
        # A subclass of the next error: the hub did not answer, and the file is not in the cache.
        known = hub.try_to_load_from_cache(name, file, revision=revision)
        # The cache also records that a file does not exist.
        if hub.is_offline_mode() or known is not None:
            return None
        raise _cannot_fetch(name, file, error) from error
    except hub.errors.EntryNotFoundError:
        return None
    except Exception as error:  # the hub client raises exceptions of many types
        raise _cannot_fetch(name, file, error) from error


def _cannot_fetch(name: str, file: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{name}: {file} cannot be fetched ({first_line(error)}); download the model and name its folder"
    )

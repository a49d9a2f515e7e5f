"""Finds the GGUF file of a name: a file, a folder, or `owner/repository:TYPE`.

On the hub, TYPE is a part of the file's name, such as Q4_K_M, as for llama.cpp. A repository
without config.json needs no TYPE if it has one model, or one of the type Q4_K_M. Not for: what is
in the file (`folder.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import msgspec

from engine.config import MTP, EngineConfig
from engine.errors import ConfigError, first_line
from engine.models.checkpoint import Source
from engine.models.files import (
    PROBE_S,
    MissingConfig,
    ask_hub,
    begins_as_gguf,
    check_source,
    first_of,
    hub_client,
    is_hub_name,
)
from engine.models.gguf.parts import parts_of

log = logging.getLogger("polydraft")

_SUFFIX = ".gguf"
_PREFERRED = "Q4_K_M"
_NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Parts of names of other GGUF files: projectors of images, statistics."""
_TYPE = re.compile(
    r"(?<![a-z0-9])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|B?F16|F32))(?=[-.]|$)",
    re.IGNORECASE,
)
_SHOWN = 12


def with_folders(config: EngineConfig) -> EngineConfig:
    """Return a configuration with folders in place of GGUF files (`given_names`).

    Raise ConfigError for missing models, or LoadError for a file that cannot be served.
    """
    model, cache = config.model, config.profile_cache
    has_other_tokenizer = model.tokenizer not in (None, model.target)
    target = source_of(model.target, model.revision, cache, has_other_tokenizer)
    changes: dict[str, Any] = {"target": target.name, "revision": target.revision}
    given = {target.name: model.target}
    if model.draft is not None and model.draft != MTP:
        draft = target
        if model.draft_source != (model.target, model.revision):
            draft = source_of(model.draft, model.draft_revision, cache, has_other_tokenizer)
        changes |= {"draft": draft.name, "draft_revision": draft.revision}
        given.setdefault(draft.name, model.draft)
    if model.tokenizer is not None:
        tokenizer = target.name
        if model.tokenizer != model.target:
            tokenizer = _tokenizer_of(model.tokenizer, cache)
        changes["tokenizer"] = tokenizer
        given.setdefault(tokenizer, model.tokenizer)
    changes["given_names"] = {folder: name for folder, name in given.items() if folder != name}
    return msgspec.structs.replace(config, model=msgspec.structs.replace(model, **changes))


def _tokenizer_of(name: str, cache: str) -> str:
    path = local_file(name) or hub_file(name, None)
    if path is None:
        return name
    return _folder_of(path, cache)


def source_of(name: str, revision: str | None, cache: str, has_other_tokenizer: bool = False) -> Source:
    """Return where a model's files are: the derived folder of a GGUF file, or the name itself.

    cache: of `folder_of`; has_other_tokenizer: whether the model's own is not served. Raise
    ConfigError if there is no such model, LoadError for a GGUF file that cannot be served.
    """
    path = local_file(name) or hub_file(name, revision)
    if path is None:
        try:
            check_source(name, revision)
        except MissingConfig:
            with suppress(MissingConfig):
                path = hub_file(name, revision, has_type=False)
            if path is None:
                raise
    if path is None:
        return Source(name, revision)
    return Source(_folder_of(path, cache, not has_other_tokenizer))


def _folder_of(path: Path, cache: str, needs_tokenizer: bool = True) -> str:
    # It imports numpy (0.13 s), which names of other models do not need.
    from engine.models.gguf.folder import folder_of

    return str(folder_of(path, cache, needs_tokenizer))


def local_file(name: str) -> Path | None:
    """Return the GGUF file, or first part, of a file's or folder's name, or None.

    Raise ConfigError for a folder with GGUF files that are no model, or several.
    """
    path = Path(name)
    try:
        if path.is_file():
            return path if path.suffix.lower() == _SUFFIX or begins_as_gguf(path) else None
        if not path.is_dir() or (path / "config.json").exists():
            if path.suffix.lower() == _SUFFIX and not path.exists():
                raise ConfigError(f"{name}: no such file; check the name")
            return None
        names = sorted(file.name for file in path.iterdir() if file.suffix.lower() == _SUFFIX)
    except OSError:  # `check_source` explains it
        return None
    if not names:
        return None
    models = _models(names)
    if len(models) == 1:
        return path / models[0]
    if not models:
        raise ConfigError(
            f"{name}: the GGUF files of this folder are no models ({first_of(names, _SHOWN)}); name a model's file"
        )
    raise ConfigError(
        f"{name}: this folder has {len(models)} GGUF models ({first_of(models, _SHOWN)}); name one of the files"
    )


def hub_file(name: str, revision: str | None, has_type: bool = True) -> Path | None:
    """Return the downloaded file, or first part, of `owner/repository:TYPE`; None for other names.

    has_type: else the name is that of a repository without config.json, and the type is chosen;
    None if it has no GGUF files.
    """
    repository, _, kind = name.rpartition(":") if has_type else (name, "", "")
    if not is_hub_name(repository) or (has_type and not kind):
        return None
    files, snapshot = _listed(repository, revision, name)
    models = _models([file for file in files if file.lower().endswith(_SUFFIX)])
    if not models:
        if not has_type:
            return None
        raise ConfigError(f"{name}: {repository} has no GGUF models; leave :{kind} out, or check the name")
    chosen = _chosen(name, models, kind)
    if snapshot is not None:
        return snapshot / chosen
    return _fetched(name, repository, revision, chosen)


def _models(names: Sequence[str]) -> list[str]:
    """Return the names of models: of a model in parts the first one, and no projectors."""
    firsts = {str(PurePath(name).with_name(parts_of(Path(name))[0].name)) for name in names}
    return sorted(name for name in firsts if not _NO_MODELS.search(PurePath(name).name))


def _chosen(name: str, models: list[str], kind: str) -> str:
    """Return the model of a type, or without one the preferred or the only model."""
    fitting = _with_type(models, kind or _PREFERRED)
    if not kind and not fitting:
        fitting = models
    if len(fitting) == 1:
        return fitting[0]
    types = sorted({match[1] for model in models for match in _TYPE.finditer(PurePath(model).stem)})
    there = f"files: {first_of(models, _SHOWN)}"
    if types:
        there = f"types: {first_of(types, _SHOWN)}"
    repository = name.removesuffix(f":{kind}")
    if not fitting:
        raise ConfigError(f"{name}: no GGUF file there has {kind!r} in its name; {there}")
    if kind:
        raise ConfigError(
            f"{name}: {len(fitting)} GGUF models there fit ({first_of(fitting, _SHOWN)}); name one: {repository}:FILE"
        )
    raise ConfigError(f"{name}: {len(fitting)} GGUF models; name a type, as in {repository}:Q8_0; {there}")


def _with_type(models: list[str], kind: str) -> list[str]:
    """Return the models with a type in their names, as a word or else anywhere."""
    word = re.compile(rf"(?<![a-z0-9]){re.escape(kind)}(?![a-z0-9_])", re.IGNORECASE)
    whole = [model for model in models if word.search(model)]
    # Unsloth's dynamic types are named UD-Q4_K_XL: a plain type means the plain file if there are
    # both.
    plain = [model for model in whole if not re.search(rf"UD-{re.escape(kind)}", model, re.IGNORECASE)]
    return plain or whole or [model for model in models if kind.lower() in model.lower()]


def _listed(repository: str, revision: str | None, name: str) -> tuple[list[str], Path | None]:
    """Return (names of a repository's files, the cache's folder if it was offline)."""
    hub = hub_client()
    fault: str | None = "HF_HUB_OFFLINE"
    if not hub.is_offline_mode():
        api = hub.HfApi()
        # Unlike `list_repo_files` it asks once, without waits between attempts.
        answer, fault = ask_hub(
            repository, revision, lambda: api.model_info(repository, revision=revision, timeout=PROBE_S)
        )
        if fault is None:
            return [file.rfilename for file in getattr(answer, "siblings", None) or []], None
    try:
        folder = Path(hub.snapshot_download(repository, revision=revision, local_files_only=True))
    except hub.errors.LocalEntryNotFoundError as error:
        raise MissingConfig(
            f"{name}: the hub ({hub.constants.ENDPOINT}) is not asked or does not answer ({fault}), and its cache "
            f"({hub.constants.HF_HUB_CACHE}) does not have it; download the file and name it"
        ) from error
    if not hub.is_offline_mode():
        log.warning(
            "the hub (%s) does not answer (%s); %s is taken from its cache", hub.constants.ENDPOINT, fault, name
        )
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()], folder


def _fetched(name: str, repository: str, revision: str | None, file: str) -> Path:
    """Download a model's file, or all of its parts; return the first."""
    hub = hub_client()
    parts = [str(PurePath(file).with_name(part.name)) for part in parts_of(Path(file))]
    try:
        files = [Path(hub.hf_hub_download(repository, part, revision=revision)) for part in parts]
        return files[0]
    except Exception as error:  # the hub client raises exceptions of many types
        raise ConfigError(
            f"{name}: {file} cannot be fetched ({first_line(error)}); start again, which continues the download, or "
            "download the file and name it"
        ) from error

"""Files of a model, in its folder or on the hub."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError


def model_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """Where a file of a model lies, fetched first where `name` is no folder; None where the model has no such file.

    revision: of the hub's repository; folders have none. Where the hub must not be asked (`HF_HUB_OFFLINE`), a model
    has the files that are in the cache. Raises ConfigError where the hub does not answer.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hub.hf_hub_download(name, file, revision=revision))
    except LocalEntryNotFoundError as error:
        # A kind of the next one: the hub did not answer, and the file is not in the cache.
        known = hub.try_to_load_from_cache(name, file, revision=revision)
        if hub.is_offline_mode() or known is not None:  # it is kept, too, that a file does not exist
            return None
        raise _cannot_fetch(name, file, error) from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # the hub client raises many kinds
        raise _cannot_fetch(name, file, error) from error


def _cannot_fetch(name: str, file: str, error: Exception) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"{name}: {file} cannot be fetched ({reason}); download the model and name its folder")

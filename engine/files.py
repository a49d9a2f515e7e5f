"""Files of a model, in its folder or on the hub."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError


def model_file(name: str, file: str, revision: str | None = None) -> Path | None:
    """Where a file of a model lies, fetched first where `name` is no folder; None where the model has no such file.

    revision: of the hub's repository; folders have none. Raises ConfigError where the hub cannot be asked.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except EntryNotFoundError:
        return None
    except Exception as error:  # the hub client raises many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{name}: {file} cannot be fetched ({reason}); download the model and name its folder"
        ) from error

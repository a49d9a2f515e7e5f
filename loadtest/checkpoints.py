"""Checkpoints for measurements of long texts."""

from __future__ import annotations

import json
from pathlib import Path


def lengthened(folder: Path, num_tokens: int, place: Path) -> Path:
    """Return a folder with the checkpoint in `folder` and positions for at least this many tokens.

    It is `folder` itself if the checkpoint has them, else `place` with links to its files.
    Durations do not depend on positions; answers beyond the checkpoint's own are not meaningful.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["max_position_embeddings"] >= num_tokens:
        return folder
    place.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.name != "config.json":
            (place / file.name).symlink_to(file.resolve())
    (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": num_tokens}))
    return place

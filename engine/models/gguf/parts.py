"""Names of the files of a model that is split into parts, `NAME-00001-of-00003.gguf`."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""Mark of a part in a file's name: its number from 1, and the number of parts."""


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the names of all parts of a file's model."""
    mark = _PART.search(path.name)
    if mark is None or not 1 <= int(mark[1]) <= int(mark[2]):
        return (path,)
    before, after = path.name[: mark.start()], path.name[mark.end() :]
    count = int(mark[2])
    return tuple(path.with_name(f"{before}-{number:05}-of-{mark[2]}{after}") for number in range(1, count + 1))

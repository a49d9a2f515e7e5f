"""Files of compiled code in Numba's cache, with a checksum each.

Numba's cache has an index for each function, without checksums: a damaged file ends a start or the
process, and two processes can give the same name to different code. Here a file's name follows from
its key, so there is no index and no lock, and a damaged file counts as missing.
`start/compiling.py` tries new files.
"""

# Numba has no types.
# mypy: disable-error-code="misc, no-any-unimported"

from __future__ import annotations

import hashlib
import logging
import pickle
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.caching import IndexDataCacheFile
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

log = logging.getLogger("polydraft")

_CHECKSUM_BYTES = 32
SUFFIX = ".nbc"


class CompiledFiles(IndexDataCacheFile):
    """Cached code of one function: reads and writes files that Numba's `Cache` asks for."""

    def load(self, key: object) -> Any:
        """Return the code saved under a key; None if its file is missing, unreadable or damaged."""
        path = self._path_of(key)
        try:
            code = checked(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("a kernel is compiled again, because its file cannot be read: %s", error)
            return None
        if code is None:
            log.warning("%s is damaged and is compiled again", path)
            return None
        return pickle.loads(code)

    def save(self, key: object, data: object) -> None:
        """Save code under a key. If that fails, later starts compile the function again."""
        code = self._dump(data)
        try:
            with self._open_for_write(str(self._path_of(key))) as file:
                file.write(code + _checksum(code))
        except OSError as error:
            _warn_of_write(self._cache_path, str(error))

    def _path_of(self, key: object) -> Path:
        base = self._index_name.removesuffix(".nbi")
        digest = hashlib.sha256(repr((key, self._source_stamp)).encode()).hexdigest()
        return Path(self._cache_path) / f"{base}.{digest[:16]}{SUFFIX}"


@cache
def _warn_of_write(folder: str, error: str) -> None:
    log.warning("compiled kernels are not stored in %s, so the next start compiles them again: %s", folder, error)


def _checksum(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_CHECKSUM_BYTES).digest()


def checked(content: bytes) -> bytes | None:
    """Return the code in a file's content; None if the content is damaged."""
    code = content[:-_CHECKSUM_BYTES]
    if content[-_CHECKSUM_BYTES:] != _checksum(code):
        return None
    return code


def damaged_files(folder: Path) -> list[Path]:
    """Return the files in a folder that are damaged, in the order of their names."""
    return [path for path in sorted(folder.rglob(f"*{SUFFIX}")) if _is_damaged(path)]


def _is_damaged(path: Path) -> bool:
    try:
        return checked(path.read_bytes()) is None
    except OSError:  # another process has removed the file, or only others may read it
        return False


def load_all(folder: Path) -> None:
    """Load the code of every file in a folder, as a kernel's first call does."""
    context = cpu_target.target_context
    context.refresh()
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        code = checked(path.read_bytes())
        if code is not None:
            CompileResult._rebuild(context, *pickle.loads(code))

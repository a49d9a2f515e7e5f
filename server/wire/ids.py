"""Ids and seeds without system calls, in which threads take the lock from the loop.

Not for: secrets. They come from the system (`secrets`, `os.urandom`).
"""

from __future__ import annotations

import hashlib
import random

_random = random.Random()


def new_id() -> str:
    """Return 32 random hexadecimal digits."""
    return f"{_random.getrandbits(128):032x}"


def new_seed() -> int:
    """Return a random seed of 63 bits."""
    return _random.getrandbits(63)


def seed_of(name: str) -> int:
    """Return the seed of 63 bits that belongs to a name, in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1

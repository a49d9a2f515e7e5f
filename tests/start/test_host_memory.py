"""Memory that start leaves behind goes back to the system."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
from pathlib import Path
from engine.start.host import keep_freed_memory, return_freed_memory

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) >> 8

keep_freed_memory()
freed = [b"x" * (100_000 + i) for i in range(1000)]
last = bytes(1000)  # what is freed lies below something that is not
full = resident_mib()
del freed
kept = resident_mib()
return_freed_memory()
print(full - kept, full - resident_mib())
"""


def test_freed_memory_is_kept_until_it_is_returned() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    before, after = map(int, run.stdout.split())
    assert before < 10
    assert after > 80

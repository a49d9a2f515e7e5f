"""The command line before anything is served: help comes at once, and without what only measuring needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What takes long to import, and what help can do without.
HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "numpy", "httpx", "matplotlib")

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({missing}))
from server.cli import main
try:
    code = main({arguments})
except SystemExit as end:
    code = end.code or 0
loaded = [name for name in {heavy} if sys.modules.get(name)]
assert code or not loaded, loaded
sys.exit(code)
"""


def polydraft(*arguments: str, missing: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command in a Python in which some packages cannot be imported; success must not have loaded HEAVY."""
    program = PROGRAM.format(missing=missing, arguments=arguments, heavy=HEAVY)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["serve", "--help"], ["bench", "--help"]])
@pytest.mark.parametrize("missing", [(), ("httpx", "matplotlib", "numpy")])
def test_help_loads_nothing_heavy(arguments: list[str], missing: tuple[str, ...]) -> None:
    done = polydraft(*arguments, missing=missing)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [("httpx", []), ("httpx", ["--short", "--plot", "a.png"]), ("matplotlib", ["--plot", "a.png"])],
)
def test_the_bench_names_what_is_missing(missing: str, arguments: list[str]) -> None:
    """Before a daemon is started, in one line."""
    done = polydraft("bench", *arguments, missing=(missing,))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"polydraft bench: needs {missing}; pip install 'polydraft[bench]'\n"

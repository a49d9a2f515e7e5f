"""The command line before anything is served: help comes at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pexpect
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
assert not loaded, loaded
sys.exit(code)
"""

# Names that are wrong are found by what needs no model.
REFUSED = (
    ["serve", "--spec-rule", "nonsense"],
    ["serve", "--num-drafts", "20"],
    ["serve", "--draft-tree", "2,2"],
    ["serve", "--host", "192.0.2.1"],
    ["serve", "--rate-limit", "5/fortnight"],
    ["serve", "./no/such/model"],
)


def polydraft(*arguments: str, missing: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command without some packages; all but `bench` must not load HEAVY."""
    heavy = HEAVY if arguments[0] != "bench" or "--help" in arguments else ()
    program = PROGRAM.format(missing=missing, arguments=arguments, heavy=heavy)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["version"], ["serve", "--help"], ["bench", "--help"], ["chat", "--help"], ["help", "serve"]),
        ["run-batch", "--help"],
    ],
)
@pytest.mark.parametrize("missing", [(), ("httpx", "matplotlib", "numpy")])
def test_help_loads_nothing_heavy(arguments: list[str], missing: tuple[str, ...]) -> None:
    done = polydraft(*arguments, missing=missing)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


@pytest.mark.sampled
@pytest.mark.parametrize("arguments", REFUSED)
def test_a_refusal_loads_nothing_heavy(arguments: list[str]) -> None:
    done = polydraft(*arguments)
    assert done.returncode in (2, 3), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [("httpx", []), ("httpx", ["--short", "--plot", "a.png"]), ("matplotlib", ["--plot", "a.png"])],
)
def test_the_bench_names_what_is_missing(missing: str, arguments: list[str]) -> None:
    """Before a daemon is started, in one line."""
    done = polydraft("bench", *arguments, missing=(missing,))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"polydraft bench: needs {missing}: pip install 'polydraft[bench]'\n"


@pytest.mark.slow
def test_help_of_a_command_has_all_flags() -> None:
    shown = polydraft("help", "serve")
    assert shown.stdout == polydraft("serve", "--help=all").stdout
    assert "--profile-cache" in shown.stdout
    assert polydraft("help", "help").stdout == polydraft("--help").stdout
    wrong = polydraft("help", "serv")
    assert wrong.returncode == 2
    assert "unknown command 'serv' (did you mean serve?)" in wrong.stderr


@pytest.mark.slow
def test_help_of_a_command_is_paged_on_a_terminal() -> None:
    environment = os.environ | {"PAGER": "sed 's/^/paged: /'", "TERM": "xterm"}
    command = f"{sys.executable} -m server.cli help serve"
    shown, code = pexpect.run(command, env=environment, withexitstatus=True, encoding="utf-8")
    assert code == 0
    lines = shown.splitlines()
    assert lines[0] == "paged: usage: polydraft serve [MODEL] [FLAGS]"
    assert any("--profile-cache" in line for line in lines)

"""`polydraft completion`: a real bash completes commands, flags and values with the script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
import shtab

from polydraft import completion
from polydraft.completion import SHELLS, all_commands
from server import cli
from server.cli import USAGE
from server.settings.settings import Serve
from tests.grid import slow_fixture

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "ready> "
DISCARD_LINE = "\x15\r"
"""Keys that empty the line and ask for another. A signal that comes between two of the shell's
reads is lost.
"""
COMPLETED = (
    ("polydraft ser", "polydraft serve "),
    ("polydraft serve --spec-r", "--spec-rule "),
    ("polydraft serve --weights int8 --no-cal", "--no-calibrate "),
    ("polydraft serve --kv-cache-dtype bf", "bfloat16 "),
    ("polydraft serve --draft-model mod", "model.gguf "),
    ("polydraft analyze lim", "limits "),
    ("polydraft distill --draft-le", "--draft-length "),
    ("polydraft help an", "analyze "),
)
"""Text typed before the tab key, and the end of the line after it."""


@pytest.fixture(scope="module")
@slow_fixture
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that `polydraft completion bash` writes."""
    path = tmp_path_factory.mktemp("completion") / "polydraft"
    command = [sys.executable, "-P", "-m", "polydraft", "completion", "bash"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    path.write_text(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    return path


@pytest.fixture
def bash(script: Path, tmp_path: Path) -> pexpect.spawn:
    """An interactive shell that has read the script, in a folder with a model."""
    (tmp_path / "model.gguf").touch()
    environment = os.environ | {"PS1": PROMPT, "TERM": "dumb", "INPUTRC": "/dev/null"}
    shell = pexpect.spawn(
        "bash", ["--norc", "--noprofile", "-i"], cwd=str(tmp_path), env=environment, encoding="utf-8", timeout=60
    )
    shell.setwinsize(60, 300)
    shell.expect_exact(PROMPT)
    shell.sendline(f"source {script}; bind 'set show-all-if-ambiguous on'; echo so''urced")
    shell.expect_exact("sourced\r\n" + PROMPT)
    return shell


def test_bash_completes_commands_flags_and_values(bash: pexpect.spawn) -> None:
    for typed, end in COMPLETED:
        bash.send(typed + "\t")
        bash.expect_exact(end)
        bash.send(DISCARD_LINE)
        bash.expect_exact(PROMPT)


def test_bash_lists_the_flags_that_begin_so(bash: pexpect.spawn) -> None:
    bash.send("polydraft serve --dra\t")
    bash.expect_exact("--draft-window")
    listed = re.findall(r"--[a-z-]+", str(bash.before) + str(bash.after))
    flags = {f"--{name.replace('_', '-')}" for name in Serve.model_fields if name.startswith("draft")}
    assert flags <= set(listed)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_all_flags_that_help_shows(shell: str) -> None:
    text = shtab.complete(all_commands(), shell)
    names = {name.replace("_", "-") for name in Serve.model_fields} - {"model"}
    assert not {name for name in names if not re.search(rf"(--|-l )'?{name}\b", text)}
    assert "enable-chunked-prefill" not in text, "flags of other servers are understood, not offered"


def test_completed_commands_are_those_of_the_usage() -> None:
    listed = re.findall(r"^  ([a-z-]+) ", USAGE, re.MULTILINE)
    (commands,) = [action.choices for action in all_commands()._actions if isinstance(action.choices, dict)]
    assert sorted({*listed, "help"}) == sorted(commands)


def test_commands_of_research_are_refused_outside_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installed wheel has neither the folder nor the commands' completion."""
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "server" / "cli.py"))
    monkeypatch.setattr(completion, "__file__", str(tmp_path / "polydraft" / "completion.py"))
    for command in ("analyze", "distill"):
        assert cli.main([command]) == 2
        assert capsys.readouterr().err.startswith(f"polydraft {command}: this installation has no folder research/")
    (commands,) = [action.choices for action in all_commands()._actions if isinstance(action.choices, dict)]
    assert not {"analyze", "distill"} & set(commands)
    assert "bench" in commands

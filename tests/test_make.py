"""Setting up says one line for each stage, and what went wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def set_up(folder: Path, installer: str) -> subprocess.CompletedProcess[str]:
    """`make` of the daemon's environment in a folder, with another installer."""
    (folder / "pyvenv.cfg").touch()
    command = ["make", f"VENV={folder}", f"INSTALL={installer}", "TORCH_INDEX_URL=", f"{folder}/.serve"]
    # As by hand, also where `make` runs the tests: within itself it says which folder it enters.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_setting_up_prints_one_line_and_logs_the_rest(tmp_path: Path) -> None:
    run = set_up(tmp_path, "sh -c 'seq 180'")
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    assert line.startswith("installing Polydraft")
    assert run.stderr == ""
    assert (tmp_path / "install.log").read_text().split() == [str(number) for number in range(1, 181)]
    assert (tmp_path / ".serve").exists()


def test_an_installer_that_fails_is_shown_and_its_log_is_named(tmp_path: Path) -> None:
    run = set_up(tmp_path, "sh -c 'seq 180; echo no such package >&2; exit 3'")
    assert run.returncode != 0
    assert "180\nno such package\n" in run.stderr
    assert f"all output is in {tmp_path}/install.log" in run.stderr
    assert "\n100\n" not in run.stderr
    assert not (tmp_path / ".serve").exists()

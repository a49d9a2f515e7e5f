"""A section on a device that is stopped says where it was, and leaves no process behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from research.analysis.gpu_session import Section
from tests.research.analysis.test_gpu_session import run


def test_a_section_that_is_stopped_says_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable} -IS\nimport faulthandler, signal, time\nfaulthandler.register(signal.SIGTERM)\n"
        "def hangs():\n    time.sleep(60)\nhangs()\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert any(line.endswith("in hangs") for line in run(Section("engine", 4, ""), tmp_path)["last_lines"])


def test_processes_of_a_section_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process that outlived its section would hold the device."""
    script, number = tmp_path / "python", tmp_path / "pid"
    script.write_text(
        f"#!{sys.executable} -IS\nimport os, time\nif not os.fork():\n"
        f"    open({str(number)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert run(Section("engine", 4, ""), tmp_path)["ended"] == "stopped after 4 s"
    assert number.read_text(), "the process did not fork in time"
    for _ in range(500):
        try:
            state = Path(f"/proc/{number.read_text()}/stat").read_text().split()[2]
        except (FileNotFoundError, ProcessLookupError):
            state = "ended"
        if state in ("Z", "ended"):
            break
        time.sleep(0.02)
    assert state in ("Z", "ended")

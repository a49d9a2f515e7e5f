"""A daemon that is started to be measured."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import httpx
import pytest

from loadtest.cli import main
from loadtest.daemon import pausable_daemon, running_daemon
from tests.server.tiny_models import write_pair

ROOT = Path(__file__).resolve().parents[2]
_PIPE_BYTES = 64 << 10


@pytest.mark.slow
def test_a_daemon_that_logs_much_is_not_held_up(tmp_path: Path) -> None:
    """More lines than a pipe holds are read while it runs."""
    pair = write_pair(tmp_path)
    words = [str(pair.target), "--draft-model", str(pair.draft), "--no-calibrate", "--enable-log-requests"]
    with running_daemon(words) as url, httpx.Client(base_url=url) as client:
        for _ in range(_PIPE_BYTES // 60):
            assert client.get("/version").status_code == 200


@pytest.mark.slow
def test_a_daemon_that_logs_nothing_is_found_and_may_pause(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    words = [str(pair.target), "--draft-model", str(pair.draft), "--no-calibrate", "--log-level", "error"]
    with pausable_daemon(words) as daemon:
        daemon.pause()
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{daemon.url}/version", timeout=0.2)
        daemon.resume()
        assert httpx.get(f"{daemon.url}/version").status_code == 200


@pytest.mark.slow
def test_a_daemon_that_exits_is_said_with_its_log() -> None:
    with pytest.raises(RuntimeError, match=r"exited with 2(.|\n)*--no-such-flag"), running_daemon(["--no-such-flag"]):
        raise AssertionError("it does not run")


def test_an_address_where_nobody_answers_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{one.getsockname()[1]}"
        assert main(["--url", address, "--short"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("polydraft bench: ")
    assert address in said


@pytest.mark.slow
def test_two_versions_are_measured_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkout before is a copy that leaves a file when its daemon starts."""
    before, started = tmp_path / "before", tmp_path / "started"
    shutil.copytree(ROOT / "server", before / "server", ignore=shutil.ignore_patterns("__pycache__"))
    # The same files of the engine: kernels of a copy would be compiled again.
    (before / "engine").mkdir()
    (before / "engine" / "__init__.py").write_text(f"__path__ = [{str(ROOT / 'engine')!r}]\n")
    with (before / "server" / "__init__.py").open("a") as package:
        package.write(f"\nopen({str(started)!r}, 'w').write(__file__)\n")
    pair = write_pair(tmp_path)
    words = ["--serve-args", f"{pair.target} --draft-model {pair.draft} --no-calibrate", "--before", str(before)]
    words += ["--tasks", "dialogues", "--concurrency", "1", "--repeats", "1", "--max-tokens", "8", "--short"]
    assert main([*words, "--rules", "block:1x2"]) == 0
    printed = capsys.readouterr().out
    (cell,) = json.loads(printed.splitlines()[-1])["cells"]
    assert list(cell["arms"]) == ["off", "before off", "block:1x2", "before block:1x2"]
    assert cell["arms"]["block:1x2"]["ratio_to_before"]["ratio"] > 0
    assert Path(started.read_text()) == before / "server" / "__init__.py"
    assert "6 of 6 greedy answers equal in all arms" in printed

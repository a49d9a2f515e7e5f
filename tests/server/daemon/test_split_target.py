"""A target split over two processes: the same answers, and no process is left."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.server.daemon_process import MODEL, Daemon, Daemons, wait_until
from tests.server.tiny_models import TinyModels

pytestmark = pytest.mark.slow

SPLIT = ("--tensor-parallel-size", "2", "--no-calibrate", "--device", "cpu")


def answers(daemon: Daemon) -> list[str]:
    """Greedy answers of several requests, plain and speculative."""
    with daemon.client() as client:
        found = []
        for number in range(6):
            body = {"model": MODEL, "prompt": list(range(10 + number, 30 + number)), "max_tokens": 20, "temperature": 0}
            body["speculation"] = {"enabled": bool(number % 2)}
            found.append(client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"])
        return found


def ranks_of(daemon: Daemon) -> list[int]:
    """Process ids of the ranks behind the engine."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_text()
            family = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if "engine.start.rank" in command:
            parent = int(family[1])
            grandparent = int(Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if grandparent == daemon.process.pid:
                found.append(int(folder.name))
    return found


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_split_target_answers_like_a_whole_one_and_ends_whole(
    daemons: Daemons, tmp_path: Path, pair_arguments: list[str]
) -> None:
    whole = daemons.get(*pair_arguments, "--no-calibrate")
    split = Daemon([*pair_arguments, *SPLIT], tmp_path / "log")
    try:
        split.wait_ready()
        (rank,) = ranks_of(split)
        assert answers(split) == answers(whole)
        split.process.send_signal(signal.SIGTERM)
        assert split.process.wait(60) == 0
        wait_until(lambda: not is_alive(rank), "a rank outlives the daemon")
        assert "Traceback" not in split.log, split.log
    finally:
        split.process.kill()


def test_an_ended_rank_ends_the_daemon(tmp_path: Path, pair_arguments: list[str]) -> None:
    daemon = Daemon([*pair_arguments, *SPLIT], tmp_path / "log")
    try:
        daemon.wait_ready()
        (rank,) = ranks_of(daemon)
        os.kill(rank, signal.SIGKILL)
        with daemon.client() as client:
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 5}
            with contextlib.suppress(httpx.TransportError):  # it may end before it answers
                assert client.post("/v1/completions", json=body).status_code >= 500
        wait_until(lambda: not daemon.is_running, "the daemon goes on without a part of its model")
        assert daemon.process.returncode == 1
    finally:
        daemon.process.kill()


def test_heads_that_cannot_be_split_are_refused(tmp_path: Path, models: TinyModels) -> None:
    daemon = Daemon([str(models.target), "--tensor-parallel-size", "3", "--device", "cpu"], tmp_path / "log")
    assert daemon.process.wait(60) == 2
    assert "cannot be split over 3 ranks" in daemon.log
    assert "Traceback" not in daemon.log

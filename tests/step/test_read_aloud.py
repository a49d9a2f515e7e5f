"""docs/execution.md reads a step of a CPU aloud: the files that a step enters, in the order in
which it enters them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.engine import tiny
from tests.entered_files import ROOT

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a step of a CPU")


def files_read_aloud() -> list[str]:
    """Return the files of the page's section, in order."""
    page = (ROOT / "docs" / "execution.md").read_text()
    section = page.split("<!-- read aloud -->")[1].split("<!-- read aloud: end -->")[0]
    return [f"engine/{name}" for name in re.findall(r"`([\w/]+\.py)`", section)]


@pytest.mark.slow
def test_a_step_is_read_aloud_in_order() -> None:
    command = [sys.executable, "-m", "tests.entered_files", "compiled"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = json.loads(run.stdout)[0]
    named = files_read_aloud()
    assert len(named) > 20
    assert [name for name in named if name not in files] == [], "files that the step does not enter"
    assert named == sorted(named, key=files.index)

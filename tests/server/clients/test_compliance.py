"""A public checker of three APIs (llm-comply) against a real daemon: only images fail."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.daemon_process import Daemon, Daemons
from tests.server.scripted_model import CUT, write_scripted

pytestmark = pytest.mark.slow
# The checker forces its calls, so the script has only the text that the grammar leaves free.
CALL = CUT.join(["<tool_call>", 'Paris"}}\n</tool_call>'])
FORMATS = {
    # Tests of thinking run for models with certain names only.
    "open-responses": ("gpt-5", 12, []),
    "openai-chat": ("gpt-5", 8, []),
    "anthropic": ("claude-4", 8, ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]),
}


@pytest.fixture(scope="module")
def strict(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """A strict daemon, because the checker wants requests without a model to be refused."""
    folder = write_scripted(tmp_path_factory.mktemp("scripted") / "model", {"get_weather": [CALL]}, "Hello there.")
    names = ["--served-model-name", "gpt-5,claude-4"]
    return daemons.get(str(folder), *names, "--no-calibrate", "--strict-fields")


def without_citations(folder: Path) -> Path:
    """Return Anthropic's description in which text need not have citations.

    Clients of the AI SDK refuse null in their place.
    """
    source = importlib.resources.files("llm_comply") / "specs" / "anthropic.json"
    description = json.loads(source.read_text())
    description["components"]["schemas"]["ResponseTextBlock"]["required"].remove("citations")
    changed = folder / "anthropic.json"
    changed.write_text(json.dumps(description))
    return changed


@pytest.mark.parametrize("name", FORMATS)
def test_answers_have_the_shape_of_the_api(strict: Daemon, tmp_path: Path, name: str) -> None:
    model, num_passed, more = FORMATS[name]
    if name == "anthropic":
        more = [*more, "--spec", str(without_citations(tmp_path))]
    command = [sys.executable, "-m", "llm_comply.cli", "--format", name, "-u", f"{strict.url}/v1", "-k", "unused"]
    done = subprocess.run(
        [*command, "-m", model, "--json", *more], capture_output=True, text=True, timeout=300, check=False
    )
    found: dict[str, Any] = json.loads(done.stdout)
    failed = {one["id"]: one.get("errors") for one in found["results"] if one["status"] == "failed"}
    assert all("image" in test for test in failed), failed
    assert (found["summary"]["passed"], found["summary"]["skipped"]) == (num_passed, 0)

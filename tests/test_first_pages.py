"""The first page of each audience: one screen with one command and one picture, and the command is
understood.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from engine.speculation.rule_facts import RULE_FACTS
from server.settings.flags import parse_flags
from server.wire.fields import SpeculationFields

ROOT = Path(__file__).parent.parent
PAGES = {page.stem.removeprefix("first-"): page.read_text() for page in (ROOT / "docs").glob("first-*.md")}
MOST_WORDS = 300


def command_of(name: str) -> str:
    """Return the only command of a page."""
    (command,) = re.findall(r"^```sh\n(.*?)\n```", PAGES[name], re.MULTILINE | re.DOTALL)
    assert "\n" not in command
    return str(command)


@pytest.mark.parametrize("name", ["laptop", "vllm", "cluster", "research"])
def test_a_first_page_has_one_screen_one_command_and_one_picture(name: str) -> None:
    page = PAGES[name]
    assert len(page.split()) <= MOST_WORDS
    assert command_of(name)
    assert page.count("![") == 1
    assert f"docs/first-{name}.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["laptop", "research"])
def test_make_knows_the_target(name: str) -> None:
    command = shlex.split(command_of(name))
    assert command[0] == "make"
    done = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_of_vllm_starts_the_pair() -> None:
    settings = parse_flags(shlex.split(command_of("vllm"))[2:])
    assert settings == parse_flags(
        "Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B --draft-length 5 --max-model-len 8192 "
        "--gpu-memory-utilization 0.9".split()
    )


def test_the_flags_of_the_laptop_are_understood() -> None:
    flags = re.findall(r"`(--[^`]+)`", PAGES["laptop"])
    assert len(flags) == 3
    in_command = command_of("laptop").partition('ARGS="')[2].rstrip('"')
    settings = parse_flags([word for flag in (*flags, in_command) for word in flag.split()])
    assert (settings.max_model_len, settings.kv_cache_memory_bytes, settings.port) == (2048, 256 << 20, 8123)
    assert settings.spec_drafters == ["prompt_lookup"]


def test_the_overlay_of_the_cluster_exists() -> None:
    *_, folder = command_of("cluster").split()
    assert (ROOT / folder / "kustomization.yaml").is_file()


def test_the_rule_of_research_can_be_asked_for() -> None:
    shown = re.search(r'`"speculation": (\{[^`]*\})`', PAGES["research"], re.DOTALL)
    assert shown is not None
    fields = SpeculationFields.model_validate(json.loads(shown[1]))
    assert fields.rule in RULE_FACTS

"""The commands of docs/heads.md run, with tiny models in the places of TARGET and HEAD."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from engine.scheduling.request_checks import check_requests, default_speculation
from engine.start.building import build_engine
from research.distill.__main__ import main as distill
from server.settings.flags import parse_flags
from server.wire.fields import SpeculationFields
from tests.engine import tiny
from tests.heads import folders

PAGE = (Path(__file__).parents[2] / "docs/heads.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
SERVED = [words for words in COMMANDS if words[1] == "serve"]
SMALL = ["--num-gpu-blocks-override", "60", "--max-num-seqs", "2", "--device", "cpu", "--dtype", "float32"]


def serve(words: list[str], target: Path, head: Path, *more: str) -> set[int]:
    """Return the draft lengths of an answer's steps by the engine that a command starts."""
    named = [part.replace("TARGET", str(target)).replace("HEAD", str(head)) for part in words[2:]]
    settings = parse_flags([*named, *SMALL, *more])
    engine = build_engine(settings.engine_config())
    speculation = default_speculation(engine.limits, engine.facts)
    request = tiny.request("a", [1, 2, 3], speculation, max_tokens=12, temperature=1.0)
    check_requests([request], engine.facts, engine.limits)
    return {outcome.draft_length for outcome in tiny.run(engine, [request]).outcomes["a"]}


@pytest.mark.sampled
@pytest.mark.parametrize("words", SERVED, ids=" ".join)
def test_a_head_is_served_by_the_command(tmp_path: Path, words: list[str]) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    if "mtp" in " ".join(words):
        folders.write_mtp(target)
    else:
        folders.target().model.save_pretrained(target)
        folders.write_eagle(head)
    (asked,) = re.findall(r'"num_speculative_tokens": (\d+)', " ".join(words)) or ["5"]
    assert max(serve(words, target, head)) == int(asked)


def test_trees_of_the_most_likely_tokens_are_served_as_the_page_says(tmp_path: Path) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    folders.target().model.save_pretrained(target)
    folders.write_block(head, size=6)
    flags = re.search(r"`(--spec-rule\s+nss\s+--draft-method most_likely)`", PAGE)
    field = re.search(r'"speculation": (\{"rule": "nss"[^}]*\})', PAGE)
    assert flags is not None
    assert field is not None
    assert max(serve(SERVED[0], target, head, *flags[1].split())) > 1
    assert SpeculationFields.model_validate(json.loads(field[1])).tree


@pytest.mark.sole("training and serving a head")
def test_a_head_is_trained_and_served_by_the_commands(tmp_path: Path) -> None:
    target, head = tmp_path / "target", tmp_path / "trained"
    model = folders.target().model
    model.config.bos_token_id = 1
    model.save_pretrained(target)
    (trains,) = (words for words in COMMANDS if words[1] == "distill")
    small = "--taps 1,2,4 --draft-length 5 --length 24 --sample-batch 8 --tokens 800 --epochs 1 --threads 1"
    named = [part.replace("TARGET", str(target)).replace("HEAD", str(head)) for part in trains[2:]]
    assert distill([*named, *small.split()]) == 0
    assert max(serve(SERVED[0], target, head)) == 5

"""Prompts to send: held-out dialogues (inside the embedded pair's training domain) and held-out prose (outside)."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

TASKS = ("dialogues", "gutenberg")


@dataclass(frozen=True)
class Prompt:
    """One prompt: the path it is sent to, and the part of the body that holds it."""

    path: str
    body: dict[str, Any]


def load(task: str, file: Path | None = None) -> list[Prompt]:
    """Prompts of a task, or of a JSON-lines file with `messages` or `prompt` in each record.

    The embedded tasks are read as package data, without importing the engine.
    """
    if file is None:
        resource = files("engine").joinpath("demo", f"heldout_{task}.jsonl")
        lines = resource.read_text(encoding="utf8").splitlines()
    else:
        lines = file.read_text(encoding="utf8").splitlines()
    return [_prompt(json.loads(line)) for line in lines if line.strip()]


def _prompt(record: dict[str, Any]) -> Prompt:
    if "messages" in record:
        return Prompt("/v1/chat/completions", {"messages": record["messages"]})
    return Prompt("/v1/completions", {"prompt": record.get("prompt") or record["text"]})


def random_prompts(length: int, count: int, seed: int = 0) -> list[Prompt]:
    """Prompts of `length` random token ids; the embedded pair and the bench pair know all of them."""
    generator = random.Random(seed)
    return [
        Prompt("/v1/completions", {"prompt": [generator.randrange(300, 4000) for _ in range(length)]})
        for _ in range(count)
    ]

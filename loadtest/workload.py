"""Prompts: held-out dialogues and held-out prose.

Dialogues are in the embedded pair's training domain, prose is outside it.
"""

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
    """Prompt: its path, and the part of the body that contains it."""

    path: str
    body: dict[str, Any]


def load(task: str) -> list[Prompt]:
    """Return the prompts of a task, or of a file of JSON lines.

    Each record of a file has `messages`, `prompt` or `text`.

    The embedded tasks are read as package data, without importing the engine. Raises ValueError if
    a file cannot be read or a record has no prompt.
    """
    resource = files("loadtest").joinpath("prompts", f"heldout_{task}.jsonl") if task in TASKS else Path(task)
    try:
        lines = resource.read_text(encoding="utf8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{task}: neither a task ({', '.join(TASKS)}) nor a file that can be read: {error}") from error
    prompts = [_prompt(line, f"{task}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{task}: no prompts in it")
    return prompts


def _prompt(line: str, place: str) -> Prompt:
    try:
        record = json.loads(line)
        if "messages" in record:
            return Prompt("/v1/chat/completions", {"messages": record["messages"]})
        return Prompt("/v1/completions", {"prompt": record.get("prompt") or record["text"]})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: not a JSON object with messages, prompt or text") from error


def random_prompts(length: int, count: int, seed: int = 0) -> list[Prompt]:
    """Return prompts of `length` random token ids.

    The embedded pair and the bench pair both have these tokens.
    """
    generator = random.Random(seed)
    return [
        Prompt("/v1/completions", {"prompt": [generator.randrange(300, 4000) for _ in range(length)]})
        for _ in range(count)
    ]

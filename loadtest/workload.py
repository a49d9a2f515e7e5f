"""Prompts: held-out dialogues and held-out prose.

Dialogues are in the embedded pair's training domain, prose is outside it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
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

    Raises ValueError if a file cannot be read or a record has no prompt. The texts of the tasks are
    in the repository alone.
    """
    resource = Path(__file__).parent / "prompts" / f"heldout_{task}.jsonl" if task in TASKS else Path(task)
    if task in TASKS and not resource.exists():
        message = (
            "its texts are in the repository (loadtest/prompts) and not in the package; run it from a clone, or name"
        )
        raise ValueError(f"{task}: {message} a file of your own prompts (--tasks FILE)")
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

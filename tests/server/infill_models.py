"""Models for tests of filling gaps, with a known answer to a gap."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.server.scripted_model import added_token, byte_level, write_answers
from tests.server.tiny_models import TOKENIZER, llama_config, write_folder

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
"""Qwen2.5-Coder's marks, which are no special tokens there."""


def write_tokenizer(folder: Path, marks: Sequence[str], special: bool = False) -> Path:
    """Write the embedded pair's tokenizer with more tokens."""
    write_folder(folder, llama_config(1))
    described = json.loads((folder / "tokenizer.json").read_text())
    size = len(described["model"]["vocab"])
    described["added_tokens"] += [added_token(mark, special) | {"id": size + n} for n, mark in enumerate(marks)]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


WORDS = tuple(f"<word-{number}>" for number in range(8))
"""Tokens that prompts may have, and answers."""
COPIES = "<copies>"
"""Token in a prompt after which the model answers with the words."""
ANSWER = "sum(\n    values\n) + 1\ndone"


def write_filling_model(folder: Path) -> Path:
    """Write a model with Qwen's marks, which answers `ANSWER` to each gap."""
    answers = {"<|fim_middle|>": f"{ANSWER}<|fim_pad|>leak", COPIES: "".join(WORDS) + "<|fim_pad|>"}
    write_folder(folder, llama_config(1))
    described = json.loads((TOKENIZER / "tokenizer.json").read_text())
    described["added_tokens"] += [added_token(mark) for mark in (*QWEN, *WORDS) if mark not in answers]
    write_answers(folder, described, byte_level, answers, "<|end|>")
    return folder

"""Marks around the thoughts of model families, found in their chat templates."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ThoughtMarks:
    """Texts around thoughts. An answer begins with them or has none."""

    open: str
    close: str
    between: str = ""
    """Text after closed thoughts, before further thoughts or the rest of the answer."""
    lead: str = ""
    """Text that begins the rest of the answer; "" if it begins without a mark."""
    efforts: tuple[tuple[str, str], ...] = ()
    """Efforts that the model does not know, each with the nearest that it knows."""
    wrapper: tuple[str, str] = ("", "")
    """Tags around the rest of the answer, which are not a part of it; "" if there are none."""

    def texts(self) -> tuple[str, ...]:
        """Return all marks."""
        return (self.open, self.close, self.between, self.lead)


Parser = Literal[
    "auto", "none", "qwen3", "deepseek_r1", "harmony", "seed_oss", "mistral", "cohere", "gemma4", "apertus",
    "openthinker", "exaone_deep", "kimi_vl",
]  # fmt: skip
HARMONY = "harmony"
DEEPSEEK_R1 = "deepseek_r1"
MARKS: dict[str, ThoughtMarks] = {
    HARMONY: ThoughtMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "<|channel|>final<|message|>",
        (("none", "low"), ("minimal", "low"), ("xhigh", "high"), ("max", "high")),
    ),
    "seed_oss": ThoughtMarks("<seed:think>", "</seed:think>"),
    "mistral": ThoughtMarks("[THINK]", "[/THINK]"),
    "cohere": ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ThoughtMarks("<|channel>thought\n", "<channel|>"),
    "apertus": ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    "openthinker": ThoughtMarks("<|begin_of_thought|>", "<|end_of_thought|>"),
    "exaone_deep": ThoughtMarks("<thought>", "</thought>"),
    "kimi_vl": ThoughtMarks("◁think▷", "◁/think▷"),
    "qwen3": ThoughtMarks("<think>", "</think>"),
    DEEPSEEK_R1: ThoughtMarks("<think>", "</think>"),
}
THINK = MARKS["qwen3"]
_WRAPPERS = (("<answer>", "</answer>"), ("<response>", "</response>"))
"""Tags of GLM-4.1V and Hunyuan, and of Granite 3.3."""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


def thought_marks(setting: str, chat_template: str) -> ThoughtMarks | None:
    """Return the marks of thoughts by setting or chat template, or None."""
    if setting != "auto":
        return MARKS.get(setting)
    chat_template = _COMMENT.sub("", chat_template)
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return MARKS[HARMONY]
    wrapper = next((tags for tags in _WRAPPERS if tags[1] in chat_template), ("", ""))
    for marks in MARKS.values():
        if marks.lead:
            continue
        if marks.close in chat_template or marks.open.strip() in chat_template:
            return replace(marks, wrapper=wrapper)
    return None

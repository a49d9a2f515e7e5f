"""Marks around the thoughts of model families. Not for: finding them."""

from __future__ import annotations

from dataclasses import dataclass
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
    wrapper: tuple[str, str] = ("", "")
    """Tags around the rest of the answer, which are not a part of it; "" if there are none."""

    def texts(self) -> tuple[str, ...]:
        """Return all marks."""
        return (self.open, self.close, self.between, self.lead)


Parser = Literal[
    "auto", "none", "qwen3", "deepseek_r1", "harmony", "seed_oss", "mistral", "cohere", "gemma4", "apertus",
    "openthinker", "exaone_deep", "kimi_vl", "solar_open", "kimi_k3",
]  # fmt: skip
HARMONY = "harmony"
DEEPSEEK_R1 = "deepseek_r1"
MARKS: dict[str, ThoughtMarks] = {
    HARMONY: ThoughtMarks(
        "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
    ),
    "solar_open": ThoughtMarks("<|think|>", "<|end|>", "<|begin|>assistant", "<|content|>"),
    "kimi_k3": ThoughtMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>", "", "<|open|>response<|sep|>"),
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

"""Finds the marks around a model's thoughts by rendering with its chat template.

The marks are those that read a rendered thought back. A template that shows no thoughts proves its
marks at the end of a prompt, in its system prompt, or by dropping them from an earlier answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from server.text.answer_parts import part_reader
from server.text.probe import ANSWER, THOUGHT, Probe, tail
from server.text.reasoning import Thought
from server.text.thought_marks import MARKS, THINK, ThoughtMarks

_WRAPPERS = (("<answer>", "</answer>"), ("<response>", "</response>"))
"""Tags of GLM-4.1V and Hunyuan, and of Granite 3.3."""
_TAG = r"(?:<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]|◁[^◁▷\s]{1,60}▷)"
_LAST_TAG = re.compile(rf"({_TAG})\s*\Z")
_FIRST_TAG = re.compile(rf"\s*({_TAG})")
_SWITCHES: tuple[Mapping[str, bool], ...] = (
    {},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)


def found_marks(setting: str, probe: Probe) -> ThoughtMarks | None:
    """Return the marks of thoughts, by the setting or by rendering; None without thoughts."""
    if setting != "auto" or probe.plain is None:
        return MARKS.get(setting)
    shown = shown_thought(probe)
    candidates = [*MARKS.values(), *_rendered_marks(shown)]
    marks = next((marks for marks in candidates if shown and reads_thought(shown, marks)), None)
    if marks is None and shown is None:
        marks = next((marks for marks in MARKS.values() if _proves(probe, marks)), None)
    if marks is None or marks.lead:
        return marks
    wrapper = next((tags for tags in _WRAPPERS if _wraps(probe, tags)), ("", ""))
    return replace(marks, wrapper=wrapper)


def shown_thought(probe: Probe) -> str | None:
    """Return a conversation with a thought and an answer; None if it hides the thought."""
    shown = probe.answer(has_thoughts=True, content=ANSWER)
    if shown is None or THOUGHT not in shown:
        return None
    return shown


def _rendered_marks(shown: str | None) -> Iterator[ThoughtMarks]:
    before, _, after = tail(shown or "").partition(THOUGHT)
    opening = _LAST_TAG.search(before)
    closing = _FIRST_TAG.match(after.partition(ANSWER)[0])
    if opening and closing:
        yield ThoughtMarks(opening[1], closing[1])


def _proves(probe: Probe, marks: ThoughtMarks) -> bool:
    """Return whether these marks are written or dropped, or are tokens of the model."""
    if marks.lead:
        return f"{marks.lead}{ANSWER}" in (probe.answer(content=ANSWER) or "")
    prompts = [probe.question(variables) or "" for variables in _SWITCHES]
    if any(marks.close in prompt or tail(prompt).rstrip().endswith(marks.open.rstrip()) for prompt in prompts):
        return True
    earlier = probe.earlier_answer(f"{marks.open}{THOUGHT}{marks.close}{ANSWER}")
    if earlier is not None and ANSWER in earlier and THOUGHT not in earlier:
        return True
    if marks == THINK:
        return False  # many models have these tokens and do not think
    return all(probe.tokenizer.token_of(mark) is not None for mark in (marks.open, marks.close))


def _wraps(probe: Probe, tags: tuple[str, str]) -> bool:
    """Return whether tags around an answer are asked for, or dropped from an earlier one."""
    prompts = [probe.question(variables) or "" for variables in _SWITCHES]
    if any(tags[1] in prompt for prompt in prompts):
        return True
    earlier = probe.earlier_answer(f"{tags[0]}{ANSWER}{tags[1]}")
    return earlier is not None and ANSWER in earlier and tags[1] not in earlier


def reads_thought(shown: str, marks: ThoughtMarks) -> bool:
    """Return whether the reader of these marks finds the thought and the answer."""
    before, _, after = tail(shown).partition(THOUGHT)
    begin = before.rfind(marks.open.strip())
    if begin < 0:
        return False
    parts = part_reader(marks, marks.between, False).feed(before[begin:] + THOUGHT + after, True)
    thoughts = [part.text for part in parts if isinstance(part, Thought)]
    said = "".join(part for part in parts if isinstance(part, str))
    return thoughts == [THOUGHT] and said.strip().startswith((ANSWER, *(tags[0] for tags in _WRAPPERS)))

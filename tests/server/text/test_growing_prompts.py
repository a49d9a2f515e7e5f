"""A prompt only grows at its end, so that its K/V is cached.

Every template that comes with the server or the tests renders every conversation turn by turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import RequestError
from server.text.call_formats import call_marks
from server.text.content_forms import content_form
from server.text.rendering import render_conversation
from server.text.shipped_templates import SHIPPED
from tests.server.call_spellings import TEMPLATES
from tests.server.families import FAMILIES
from tests.server.text.call_cases import FORM_OF
from tests.server.text.conversations import Turn, rendered, says, template
from tests.server.text.layouts import LAYOUTS
from tests.server.tiny_models import TOKENIZER

FILES = {
    **SHIPPED,
    "demo": TOKENIZER / "chat_template.jinja",
    **{path.stem: path for path in sorted(TEMPLATES.glob("*.jinja"))},
    **{f"family {path.stem}": path for path in sorted((TEMPLATES / "families").glob("*.jinja"))},
}
FORMATS = {
    **{name: FORM_OF.get(name) for name in FILES},
    **{f"family {family.name}": family.calls for family in FAMILIES},
    **{(layout.name if layout.name in SHIPPED else f"family {layout.name}"): layout.calls for layout in LAYOUTS},
    "harmony": "harmony",
    "chatml-tools": "hermes",
    "gemma-tools": "hermes",
    "deepseek-tools": "deepseek_v3",
}
"""Format of calls of each template."""
CONVERSATIONS = (
    *("U A U A U", "S U A U A U", "U U A U", "U A S U A U", "S S U A S U A U", "U S A U A U", "S U S A U A U"),
    *("S A U A U", "U C U A U", "S U C A U A U", "U A S C A U", "U C A U TC A U", "U TC A U C A U", "U C A U CC A U"),
    *("U H U H U", "U HC A U A U"),
)
"""Turns: system prompt, user, answer, thoughts and answer (H), calls with results (C).

Also text before a call (TC), and thoughts before a call (HC).
"""
BY_TEMPLATE = {
    "tools": {"mistral", "family mistral_v3", "family mistral_v11"},
    "thoughts": {
        *("qwen3", "harmony", "family qwen3", "family glm4", "family lfm25", "family minimax_m2"),
        *("deepseek32", "deepseek4", "family kimi_k25"),
    },
}
"""Templates that move a part themselves: they show tools in the user's last turn, or thoughts
(harmony: also text) before a call until the user's next turn.
"""
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
OFF = {"enable_thinking": False, "thinking": False}


def called(word: Callable[[], str], num_calls: int, **more: Any) -> list[Turn]:
    """A turn with calls, and their results."""
    ids = [f"call_{word()}" for _ in range(num_calls)]
    calls = [{"id": one, "type": "function", "function": {"name": "look", "arguments": {"at": word()}}} for one in ids]
    results = [says("tool", word(), tool_call_id=one) for one in ids]
    return [says("assistant", "", **more) | {"tool_calls": calls}, *results]


def turns_of(conversation: str) -> list[Turn]:
    """The turns of a conversation; no two have a word in common."""
    words = (f"word{number:03d}" for number in range(1000))
    word = partial(next, words)

    def thought() -> Turn:
        text = word()
        return {"reasoning_content": text, "reasoning": text, "thinking": text}

    turns: dict[str, Callable[[], list[Turn]]] = {
        "S": lambda: [says("system", word())],
        "U": lambda: [says("user", word())],
        "A": lambda: [says("assistant", word())],
        "H": lambda: [says("assistant", word(), **thought())],
        "C": lambda: called(word, 1),
        "CC": lambda: called(word, 2),
        "TC": lambda: [one | {"content": one["content"] or word()} for one in called(word, 1)],
        "HC": lambda: called(word, 1, **thought()),
    }
    return [turn for letters in conversation.split() for turn in turns[letters]()]


def prompts(
    file: Path, call_format: str | None, conversation: str, tools: Sequence[Turn], **variables: Any
) -> Iterator[str]:
    """Yield the prompt before each answer of the assistant, up to the text of the last turn."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Any, tools: Any, _documents: Any) -> str:
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        ((text, *_), _) = render_jinja_template(
            [messages], list(tools) or None, None, file.read_text(), add_generation_prompt=True, **special, **variables
        )
        return str(text)

    form = content_form(lambda messages, tools, documents: render(messages, tools, documents))
    turns = turns_of(conversation)
    for number, turn in enumerate(turns):
        follows = turns[number + 1]["role"] if number + 1 < len(turns) else "assistant"
        has_user = any(one["role"] == "user" for one in turns[: number + 1])
        if turn["role"] == "assistant" or follows != "assistant" or not has_user:
            continue
        fitted: Any = lambda messages, *rest: render(form.of(messages), *rest)  # noqa: E731
        prompt = render_conversation(fitted, turns[: number + 1], tools, [], call_marks(call_format))
        yield prompt[: prompt.rindex(turn["content"]) + len(turn["content"])]


def moves(name: str, conversation: str, tools: Sequence[Turn], **variables: Any) -> bool:
    """Whether a prompt of a conversation does not begin with the one before."""
    before = ""
    for prompt in prompts(FILES[name], FORMATS[name], conversation, tools, **variables):
        if not prompt.startswith(before):
            return True
        before = prompt
    return False


@pytest.mark.parametrize("name", FILES)
def test_prompts_only_grow_at_their_end(name: str) -> None:
    num_rendered = 0
    found = set()
    for conversation in CONVERSATIONS:
        for tools in ([], [TOOL]):
            causes = {
                "tools": bool(tools),
                "thoughts": "HC" in conversation or "TC" in conversation,
            }
            excused = {cause for cause, holds in causes.items() if holds and name in BY_TEMPLATE[cause]}
            try:
                has_moved = moves(name, conversation, tools, **(OFF if "H" in conversation and tools else {}))
            except RequestError:  # a template without a place for tools or calls, or that begins with the user
                assert "C" in conversation or tools or conversation.startswith("S A"), conversation
                continue
            num_rendered += 1
            assert excused or not has_moved, (conversation, tools)
            found |= excused if has_moved else set()
    assert num_rendered >= CONVERSATIONS.index("S A U A U")
    assert found == {cause for cause, names in BY_TEMPLATE.items() if name in names}, "exceptions that still hold"


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@settings(deadline=None, max_examples=40)
@given(letters=st.lists(st.sampled_from(["S", "U", "A", "C", "CC", "TC", "U A", "U TC A"]), min_size=2, max_size=9))
def test_any_conversation_only_grows(name: str, letters: list[str]) -> None:
    """With tools and without them, in each variant that the template needs."""
    for tools in ([], [TOOL]):
        if tools and name in BY_TEMPLATE["tools"]:
            continue
        with contextlib.suppress(RequestError):
            conversation = " ".join(["U", *letters, "A"])
            is_excused = "TC" in conversation and name in BY_TEMPLATE["thoughts"]
            assert is_excused or not moves(name, conversation, tools, **OFF)


def test_a_late_system_prompt_that_the_template_moves_is_said_by_the_user() -> None:
    """Shown first, in another turn's place, or in place of a default."""

    def hoisted(messages: Any, *_: Any) -> str:
        system = "".join(one["content"] for one in messages if one["role"] == "system")
        return system + "".join(f"<{one['role']}>{one['content']}" for one in messages if one["role"] != "system")

    def default(messages: Any, *_: Any) -> str:
        has_system = any(one["role"] == "system" for one in messages)
        return ("" if has_system else "Be good.") + "".join(f"<{one['role']}>{one['content']}" for one in messages)

    turns = [says("user", "A"), says("assistant", "B"), says("system", "C"), says("user", "D")]
    assert rendered(hoisted, *turns) == "<user>A<assistant>B<user>C<user>D"
    assert rendered(default, *turns) == "Be good.<user>A<assistant>B<user>C<user>D"
    assert rendered(template(), *turns) == "<user>A<assistant>B<system>C<user>D"

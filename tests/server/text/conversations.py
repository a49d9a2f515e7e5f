"""Turns of a conversation, and templates that render them, as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.api import RequestError
from server.text.rendering import render_conversation

Turn = dict[str, Any]
Wish = Callable[[list[Turn]], bool]


def shown(turn: Turn) -> str:
    """A turn with all that it holds."""
    calls = "".join(
        f"!{call['id']} {call['function']['name']} {call['function']['arguments']}"
        for call in turn.get("tool_calls", ())
    )
    name, of = turn.get("name", ""), turn.get("tool_call_id", "")
    return f"<{turn['role']}{name and ' ' + name}{of and ' ' + of}>{turn.get('content') or ''}{calls}"


def template(wish: Wish = lambda _: True, shows: Callable[[Turn], str] = shown) -> Any:
    """A template that refuses turns that are not as it wishes."""

    def render(messages: Any, tools: Any, documents: Any) -> str:
        if not wish(messages):
            raise ValueError("not so")
        names = "".join(tool["function"]["name"] for tool in tools)
        return names + "".join(one["text"] for one in documents) + "".join(map(shows, messages))

    return render


def rendered(render: Any, *turns: Turn, tools: Any = (), documents: Any = (), marks: Any = ()) -> str:
    return render_conversation(render, list(turns), tools, documents, marks)


def refused(render: Any, *turns: Turn, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        rendered(render, *turns, **more)
    return caught.value


def says(role: str, content: str | None, **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


def called(*ids: str, content: str | None = None, **arguments: Any) -> Turn:
    calls = [{"id": one, "function": {"name": f"f{number}", "arguments": arguments}} for number, one in enumerate(ids)]
    return says("assistant", content, tool_calls=calls)


def result(call_id: str, content: str = "12") -> Turn:
    return says("tool", content, tool_call_id=call_id)


USER, ANSWER = says("user", "Hi"), says("assistant", "Ho")
SHORT = "a1b2c3d4e"

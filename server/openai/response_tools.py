"""Translates tools of `/v1/responses` to tools of a chat.

A namespace is a named group of functions. Chat templates know single functions only. Functions of a namespace are
offered under their own names, or, if another function has the same one, with the name of the namespace as a prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.api import RequestError

_JOINT = "__"


@dataclass(frozen=True)
class Names:
    """Names of functions in the prompt."""

    of_members: dict[tuple[str, str], str]
    """Names in the prompt by (namespace, name)."""

    def offered(self, namespace: Any, name: Any) -> Any:
        """Return a function's name in the prompt; unknown names are returned unchanged."""
        is_member = isinstance(namespace, str) and isinstance(name, str)  # else pydantic refuses the name later
        return self.of_members.get((namespace, name), name) if is_member else name

    def called(self, name: str) -> dict[str, str]:
        """Return the fields of a call's item that name the function: name, and namespace if there is one."""
        for (namespace, member), offered in self.of_members.items():
            if offered == name:
                return {"name": member, "namespace": namespace}
        return {"name": name}


def names_of(tools: Iterable[dict[str, Any]]) -> Names:
    """Return unique names for the functions of all namespaces."""
    members = [(_text(tool, "name"), _text(one, "name")) for tool in _namespaces(tools) for one in _members(tool)]
    uses = Counter(name for _, name in members) + Counter(
        str(tool.get("name")) for tool in tools if tool.get("type") == "function"
    )
    return Names({(space, name): name if uses[name] == 1 else f"{space}{_JOINT}{name}" for space, name in members})


def chat_tools(tools: Sequence[dict[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Return the tools of a chat; tools that are not supported are reduced to their type."""
    found = []
    for tool in tools:
        if tool.get("type") == "function":
            found.append(_function(tool))
        elif tool.get("type") == "namespace":
            found += _functions_of(tool, names)
        else:
            found.append({"type": tool.get("type")})
    return found


def described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as the response repeats it: a function has all its fields, and is strict only if it says so."""
    if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
        return {**tool, "tools": [described(one) if isinstance(one, dict) else one for one in tool["tools"]]}
    if tool.get("type") != "function":
        return tool
    given = {name: value for name, value in tool.items() if value is not None}
    return {"description": None, "parameters": None, "strict": False, **given}


def _namespaces(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [tool for tool in tools if tool.get("type") == "namespace"]


def _members(namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of a namespace; raises RequestError if there are none."""
    members = namespace.get("tools")
    if not isinstance(members, list) or not all(isinstance(one, dict) for one in members):
        raise RequestError("tools: a namespace holds a list of tools", "tools")
    return [one for one in members if one.get("type") == "function"]


def _text(tool: dict[str, Any], key: str) -> str:
    if not isinstance(tool.get(key), str):
        raise RequestError(f"tools: a {tool.get('type')} needs a {key}", "tools")
    return str(tool[key])


def _function(tool: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"} | changed}


def _functions_of(namespace: dict[str, Any], names: Names) -> list[dict[str, Any]]:
    """Return the functions of a namespace (the first with its description), and the types of its other tools."""
    space, about = _text(namespace, "name"), namespace.get("description")
    found: list[dict[str, Any]] = []
    for one in _members(namespace):
        changed: dict[str, Any] = {"name": names.offered(space, one["name"])}
        if about and not found:
            changed["description"] = f"[{space}: {about}] {one.get('description') or ''}".rstrip()
        found.append(_function(one, **changed))
    others = [one for one in namespace["tools"] if one.get("type") != "function"]
    return found + [{"type": one.get("type")} for one in others]

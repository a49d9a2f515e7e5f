"""Translates tools of `/v1/responses` to tools of a chat.

A namespace is a named group of functions. Chat templates know single functions only. Functions of a
namespace are offered under their own names, or, if another function has the same one, with the name
of the namespace as a prefix.
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

    by_member: dict[tuple[str, str], str]
    """Names in the prompt by (namespace, name)."""

    def offered(self, namespace: Any, name: Any) -> Any:
        """Return a function's name in the prompt; unknown names are returned unchanged."""
        if not isinstance(namespace, str) or not isinstance(name, str):
            return name  # pydantic refuses it later
        return self.by_member.get((namespace, name), name)

    def called(self, name: str) -> dict[str, str]:
        """Return the item fields that name a called function: name, and any namespace."""
        for (namespace, member), offered in self.by_member.items():
            if offered == name:
                return {"name": member, "namespace": namespace}
        return {"name": name}


def names_of(tools: Iterable[dict[str, Any]]) -> Names:
    """Return unique names for the functions of all namespaces."""
    members = [
        (_text(namespace, "name"), _text(member, "name"))
        for namespace in _namespaces(tools)
        for member in _members(namespace)
    ]
    uses = Counter(name for _, name in members)
    uses.update(str(tool.get("name")) for tool in tools if tool.get("type") == "function")
    offered = {}
    for namespace, name in members:
        is_unique = uses[name] == 1
        offered[namespace, name] = name if is_unique else f"{namespace}{_JOINT}{name}"
    return Names(offered)


def chat_tools(tools: Sequence[dict[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Return the tools of a chat; tools that are not supported are reduced to their type."""
    result = []
    for tool in tools:
        if tool.get("type") == "function":
            result.append(_function(tool))
        elif tool.get("type") == "namespace":
            result += _functions_of(tool, names)
        else:
            result.append({"type": tool.get("type")})
    return result


def described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as responses repeat it, with all fields of a function."""
    members = tool.get("tools")
    if tool.get("type") == "namespace" and isinstance(members, list):
        return {**tool, "tools": [described(member) if isinstance(member, dict) else member for member in members]}
    if tool.get("type") != "function":
        return tool
    given = {name: value for name, value in tool.items() if value is not None}
    return {"description": None, "parameters": None, "strict": False, **given}


def _namespaces(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [tool for tool in tools if tool.get("type") == "namespace"]


def _members(namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of a namespace; raises RequestError if there are none."""
    members = namespace.get("tools")
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise RequestError("tools: a namespace holds a list of tools", "tools")
    return [member for member in members if member.get("type") == "function"]


def _text(tool: dict[str, Any], key: str) -> str:
    if not isinstance(tool.get(key), str):
        raise RequestError(f"tools: a {tool.get('type')} needs a {key}", "tools")
    return str(tool[key])


def _function(tool: dict[str, Any], **changed: Any) -> dict[str, Any]:
    function = {name: tool[name] for name in tool if name != "type"}
    return {"type": "function", "function": function | changed}


def _functions_of(namespace: dict[str, Any], names: Names) -> list[dict[str, Any]]:
    """Return (a namespace's functions, the first with its description; types of other tools)."""
    space = _text(namespace, "name")
    description = namespace.get("description")
    functions: list[dict[str, Any]] = []
    for member in _members(namespace):
        changed: dict[str, Any] = {"name": names.offered(space, member["name"])}
        if description and not functions:
            changed["description"] = f"[{space}: {description}] {member.get('description') or ''}".rstrip()
        functions.append(_function(member, **changed))
    others = [{"type": tool.get("type")} for tool in namespace["tools"] if tool.get("type") != "function"]
    return functions + others

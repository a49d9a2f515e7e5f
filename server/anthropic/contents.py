"""Content blocks of Anthropic's turns as the messages of a chat.

Text documents and search results are text. Images and files are attachments of the chat
(`text/attachments.py`).
"""

from __future__ import annotations

import json
from typing import Any

from engine.api import RequestError
from server.text.attachments import is_attachment

TOOL_REFERENCE = "tool_reference"
"""Type of a block in a result that names a deferred tool, which may be called from then on."""
_CACHE_KEYS = frozenset({"cache_control", "citations"})
"""Keys of blocks without effect: common prefixes are always cached."""
_SHOWN = ("image", "document", "search_result")
"""Further blocks of a user's turn that reach the chat."""
Parts = list[dict[str, Any]]


def turn_of(role: str, blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the messages of a turn's blocks: results of calls, then the rest of the turn."""
    message: dict[str, Any] = {"role": role}
    shown: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text" or (kind in _SHOWN and role == "user"):
            shown.append(block)
        elif kind == "thinking" and role == "assistant":
            message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # encrypted by another server; it cannot be read here
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            message.setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
        elif kind == "tool_result" and role == "user":
            content = _result(block, where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            raise RequestError(f"{where}: blocks of type {kind!r} are not supported in a turn of the {role}", where)
    message["content"] = content_of(shown, where)
    has_more = message["content"] or message.keys() > {"role", "content"} or not results
    return [*results, message] if has_more else results


def content_of(content: Any, where: str) -> str | Parts:
    """Return the text of a string or of blocks; parts if some blocks are attachments."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    parts = [_part(block, where) for block in blocks]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _result(block: dict[str, Any], where: str) -> str | Parts:
    """Return the content of a call's result. A chat has no field for an error."""
    content = content_of(block.get("content") or "", where)
    if not block.get("is_error"):
        return content
    if not isinstance(content, str):
        return [{"type": "text", "text": "Error: "}, *content]
    return content if content.lower().startswith("error") else f"Error: {content}"


def _part(block: Any, where: str) -> dict[str, Any]:
    """Return a block as a part of a chat's content; raise RequestError for an unknown one."""
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    if kind == TOOL_REFERENCE:
        return {"type": "text", "text": f"Found {block.get('tool_name')}.\n"}
    if kind == "search_result":
        return _lines(block.get("title"), block.get("source"), *_texts(block.get("content"), where))
    if kind == "document" and (texts := _document(block.get("source"), where)):
        return _lines(block.get("title"), block.get("context"), *texts)
    if is_attachment(kind):
        return {"type": kind}
    if kind != "text" or not isinstance(block.get("text"), str):
        raise RequestError(f"{where}: blocks of type {kind!r} are not supported; send text", where)
    if unknown := sorted(block.keys() - {"type", "text"} - _CACHE_KEYS):
        raise RequestError(f"{where}: {unknown[0]!r} is not known in a block of text", where)
    return {"type": "text", "text": block["text"]}


def _document(source: Any, where: str) -> list[Any]:
    """Return the texts of a document; none if it is a file."""
    if not isinstance(source, dict):
        return []
    if source.get("type") == "text":
        return [source.get("data")]
    return _texts(source.get("content"), where) if source.get("type") == "content" else []


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of a string or of blocks; raise RequestError for attachments."""
    text = content_of(content or "", where)
    if not isinstance(text, str):
        raise RequestError(f"{where}: a document or search result holds text; send images next to it", where)
    return [text]


def _lines(*texts: Any) -> dict[str, Any]:
    """Return a part with each text in a line."""
    shown = [f"{text}\n" for text in texts if isinstance(text, str) and text]
    return {"type": "text", "text": "".join(shown)}

"""Chat templates with a place for tools that come with the server (`server/templates/`), by name.

A name is chosen by `--chat-template NAME`.
"""

from __future__ import annotations

from pathlib import Path

from server.text.tokenizer import Tokenizer

_FOLDER = Path(__file__).resolve().parent.parent / "templates"
_MARKS = {"<|im_start|>": "chatml-tools", "<start_of_turn>": "gemma-tools", "<｜User｜>": "deepseek-tools"}
"""Templates by the token with which the turns of their models begin."""
SHIPPED = {name: _FOLDER / f"{name}.jinja" for name in _MARKS.values()}


def advice_for(tokenizer: Tokenizer, shows_tools: bool) -> str:
    """Return the operator's way to serve tools; shows_tools: the template does."""
    fitting = next((name for mark, name in _MARKS.items() if tokenizer.token_of(mark) is not None), None)
    if fitting is not None:
        return (
            f"start the server with --chat-template {fitting}, which is a part of it; the calls of this template are "
            "recognised without --tool-call-parser"
        )
    if shows_tools:
        return "start the server with the right --tool-call-parser, or with a --chat-template that shows calls"
    return (
        "start the server with a --chat-template FILE that shows tools and calls; calls in one of the formats of "
        "--tool-call-parser are then recognised without it"
    )

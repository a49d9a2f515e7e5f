"""Chat templates that come with the server (`server/templates/`), by name (`--chat-template`)."""

from __future__ import annotations

from pathlib import Path

from server.text.tokenizer import Tokenizer

_FOLDER = Path(__file__).resolve().parent.parent / "templates"
_TEACHING = (
    ("<｜User｜>", "deepseek_v31", "deepseek31-tools"),
    ("<｜User｜>", "", "deepseek-tools"),
    ("<start_of_turn>", "", "gemma-tools"),
    ("<|im_start|>", "", "chatml-tools"),
)
"""Templates with a place for tools, by the token of turns and the format shown."""
_WITHOUT = (
    ("<|end_of_msg|>", ("kimi-k3",)),
    ("<｜User｜>", ("deepseek32", "deepseek4")),
)
"""Templates for models without one, by a token of their vocabulary."""
SHIPPED = {
    name: _FOLDER / f"{name}.jinja"
    for name in sorted({name for _, _, name in _TEACHING} | {name for _, names in _WITHOUT for name in names})
}


def advice_for(tokenizer: Tokenizer, shows_tools: bool, shows_calls: bool, call_format: str | None) -> str:
    """Return what the operator has to do so that tools are served.

    shows_tools, shows_calls: whether the present template does. call_format: that reads its calls.
    """
    if shows_tools and shows_calls:
        return (
            "no --tool-call-parser of this server reads them; start the server with a --chat-template FILE that shows "
            "calls in one of its formats, or leave tools out"
        )
    if shows_tools:
        return "start the server with the --tool-call-parser of its format, or with a --chat-template that shows calls"
    fitting = next(
        (name for mark, form, name in _TEACHING if form in ("", call_format) and tokenizer.token_of(mark) is not None),
        None,
    )
    if fitting is not None:
        return (
            f"start the server with --chat-template {fitting}, which is a part of it; the calls of this template are "
            "recognised without --tool-call-parser"
        )
    return (
        "start the server with a --chat-template FILE that shows tools and calls; calls in one of the formats of "
        "--tool-call-parser are then recognised without it"
    )


def advice_without_template(tokenizer: Tokenizer) -> str:
    """Return what to do about a model without a chat template."""
    names = next((names for mark, names in _WITHOUT if tokenizer.token_of(mark) is not None), ())
    if not names:
        return "see --chat-template"
    return f"start the server with --chat-template {' or '.join(names)}, which is a part of it"

"""Picture of an answer, each token colored by its origin.

`python -m tests.server.answer_picture --output docs/images/answer.svg` asks a daemon and draws the
answer of the README.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import httpx

from server.chat.conversation import key_headers

MESSAGE = "I would like to book a table for two tonight."
DRAFTED, ADDED = "#b7ebc6", "#cfe1ff"
_COLUMNS = 56
_CHARACTER_PX, _LINE_PX, _MARGIN_PX = 12, 36, 24


def request() -> dict[str, Any]:
    """Return the body of the pictured chat with the embedded pair."""
    messages = [{"role": "user", "content": MESSAGE}]
    return {"model": "polydraft-demo", "messages": messages, "max_tokens": 60, "seed": 2}


def tokens_by_origin(steps: Sequence[dict[str, Any]], text: str) -> Iterator[tuple[str, bool]]:
    """Yield the tokens that the text shows, and whether each was drafted."""
    place = 0
    for step in steps:
        for index, token in enumerate(step["tokens"]):
            shown = token if text.startswith(token, place) else ""
            place += len(shown)
            if shown:
                yield shown, index < step["num_accepted"]
    if place != len(text):
        raise ValueError(f"the steps do not spell the answer from {text[place:]!r} on")


def _rows(tokens: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the SVG elements of each line of tokens."""
    rows, column = [""], 0
    for token, is_drafted in tokens:
        if column and column + len(token) > _COLUMNS:
            rows.append("")
            column = 0
        x, y = _MARGIN_PX + column * _CHARACTER_PX, _MARGIN_PX + len(rows) * _LINE_PX
        width, word = len(token) * _CHARACTER_PX - 2, token.strip()
        rows[-1] += (
            f'<rect x="{x}" y="{y}" width="{width}" height="28" rx="4" fill="{DRAFTED if is_drafted else ADDED}"/>'
            f'<text x="{x + width // 2}" y="{y + 20}" text-anchor="middle" '
            f'textLength="{len(word) * _CHARACTER_PX - 2}">{escape(word)}</text>'
        )
        column += len(token)
    return rows


def _legend(y: int, num_drafted: int, num_added: int, num_passes: int) -> str:
    entries = (
        (_MARGIN_PX, DRAFTED, f"accepted from the draft model: {num_drafted}"),
        (360, ADDED, f"added by the target model: {num_added} ({num_passes} passes)"),
    )
    return (
        '<g font-family="system-ui, sans-serif" font-size="15">'
        + "".join(
            f'<rect x="{x}" y="{y}" width="16" height="16" rx="3" fill="{colour}"/>'
            f'<text x="{x + 24}" y="{y + 14}">{text}</text>'
            for x, colour, text in entries
        )
        + "</g>"
    )


def picture(answer: dict[str, Any]) -> str:
    """Return the SVG of an answer to `request` with `return_drafts`."""
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    tokens = list(tokens_by_origin(choice["drafts"], text))
    num_drafted = sum(is_drafted for _, is_drafted in tokens)
    rows = _rows(tokens)
    width = 2 * _MARGIN_PX + _COLUMNS * _CHARACTER_PX
    height = _MARGIN_PX + (len(rows) + 1) * _LINE_PX + 56
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="19" fill="#1b1f24">',
        f"<title>{escape(text)}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        f'<text x="{_MARGIN_PX}" y="{_MARGIN_PX + 16}" fill="#57606a">{escape(MESSAGE)}</text>',
    )
    legend = _legend(height - 44, num_drafted, len(tokens) - num_drafted, len(choice["drafts"]))
    return "\n".join((*head, *rows, legend, "</svg>\n"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the daemon and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--output", type=Path, default=Path("docs/images/answer.svg"))
    options = parser.parse_args(arguments)
    body = request() | {"speculation": {"return_drafts": True}}
    answer = httpx.post(f"{options.url}/v1/chat/completions", json=body, headers=key_headers()).raise_for_status()
    options.output.write_text(picture(answer.json()))


if __name__ == "__main__":
    main()

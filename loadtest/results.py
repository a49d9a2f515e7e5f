"""Results of measurements: JSON documents, and Markdown tables of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.environment import environment

if TYPE_CHECKING:  # it needs numpy, which the bench's help does not
    from loadtest.statistics import Ratio


def document(
    what: str, options: argparse.Namespace, names: Iterable[str] | None = None, **found: Any
) -> dict[str, Any]:
    """Return what was measured, with which options and on which machine, and then what was `found`.

    names: of the options; by default all but the file of the document.
    """
    names = [name for name in vars(options) if name != "output"] if names is None else names
    shown = {name: getattr(options, name) for name in names}
    return {"what": what, "options": shown, "environment": environment(), **found}


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--output`, the file of the JSON document."""
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")


def write(result: Any, output: Path | None) -> None:
    """Write a JSON document, where a file is named."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def with_interval(name: str, found: Ratio) -> dict[str, Any]:
    """Return a ratio and its interval as two fields."""
    return {name: found.ratio, f"{name}_interval": [found.low, found.high]}


def shown_ratio(found: Mapping[str, float]) -> str:
    """Return a ratio with its interval."""
    return f"{found['ratio']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"

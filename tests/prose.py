"""Check of the project's English: openings of docstrings, and words that have a plainer one (`./check`).

Docstrings begin with a verb or a noun. Words are checked in docstrings, comments and pages, not in code.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

NOT_YET = ("engine/", "tests/", "docs/log.md", "docs/results/")
"""Files that have not been converted."""

OPENINGS = frozenset("As Behind Beside By How Of So What Where Who Whose".split())
WORDS = re.compile(
    r"\b(whoever|of (?:its|their|his|one's) own|so many|for ever|made up|mended"
    r"|(?:is|are|was|were|be|been|being) told|tells? of|told of)\b",
    re.IGNORECASE,
)


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, also of attributes, that begin with a banned word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first = re.match(r"\W*(\w+)", node.value.value)
            if first and first[1] in OPENINGS:
                yield node.lineno, f"a docstring begins with {first[1]!r}"


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module, line by line."""
    statements = {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in statements
        if token.type == tokenize.COMMENT or is_docstring:
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def faults(path: Path) -> Iterator[str]:
    """Yield the faults of a file, with their lines."""
    source = path.read_text()
    is_code = path.suffix == ".py"
    lines = prose(source) if is_code else enumerate(source.splitlines(), start=1)
    found = [(number, f"{word[0]!r}") for number, line in lines for word in WORDS.finditer(line)]
    for number, fault in sorted([*found, *(openings(source) if is_code else ())]):
        yield f"{path}:{number}: {fault}"


def main() -> int:
    """Print all faults; 1 if there are any."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], check=True, capture_output=True, text=True).stdout
    found = [fault for name in listed.split() if not name.startswith(NOT_YET) for fault in faults(Path(name))]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

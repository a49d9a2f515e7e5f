"""Check of the project's English (`./check`): openings of docstrings, words with a plainer one, and names of classes.

Docstrings begin with a verb or a noun. Words are checked in docstrings, comments, messages and pages. A class has a
name that no other class has.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

OTHERS = ("docs/results/", "tests/prose.py", "tests/test_prose.py")
"""Results, and the list of words itself."""

OPENINGS = frozenset("As Behind Beside By How Of So What Where Who Whoever Whom Whose Why".split())
WORDS = re.compile(
    r"\b(whoever|whomever|of (?:its|their|his|one's) own(?! \w)|so many|for ever|for want of|made up|mended"
    r"|beside(?= )|anew|(?:is|are|was|were|be|been|being) told|tells|tell of|told of|gave|copied (?:chains?|drafts?)"
    r"|behind (?:\w+ )?(?:texts?|prompts?))\b",
    re.IGNORECASE,
)


# From Python 3.12 on, the texts of f-strings are tokens of another type.
_TEXTS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, also of attributes, that begin with a banned word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first = re.match(r"\W*(\w+)", node.value.value)
            if first and first[1] in OPENINGS:
                yield node.lineno, f"a docstring begins with {first[1]!r}"


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the texts and comments of a module, line by line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _TEXTS:
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def twice(names: Sequence[str]) -> Iterator[str]:
    """Yield classes of the project, tests apart, that have the name of another one."""
    seen: dict[str, str] = {}
    for name in names:
        if name.endswith(".py") and not name.startswith("tests/"):
            for node in ast.walk(ast.parse(Path(name).read_text())):
                if isinstance(node, ast.ClassDef):
                    if node.name in seen:
                        yield f"{name}:{node.lineno}: {seen[node.name]} has a class {node.name!r}, too"
                    seen[node.name] = name


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
    names = [name for name in listed.split() if not name.startswith(OTHERS)]
    found = [*(fault for name in names for fault in faults(Path(name))), *twice(listed.split())]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

"""Check of the project's English (`./check`): docstrings, comments, pages and names.

Docstrings begin with a verb or a noun. Words are checked in docstrings, comments, messages and
pages. A class has a name that no other class has. Rooms in `CLEAN` have two more rules: no pronoun
without a noun (`bare_pronouns`), and no name that is a pronoun, a preposition or a word of
`NAME_WORDS` (`bad_names`). `python tests/prose.py --all` lists the violations of these two in all
rooms.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
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

CLEAN = (
    "deploy",
    "engine/attention",
    "engine/control",
    "engine/cuda",
    "engine/drafting",
    "engine/kernels",
    "engine/sampling",
    "engine/scheduling",
    "engine/speculation",
    "engine/step",
    "docs/examples",
    "polydraft",
    "research/demo",
    "research/distill",
    "server",
    "server/anthropic",
    "server/http",
    "server/openai",
    "server/serving",
    "server/settings",
    "server/text",
    "server/wire",
    "tests",
    "tests/deploy",
    "tests/research/distill",
    "tests/sampling",
    "tests/speculation",
)
"""Rooms (`room_of`) in which pronouns and names are checked."""

BARE = re.compile(r"\b(these|those)\b(?:\s*([^\s\w`]|$)|\s+(\w+))", re.IGNORECASE)
"""A pronoun, and the sign or the word after it."""
NO_NOUNS = frozenset(
    """
    of in with that which who whose for from by at on to under above below before after between through within
    beyond beside already without and or but are is were was be have has had do does did may must can could will
    would should not only alone also as than if when while where because so then too both never always left given
    it they we each every all the a an there here again more most
    """.split()
)
"""Words after which no noun follows a pronoun."""
NO_PLURALS = frozenset(
    """
    this these those its his has was does is as us yes always unless thus plus across others perhaps besides towards
    returns yields takes reads writes holds makes gets uses needs computes
    """.split()
)
"""Words that end like a plural, and verbs that docstrings often have."""
PHRASES = re.compile(
    r"\b(the\s+others|(?:one|ones|some|any|each|none)\s+of\s+them"
    r"|those\s+of\s+(?:the\s+others|these|those|them))\b",
    re.IGNORECASE,
)
_SENTENCE_ENDS = re.compile(r"[.!?](?=\s)|\n\s*\n")

PRONOUN_NAMES = frozenset(("found", "mine", "some", "one"))
"""Names of variables in comprehensions and lambdas alone."""
TEST_OPENINGS = ("what", "where", "who", "how", "which")
NAME_WORDS = frozenset(
    """
    whoever told tell tells gave gives behind beside anew mended law laws job jobs handler handlers manager managers
    helper helpers ctx info meta
    """.split()
)
"""Words that no name of the project has."""
LAW_ROOMS = (
    "research/analysis",
    "engine/speculation",
    "tests/oracles",
    "tests/research/analysis",
    "tests/speculation",
)
"""Rooms with proofs, in which a distribution is called a law."""
FOREIGN_NAMES = frozenset(("get_route_handler", "get_extra_info", "n_ctx", "_META"))
"""Names that libraries have chosen."""

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


def remarks(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and the comments of a module, with their first lines; adjacent comments
    are one text.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    first, texts = 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if texts and token.start[0] != first + len(texts):
                yield first, "\n".join(texts)
                texts = []
            if not texts:
                first = token.start[0]
            texts.append(token.string.lstrip("# "))
    if texts:
        yield first, "\n".join(texts)


def bare_pronouns(source: str) -> Iterator[tuple[int, str]]:
    """Yield "these" and "those" without a noun, "the others" and "one of them" in docstrings and
    comments.

    A noun follows a pronoun if no sign and no word of `NO_NOUNS` does. "those" may also stand for a
    plural before it in its sentence: "logits differ from those of the model".
    """
    for first_line, text in remarks(source):
        for match in BARE.finditer(text):
            _, sign, word = match.groups()
            has_noun = sign is None and word.lower() not in NO_NOUNS
            if not has_noun and not _stands_for_plural(text, match):
                yield first_line + text.count("\n", 0, match.start()), f"{match[1]!r} without a noun"
        for match in PHRASES.finditer(text):
            yield first_line + text.count("\n", 0, match.start()), f"{' '.join(match[0].split())!r} without a noun"


def _stands_for_plural(text: str, match: re.Match[str]) -> bool:
    """Return whether a pronoun is "those" after a plural in its sentence."""
    if match[1].lower() != "those":
        return False
    sentence = _SENTENCE_ENDS.split(text[: match.start()])[-1]
    plurals = re.findall(r"[a-z_]+[^\W\ds]s\b", sentence.lower())
    return bool(set(plurals) - NO_PLURALS)


def bad_names(source: str, room: str) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines and that are a pronoun, begin with a preposition, or
    have a banned word.

    Pronouns may be names in comprehensions and lambdas, whose variables end on the same line.
    """
    tree = ast.parse(source)
    inside = {id(node) for node in _short_scopes(tree)}
    words = NAME_WORDS - {"law", "laws"} if room in LAW_ROOMS else NAME_WORDS
    for line, name, node in defined_names(tree):
        parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]
        noun = re.sub(r"(_[A-Z0-9]+)?$", "", name)  # without the shape of an array
        if noun in PRONOUN_NAMES and id(node) not in inside:
            yield line, f"{name!r} is a name outside of a comprehension"
        elif name.lstrip("_").startswith("of_"):
            yield line, f"{name!r} begins with a preposition"
        elif name.startswith(tuple(f"test_{word}_" for word in TEST_OPENINGS)):
            yield line, f"{name!r} does not say what holds"
        elif name not in FOREIGN_NAMES and (banned := words.intersection(parts)):
            yield line, f"{name!r} has the word {min(banned)!r}"


def _short_scopes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in which comprehensions and lambdas define their variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.comprehension):
            yield from ast.walk(node.target)
        elif isinstance(node, ast.Lambda):
            yield from ast.walk(node.args)


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str, ast.AST]]:
    """Yield (line, name, node) of the functions, classes, parameters, variables and attributes that
    are defined.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name, node
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, node
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, node
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, node


def room_of(path: str) -> str:
    """Return the room of a file: its first two folders, or the package if it is directly there."""
    return "/".join(path.split("/")[:-1][:2]) or "."


def further_faults(name: str) -> list[str]:
    """Return the pronouns without nouns and the bad names of a module."""
    source = Path(name).read_text()
    faults = {*bare_pronouns(source), *bad_names(source, room_of(name))}
    return [f"{name}:{line}: {fault}" for line, fault in sorted(faults)]


def faults(path: Path) -> Iterator[str]:
    """Yield the faults of a file, with their lines."""
    source = path.read_text()
    is_code = path.suffix == ".py"
    lines = prose(source) if is_code else enumerate(source.splitlines(), start=1)
    found = [(number, f"{word[0]!r}") for number, line in lines for word in WORDS.finditer(line)]
    for number, fault in sorted([*found, *(openings(source) if is_code else ())]):
        yield f"{path}:{number}: {fault}"


def main() -> int:
    """Print all faults; 1 if there are any. `--all`: the further faults of all rooms, and their
    number by room.
    """
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split() if not name.startswith(OTHERS)]
    modules = [name for name in names if name.endswith(".py")]
    if sys.argv[1:] == ["--all"]:
        return print_all(modules)
    printed = [fault for name in names for fault in faults(Path(name))]
    printed += twice(listed.split())
    for name in modules:
        if room_of(name) in CLEAN:
            printed += further_faults(name)
    print("\n".join(printed), end="\n" if printed else "")
    return bool(printed)


def print_all(modules: Sequence[str]) -> int:
    """Print the further faults of all modules, and a table of their number by room."""
    counts: Counter[str] = Counter()
    for name in modules:
        printed = further_faults(name)
        counts[room_of(name)] += len(printed)
        print("\n".join(printed), end="\n" if printed else "")
    print("\n| room | faults | checked |\n| --- | --- | --- |")
    for room in sorted(counts):
        print(f"| {room} | {counts[room]} | {'yes' if room in CLEAN else ''} |")
    print(f"| all | {counts.total()} | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())

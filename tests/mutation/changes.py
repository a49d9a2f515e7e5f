"""The mutants of a module: mutmut's operators, each applied to one place of one function.

Functions with decorators are mutated, too. Sentences are not: no test should depend on the words of
a message.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from fnmatch import fnmatch
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import NEVER_MUTATE_FUNCTION_NAMES, MutationVisitor, OuterFunctionProvider
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

FOLDER = Path(__file__).parent
HARMLESS = tomllib.loads((FOLDER / "harmless.toml").read_text())["harmless"]


class _Visitor(MutationVisitor):
    """Mutates functions that have decorators, but no words of sentences."""

    METADATA_DEPENDENCIES = (PositionProvider, OuterFunctionProvider)

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return node.name.value in NEVER_MUTATE_FUNCTION_NAMES
        if isinstance(node, cst.SimpleString | cst.ConcatenatedString | cst.FormattedStringText):
            return " " in getattr(node, "value", " ").strip("\"' ")
        return super()._skip_node_and_children(node)


@dataclass(frozen=True)
class Mutant:
    """One change of a module."""

    module: Module
    number: int
    function: str
    line: int
    original: cst.CSTNode
    mutated: cst.CSTNode
    node: cst.FunctionDef

    @cached_property
    def change(self) -> tuple[str, str]:
        """Its lines before and after."""
        changed = self.node.deep_replace(self.original, self.mutated)
        assert isinstance(changed, cst.FunctionDef)
        texts = (
            [line.strip() for line in self.module.tree.code_for_node(part).splitlines()]
            for part in (self.node, changed)
        )
        lines = [line for line in unified_diff(*texts, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")]
        before, after = (" ".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        return before, after

    @property
    def source(self) -> str:
        """Source of the changed module."""
        changed = self.module.tree.deep_replace(self.original, self.mutated)
        assert isinstance(changed, cst.Module)
        return changed.code

    @property
    def reason(self) -> str:
        """Reason why no test can notice it; empty if one can."""
        return reason_of(self.module.name, *self.change)


class Module:
    """A module and its mutants, always in the same order."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.source = path.read_text()
        wrapper = MetadataWrapper(cst.parse_module(self.source))
        self.tree = wrapper.module
        self._wrapper = wrapper

    @cached_property
    def mutants(self) -> list[Mutant]:
        """All of its functions and methods."""
        visitor = _Visitor(mutation_operators, IgnoredCode(set(), set(), set()))
        self._wrapper.visit(visitor)
        names, lines = dict(_functions(self.tree)), self._wrapper.resolve(PositionProvider)
        found: list[Mutant] = []
        for one in visitor.mutations:
            function = one.contained_by_top_level_function
            if isinstance(function, cst.FunctionDef) and function in names:
                line = lines[one.original_node].start.line if one.original_node in lines else lines[function].start.line
                found.append(
                    Mutant(self, len(found), names[function], line, one.original_node, one.mutated_node, function)
                )
        return found

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its functions without docstrings and comments: what is mutated."""
        functions = []
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [line for line in node.body if not _is_text(line)]
                functions.append(ast.dump(node))
        return sha256("\n".join(functions).encode()).hexdigest()


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, also of an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _functions(tree: cst.Module) -> Iterator[tuple[cst.FunctionDef, str]]:
    for node in tree.body:
        if isinstance(node, cst.FunctionDef):
            yield node, node.name.value
        elif isinstance(node, cst.ClassDef):
            for part in node.body.body:
                if isinstance(part, cst.FunctionDef):
                    yield part, f"{node.name.value}.{part.name.value}"


def statement_lines(source: str, line: int) -> range:
    """Lines of the innermost statement at a line; of a compound statement those before its body."""
    best = range(line, line + 1)
    widest = len(source)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or node.end_lineno is None or not node.lineno <= line <= node.end_lineno:
            continue
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if body else node.end_lineno
        lines = range(node.lineno, max(end, node.lineno) + 1)
        if line in lines and node.end_lineno - node.lineno < widest:
            best, widest = lines, node.end_lineno - node.lineno
    return best


def is_of(harmless: dict[str, str], before: str, after: str) -> bool:
    """Whether an entry of harmless.toml describes a change."""
    return re.search(harmless["change"], f"{before} -> {after}") is not None


def reason_of(module: str, before: str, after: str) -> str:
    """Return the reason why a change is harmless; empty if it is not known to be."""
    found = (one for one in HARMLESS if fnmatch(module, one["module"]) and is_of(one, before, after))
    return str(next(found, {"reason": ""})["reason"])

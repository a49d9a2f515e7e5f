"""Wrong variants of the code that serves, which a test must notice, and notes of its calls.

Tests replace functions of the project here alone. What is outside it (clocks, the machine,
libraries) is replaced with pytest's `monkeypatch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

from engine.speculation.verification import RULES, Verify
from engine.step import verify as verifying


def instead(owner: Any, name: str, variant: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Run a wrong variant of a function, method or property, temporarily.

    owner: its module (or the module's name), class or object; variant: called with the right
    function, and then with the operands (for a method of a class, its object first).
    """
    owner = import_module(owner) if isinstance(owner, str) else owner
    right = inspect.getattr_static(owner, name)
    if isinstance(right, property):
        getter = right.fget
        return patch.object(owner, name, property(lambda one: variant(getter, one)))
    right = getattr(owner, name)
    if not callable(right):
        raise TypeError(f"{name} is no function: give the test another argument, or a smaller model")

    def wrong(*operands: Any, **named: Any) -> Any:
        return variant(right, *operands, **named)

    # On its class a static method stays one; elsewhere what is found is called as it is.
    is_static = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod)
    return patch.object(owner, name, staticmethod(wrong) if is_static else wrong)


class Call(NamedTuple):
    """Operands and result of a call."""

    operands: tuple[Any, ...]
    result: Any


@contextmanager
def calls_of(owner: Any, name: str) -> Iterator[list[Call]]:
    """Note a function's calls; the result of a call that raises is None."""
    calls: list[Call] = []

    def noted(right: Callable[..., Any], *operands: Any, **named: Any) -> Any:
        result = None
        try:
            result = right(*operands, **named)
        finally:
            calls.append(Call((*operands, *named.values()), result))
        return result

    with instead(owner, name, noted):
        yield calls


def by_distributions() -> AbstractContextManager[Any]:
    """Let steps compute distributions and verify with `RULES`, as without kernels."""
    from engine.cpu import verdict

    return instead(verdict, "_is_decided", lambda *_: False)


def level_by_level() -> AbstractContextManager[Any]:
    """Let a draft model or head of a CPU draft level by level, as for rows that need more."""
    from engine.cpu import drafting

    return instead(drafting, "may_draw_at_once", lambda *_: False)


@contextmanager
def wrong_rule(name: str, variant: Verify) -> Iterator[None]:
    """Let steps verify with a wrong variant of a rule."""
    right = RULES[name].verify

    def parts(
        verified_together: Callable[..., Any], *operands: Any, **named: Any
    ) -> Iterator[tuple[Verify, list[int]]]:
        for verify, numbers in verified_together(*operands, **named):
            yield variant if verify is right else verify, numbers

    with by_distributions(), instead(verifying, "verified_together", parts):
        yield

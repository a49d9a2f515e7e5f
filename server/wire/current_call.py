"""The HTTP request that the running task serves, for code far from its route."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(eq=False)
class HttpCall:
    """One HTTP request, equal to itself alone."""

    request_id: str
    path: str
    """Raw path; a decoded one may contain line breaks."""
    trace_parent: str | None = None
    """The caller's span (W3C `traceparent`)."""
    client: str = ""
    """Opaque name of the client, by its API key, or its address without keys."""
    attempt_of: str = ""
    """Name of the work that this call attempts; each attempt draws the same numbers.

    Otherwise an interrupted answer, which is longer in the mean, would be replaced by another one.
    """
    shape: tuple[int, int] | None = None
    """Chains and tokens that each attempt drafts unless the body says more; (0, 0) for none."""
    added_priority: int = 0
    """Added to the priority of its requests; a higher number is served later."""
    is_generation: bool = False
    """Whether a generation has started, which reports the request's end."""
    refusal: dict[str, str | None] = field(default_factory=dict)
    """Field and code of the error that was sent, for the log; empty for other answers."""
    ignored: list[str] = field(default_factory=list)
    """Names of fields that were sent and had no effect, in ASCII."""
    on_prompt: ExitStack = field(default_factory=ExitStack)
    """Closed once the prompt is known: then the next body may be read."""


current_call: ContextVar[HttpCall] = ContextVar("current_call")


def this_call() -> HttpCall:
    """Return the request that the running task serves; an empty one outside of requests."""
    return current_call.get(HttpCall("", ""))

"""Which HTTP request the running task serves: for what is told of it far from its handler."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(eq=False)
class Call:
    """One HTTP request, equal to itself alone."""

    request_id: str
    path: str
    """As it was sent: a decoded path may hold line breaks."""
    trace_parent: str | None = None
    """The caller's span (W3C `traceparent`)."""
    client: str = ""
    """Opaque name of the client: equal for equal API keys, or for equal addresses if the server has no keys."""
    is_generation: bool = False
    """Whether its end is told by the generation it has begun."""
    ignored: list[str] = field(default_factory=list)
    """Names of fields that were sent and have no effect, in ASCII."""


current_call: ContextVar[Call] = ContextVar("current_call")


def this_call() -> Call:
    """The request that the running task serves; outside of one, a nameless one."""
    return current_call.get(Call("", ""))

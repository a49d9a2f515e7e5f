"""State that the routes share, built once at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.openai.unsupported_fields import UnknownFields
from server.serving.engine_client import EngineClient
from server.serving.metrics import ServerMetrics
from server.serving.observer import Observer
from server.settings import Serve
from server.text.thought_marks import ThoughtMarks
from server.text.tokenizer import GenerationDefaults, Tokenizer


@dataclass(frozen=True)
class Server:
    """Parts of a running server."""

    settings: Serve
    client: EngineClient
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    observer: Observer
    model_name: str
    call_format: str | None
    """Format in which the model writes calls (`text/tools.py`); None if it is not known."""
    thoughts: ThoughtMarks | None = None
    """Marks around the thoughts in answers; None if answers have none."""
    unknown_fields: UnknownFields = field(default_factory=lambda: UnknownFields(False))
    """Policy for unknown fields of a body."""

    @property
    def metrics(self) -> ServerMetrics:
        """Prometheus metrics."""
        return self.observer.metrics

"""State that the routes share, built once at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.serving.answering import Sender
from server.serving.engine_client import EngineClient
from server.serving.metrics import ServerMetrics
from server.serving.observer import Observer
from server.settings.settings import Serve
from server.text.dialogue import Dialogue
from server.text.infill import Infill
from server.text.thought_marks import ThoughtMarks
from server.text.tokenizer import GenerationDefaults, Tokenizer
from server.wire.unsupported_fields import UnknownFields


@dataclass(frozen=True)
class Server:
    """Parts of a running server."""

    settings: Serve
    client: EngineClient
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    observer: Observer
    model_name: str
    dialogue: Dialogue
    """Format of the model's part of a conversation, as found at start."""
    thoughts: ThoughtMarks | None = None
    """Marks around the thoughts in answers; None if answers have none."""
    infill: Infill | None = None
    """Filling of gaps; None if the model has no tokens for it."""
    unknown_fields: UnknownFields = field(default_factory=lambda: UnknownFields(False))
    """Policy for unknown fields of a body."""

    @property
    def metrics(self) -> ServerMetrics:
        """Prometheus metrics."""
        return self.observer.metrics

    @property
    def sender(self) -> Sender:
        """Parts that generate an answer and send it."""
        return Sender(self.client, self.observer, self.tokenizer, self.settings.sse_keep_alive_interval)

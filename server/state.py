"""What the routes share, built once by `build_app`."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.openai.unsupported_fields import UnknownFields
from server.serving.engine_client import EngineClient
from server.serving.metrics import ServerMetrics
from server.serving.observer import Observer
from server.settings import Serve
from server.text.tokenizer import GenerationDefaults, Tokenizer


@dataclass(frozen=True)
class Server:
    """The parts of a running server."""

    settings: Serve
    client: EngineClient
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    observer: Observer
    model_name: str
    call_format: str | None
    """How the model writes calls of tools (`tools.py`); None where that is not known."""
    thinks: bool = False
    """Whether answers may hold thoughts (`reasoning.py`)."""
    unknown_fields: UnknownFields = field(default_factory=lambda: UnknownFields(False))
    """What is done about names in a body that no field has."""

    @property
    def metrics(self) -> ServerMetrics:
        """The counters."""
        return self.observer.metrics

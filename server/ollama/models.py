"""Description of the served model as Ollama's `/api/tags`, `/api/show` and `/api/ps` have it."""

from __future__ import annotations

import hashlib
from typing import Any

from server.openai.preparing import check_model
from server.state import Server
from server.wire.fields import Body, Name

LATEST = ":latest"
"""Tag of a name without a tag."""
_NEVER = "9999-12-31T23:59:59Z"


class ShowRequest(Body):
    """Body of `POST /api/show`."""

    model: Name | None = None
    name: Name | None = None
    """Older name of `model`."""


def served_name(server: Server, name: str | None) -> str:
    """Return the served name, which a client may give with the tag `latest`; raises a 404."""
    bare = name and name.removesuffix(LATEST)
    return check_model(server, bare if bare in server.settings.served_names() else name)


def listed_model(server: Server, name: str, started: str) -> dict[str, Any]:
    """Return a name's entry in the lists of models. started: time of the start."""
    facts = server.client.ready_facts()
    size = facts.memory_plan.get("weights", 0) + facts.memory_plan.get("draft_weights", 0)
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": started,
        "expires_at": _NEVER,
        "size": size,
        "size_vram": 0 if facts.device == "cpu" else size,
        "context_length": facts.max_model_len,
        # Clients compare it. It stands for the name, because no file is read for it.
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(server),
    }


def shown_model(server: Server, started: str) -> dict[str, Any]:
    """Return the description of the served model. started: time of the start."""
    facts = server.client.ready_facts()
    # Clients look for the suffix in it before they ask for the text of a gap.
    template = "{{ .System }}{{ .Prompt }}"
    capabilities = ["completion"]
    if server.dialogue.call_format is not None and not server.dialogue.tools_refusal:
        capabilities.append("tools")
    if server.thoughts is not None:
        capabilities.append("thinking")
    if server.infill is not None:
        capabilities.append("insert")
        template += "{{ .Suffix }}"
    context = {f"{facts.architecture}.context_length": facts.max_model_len}
    return {
        "modelfile": "",
        "parameters": f"num_ctx {facts.max_model_len}\ntemperature {server.defaults.temperature}",
        "template": template,
        "details": _details(server),
        "model_info": {"general.architecture": facts.architecture, **context},
        "capabilities": capabilities,
        "modified_at": started,
    }


def _details(server: Server) -> dict[str, Any]:
    facts = server.client.ready_facts()
    return {
        "parent_model": "",
        "format": "gguf" if (server.settings.model or "").endswith(".gguf") else "safetensors",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": "",
        "quantization_level": facts.dtype,
    }

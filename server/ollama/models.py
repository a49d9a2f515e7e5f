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
"""Time at which the model is unloaded."""


class ShowRequest(Body):
    """Body of `POST /api/show`."""

    model: Name | None = None
    name: Name | None = None
    """Older name of `model`."""
    verbose: bool = False
    """Accepted without effect."""


def served_name(server: Server, name: str | None) -> str:
    """Return the served name, which a client may give with the tag `latest`; raises a 404."""
    bare = name and name.removesuffix(LATEST)
    if bare in server.settings.served_names():
        name = bare
    return check_model(server, name)


def listed_models(server: Server, started: str) -> list[dict[str, Any]]:
    """Return an entry for each name of the served model. started: time of the start."""
    return [_entry(server, name) | {"modified_at": started} for name in server.settings.served_names()]


def running_models(server: Server) -> list[dict[str, Any]]:
    """Return the entries of a model that is in memory; none of a model that sleeps."""
    facts = server.client.ready_facts()
    if not server.client.is_awake:
        return []
    entries = []
    for name in server.settings.served_names():
        entry = _entry(server, name)
        size_vram = 0 if facts.device == "cpu" else entry["size"]
        more = {"expires_at": _NEVER, "size_vram": size_vram, "context_length": facts.max_model_len}
        entries.append(entry | more)
    return entries


def shown_model(server: Server, started: str) -> dict[str, Any]:
    """Return the description of the served model. started: time of the start."""
    facts = server.client.ready_facts()
    defaults = server.defaults
    parameters = {
        "num_ctx": facts.max_model_len,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    abilities = {
        "completion": True,
        "tools": server.dialogue.call_format is not None and not server.dialogue.tools_refusal,
        "thinking": server.thoughts is not None,
        "insert": server.infill is not None,
    }
    architecture = facts.architecture
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in parameters.items()),
        # Clients look for the suffix in it before they ask for the text of a gap.
        "template": "{{ .System }}{{ .Prompt }}" + ("{{ .Suffix }}" if abilities["insert"] else ""),
        "details": _details(server),
        "model_info": {
            "general.architecture": architecture,
            f"{architecture}.context_length": facts.max_model_len,
        },
        "capabilities": [name for name, is_there in abilities.items() if is_there],
        "modified_at": started,
    }


def _entry(server: Server, name: str) -> dict[str, Any]:
    tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
    plan = server.client.ready_facts().memory_plan
    return {
        "name": tagged,
        "model": tagged,
        "size": plan.get("weights", 0) + plan.get("draft_weights", 0),
        # Clients compare it; it stands for the name, because no file is read for it.
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(server),
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

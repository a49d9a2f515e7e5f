"""Fixes rotary embeddings that depend on a batch's longest text.

Transformers chooses the frequencies of `longrope` and `dynamic` embeddings in every pass, by its
longest position. One request would then change the K/V of other requests, and a text that grows
would not fit its own cached K/V. So the choice is made once, in the configuration, before the model
is built. Every backend then reads the same table.

longrope has short and long factors (LongRoPE, https://arxiv.org/abs/2402.13753). If the served
context is at most the original length, all texts have the short factors, as in transformers.
Otherwise all texts have the long factors, as in vLLM: transformers has them for the texts that are
longer than the original length. `dynamic` scales only texts that are longer than
max_position_embeddings, which no text here is, so it is the plain embedding.
"""

from __future__ import annotations

from typing import Any

_LONGROPE, _DYNAMIC = "longrope", "dynamic"
_CHOSEN = ("factor", "mscale")
"""Endings of the fields of longrope that exist twice, as `short_...` and `long_...`."""


def fix_rope(name: str, config: Any, context: int) -> str:
    """Fix the rotary embedding for texts of up to `context` tokens, in place.

    Return a line for the log that names the choice; "" if the configuration leaves none.
    """
    lines = []
    for rope in _ropes(config):
        if not _depends_on_length(rope):
            continue
        if rope["rope_type"] == _DYNAMIC:
            lines.append("'dynamic' scaling begins after the model's context, so texts have the plain embedding")
            rope["rope_type"] = "default"
            rope.pop("factor", None)
            continue
        original = int(rope["original_max_position_embeddings"])
        chosen, order = "short", "at most"
        if context > original:
            chosen, order = "long", "longer than"
        for field in _CHOSEN:
            if f"{chosen}_{field}" in rope:
                rope[f"short_{field}"] = rope[f"long_{field}"] = rope[f"{chosen}_{field}"]
        lines.append(
            f"{chosen} factors of 'longrope' for all texts: the context ({context}) is {order} the original length "
            f"({original})"
        )
    if not lines:
        return ""
    return f"{name}: rotary embedding: {'; '.join(dict.fromkeys(lines))}"


def depends_on_length(config: Any) -> bool:
    """Whether the rotary embedding still depends on the longest text of a batch."""
    return any(map(_depends_on_length, _ropes(config)))


def original_length(config: Any) -> int | None:
    """Return the longest context of longrope's short factors, or None."""
    ropes = (rope for rope in _ropes(config) if rope["rope_type"] == _LONGROPE)
    return min((int(rope["original_max_position_embeddings"]) for rope in ropes), default=None)


def limit_reason(config: Any) -> str:
    """Return why the rotary embedding bounds texts; else ""."""
    if all(rope["rope_type"] != _DYNAMIC for rope in _ropes(config)):
        return ""
    return ", because its 'dynamic' rotary embedding would let longer texts change the answers of other requests"


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of all rotary embeddings; some families have several."""
    stored = getattr(config, "rope_parameters", None)
    parts = [stored, *stored.values()] if isinstance(stored, dict) else []
    return [part for part in parts if isinstance(part, dict) and isinstance(part.get("rope_type"), str)]


def _depends_on_length(rope: dict[str, Any]) -> bool:
    if rope["rope_type"] == _DYNAMIC:
        return True
    is_longrope = rope["rope_type"] == _LONGROPE
    return is_longrope and any(rope.get(f"short_{field}") != rope.get(f"long_{field}") for field in _CHOSEN)

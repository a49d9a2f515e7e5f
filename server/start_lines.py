"""Log lines of a daemon that has started: model, addresses, speculation, memory."""

from __future__ import annotations

import re

from engine.api import MODEL, EngineFacts, SpeculationConfig, default_speculation
from server.state import Server


def start_lines(facts: EngineFacts, server: Server, address: str) -> list[str]:
    """Return the log lines; address: without a slash at its end."""
    plan = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in facts.memory_plan.items())
    drafters = drafting(facts, server.client.config.speculation)
    states = f"; {facts.num_states} places for states of recurrent layers" if facts.num_states else ""
    lines = [
        f"serving {server.model_name} ({facts.architecture}, {facts.dtype}, {facts.device}) on {address}",
        f"speculation: {drafters}; context {facts.max_model_len} tokens; "
        f"{facts.num_blocks} blocks of {facts.block_size} tokens{states}",
        f"memory plan: {plan}",
    ]
    if server.dialogue.tools_refusal:
        lines.append(f"requests with tools are refused: {server.dialogue.tools_refusal}")
    if server.dialogue.thinking:
        lines.append(f"thoughts: {server.dialogue.thinking}")
    if server.infill is not None:
        lines.append(f"gaps are filled with the tokens {server.infill.marks}")
    if not server.settings.uds:
        here = reachable(address)
        line = f"API: {here}/v1, described at {here}/docs"
        if server.settings.dashboard:
            line = f"page: {here}/; {line}"
        lines.append(line)
    return lines


def reachable(address: str) -> str:
    """Return an address for a browser on this machine; wildcards become localhost."""
    return re.sub(r"//(0\.0\.0\.0|\[::\]):", "//localhost:", address)


def drafting(facts: EngineFacts, limits: SpeculationConfig) -> str:
    """Return the default drafters or, if there are none, the flags that would add some."""
    if limits.rule == "off":
        return "off (--spec-rule off)"
    usual = default_speculation(limits, facts)
    parts = []
    if usual.tree:
        parts.append(f"a tree of {','.join(map(str, usual.tree))}")
    elif usual.num_drafts:
        up_to = "up to " if usual.adaptive else ""
        drafts = "draft" if usual.num_drafts == 1 else "drafts"
        parts.append(f"{up_to}{usual.num_drafts} {drafts} of {usual.draft_length} tokens")
    parts += [name.replace("_", " ") for name in usual.drafters if name != MODEL]
    if not parts:
        return "off, as nothing drafts; --draft-model MODEL or --spec-drafters prompt_lookup makes answers faster"
    return f"{usual.rule}, {' and '.join(parts)}"

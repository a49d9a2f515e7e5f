"""Runs a task with coding agents against a daemon, without login and without flags.

Their settings are those of docs/clients.md: the address, a key and the
model's name.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_S = 300.0
_CODEX = """
model = "{model}"
model_provider = "polydraft"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.polydraft]
name = "Polydraft"
base_url = "{url}/v1"
env_key = "POLYDRAFT_KEY"
"""

_PI = """
{{"providers": {{"polydraft": {{
  "baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "{key}",
  "models": [{{"id": "{model}", "contextWindow": 65536, "maxTokens": 32000}}]
}}}}}}
"""


@dataclass(frozen=True)
class Task:
    """Task of an agent, and the folder it works in."""

    url: str
    model: str
    key: str
    words: str
    home: Path
    """Folder for its settings."""
    work: Path
    """Folder that it works in."""


def codex(program: Path, task: Task) -> subprocess.CompletedProcess[str]:
    """Run Codex, with its permission to write below the folder."""
    (task.home / "config.toml").write_text(_CODEX.format(model=task.model, url=task.url))
    command = [str(program), "exec", "--skip-git-repo-check", "--sandbox", "workspace-write", task.words]
    return _run(command, task, {"CODEX_HOME": str(task.home), "POLYDRAFT_KEY": task.key})


def claude_code(program: Path, task: Task) -> subprocess.CompletedProcess[str]:
    """Run Claude Code, with its permission to write and to run commands."""
    command = [str(program), "--print", task.words, "--allowedTools", "Write,Bash"]
    settings = {
        "ANTHROPIC_BASE_URL": task.url,
        "ANTHROPIC_API_KEY": task.key,
        "ANTHROPIC_MODEL": task.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return _run(command, task, settings)


def pi(program: Path, task: Task) -> subprocess.CompletedProcess[str]:
    """Run pi, which asks for no permission."""
    folder = task.home / ".pi" / "agent"
    folder.mkdir(parents=True)
    (folder / "models.json").write_text(_PI.format(url=task.url, key=task.key, model=task.model))
    command = [str(program), "--print", "--provider", "polydraft", "--model", task.model, task.words]
    return _run(command, task, {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"})


AGENTS: dict[str, tuple[str, str, Callable[[Path, Task], subprocess.CompletedProcess[str]]]] = {
    "Codex, the program: a task with two calls": ("@openai/codex", "codex", codex),
    "Claude Code, the program: a task with two calls": ("@anthropic-ai/claude-code", "claude", claude_code),
    "pi, the program: a task with two calls": ("@earendil-works/pi-coding-agent", "pi", pi),
}
"""Package, program and run function by the name of the row."""


def _run(command: list[str], task: Task, settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    # The user's settings and keys are not passed on.
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return subprocess.run(
        command,
        cwd=task.work,
        env={**kept, "HOME": str(task.home), **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )

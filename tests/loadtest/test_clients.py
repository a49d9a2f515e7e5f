"""The table of client libraries: failures, and what is not installed. Clients that work:
`server/clients/`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loadtest.agents import AGENTS
from loadtest.clients import CLIENTS, DaemonUnderTest, tried, tried_agent, tried_in_node
from tests.server.daemon_process import MODEL


def test_a_failure_and_a_missing_package_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = DaemonUnderTest("http://127.0.0.1:9", MODEL)
    assert tried(nobody, "openai: tools")["result"].startswith("APIConnectionError")
    monkeypatch.setitem(CLIENTS, "none", ("no-such-package", lambda _: None))
    assert tried(nobody, "none")["result"] == "not installed"


def test_javascript_clients_that_are_not_installed_are_told(tmp_path: Path) -> None:
    row = tried_in_node(DaemonUnderTest("http://127.0.0.1:9", MODEL), "npm openai: stream, responses", tmp_path)
    assert row["result"] == "not installed"


@pytest.mark.parametrize(
    ("script", "result"),
    [("echo x > made.txt", "works"), ("echo refused >&2; exit 3", "refused\n"), ("true", "no file was written")],
)
def test_an_agent_works_if_it_has_written_a_file(tmp_path: Path, script: str, result: str) -> None:
    server, name = DaemonUnderTest("http://127.0.0.1:9", MODEL), next(iter(AGENTS))
    assert tried_agent(server, name, tmp_path)["result"] == "not installed"
    package, program, _ = AGENTS[name]
    for file, text in (
        (f"{package}/package.json", '{"version": "1.2.3"}'),
        (f".bin/{program}", f"#!/bin/sh\n{script}\n"),
    ):
        path = tmp_path / "node_modules" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o700)
    row = tried_agent(server, name, tmp_path)
    assert (row["version"], row["result"]) == ("1.2.3", result)


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_a_javascript_client_finds_its_package_and_its_failure_is_said(tmp_path: Path) -> None:
    package = tmp_path / "node_modules" / "openai"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "1.2.3", "type": "module", "main": "index.js"}')
    (package / "index.js").write_text("throw new Error('the stand-in was found');")
    row = tried_in_node(DaemonUnderTest("http://127.0.0.1:9", MODEL), "npm openai: stream, responses", tmp_path)
    assert row["version"] == "1.2.3"
    assert "the stand-in was found" in row["result"]

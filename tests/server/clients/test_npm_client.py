"""The official JavaScript client (`make npm-check`); skipped if not installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.server.daemon_process import MODEL, Daemon, Daemons

FOLDER = Path(__file__).parent / "npm"
installed = pytest.mark.skipif(
    not (FOLDER / "node_modules").is_dir(), reason="the npm client is not installed: make npm-check"
)


@installed
def test_the_javascript_client_is_served(daemon: Daemon) -> None:
    done = subprocess.run(
        ["node", "check.mjs", daemon.url, MODEL], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] == found["streamed"] == found["helper"] == found["response"] != ""
    assert found["completionTokens"] == 20
    assert found["events"][0] == "response.created"
    assert found["events"][-1] in ("response.incomplete", "response.completed")
    assert found["refusal"] == {"status": 400, "param": "temperature"}


@installed
def test_the_ai_sdk_reads_messages(daemon: Daemon) -> None:
    """Its schemas refuse nulls that Anthropic's server leaves out."""
    done = subprocess.run(
        ["node", "ai_sdk.mjs", daemon.url, MODEL], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers.keys() == {"2", "3", "4"}
    assert all(answer["whole"] == answer["streamed"] != "" for answer in answers.values())


@installed
def test_the_javascript_client_runs_a_batch(daemons: Daemons, pair_arguments: list[str], tmp_path: Path) -> None:
    daemon = daemons.get(*pair_arguments, "--no-calibrate", "--batch-folder", str(tmp_path / "batches"))
    done = subprocess.run(
        ["node", "batches.mjs", daemon.url, MODEL], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "completed"
    assert found["counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert [answer["custom_id"] for answer in found["answers"]] == ["a", "b", "c"]
    assert [(fault["custom_id"], fault["response"]["status_code"]) for fault in found["faults"]] == [("bad", 400)]
    assert found["listed"] == [found["id"]]
    assert found["deleted"] is True


@installed
def test_the_ai_sdk_goes_on_with_kept_responses(
    daemons: Daemons, pair_arguments: list[str], tmp_path: Path, http: httpx.Client
) -> None:
    """The answers are those to the whole conversation."""
    daemon = daemons.get(*pair_arguments, "--no-calibrate", "--batch-folder", str(tmp_path / "responses"))
    command = ["node", "ai_sdk_responses.mjs", daemon.url, MODEL]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "item_reference" in found["kinds"]
    turns: list[dict[str, str]] = []
    for question, text in zip(("Hello.", "A story, please.", "And its end?"), found["texts"], strict=True):
        turns.append({"role": "user", "content": question})
        whole = {"model": MODEL, "input": turns, "max_output_tokens": 6, "temperature": 0}
        (item,) = http.post("/v1/responses", json=whole).json()["output"]
        assert item["content"][0]["text"] == text
        turns.append({"role": "assistant", "content": text})

"""Answers to the prompts of several tasks, measured on a small GGUF file (`research.analysis.peers
--task-prompts`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from research.analysis import peers
from tests.engine import tiny
from tests.models.gguf_models import write_model

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="files stay in their blocks on a CPU")

TASKS = ("copying", "talking")
SPEC_BENCH = Path(__file__).parents[3] / "loadtest" / "prompts" / "spec_bench.jsonl"


def write_prompts(file: Path) -> Path:
    texts = {"copying": "one two three one two three one two three", "talking": "How do you do?"}
    lines = [{"task": task, "question_id": number, "prompt": texts[task]} for task in TASKS for number in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.slow
def test_all_prompts_are_answered_by_all_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("research.analysis.loading.CACHE", str(tmp_path / "cache"))
    model = write_model(tmp_path / "model.gguf", "llama", "Q8_0")
    prompts, output = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "found.json"
    flags = ["--task-prompts", str(prompts), "--warm-up", "0", "--per-task", "2", "--tokens", "6", "--threads", "1"]
    flags += ["--concurrency", "1,3", "--temperature", "0,0.8", "--without", "transformers", "llama.cpp"]
    assert peers.main([str(model), *flags, "--output", str(output)]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    cells = [(cell["temperature"], cell["concurrency"]) for cell in found["cells"]]
    assert cells == [(0, 1), (0, 3), (0.8, 1), (0.8, 3)]
    for cell in found["cells"]:
        num_batches = -(-4 // cell["concurrency"])
        assert {name: len(arm["seconds"]) for name, arm in cell["arms"].items()} == {
            peers.OWN: num_batches,
            peers.OFF: num_batches,
        }
        assert cell["tokens_per_pass"].keys() == set(TASKS)
        # A plain pass emits one token, and drafts are six tokens at most.
        assert all(1 <= count <= 6 for count in cell["tokens_per_pass"].values())
    assert peers.tasks_markdown(found).count("\n") == 1 + len(cells) * 2
    assert peers.passes_markdown(found).splitlines()[0] == "| temperature | c | copying | talking |"


def test_prompts_of_six_tasks_are_here() -> None:
    stated = [json.loads(line) for line in SPEC_BENCH.read_text(encoding="utf-8").splitlines()]
    counts = {name: sum(line["task"] == name for line in stated) for name in {line["task"] for line in stated}}
    assert set(counts.values()) == {8}
    assert len(counts) == 6
    assert all(line["prompt"] for line in stated)

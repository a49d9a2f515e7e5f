"""lm-eval's local-completions: speculation changes no score and no text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.daemon_process import MODEL, Daemon, Daemons

TASKS = Path(__file__).parent / "lm_eval_tasks"
ITEMS = [
    {"text": f"{name} went to the {place} and said", "endings": [one, other]}
    for name in ("The old man", "Alice", "My brother")
    for place in ("market", "river")
    for one, other in (("hello to everyone", "zq vvk xj"), ("that it was late", "the the of"))
]


def evaluate(daemon: Daemon, folder: Path) -> dict[str, Any]:
    """(scores, responses) by task; the tokenizer is the server's own, through its endpoints."""
    folder.mkdir()
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    for task in TASKS.glob("*.yaml"):
        (folder / task.name).write_text(task.read_text().replace("DATA", str(data)))
    arguments = f"base_url={daemon.url}/v1/completions,model={MODEL},num_concurrent=4,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "words_choice,words_generate", "--include_path", str(folder), "--log_samples"]
    environment = {**os.environ, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--output_path", str(folder / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    found: dict[str, Any] = {"scores": json.loads(results.read_text())["results"]}
    for samples in (folder / "out").rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        name = "choice" if "words_choice" in samples.name else "generate"
        found[name] = [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return found


@pytest.mark.slow
def test_scores_do_not_depend_on_speculation(
    daemon: Daemon, daemons: Daemons, pair_arguments: list[str], tmp_path: Path
) -> None:
    plain = daemons.get(*pair_arguments, "--no-calibrate", "--spec-rule", "off")
    drafted, without = evaluate(daemon, tmp_path / "on"), evaluate(plain, tmp_path / "off")
    for task, score in without["scores"].items():
        for name, value in score.items():
            if isinstance(value, float) and "stderr" not in name:
                assert drafted["scores"][task][name] == value
    assert len(drafted["choice"]) == len(drafted["generate"]) == len(ITEMS)
    assert drafted["generate"] == without["generate"]
    assert len({str(answer) for answer in drafted["generate"]}) > 3

    def likelihoods(found: dict[str, Any]) -> list[float]:
        return [float(response[0][0]) for item in found["choice"] for response in item]

    assert likelihoods(drafted) == pytest.approx(likelihoods(without), abs=1e-3)

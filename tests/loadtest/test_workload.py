"""Prompts of the bench: the embedded tasks, and files of users."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import workload
from loadtest.cli import main, parser
from loadtest.workload import TASKS, Prompt, load


def test_the_tasks_have_prompts() -> None:
    for task in TASKS:
        assert len(load(task)) >= 16
    for file in (Path(workload.__file__).parent / "prompts").glob("*.jsonl"):
        assert len({str(prompt.body) for prompt in load(str(file))}) >= 12


def test_a_file_gives_its_records_in_turn(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    file = tmp_path / "own prompts.jsonl"
    # This separator ends no record.
    records = [{"messages": chat}, {"prompt": "Once"}, {"text": "upon\u2028a"}]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    file.write_text("\n\n".join(lines) + "\n", encoding="utf8")
    assert load(str(file)) == [
        Prompt("/v1/chat/completions", {"messages": chat}),
        Prompt("/v1/completions", {"prompt": "Once"}),
        Prompt("/v1/completions", {"prompt": "upon\u2028a"}),
    ]
    assert parser().parse_args(["--tasks", f"dialogues,{file}"]).tasks == ["dialogues", str(file)]


def test_a_package_without_the_texts_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workload, "__file__", str(tmp_path / "workload.py"))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "run it from a clone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "neither a task (dialogues, gutenberg) nor a file"),
        ('{"prompt": "a"}\n{"question": "b"}\n', "own.jsonl:2: not a JSON object with messages, prompt or text"),
        ("hello\n", "own.jsonl:1: not a JSON"),
        ("[1]\n", "own.jsonl:1: not a JSON"),
        ("\n", "no prompts"),
    ],
)
def test_what_is_no_file_of_prompts_is_said_before_anything_runs(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--tasks", str(file)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

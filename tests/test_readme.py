"""The README is true: its commands and the examples run, and its table is rendered from the committed result."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis import drafters, peers, quality, reports, shapes, turns
from analysis.report import table
from analysis.times import chains, heads, limits
from loadtest import clients, overhead, picture
from loadtest.daemon import running_daemon
from loadtest.report import rules_markdown
from server.flags import parse_flags

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_daemon(["--no-calibrate"]) as address:
        yield address


def shortened(answer: Any, shown: Any) -> Any:
    """Return the part of an answer that has the keys of the part that is shown."""
    if isinstance(shown, dict):
        return {name: shortened(answer[name], part) for name, part in shown.items()}
    if isinstance(shown, list):
        return [shortened(whole, part) for whole, part in zip(answer, shown, strict=True)]
    return answer


def test_the_curl_request_has_the_answer_that_is_shown(url: str) -> None:
    (command,) = [block for block in code_blocks("sh") if block.startswith("curl")]
    (shown,) = [json.loads(block) for block in code_blocks("json")]
    done = subprocess.run(
        ["bash", "-c", command.replace("http://localhost:8000", url)], capture_output=True, text=True, check=True
    )
    assert shortened(json.loads(done.stdout), shown) == shown


def test_the_picture_is_that_answer(url: str, tmp_path: Path) -> None:
    (command,) = [block for block in code_blocks("sh") if block.startswith("curl")]
    assert json.loads(command[command.index("{") : command.rindex("}") + 1]) == picture.request()
    picture.main(["--url", url, "--output", str(tmp_path / "answer.svg")])
    assert (tmp_path / "answer.svg").read_text() == (ROOT / "docs/images/answer.svg").read_text()


def test_the_command_for_a_real_pair_is_understood() -> None:
    (command,) = [block.split() for block in code_blocks("sh") if block.startswith(".venv/bin/polydraft")]
    settings = parse_flags(command[2:])
    assert (settings.model, settings.draft_model) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")


def test_the_openai_client_example_runs(url: str) -> None:
    programs = code_blocks("python")
    assert programs
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", program.replace("http://localhost:8000", url)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "'acceptance_histogram': [" in done.stdout, "a stream shows its metrics without asking for the usage"


# A line of each example's output.
EXAMPLES = {
    "chat": "What location would you like to search in",
    "streaming_metrics": "tokens per pass",
    "predicted_output": "the same text: True",
    "structured_output": "a table for ",
    "langchain_chat": "\nBooking {",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "langchain_chat":
        pytest.importorskip("langchain_openai")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert EXAMPLES[name] in capsys.readouterr().out


def test_the_page_of_langchain_has_the_program() -> None:
    program = (ROOT / "examples/langchain_chat.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{program}```" in (ROOT / "docs/langchain.md").read_text()


def test_every_example_is_listed_and_tested() -> None:
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(EXAMPLES) == sorted(file.stem for file in (ROOT / "examples").glob("*.py"))


def test_continuous_integration_runs_the_commands_of_the_readme() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == ["make test", "make test-all"]
    for command in commands:
        assert re.search(rf"^{command} ", "\n".join(code_blocks("sh")), re.MULTILINE), command
        assert command in (ROOT / ".ci/run").read_text().splitlines()


def test_the_table_is_the_committed_result() -> None:
    result = json.loads((ROOT / "docs/results/arms-several-cpu.json").read_text())
    shown = re.search(r"<!-- arms:begin -->\n(.*?)\n<!-- arms:end -->", README, re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == turns.summary_markdown(result)


@pytest.mark.parametrize(
    ("mark", "file", "table_of"),
    [
        ("arms-pair", "arms-pair-cpu", turns.markdown),
        ("arms-greedy", "arms-greedy-cpu", turns.markdown),
        ("arms-07", "arms-07-cpu", turns.markdown),
        ("arms-long", "arms-long-cpu", turns.markdown),
        ("arms-long-16", "arms-long-16-cpu", turns.markdown),
        ("reports", "reports-cpu", reports.markdown),
        ("arms-several", "arms-several-cpu", turns.markdown),
        ("arms-bf16", "arms-bf16-cpu", turns.markdown),
        ("heads", "heads-cpu", drafters.markdown),
        ("heads-chains", "heads-chains-cpu", heads.markdown),
        ("heads-chains-larger", "heads-chains-larger-cpu", heads.markdown),
        ("reported", "arms-several-cpu", turns.reported_markdown),
        ("arms-64", "arms-64-cpu", turns.markdown),
        ("useless", "useless-drafter-cpu", turns.markdown),
        ("peers-115m", "peers-115m-cpu", peers.markdown),
        ("peers-embedded-bf16", "peers-embedded-bf16-cpu", peers.markdown),
        ("peers-embedded-q8", "peers-embedded-q8-cpu", peers.markdown),
        ("peers-embedded-q4", "peers-embedded-q4-cpu", peers.markdown),
        ("peers-batches", "peers-batches-cpu", peers.markdown),
        ("tasks-smollm2", "tasks-smollm2-cpu", peers.tasks_markdown),
        ("tasks-smollm2-passes", "tasks-smollm2-cpu", peers.passes_markdown),
        ("tasks-copying", "tasks-copying-cpu", peers.tasks_markdown),
        ("peers-smollm2-file", "peers-smollm2-file-cpu", partial(peers.markdown, own=peers.OFF)),
        ("peers-115m-q8", "peers-115m-q8-cpu", peers.markdown),
        ("peers-115m-q4", "peers-115m-q4-cpu", peers.markdown),
        *(
            (f"peers-{texts}-{kind}", f"peers-{texts}-{kind}-cpu", partial(peers.markdown, own=peers.OFF))
            for texts in ("smollm2", "prompts")
            for kind in ("bf16", "q8", "q4")
        ),
        *((f"limits-115m-{kind}", f"limits-115m-{kind}-cpu", limits.markdown) for kind in ("auto", "int8", "int4")),
        ("limits", "limits-cpu", limits.markdown),
        ("chains", "chains-cpu", rules_markdown),
        ("overhead", "overhead-cpu", overhead.markdown),
        ("growth", "growth-cpu", chains.markdown),
        *((f"shapes-{texts}", f"shapes-{texts}-cpu", shapes.markdown) for texts in ("prose", "dialogues", "115m")),
        ("quality", "quality-cpu", quality.markdown),
        ("arms-dots", "arms-dots-cpu", turns.markdown),
        ("quality-smollm2", "quality-smollm2-cpu", quality.markdown),
        ("gguf-numbers", "gguf-numbers-cpu", quality.markdown),
    ],
)
def test_tables_of_pages_are_committed_results(mark: str, file: str, table_of: Any) -> None:
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    shown = re.search(rf"<!-- {mark}:begin -->\n(.*?)\n<!-- {mark}:end -->", text, re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == table_of(json.loads((ROOT / f"docs/results/{file}.json").read_text()))


def test_the_rules_table_is_the_committed_result() -> None:
    result = json.loads((ROOT / "docs/results/rules-cpu.json").read_text())
    text = (ROOT / "docs/speculation-measured.md").read_text()
    shown = re.search(r"<!-- rules:begin -->\n(.*?)\n<!-- rules:end -->", text, re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == table(result["cells"], result["settings"]["concurrency"])


def test_make_targets_and_links_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(code_blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    tree = code_blocks("")[-1]
    for name in re.findall(r"^(\w+)/", tree, re.MULTILINE):
        assert (ROOT / name).is_dir(), name


def test_the_table_of_clients_is_the_committed_result() -> None:
    rows = json.loads((ROOT / "docs/results/clients.json").read_text())
    page = (ROOT / "docs/quickstart.md").read_text()
    shown = page.partition("<!-- clients:begin -->\n")[2].partition("<!-- clients:end -->")[0]
    assert shown.strip() == clients.markdown(rows)

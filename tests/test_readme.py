"""Commands, blocks and examples of the README run."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.daemon import running_daemon
from tests import cpu_time
from tests.server import answer_picture

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ExitStack() as stack:
        with cpu_time.shared():
            address = stack.enter_context(running_daemon(["--no-calibrate"]))
        yield address


def shortened(answer: Any, shown: Any) -> Any:
    """Return the part of an answer that has the keys of the part that is shown."""
    if isinstance(shown, dict):
        return {name: shortened(answer[name], part) for name, part in shown.items()}
    if isinstance(shown, list):
        return [shortened(whole, part) for whole, part in zip(answer, shown, strict=True)]
    return answer


@pytest.mark.sole("the README's blocks")
def test_the_curl_request_has_the_answer_that_is_shown(url: str) -> None:
    (command,) = [block for block in code_blocks("sh") if block.startswith("curl")]
    (shown,) = [json.loads(block) for block in code_blocks("json")]
    done = subprocess.run(
        ["bash", "-c", command.replace("http://localhost:8000", url)], capture_output=True, text=True, check=True
    )
    assert shortened(json.loads(done.stdout), shown) == shown


def test_the_picture_is_that_answer(url: str, tmp_path: Path) -> None:
    (command,) = [block for block in code_blocks("sh") if block.startswith("curl")]
    assert json.loads(command[command.index("{") : command.rindex("}") + 1]) == answer_picture.request()
    answer_picture.main(["--url", url, "--output", str(tmp_path / "answer.svg")])
    assert (tmp_path / "answer.svg").read_text() == (ROOT / "docs/images/answer.svg").read_text()


@pytest.mark.slow
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


@pytest.mark.sampled
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "langchain_chat":
        pytest.importorskip("langchain_openai")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    runpy.run_path(str(ROOT / "docs" / "examples" / f"{name}.py"), run_name="__main__")
    assert EXAMPLES[name] in capsys.readouterr().out


def test_the_page_of_langchain_has_the_program() -> None:
    program = (ROOT / "docs/examples/langchain_chat.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{program}```" in (ROOT / "docs/clients.md").read_text()


def test_every_example_is_listed_and_tested() -> None:
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", (ROOT / "docs/examples/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(EXAMPLES) == sorted(file.stem for file in (ROOT / "docs" / "examples").glob("*.py"))


def test_continuous_integration_runs_the_commands_of_the_readme() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step["run"] for part in workflow.values() for step in part["steps"] if "run" in step]
    assert commands == ["make test", "make test-all"]
    for command in commands:
        assert re.search(rf"^{command} ", "\n".join(code_blocks("sh")), re.MULTILINE), command
        assert re.search(rf"^{command}( |$)", (ROOT / ".ci/run").read_text(), re.MULTILINE), command


def test_make_targets_and_folders_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(code_blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    tree = code_blocks("")[-1]
    for name in re.findall(r"^(\w+)/", tree, re.MULTILINE):
        assert (ROOT / name).is_dir(), name

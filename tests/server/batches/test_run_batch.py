"""`polydraft run-batch`: the lines of a file, answered without a daemon."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.api import ConfigError
from server import run_batch
from server.batches.lines import read_lines
from server.batches.objects import ENDPOINTS
from server.run_batch import _Identity, _lines_left, _lines_of, _Run, _run_identity
from server.settings.flags import BatchCommand, parse_batch_flags
from server.settings.settings import Serve
from tests.server.batches.inputs import line, short_lines
from tests.server.daemon_process import ROOT, wait_until
from tests.wrong import instead


def command_of(pair_arguments: list[str], source: Path, output: Path) -> list[str]:
    """The command with the tiny pair."""
    model = ["--model", *pair_arguments, "--no-calibrate", "--max-num-seqs", "2"]
    return [sys.executable, "-m", "server.cli", "run-batch", str(source), "-o", str(output), *model]


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "POLYDRAFT_PROFILE_CACHE": "off"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def answers_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in output.read_text().splitlines()]


def texts_in(output: Path) -> dict[str, str]:
    """The answers of a completion file by custom id."""
    return {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers_in(output)}


@pytest.mark.slow
def test_lines_that_an_output_lacks_are_answered(pair_arguments: list[str], tmp_path: Path) -> None:
    """A whole line stays as it is; the half of one, as a kill leaves it, is answered again."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = line("chat", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}, "/v1/chat/completions")
    response = line("response", {"input": "x", "max_output_tokens": 3}, "/v1/responses")
    refused = line("refused", {"prompt": "x", "temperature": 9})
    source.write_text("\n".join([*short_lines(6), chat, response, refused, "{bad", line("c-1", {})]))
    first, second, *_ = lines = list(read_lines(io.BytesIO(source.read_bytes()), ENDPOINTS))
    kept = {"id": first.line_id, "custom_id": "c-0", "kept": True}
    output.write_text(f'{json.dumps(kept)}\n{{"id": "{second.line_id}", "custom')
    done = start(command_of(pair_arguments, source, output))
    _, printed = done.communicate(timeout=120)
    assert done.returncode == 0, printed
    assert "11 lines are in" in printed
    assert "3 of this run with an error" in printed
    assert "11/11" in printed, "the bar"
    answers = answers_in(output)
    assert answers[0] == kept
    assert sorted(answer["id"] for answer in answers) == sorted(line.line_id for line in lines)
    statuses = {answer["custom_id"]: answer["response"]["status_code"] for answer in answers if answer.get("response")}
    good = ["c-1", "c-2", "c-3", "c-4", "c-5", "chat", "response"]
    assert statuses == dict.fromkeys(good, 200) | {"refused": 400}
    codes = [answer["error"]["code"] for answer in answers if answer.get("error")]
    assert sorted(codes) == ["duplicate_custom_id", "invalid_json_line"]
    again = subprocess.run(
        command_of(pair_arguments, source, output), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "all 11 lines are in" in again.stderr, "no engine starts"
    assert answers_in(output) == answers


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on(pair_arguments: list[str], tmp_path: Path, number: signal.Signals) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(short_lines(200, max_tokens=40)))
    other = tmp_path / "other.jsonl"
    identity = '{"name":"a name","shape":[0,0]}'
    (tmp_path / "out.jsonl.run").write_text(identity)
    (tmp_path / "other.jsonl.run").write_text(identity)
    command = command_of(pair_arguments, source, output)
    running = start(command)
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") > 20, "the first lines")
    running.send_signal(number)
    _, printed = running.communicate(timeout=60)
    num_before = output.read_bytes().count(b"\n")
    assert num_before < 200
    if number == signal.SIGINT:
        assert running.returncode == 1
        assert f"{num_before} of 200 lines are in {output}; the same command" in printed
        assert "Traceback" not in printed
    running = start(command)
    _, printed = running.communicate(timeout=120)
    assert running.returncode == 0, printed
    assert sorted(answer["custom_id"] for answer in answers_in(output)) == sorted(f"c-{n}" for n in range(200))
    assert not (tmp_path / "out.jsonl.run").exists()
    start(command_of(pair_arguments, source, other)).communicate(timeout=120)
    assert texts_in(other) == texts_in(output), "an interrupted run has the answers of another one"


def test_a_run_has_an_identity_until_it_ends(tmp_path: Path) -> None:
    """Each run has other random numbers; a run that goes on keeps its own, and its shape."""
    command = BatchCommand(Serve(), tmp_path / "in.jsonl", tmp_path / "out.jsonl", False)
    identity = _run_identity(command, (1, 3))
    assert (len(identity.name), identity.shape) == (32, (1, 3))
    assert _run_identity(command, (0, 0)) == identity
    again = _run_identity(BatchCommand(Serve(), command.input_file, command.output_file, True), (0, 0))
    assert again.name != identity.name
    assert again.shape == (0, 0)
    (tmp_path / "out.jsonl.run").write_text("a name")
    causes = {command.output_file: "is not of this version", tmp_path / "no" / "out": "cannot be stored or read"}
    for output, cause in causes.items():
        with pytest.raises(ConfigError, match=cause):
            _run_identity(BatchCommand(Serve(), command.input_file, output, False), (1, 3))


def test_a_full_disk_delays_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are written whole, one after the other."""
    monkeypatch.setattr("server.run_batch._REPAIR_S", 0.0)
    command = BatchCommand(Serve(), tmp_path / "in.jsonl", tmp_path / "out.jsonl", False)
    written = bytearray()
    errors = [OSError(errno.ENOSPC, "No space left")] * 3

    def write(text: bytes) -> int:
        if errors and len(written) % 2:
            raise errors.pop()
        written.extend(text[:3])
        return len(text[:3])

    async def run() -> None:
        run = _Run(command, cast(Any, SimpleNamespace(client=None, settings=None)), [], 0, _Identity("name", (1, 4)))
        output = cast(Any, SimpleNamespace(write=write))
        await asyncio.gather(*(run._write(b"answer\n", output) for _ in range(3)))

    with instead(run_batch, "LineEndpoint", lambda *_: None):
        asyncio.run(run())
    assert written == b"answer\n" * 3
    assert not errors


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = BatchCommand(parse_batch_flags([str(source), "-o", str(output)]).settings, source, output, False)
    with pytest.raises(ConfigError, match="cannot be read"):
        _lines_of(source)
    source.write_text("\n\n")
    with pytest.raises(ConfigError, match="has no lines"):
        _lines_of(source)
    source.write_text("\n".join(short_lines(2)))
    lines = _lines_of(source)
    for other in ('{"id": "batch_req_other"}\n', "no answer\n"):
        output.write_text(other)
        with pytest.raises(ConfigError, match="answers to other lines"):
            _lines_left(command, lines)
        assert output.read_text() == other
    assert _lines_left(BatchCommand(command.settings, source, output, True), lines) == (0, lines)
    assert output.read_text() == ""
    with pytest.raises(ConfigError, match="is the input"):
        _lines_left(BatchCommand(command.settings, source, source, True), lines)
    assert _lines_of(source) == lines


def test_pipes_are_refused(tmp_path: Path) -> None:
    """The input is read twice, and the output is read first."""
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    source.write_text("\n".join(short_lines(2)))
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR)  # opening an end waits for the other one
    with pytest.raises(ConfigError, match="a pipe, and each line is read again"):
        _lines_of(pipe)
    settings = parse_batch_flags(["in", "-o", "out"]).settings
    with pytest.raises(ConfigError, match="a pipe; name a file"):
        _lines_left(BatchCommand(settings, source, pipe, False), _lines_of(source))
    os.close(descriptor)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["in"], "FILE and -o OUTPUT are needed"),
        (["-o", "out"], "FILE and -o OUTPUT are needed"),
        (["in", "-i", "other", "-o", "out"], "--input-file other: FILE is in already"),
        (["in", "model", "-o", "out"], "model: unexpected; one FILE"),
        (["in", "-o", "out", "--port", "1"], "--port: has no effect on polydraft run-batch; leave it out"),
        (["in", "-o", "out", "--batch-folder", "f"], "--batch-folder: has no effect"),
        (["in", "-o", "out", "--draft-modle", "d"], "did you mean --draft-model?"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_batch_flags(words)
    assert message in str(caught.value)


def test_the_flags_are_those_of_serve() -> None:
    """With vLLM's names of the files, too."""
    ours = parse_batch_flags("in -o out --model m --draft-model d --overwrite".split())
    assert (ours.settings.model, ours.settings.draft_model, ours.overwrites) == ("m", "d", True)
    vllm = parse_batch_flags(["-i", "in", "--output_file", "out", "--model", "m", "--max_model_len", "4k"])
    assert (vllm.input_file, vllm.output_file, vllm.settings.max_model_len) == (Path("in"), Path("out"), 4000)

"""Daemons that cannot start: each with its exit code and one clear line, never a traceback."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.api import ConfigError
from engine.models.files import read_object, warn_of_adapter
from engine.models.weight_files import _header_fault
from server.cli import main
from server.openai.generation_defaults import generation_defaults
from server.serving.socket_folder import SocketFolder
from server.settings.listener import bind, own_socket_file
from server.settings.settings import Serve, read_config_file
from tests.server.daemon_process import ROOT, Daemon, Daemons, wait_until
from tests.server.tiny_models import VOCAB_SIZE, TinyModels, llama_config, llama_weights, write_folder

RWKV = {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "vocab_size": VOCAB_SIZE, "hidden_size": 64}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return (exit code, standard error) of a `polydraft serve` that does not start."""
    code = main(["serve", *arguments])
    assert gc.isenabled(), "a start that failed left the search for garbage off"
    printed = capsys.readouterr()
    assert printed.out == ""
    return code, printed.err


def one_line(text: str) -> str:
    """The only line of `text`."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


def error_line(daemon: Daemon) -> str:
    """The only error in the log of a daemon that has exited."""
    log = daemon.log
    assert "Traceback" not in log, log
    return one_line("\n".join(line for line in log.splitlines() if " ERROR " in line))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nonsense"], "--nonsense"),
        (["model", "another"], "another"),
        (["--port"], "--port"),
        (["--port", "abc"], "--port"),
        (["--port", "70000"], "--port"),
        (["--draft-tree", "2,x"], "--draft-tree: must be whole numbers"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--num-drafts", "-1"], "--num-drafts"),
        (["--dtype", "float8"], "--dtype"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--chat-template", "no/such/file"], "--chat-template: no such file"),
        (["--ssl-certfile", "no/such/file"], "--ssl-certfile: no such file"),
        (["--api-key", ""], "--api-key: a key must not be empty"),
        (["--host", "300.1.1.1"], "--host: must be an address"),
        (["--host", "http://0.0.0.0"], "--host: must be an address"),
        (["--rate-limit", "5/fortnight"], "--rate-limit: must be a number per second"),
        (["--spec-shape", "wide"], "--spec-shape: must be adaptive"),
        (["--spec-rule", "nonsense"], "--spec-rule nonsense: unknown; choose off or one of token, "),
        (["--num-drafts", "17"], "--num-drafts 17: must be between 1 and 16, or raise --max-num-drafts"),
        (["--draft-tree", "2,2"], "--draft-tree 2,2: rule 'bv_race' would be biased with chains that share"),
        (["--lora-modules", "polite"], "must be NAME=PATH"),
        (["--lora-modules", '{"name": "a", "path": "/b"}'], "must be NAME=PATH"),
        (["--lora-modules", "a=/b", "--lora-modules", "c=/d"], "one adapter is merged"),
        (["--lora-modules", "a=/b", "--served-model-name", "c"], "--lora-modules gives the model its name"),
        (["--config", "no/such/file.toml"], "no/such/file.toml: cannot be read"),
        (["./no/such/model"], "./no/such/model: no such model folder"),
        (["a" * 300], "no such model folder (File name too long); name a folder with"),
        (["/no/such/model"], "/no/such/model: no such model folder"),
        (["--draft-model", "/no/such/draft"], "/no/such/draft: no such model folder"),
        (["--tokenizer", "/no/such/words"], "/no/such/words: no such model folder"),
    ],
)
def test_a_bad_command_line_exits_2(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """A bad flag or value, or a model that is not there, is named in one line."""
    code, errors = run(capsys, *arguments)
    assert code == 2
    line = one_line(errors)
    assert line.startswith("polydraft serve: ")
    assert words in line


@pytest.mark.slow
def test_the_process_exits_with_that_code(daemons: Daemons) -> None:
    """The result of `main` is the exit code of the process, and its line is all that is printed."""
    failed = daemons.start("--nonsense")
    assert failed.exit_code() == 2
    assert "--nonsense" in one_line(failed.log)


@pytest.mark.parametrize("words", [[], ["nonsense"]])
def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """No command, or an unknown one: usage on standard error, exit code 2."""
    assert main(words) == 2
    assert "usage: polydraft" in capsys.readouterr().err


def test_help_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    """Help is printed and is no error."""
    assert main(["--help"]) == 0
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    assert "--draft-model" in capsys.readouterr().out


def test_a_wrong_secret_is_not_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """If keys are set wrongly, the message does not repeat them."""
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"api-key": {"a": "topsecret"}}))
    code, errors = run(capsys, "--config", str(path))
    assert code == 2
    assert "--api-key" in errors
    assert "topsecret" not in errors


def test_a_taken_port_exits_3(capsys: pytest.CaptureFixture[str], models: TinyModels) -> None:
    """A port that is in use, or an address of another machine: exit code 3 and a suggestion."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = run(capsys, str(models.target), "--port", str(port))
    assert code == 3
    assert f"127.0.0.1:{port}" in one_line(errors)
    assert "choose another --port" in errors
    code, errors = run(capsys, str(models.target), "--host", "192.0.2.1")
    assert code == 3
    assert "192.0.2.1:8000" in one_line(errors)
    assert "choose another --host" in errors


def test_a_taken_unix_socket_exits_3(capsys: pytest.CaptureFixture[str], models: TinyModels, tmp_path: Path) -> None:
    """A socket file in use is not removed."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        code, errors = run(capsys, str(models.target), "--uds", str(path))
        assert path.is_socket()
    assert code == 3
    assert f"cannot listen on {path}: Address already in use; choose another --uds" in one_line(errors)


def test_a_bad_certificate_exits_2(capsys: pytest.CaptureFixture[str], models: TinyModels, tmp_path: Path) -> None:
    """A certificate that is none, or a key without one, is a bad configuration."""
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    for flag in ("--ssl-certfile", "--ssl-keyfile"):
        code, errors = run(capsys, str(models.target), "--port", "0", flag, str(junk))
        assert code == 2
        assert flag in one_line(errors)


@pytest.fixture(scope="module")
def failing(daemons: Daemons, models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Daemon]:
    """Daemons whose engine cannot load, started together because each takes a while to find out."""
    folder = tmp_path_factory.mktemp("broken")
    write_folder(folder / "rwkv", RWKV)
    write_folder(folder / "incomplete", llama_config(2), llama_weights(1))
    target = str(models.target)
    return {
        "max-model-len": daemons.start(target, "--max-model-len", "9999"),
        "rwkv": daemons.start(str(folder / "rwkv")),
        "incomplete": daemons.start(str(folder / "incomplete")),
    }


def swap_two_tokens(path: Path) -> None:
    """Make a tokenizer in which two words have each other's ids."""
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(tokenizer))


def test_a_draft_model_with_other_tokens_is_refused_before_the_engine_starts(
    capsys: pytest.CaptureFixture[str], models: TinyModels, tmp_path: Path
) -> None:
    write_folder(tmp_path / "draft", llama_config(1))
    swap_two_tokens(tmp_path / "draft" / "tokenizer.json")
    code, errors = run(capsys, str(models.target), "--port", "0", "--draft-model", str(tmp_path / "draft"))
    assert code == 2
    assert "different vocabularies" in one_line(errors)


def test_an_adapter_names_its_base(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, models: TinyModels, tmp_path: Path
) -> None:
    """Alone it is refused; in the folder of a whole model a line says that it is not applied."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    code, errors = run(capsys, str(tmp_path), "--port", "0")
    assert code == 2
    assert "an adapter (LoRA) of owner/base" in one_line(errors)
    (tmp_path / "config.json").write_text("{}")
    warn_of_adapter(str(tmp_path))
    warn_of_adapter(str(models.target))
    assert [record.getMessage().count("is not applied") for record in caplog.records] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("max-model-len", 2, "reaches 2048 positions; lower it to 2048"),
        ("rwkv", 2, "architecture 'rwkv'"),
        ("incomplete", 1, "the checkpoint lacks"),
    ],
)
def test_a_model_that_cannot_be_served_is_explained(
    failing: dict[str, Daemon], name: str, code: int, words: str
) -> None:
    """An unsupported architecture: 2. A checkpoint without some weights: 1."""
    daemon = failing[name]
    assert daemon.exit_code() == code
    line = error_line(daemon)
    assert words in line
    assert name in line
    # All faults that need no weights are found before the weights are read.
    assert ("loading target" in daemon.log) == (name == "incomplete")


def test_a_path_that_is_too_long_for_a_socket_exits_3(
    capsys: pytest.CaptureFixture[str], models: TinyModels, tmp_path: Path
) -> None:
    code, printed = run(capsys, str(models.target), "--uds", str(tmp_path / ("x" * 120)))
    assert code == 3
    assert "too long; choose another --uds" in printed


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a":' * 100_000, b'\xff{"a": 1}', b'{"a": "\\ud800"}', b"9" * 9999, b""],
    ids=range(6),
)
def test_files_that_no_reader_takes_are_named(tmp_path: Path, content: bytes) -> None:
    """Deep JSON, half characters and other bytes, in each process."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("generation_config.json", "settings.json", "settings.toml"):
        (tmp_path / name).write_bytes(content)
    header = tmp_path / "model.safetensors"
    header.write_bytes(len(content).to_bytes(8, "little") + content)
    readers: list[tuple[str, Callable[[], object]]] = [
        ("generation_config.json", lambda: read_object(tmp_path / "generation_config.json")),
        ("generation_config.json", lambda: generation_defaults(str(tmp_path))),
        ("settings.json", lambda: read_config_file(str(tmp_path / "settings.json"), ())),
    ]
    if content:
        readers.append(("settings.toml", lambda: read_config_file(str(tmp_path / "settings.toml"), ())))
    for name, read in readers:
        with pytest.raises(ConfigError, match=name):
            read()
    assert _header_fault(header)


def test_sockets_fit_a_path_whatever_the_folder_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One with a long name gives way to /tmp; one that is not there is explained."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "a" * 90)
    with SocketFolder() as folder:
        assert Path(folder).parent == Path("/tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(ConfigError, match="TMPDIR"):
        SocketFolder()
    short = "/tmp/" + "b" * 72
    monkeypatch.setattr(tempfile, "tempdir", short)
    Path(short).mkdir(exist_ok=True)
    with SocketFolder() as folder, socket.socket(socket.AF_UNIX) as listener:
        assert Path(folder).parent == Path(short)
        listener.bind(f"{folder}/outbox")
    Path(short).rmdir()


def folder_of_another(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder of sockets, and the folder."""
    script = (
        "import socket, sys, tempfile; from server.serving.socket_folder import *; tempfile.tempdir = sys.argv[1]\n"
        "folder = SocketFolder(); socket.socket(socket.AF_UNIX).bind(f'{folder.name}/{INBOX}')\n"
        "print(folder.name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(parent)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_that_a_killed_process_has_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of processes that live, nor anything else of such a name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "polydraft-empty").mkdir()
    (tmp_path / "polydraft-notes").mkdir()
    (tmp_path / "polydraft-notes" / "inbox").write_text("mine")
    (tmp_path / "polydraft-notes" / "more").write_text("mine")
    killed, left = folder_of_another(tmp_path)
    with killed:
        (tmp_path / "polydraft-link").symlink_to(left)
        killed.kill()
    assert left.exists()
    alive, used = folder_of_another(tmp_path)
    with alive:
        with SocketFolder():
            assert used.exists()
        alive.kill()
    assert sorted(path.name for path in tmp_path.iterdir() if path != used) == [
        f"polydraft-{name}" for name in ("empty", "link", "notes")
    ]
    assert len(list((tmp_path / "polydraft-notes").iterdir())) == 2


@pytest.mark.slow
def test_a_daemon_that_loads_has_nothing_to_leave_behind(
    monkeypatch: pytest.MonkeyPatch, daemons: Daemons, pair_arguments: list[str]
) -> None:
    """Killed as soon as its engine has said that it loads."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        daemon = daemons.start(*pair_arguments)
        wait_until(lambda: "engine: " in daemon.log, "the engine says nothing")
        daemon.process.kill()
        daemon.process.wait()
        assert not list(Path(folder).glob("polydraft-*"))


def test_a_daemon_that_serves_has_nothing_to_leave_behind(daemon: Daemon) -> None:
    """The folder of its sockets is gone once the engine is connected."""
    own = {os.readlink(link) for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = {Path(line[7]) for line in lines if len(line) > 7 and f"socket:[{line[6]}]" in own}
    folders = {path.parent for path in paths if path.parent.name.startswith("polydraft-")}
    assert len(folders) == 1
    assert not folders.pop().exists()


@pytest.mark.slow
def test_modules_in_the_users_folder_are_not_the_engine(tmp_path: Path, pair_arguments: list[str]) -> None:
    """Started by the installed command, in a folder with modules of the same names."""
    for name in ("engine", "json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not ours')")
    command = [
        str(Path(sys.executable).with_name("polydraft")),
        "serve",
        *pair_arguments,
        "--no-calibrate",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "engine: loading target" in line:
                break
        process.terminate()
        process.communicate()
    assert "engine: loading target" in lines[-1], "".join(lines)
    assert process.returncode == 0


def test_the_socket_file_goes_with_its_daemon(tmp_path: Path) -> None:
    """A stale file is replaced at start; a file that another daemon has put there stays."""
    settings = Serve(uds=str(tmp_path / "socket"))
    path = tmp_path / "socket"
    for _ in range(2):
        bind(settings).close()  # leaves a stale file
        with bind(settings), own_socket_file(settings):
            assert path.is_socket()
        assert not path.exists()
    first = bind(settings)
    with own_socket_file(settings):
        first.close()
        path.rename(tmp_path / "old")
        second = bind(settings)
    assert path.is_socket()
    second.close()

"""The `polydraft` command; subcommands import their modules when chosen, so help is fast."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging.handlers import MemoryHandler

    from engine.api import EngineConfig
    from server.settings.settings import Serve

    Process = subprocess.Popen[bytes]

log = logging.getLogger("polydraft")

USAGE = """\
usage: polydraft COMMAND [ARGUMENTS]

commands:
  serve [MODEL]   serve a model over HTTP (without MODEL: the embedded demonstration pair)
  check MODEL     tell from config.json or a GGUF file's header whether and how a model is served
  run-batch FILE  answer the lines of a batch without a daemon
  chat            chat with a running daemon in the terminal
  analyze         measure a target and a draft model: exactness, speedup, flags to serve them with (in a clone only)
  distill TARGET  train a head that drafts for a target, on text that the target samples (in a clone only)
  bench           measure a running or a new daemon, speculation on against off
  completion      print a script that completes commands and flags in bash, zsh or fish
  version         print the version

`polydraft COMMAND --help` explains a command's usual flags, `polydraft help COMMAND` all of them.
"""

_MODULES = {
    "analyze": "research.analysis",
    "check": "polydraft.check",
    "completion": "polydraft.completion",
    "distill": "research.distill",
}
"""Commands that are processes."""
_NO_RESEARCH = (
    "this installation has no folder research/, because the wheel leaves it out; "
    "clone the repository, and run there: make serve, then"
)
_CLIENTS = {"bench": "loadtest.cli", "chat": "server.chat.terminal"}
"""Commands that are functions of other packages."""
_FEWEST_FILES, _MOST_FILES = 48, 1 << 16
"""Files that a start needs, and the highest limit that is asked for."""
_COMMANDS = ("serve", "check", "run-batch", "chat", "analyze", "distill", "bench", "completion", "version", "help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words[0] if words else ""
    rest = words[1:]
    if command in _WITH_ENGINE:
        # No collection while modules are imported; the daemon enables it when it is ready.
        gc.disable()
        try:
            return _with_engine(_WITH_ENGINE[command], rest)
        finally:
            gc.enable()
    if command in _MODULES:
        return _in_process(command, rest)
    if command in _CLIENTS:
        return int(importlib.import_module(_CLIENTS[command]).main(rest))
    if command in ("version", "--version", "-V"):
        from server.version import VERSION

        print(VERSION)
        return 0
    if command == "help" and rest and not rest[0].startswith("-"):
        return _explain(rest)
    if command in ("help", "--help", "-h"):
        print(USAGE, end="")
        return 0
    print(USAGE, end="", file=sys.stderr)
    if command:
        from server.wire.suggest import did_you_mean

        meant = did_you_mean(command, _COMMANDS)
        print(f"\npolydraft: unknown command {command!r}{meant}", file=sys.stderr)
    return 2


def _in_process(command: str, arguments: list[str]) -> int:
    """Run a command in a separate process, because this one never loads torch."""
    root = Path(__file__).parents[1]
    in_clone = (root / "research" / "analysis" / "__main__.py").is_file()
    if _MODULES[command].startswith("research.") and not in_clone:
        print(f"polydraft {command}: {_NO_RESEARCH} .venv/bin/polydraft {command}", file=sys.stderr)
        return 2
    environment = dict(os.environ)
    if in_clone:
        places = [str(root), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(places)
    program = [sys.executable, "-P", "-m", _MODULES[command], *arguments]
    return subprocess.run(program, env=environment, check=False).returncode


def _explain(command: list[str]) -> int:
    """Print the help of a command with all flags; on a terminal, in the pager that PAGER names."""
    flag = "--help=all" if command == ["serve"] else "--help"
    if not sys.stdout.isatty():
        return main([*command, flag])
    import pydoc
    import shutil

    program = [sys.executable, "-P", "-m", "server.cli", *command, flag]
    environment = os.environ | {"COLUMNS": str(shutil.get_terminal_size().columns)}
    printed = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if printed.stdout:
        pydoc.pager(printed.stdout)
    return printed.returncode


def _on_signals(react: Callable[..., object]) -> None:
    """React to signals before the event loop does: exit without a traceback, also as process 1."""
    import signal

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, react)


def _held_back() -> MemoryHandler:
    """Buffer log lines until the settings define their destination and format."""
    from logging.handlers import MemoryHandler

    buffer = MemoryHandler(100, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    log.addHandler(buffer)
    return buffer


def _raise_file_limit() -> int:
    """Raise the limit of open files to the system's maximum, and return it.

    Processes that this one starts have the same limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def _with_engine(command: Callable[[Process, list[str]], int], arguments: list[str]) -> int:
    """Run a command that needs a new engine process."""
    if (limit := _raise_file_limit()) < _FEWEST_FILES:
        text = f"{limit} files may be open, and a start needs {_FEWEST_FILES}; raise the limit (ulimit -n)"
        print(f"polydraft: {text}", file=sys.stderr)
        return 2
    # Nothing has started yet. An exception could break a library during its import (pydantic_core
    # is one).
    _on_signals(lambda *_: os._exit(0))
    from engine.api import start_process

    # Its imports take longest, and need none of the settings.
    process = start_process()
    try:
        return command(process, arguments)
    finally:
        if process.stdin and not process.stdin.closed:  # it has not received its configuration
            process.kill()
            process.communicate()


def _serve(process: Process, arguments: list[str]) -> int:
    """Read the settings, then serve."""
    from engine.api import ConfigError, check_settings
    from server.settings.flags import parse_flags
    from server.settings.listener import bind, bind_fault, own_socket_file

    settings = None
    early = _held_back()
    try:
        settings = parse_flags(arguments)
        config = settings.engine_config()
        check_settings(config)
        listener = bind(settings)
    except OSError as error:
        assert settings is not None, "only the address is bound"
        print(f"polydraft serve: {bind_fault(settings, error)}", file=sys.stderr)
        return 3
    except (ConfigError, ValueError) as error:
        return _refuse("serve", error)
    finally:
        log.removeHandler(early)
    _begin_log(settings, early)
    with listener, own_socket_file(settings):

        def run(config: EngineConfig) -> int:
            from server.daemon import run

            return run(settings, config, listener, process)

        return _with_models("serve", settings, config, run)


def _run_batch(process: Process, arguments: list[str]) -> int:
    """Read the settings and the files, then answer the lines."""
    from engine.api import ConfigError, check_settings
    from server.settings.flags import parse_batch_flags

    early = _held_back()
    try:
        command = parse_batch_flags(arguments)
        config = command.settings.engine_config()
        check_settings(config)
    except (ConfigError, ValueError) as error:
        return _refuse("run-batch", error)
    finally:
        log.removeHandler(early)
    _begin_log(command.settings, early)

    def run(config: EngineConfig) -> int:
        from server.run_batch import run_batch

        return run_batch(command, config, process)

    return _with_models("run-batch", command.settings, config, run)


_WITH_ENGINE = {"serve": _serve, "run-batch": _run_batch}
"""Commands that start an engine."""


def _refuse(command: str, error: Exception) -> int:
    """Print why the settings are refused; return the exit code. Raises any other error again."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from engine.api import ConfigError
    from server.settings.flags import faults

    if isinstance(error, ValidationError):
        for line in faults(error):
            print(f"polydraft {command}: {line}", file=sys.stderr)
        return 2
    if isinstance(error, ConfigError | SettingsError):
        print(f"polydraft {command}: {error}; see polydraft {command} --help", file=sys.stderr)
        return 2
    raise error


def _begin_log(settings: Serve, early: MemoryHandler) -> None:
    """Set up the log, and write the lines that were held back."""
    from engine.api import set_up_log

    set_up_log(settings.log_level, settings.log_format)
    for record in early.buffer:
        if log.isEnabledFor(record.levelno):
            log.handle(record)


def _with_models(command: str, settings: Serve, config: EngineConfig, run: Callable[[EngineConfig], int]) -> int:
    """Look for the models, then run; return the exit code."""
    from engine.api import ConfigError, LoadError, show_given_names
    from server.settings.model_checks import check_pair, with_quantization, with_sources

    try:
        config = with_sources(config)
        show_given_names(config.model.shown)
        check_pair(config.model)
        config = with_quantization(config, settings.quantization)
        _on_signals(lambda *_: sys.exit(0))
        return run(config)
    except (ConfigError, LoadError) as error:
        print(f"polydraft {command}: {config.model.shown(str(error))}", file=sys.stderr)
        if isinstance(error, ConfigError):
            return 2
        return 1


if __name__ == "__main__":
    sys.exit(main())

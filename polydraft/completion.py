"""`polydraft completion SHELL`: prints a script that completes commands, flags and values of flags.

shtab writes it from the parsers of all commands. The parsers of `analyze` and `distill` import
torch, so printing takes seconds. The script itself starts no Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import shtab

import loadtest.cli
import server.chat.terminal
from polydraft.check import parser as check_parser
from server.settings.flags import completed_parser

SHELLS = ("bash", "zsh", "fish")
_INSTALL = """\
bash: polydraft completion bash > ~/.local/share/bash-completion/completions/polydraft
zsh:  polydraft completion zsh > FOLDER/_polydraft, with FOLDER in fpath before compinit runs
fish: polydraft completion fish > ~/.config/fish/completions/polydraft.fish"""


_SERVED_FILES = frozenset(
    ("model", "draft_model", "tokenizer", "config", "chat_template", "ssl_keyfile", "ssl_certfile", "uds")
)
"""Settings of `serve` whose values may be files."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of `polydraft completion`."""
    result = argparse.ArgumentParser(
        prog="polydraft completion",
        description="Print a script that completes commands and flags in a shell.",
        epilog=_INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("shell", choices=SHELLS)
    return result


def _with_files(name: str) -> argparse.ArgumentParser:
    result = completed_parser(name)
    for action in result._actions:
        if action.dest in _SERVED_FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return result


def _research() -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return the commands of research/; none in an installed wheel."""
    if not (Path(__file__).parents[1] / "research" / "analysis" / "__main__.py").is_file():
        return {}
    from research.analysis.__main__ import parser as analyze
    from research.distill.__main__ import parser as distill

    return {
        "analyze": (analyze(), "measure a target and a draft model"),
        "distill": (distill(), "train a head that drafts for a target"),
    }


def all_commands() -> argparse.ArgumentParser:
    """Return one parser of all commands, from which the scripts are written."""
    result = argparse.ArgumentParser("polydraft")
    result.add_argument("--version", "-V", action="store_true", help="print the version")
    commands = result.add_subparsers(dest="command")
    parsers = {
        "serve": (_with_files("serve"), "serve a model over HTTP"),
        "check": (check_parser(), "tell whether and how a model is served"),
        "run-batch": (_with_files("run-batch"), "answer a file of requests"),
        "chat": (server.chat.terminal.parser(), "chat with a running daemon"),
        **_research(),
        "bench": (loadtest.cli.parser(), "measure a daemon, speculation on against off"),
        "completion": (parser(), "print the completion of a shell"),
    }
    for name, (command, text) in parsers.items():
        commands.add_parser(name, parents=[command], add_help=False, help=text)
    commands.add_parser("version", add_help=False, help="print the version")
    explained = commands.add_parser("help", add_help=False, help="explain a command")
    explained.add_argument("explained", nargs="?", choices=tuple(parsers))
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script of a shell."""
    options = parser().parse_args(arguments)
    print(shtab.complete(all_commands(), options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Command lines of `serve` and `run-batch`, from the settings and other servers' flags."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from engine.api import ConfigError
from server.settings import foreign_flags
from server.settings.groups import RARE, BatchSettings, HttpSettings
from server.settings.settings import GROUPS, Serve
from server.wire.suggest import did_you_mean

log = logging.getLogger("polydraft")

_MODEL_FLAG = "model_flag"
_PREFIX = "POLYDRAFT_"
_WIDTH = 110
_LONGEST_CHOICES = 40


@dataclass(frozen=True)
class _Command:
    """A command with settings."""

    name: str
    usage: str
    description: str
    without: frozenset[str] = frozenset()
    """Settings that have no effect."""


_SERVE = _Command("serve", "polydraft serve [MODEL] [FLAGS]", " ".join((Serve.__doc__ or "").split()))
_RUN_BATCH = _Command(
    "run-batch",
    "polydraft run-batch FILE -o OUTPUT [--model MODEL] [FLAGS]",
    "Answer the lines of a batch without a daemon. If OUTPUT has lines already, the other lines are answered. "
    "Without --model the embedded demonstration pair answers.",
    without=frozenset(
        [
            *(HttpSettings.model_fields.keys() - {"strict_fields", "max_request_bytes"}),
            *BatchSettings.model_fields,
            "shutdown_timeout",
            "enable_log_stats",
            "metrics_compat",
        ]
    ),
)


@dataclass(frozen=True)
class BatchCommand:
    """Command line of `polydraft run-batch`."""

    settings: Serve
    input_file: Path
    output_file: Path
    overwrites: bool
    """Whether the lines that the output has already are removed and answered again."""


class _Parser(argparse.ArgumentParser):
    """Parser that accepts full names only and raises ConfigError."""

    command = _SERVE

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument "))


class _Help(argparse.Action):
    """Prints help and exits: the common flags, or with `all` every flag."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:  # noqa: ARG002
        if values not in ("usual", "all"):
            raise ConfigError(f"{option} {values}: the only value is all, as in --help=all")
        assert isinstance(parser, _Parser)
        print(_parser(parser.command, with_rare=values == "all").format_help(), end="")
        raise SystemExit(0)


def parse_flags(words: Sequence[str]) -> Serve:
    """Return the settings of a command line, the environment and the file that they name.

    Raises ConfigError, pydantic's ValidationError, and SystemExit after help.
    """
    values = _values(_SERVE, words)
    if (flag := values.pop(_MODEL_FLAG, None)) is not None:
        if values.get("model", flag) != flag:
            raise ConfigError(f"--model {flag}: MODEL is {values['model']} already; give one of them")
        values["model"] = flag
    return Serve(**foreign_flags.translate(values))


def completed_parser(name: str) -> argparse.ArgumentParser:
    """Return a parser of all flags with their choices, for shells; it parses nothing.

    name: of the command, serve or run-batch.
    """
    command = _SERVE if name == _SERVE.name else _RUN_BATCH
    parser = _parser.__wrapped__(command, with_rare=True)
    for action in parser._actions:
        field = Serve.model_fields.get(action.dest)
        if field is not None and not isinstance(action, argparse.BooleanOptionalAction):
            action.choices = _choices(field.annotation) or None
    return parser


def parse_batch_flags(words: Sequence[str]) -> BatchCommand:
    """Return the command line of `run-batch`; raises as `parse_flags` does."""
    values = _values(_RUN_BATCH, words)
    input_file = values.pop("input_file", None)
    flag = values.pop("input_file_flag", None)
    output_file = values.pop("output_file", None)
    overwrites = values.pop("overwrite", False)
    if input_file is not None and flag not in (None, input_file):
        raise ConfigError(f"--input-file {flag}: FILE is {input_file} already; give one of them")
    if (input_file := input_file or flag) is None or output_file is None:
        raise ConfigError("FILE and -o OUTPUT are needed")
    if _MODEL_FLAG in values:
        values["model"] = values.pop(_MODEL_FLAG)
    settings = Serve(**foreign_flags.translate(values))
    return BatchCommand(settings, Path(input_file), Path(output_file), overwrites)


def _values(command: _Command, words: Sequence[str]) -> dict[str, Any]:
    """Return the given flags by name. Raises ConfigError for unknown ones."""
    _warn_of_environment()
    parser = _parser(command, with_rare=True)
    given, unknown = parser.parse_known_intermixed_args([_with_dashes(word) for word in words])
    if unknown:
        raise ConfigError(_unknown(command, unknown[0]))
    return {name: value for name, value in vars(given).items() if value is not None}


def _warn_of_environment() -> None:
    """Log the variables of the environment that are named like settings and are none."""
    for name in sorted(os.environ):
        if not name.startswith(_PREFIX):
            continue
        setting = name.removeprefix(_PREFIX).lower()
        if setting not in Serve.model_fields:
            hint = did_you_mean(setting, Serve.model_fields)
            log.warning("%s in the environment is no setting%s", name, hint)


def faults(error: ValidationError) -> list[str]:
    """Return one line for each setting with a wrong value, without the values of secrets."""
    lines = {}
    for problem in error.errors():
        setting = str(problem["loc"][0])
        value = problem["input"]
        text = problem["msg"].removeprefix("Value error, ")
        if choices := _choices(Serve.model_fields[setting].annotation):
            text = f"choose from {', '.join(choices)}{did_you_mean(str(value), choices)}"
        if setting != "api_key":
            text += f" (got {value!r})"
        lines[setting] = f"--{setting.replace('_', '-')}: {text}"
    return list(lines.values())


def _with_dashes(word: str) -> str:
    """Return a flag's name with dashes; other servers also accept underscores."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown(command: _Command, word: str) -> str:
    if not word.startswith("-") and command is _RUN_BATCH:
        return f"{word}: unexpected; one FILE is answered, and a flag of several values is repeated for each"
    if not word.startswith("-"):
        return f"{word}: unexpected; one MODEL is served, and a flag of several values is repeated for each"
    flag = word.partition("=")[0]
    name = flag.removeprefix("--").removeprefix("no-")
    if name.replace("-", "_") in command.without:
        return f"{flag}: has no effect on polydraft {command.name}; leave it out"
    known = [field.replace("_", "-") for field in Serve.model_fields.keys() - command.without]
    hint = did_you_mean(name, known).replace("mean ", "mean --")
    return f"{flag}: unknown flag{hint}"


@cache
def _parser(command: _Command, with_rare: bool) -> _Parser:
    parser = _Parser(
        prog=f"polydraft {command.name}",
        usage=command.usage,
        description=command.description,
        epilog="Each flag is also an environment variable (POLYDRAFT_PORT=8011) and a key of a --config file. "
        "vLLM's spellings are understood, for example --speculative-config.",
        formatter_class=_formatter,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.command = command
    if command is _RUN_BATCH:
        _add_files(parser)
    for group in GROUPS:
        _add_group(parser, group, with_rare)
    if command is _SERVE:
        parser.add_argument("--model", dest=_MODEL_FLAG, help=argparse.SUPPRESS)
    for name in sorted(foreign_flags.NAMES):
        flag = name.replace("_", "-")
        flags = [f"--{flag}"]
        if len(name) <= foreign_flags.LONGEST_SHORT:
            flags.insert(0, f"-{flag}")
        if name in foreign_flags.SWITCHES:
            parser.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            parser.add_argument(*flags, dest=name, help=argparse.SUPPRESS)
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    return argparse.HelpFormatter(prog, max_help_position=36, width=width)


def _add_files(parser: _Parser) -> None:
    """Add the arguments that only `run-batch` has."""
    arguments = parser.add_argument_group("files")
    lines = "requests, a JSON object on each line: custom_id, method, url, body"
    arguments.add_argument("input_file", nargs="?", metavar="FILE", help=lines)
    arguments.add_argument("-i", "--input-file", dest="input_file_flag", help=argparse.SUPPRESS)
    arguments.add_argument("-o", "--output-file", metavar="OUTPUT", help="file of answers, in the order of their ends")
    arguments.add_argument("--overwrite", action="store_true", help="answer lines again that OUTPUT has already")


def _add_group(parser: _Parser, group: type[BaseModel], with_rare: bool) -> None:
    command = parser.command
    if not group.model_fields.keys() - command.without:
        return
    arguments = parser.add_argument_group(group.__doc__)
    if "config" in group.model_fields:
        text = "show the usual flags; --help=all shows every flag"
        arguments.add_argument("-h", "--help", action=_Help, nargs="?", const="usual", metavar="all", help=text)
    for name, field in group.model_fields.items():
        if name in command.without:
            continue
        text = _description(field)
        if field.json_schema_extra == RARE and not with_rare:
            text = argparse.SUPPRESS
        if name == "model" and command is _RUN_BATCH:
            arguments.add_argument("--model", dest=_MODEL_FLAG, metavar="MODEL", help=text)
            continue
        if name == "model":
            arguments.add_argument(name, nargs="?", metavar="MODEL", help=text)
            continue
        flag = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            arguments.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            is_list = get_origin(field.annotation) is list
            action = "append" if is_list else "store"
            arguments.add_argument(flag, action=action, metavar=_metavar(name, field), help=text)


def _metavar(name: str, field: FieldInfo) -> str:
    choices = ",".join(_choices(field.annotation))
    if choices and len(choices) <= _LONGEST_CHOICES:
        return f"{{{choices}}}"
    if name.endswith(("_timeout", "_interval")):
        return "SECONDS"
    if field.annotation is int:
        return "N"
    return name.rpartition("_")[2].upper()


def _choices(annotation: Any) -> list[str]:
    """Return the values of a literal type, or of a union of literal types."""
    if isinstance(annotation, str):
        return [annotation]
    return [value for part in get_args(annotation) for value in _choices(part)]


def _description(field: FieldInfo) -> str:
    text = field.description or ""
    choices = ", ".join(_choices(field.annotation))
    if len(choices) > _LONGEST_CHOICES:
        text += f"; one of {choices}"
    if default := _shown_default(field.default, text):
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _shown_default(default: Any, text: str) -> str:
    """Return a default for the help; "" if there is none, or if the text says what 0 means."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if default in (None, "", []):
        return ""
    if default == 0 and "0: " in text:
        return ""
    if isinstance(default, list):
        return ",".join(default)
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)

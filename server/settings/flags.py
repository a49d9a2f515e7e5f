"""The command line of `polydraft serve`, generated from the settings. Flags of other servers are translated."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from engine.api import ConfigError
from server.settings import foreign_flags
from server.settings.groups import RARE
from server.settings.settings import GROUPS, Serve
from server.wire.suggest import did_you_mean

log = logging.getLogger("polydraft")

_MODEL_FLAG = "model_flag"
_PREFIX = "POLYDRAFT_"
_WIDTH = 110
_LONGEST_CHOICES = 40


class _Parser(argparse.ArgumentParser):
    """Parser that accepts full names only and raises ConfigError."""

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument "))


class _Help(argparse.Action):
    """Prints help and exits: the common flags, or with `all` every flag."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:  # noqa: ARG002
        if values not in ("usual", "all"):
            raise ConfigError(f"{option} {values}: the only value is all, as in --help=all")
        print(_parser(with_rare=values == "all").format_help(), end="")
        raise SystemExit(0)


def parse_flags(words: Sequence[str]) -> Serve:
    """Return the settings of a command line, the environment and the file that they name.

    Raises ConfigError, pydantic's ValidationError, and SystemExit after help.
    """
    _warn_of_environment()
    parser = _parser(with_rare=True)
    given, unknown = parser.parse_known_intermixed_args([_with_dashes(word) for word in words])
    if unknown:
        raise ConfigError(_unknown(unknown[0]))
    values = {name: value for name, value in vars(given).items() if value is not None}
    if (flag := values.pop(_MODEL_FLAG, None)) is not None:
        if values.get("model", flag) != flag:
            raise ConfigError(f"--model {flag}: MODEL is {values['model']} already; give one of them")
        values["model"] = flag
    return Serve(**foreign_flags.translate(values))


def completed_parser() -> argparse.ArgumentParser:
    """Return a parser of all flags with the choices of their values, from which shells complete. It parses nothing."""
    parser = _parser.__wrapped__(with_rare=True)
    for action in parser._actions:
        field = Serve.model_fields.get(action.dest)
        if field is not None and not isinstance(action, argparse.BooleanOptionalAction):
            action.choices = _choices(field.annotation) or None
    return parser


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


def _unknown(word: str) -> str:
    if not word.startswith("-"):
        return f"{word}: unexpected; one MODEL is served, and what belongs to a flag follows it"
    flag = word.partition("=")[0]
    name = flag.removeprefix("--").removeprefix("no-")
    known = [field.replace("_", "-") for field in Serve.model_fields]
    hint = did_you_mean(name, known).replace("mean ", "mean --")
    return f"{flag}: unknown flag{hint}"


@cache
def _parser(with_rare: bool) -> _Parser:
    parser = _Parser(
        prog="polydraft serve",
        usage="polydraft serve [MODEL] [FLAGS]",
        description=" ".join((Serve.__doc__ or "").split()),
        epilog="Each flag is also an environment variable (POLYDRAFT_PORT=8011) and a key of a --config file. "
        "vLLM's spellings are understood, for example --speculative-config.",
        formatter_class=_formatter,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for group in GROUPS:
        _add_group(parser, group, with_rare)
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


def _add_group(parser: _Parser, group: type[BaseModel], with_rare: bool) -> None:
    arguments = parser.add_argument_group(group.__doc__)
    if "config" in group.model_fields:
        text = "show the usual flags; --help=all shows every flag"
        arguments.add_argument("-h", "--help", action=_Help, nargs="?", const="usual", metavar="all", help=text)
    for name, field in group.model_fields.items():
        text = _description(field)
        if field.json_schema_extra == RARE and not with_rare:
            text = argparse.SUPPRESS
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
    """Return a default for the help; "" if there is none, or if the setting's text says what 0 means."""
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

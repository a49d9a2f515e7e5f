"""`analyze times --of NAME`: durations of parts of the engine on this machine, in turns.

A module of this room is one measurement. It has `DEFAULTS`, the flags that it takes; `analyze`,
which returns the document; and `markdown`, its table. A flag of another measurement is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from engine.errors import ConfigError
from loadtest.arguments import integers
from research.analysis.loading import add_format_arguments, add_pair_arguments
from research.analysis.times import chains, heads, limits, rules


class Measurement(NamedTuple):
    """A name that `--of` takes."""

    question: str
    defaults: Mapping[str, Any]
    analyze: Callable[[argparse.Namespace], dict[str, Any]]
    markdown: Callable[[dict[str, Any]], str]


def _measurement(module: Any, question: str) -> Measurement:
    return Measurement(question, module.DEFAULTS, module.analyze, module.markdown)


MEASUREMENTS = {
    "rules": _measurement(rules, "How long does each rule take to verify drafts?"),
    "chains": _measurement(chains, "How much longer is a step with several chains than with one?"),
    "limits": _measurement(
        limits,
        "What limits passes and steps after short and long texts, and how much of the speedup is left?",
    ),
    "heads": _measurement(heads, "How much longer does a one-pass head draft several chains than one?"),
}
_INTEGERS = {
    "context": "tokens of the text before a step",
    "repeats": "measurements of every point",
    "draft_length": "tokens of a chain",
    "draft_window": "draft window, as of `serve`",
    "layers": "layers of the heads",
}
_LISTS = {
    "contexts": "tokens of the texts before the steps, ascending",
    "cores": "numbers of cores to compare",
    "num_drafts": "numbers of chains",
}
_WORDS = {
    "dtypes": "types of the weights, with commas",
    "kinds": f"types of heads: {', '.join(heads.KINDS)}",
    "targets": f"targets of the heads: {', '.join(heads.TARGETS)}",
}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--of", required=True, choices=MEASUREMENTS, help="what to measure, see below")
    flags = parser.add_argument_group("flags", "Each is for some measurements, which have different defaults.")
    for name, text in _INTEGERS.items():
        flags.add_argument(_flag(name), type=int, help=text)
    for name, text in _LISTS.items():
        flags.add_argument(_flag(name), type=integers, help=f"{text}, e.g. 1,4")
    for name, text in _WORDS.items():
        flags.add_argument(_flag(name), type=lambda words: words.split(","), help=text)
    add_pair_arguments(parser)
    add_format_arguments(parser)
    parser.set_defaults(**dict.fromkeys(_all_flags()))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["measurements, and the flags that they take:", *map(_described, MEASUREMENTS)])


def _all_flags() -> set[str]:
    return {name for measurement in MEASUREMENTS.values() for name in measurement.defaults}


def _described(name: str) -> str:
    measurement = MEASUREMENTS[name]
    shown = []
    for flag, value in measurement.defaults.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        shown.append(_flag(flag) if text is None else f"{_flag(flag)} {text}")
    return f"  {name}: {measurement.question}\n      {' '.join(shown)}"


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; raise ConfigError for a flag of another measurement."""
    measurement = MEASUREMENTS[options.of]
    given = {name: value for name in _all_flags() if (value := getattr(options, name)) is not None}
    for name in sorted(given):
        if name not in measurement.defaults:
            raise ConfigError(f"{_flag(name)} is not a flag of --of {options.of}")
    return measurement.analyze(argparse.Namespace(of=options.of, **{**measurement.defaults, **given}))


def markdown(result: dict[str, Any]) -> str:
    """Return the table of the measurement."""
    return MEASUREMENTS[result["options"]["of"]].markdown(result)

"""The command line of `polydraft distill`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.errors import ConfigError, LoadError
from engine.models.gguf.folder import CACHE
from engine.models.gguf.names import source_of
from engine.start.host import usable_cores
from loadtest.arguments import Parser, numbers
from research.distill.report import show
from research.distill.run import Run

_EPILOG = """\
The run has four parts: the engine samples texts from the target, one pass over them computes the target's states,
the head is trained, and the engine measures it. The first texts show how long all parts will take, and --hours chooses
texts and epochs by that. The same command goes on where an interrupted one stopped, with the same result. It ends with
a folder for `polydraft serve TARGET --draft-model FOLDER`, and FOLDER/report.json.

A CPU is enough for small targets. For larger ones use --device cuda, which has not been run on a GPU. The texts take
(layers read + 1) * width * 2 bytes a token on disk, because the target's states are stored with them.
"""
_BEGIN_LENGTH, _CHAT_LENGTH = 256, 512
_CHAT_TEMPERATURES = (0.8, 0.0, 1.0)
_POSITIVE = (
    *("sample_batch", "batch", "tokens", "answer_tokens", "draft_length"),
    *("learning_rate", "hours", "epochs", "layers", "length"),
)
_LEARNING_RATE = 3e-4
"""A head begins from a prediction that larger steps destroy."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = Parser(
        prog="polydraft distill",
        description="Train an EAGLE-3 head for a target on text that the target samples itself.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("target", metavar="TARGET", help="target model: folder, GGUF file or hub name")
    add("--revision", help="branch, tag or commit of a target on the hub")
    add("--output", type=Path, help="folder of the head (default: TARGET's name and eagle3)")
    add("--hours", type=float, help="time of the whole run, from which texts and epochs follow (default: --tokens)")
    add("--layers", type=int, default=1, help="decoder layers of the head (default 1)")
    add("--draft-length", type=int, default=3, help="tokens of a chain that are trained (default 3)")
    add("--draft-vocabulary", type=int, default=0, help="tokens that the head may draft, the most frequent ones of the "
        "texts (default: all up to 8192, else an eighth and at least 8192)")  # fmt: skip
    add("--draft-weights", default="auto", help="numbers of the head in the report, as of `serve` (default auto)")
    add("--taps", type=_numbers, help="layers whose inputs are read, e.g. 2,12,21 (default 2, N/2, N of N)")
    add("--begin-from", type=Path, help="folder of an earlier head of the same type and size, which is trained further")
    add("--prompts", type=Path, help="JSON lines with messages, turns, prompt, question or text, that the target "
        "answers in its chat template (text: continues); default: texts from the begin token")  # fmt: skip
    add("--texts-from", type=Path, help="JSON lines of whole conversations (messages, turns, question and answer, "
        "text) that are learned as they are; half of all texts if there are enough")  # fmt: skip
    add("--texts", type=Path, help="folder of sampled texts, to share them between heads (default: OUTPUT/texts)")
    add("--tokens", type=float, default=4e6, help="tokens of all texts, without --hours (default 4e6)")
    add("--length", type=int, help="most tokens of a text (default 256, and 512 with --prompts)")
    add("--answer-tokens", type=int, default=192, help="most tokens of an answer to a prompt (default 192)")
    add("--temperatures", type=_temperatures, help="temperatures of texts, which take turns (default 1, and 0.8,0,1 "
        "with --prompts)")  # fmt: skip
    add("--sample-batch", type=int, default=64, help="texts of a file; an interrupted run repeats one (default 64)")
    add("--epochs", type=int, help="times that every text is trained on (default 2 with --tokens)")
    add("--batch", type=int, default=4, help="texts of a training step (default 4)")
    add("--learning-rate", type=float, default=_LEARNING_RATE, help="peak learning rate (default 0.0003)")
    add("--tv-weight", type=float, default=0.9, help="weight of total variation against KL, 0 to 1 (default 0.9)")
    add("--seed", type=int, default=0, help="of sampling, first weights and order (default 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: cuda if there is one")
    add("--threads", type=int, default=0, help="CPU threads (default: all cores)")
    add("--report-prompts", type=Path, help="prompts of the report, by their `task` (default: beginnings of texts not "
        "trained on)")  # fmt: skip
    return result


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(numbers(text))


def complete(options: argparse.Namespace) -> None:
    """Fill in defaults that depend on other options.

    Raise ConfigError for values that no run can have.
    """
    for name in _POSITIVE:
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    if options.draft_vocabulary < 0:
        raise ConfigError("--draft-vocabulary must be above 0")
    if not 0 <= options.tv_weight <= 1:
        raise ConfigError("--tv-weight must be from 0 to 1")
    has_prompts = options.prompts is not None
    options.length = options.length or (_CHAT_LENGTH if has_prompts else _BEGIN_LENGTH)
    options.temperatures = options.temperatures or (_CHAT_TEMPERATURES if has_prompts else (1.0,))
    if options.length < 4 * options.draft_length:
        raise ConfigError(f"--length must be at least {4 * options.draft_length}, four times --draft-length")
    options.threads = options.threads or usable_cores()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a head: 0, 1 if a model cannot be loaded, 2 for bad input, 130 after an interrupt."""
    options = parser().parse_args(arguments)
    try:
        complete(options)
        torch.set_num_threads(options.threads)
        options.folder, options.revision = source_of(options.target, options.revision, CACHE)
        report = Run(options).carry_out()
    except KeyboardInterrupt:
        print("polydraft distill: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    except (ConfigError, LoadError) as error:
        print(f"polydraft distill: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(show(report["served"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

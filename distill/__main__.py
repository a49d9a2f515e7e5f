"""The command line of `polydraft distill`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from analysis.loading import read_prompts
from distill.heads import KINDS, HeadShape, new_head, save_head, write_config
from distill.report import served_acceptance, show
from distill.target import Target
from distill.texts import Prompts, Texts, TextSizes
from distill.training import NUM_VALIDATION, Training, TrainingPlan
from engine.errors import ConfigError, LoadError
from engine.models.checkpoint import Source
from engine.models.files import check_source
from engine.models.host import usable_cores
from engine.models.loading import choose_device
from loadtest.arguments import Parser

_EPILOG = """\
The run has three parts: texts are sampled from the target, the head is trained, and the engine measures it. The same
command goes on where an interrupted one stopped, with the same result. It ends with a folder for
`polydraft serve TARGET --draft-model FOLDER`, and FOLDER/report.json.

A CPU is enough for small targets. For larger ones use --device cuda, which has not been run on a GPU. The texts take
(layers read + 1) * width * 2 bytes a token on disk, because the target's states are stored with them.
"""
_REPORT_PROMPTS, _REPORT_TOKENS = 32, 48


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = Parser(
        prog="polydraft distill",
        description="Train a head (EAGLE-3 or DSpark) for a target on text that the target samples itself.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("target", metavar="TARGET", help="target model: folder or hub name")
    add("--revision", help="branch, tag or commit of a target on the hub")
    add("--output", type=Path, help="folder of the head (default: TARGET's name and the kind)")
    add("--kind", choices=sorted(KINDS), default="dspark", help="drafts in one pass (dspark, the default) or by depth")
    add("--layers", type=int, help="decoder layers of the head (default 1 for eagle3, 2 for dspark)")
    add("--draft-length", type=int, default=5, help="tokens of a chain that are trained; dspark's block (default 5)")
    add("--taps", type=_numbers, help="layers whose inputs are read, e.g. 2,12,21 (default 2, N/2, N-3 of N)")
    add("--mask-token", type=int, help="dspark: token of unknown rows (default: the padding token, else the end)")
    add("--prompts", type=Path, help="JSON lines with prompt, text or messages that texts begin with (default: none)")
    add("--texts", type=Path, help="folder of sampled texts, to share them between heads (default: OUTPUT/texts)")
    add("--tokens", type=float, default=4e6, help="tokens that are sampled (default 4e6)")
    add("--length", type=int, default=256, help="tokens of a text (default 256)")
    add("--sample-batch", type=int, default=128, help="texts that are sampled at once (default 128)")
    add("--epochs", type=int, default=2, help="times that every text is trained on (default 2)")
    add("--batch", type=int, default=4, help="texts of a training step (default 4)")
    add("--learning-rate", type=float, default=2e-3, help="peak learning rate (default 0.002)")
    add("--tv-weight", type=float, default=0.9, help="weight of total variation against KL, 0 to 1 (default 0.9)")
    add("--seed", type=int, default=0, help="of sampling, first weights and order (default 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: cuda if there is one")
    add("--threads", type=int, default=0, help="CPU threads (default: all cores)")
    add("--report-prompts", type=Path, help="prompts of the report (default: beginnings of texts not trained on)")
    return result


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for values that no run can have."""
    for name in ("draft_length", "sample_batch", "epochs", "batch", "tokens", "learning_rate"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    if options.kind == "dspark" and options.draft_length < 2:
        raise ConfigError("--draft-length must be at least 2 for dspark; for 1 choose --kind eagle3")
    if options.length < 4 * options.draft_length:
        raise ConfigError(f"--length must be at least {4 * options.draft_length}, four times --draft-length")
    if not 0 <= options.tv_weight <= 1:
        raise ConfigError("--tv-weight must be from 0 to 1")
    if options.layers is not None and options.layers < 1:
        raise ConfigError("--layers must be at least 1")


def sizes_of(options: argparse.Namespace) -> TextSizes:
    """Return how much is sampled; raises ConfigError if that is too little."""
    num_batches = int(options.tokens // (options.sample_batch * options.length))
    sizes = TextSizes(num_batches, options.sample_batch, options.length)
    least = NUM_VALIDATION + options.batch
    if num_batches * options.sample_batch < least:
        raise ConfigError(
            f"--tokens {options.tokens:g} are {num_batches * options.sample_batch} texts in batches of "
            f"{options.sample_batch}, and at least {least} are needed; raise --tokens or lower --sample-batch"
        )
    return sizes


def prompts_of(options: argparse.Namespace, target: Target) -> Prompts:
    """Beginnings of texts: prompts of a file, or the begin token."""
    if options.prompts is not None:
        return read_prompts(options.prompts, options.target, sys.maxsize, options.length - 1)
    begin = target.config.bos_token_id
    if begin is None:
        raise ConfigError(f"{options.target} has no begin token to sample from; name a file of beginnings by --prompts")
    return [(int(begin),)]


def distill(options: argparse.Namespace) -> dict[str, Any]:
    """Sample, train, save and measure; the report."""
    check_options(options)
    sizes, device = sizes_of(options), choose_device(options.device)
    torch.set_num_threads(options.threads or usable_cores())
    check_source(*Source(options.target, options.revision))
    began = time.monotonic()
    target = Target(options.target, options.revision, options.taps, device)
    shape = shape_of(options, target)
    head = new_head(shape, target, options.seed)  # refuses unsuitable targets before anything is sampled
    output = options.output or Path(f"{Path(options.target).name}-{options.kind}")
    texts = Texts(options.texts or output / "texts", sizes)
    settings = settings_of(options, target, shape)
    texts.check(settings["texts"])
    texts.sample(target, prompts_of(options, target), options.seed)
    config, sampled_s = write_config(shape, target), time.monotonic() - began
    schedule = TrainingPlan(
        options.epochs, options.batch, options.learning_rate, options.draft_length, options.tv_weight, options.seed
    )
    training = Training(head, options.kind, texts, schedule, settings, output / "checkpoint.pt")
    del target
    training.run()
    save_head(head, config, output)
    report = {
        **settings,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "seconds_of_the_last_run": {"sampling": round(sampled_s), "all": round(time.monotonic() - began)},
        "loss": {"first": training.losses[0], "last": training.losses[-1]},
        "validation": training.validations,
        "served": measure(options, output, texts),
    }
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf8")
    return report


def shape_of(options: argparse.Namespace, target: Target) -> HeadShape:
    """Type and size of the head."""
    config = target.config
    tokens = (options.mask_token, config.pad_token_id, config.eos_token_id, 0)
    mask = next(token for token in tokens if isinstance(token, int))
    layers = options.layers or (2 if options.kind == "dspark" else 1)
    return HeadShape(options.kind, layers, options.draft_length, mask)


def settings_of(options: argparse.Namespace, target: Target, shape: HeadShape) -> dict[str, Any]:
    """All that the result depends on."""
    names = ("epochs", "batch", "learning_rate", "tv_weight", "seed")
    texts = {
        "target": Path(options.target).name,
        "revision": options.revision,
        "taps": list(target.taps),
        "length": options.length,
        "sample_batch": options.sample_batch,
        "prompts": None if options.prompts is None else options.prompts.name,
        "seed": options.seed,
    }
    return {
        "head": vars(shape),
        "num_tokens": sizes_of(options).num_tokens,
        "texts": texts,
        **{name: getattr(options, name) for name in names},
    }


def measure(options: argparse.Namespace, output: Path, texts: Texts) -> dict[str, Any]:
    """Acceptance by the engine, on held-out prompts."""
    if options.report_prompts is not None:
        prompts = read_prompts(options.report_prompts, options.target, _REPORT_PROMPTS, options.length)
    else:
        held_out = texts.rows(range(NUM_VALIDATION))["token_ids"]
        prompts = [tuple(row[: options.length // 4].tolist()) for row in held_out]
    return served_acceptance(
        options.target, str(output), options.device, options.threads, prompts, options.draft_length, _REPORT_TOKENS
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a head: 0, 1 if a model cannot be loaded, 2 for bad input, 130 after an interrupt."""
    options = parser().parse_args(arguments)
    try:
        report = distill(options)
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

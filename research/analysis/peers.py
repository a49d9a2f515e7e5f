"""`research.analysis.peers`: this engine, transformers and llama.cpp in one process, in turns.

Same weights, same prompts, same number of tokens and of threads, no end token. A GGUF file is read
by llama.cpp as it is, and dequantised by transformers. Arms take turns, in reversed order each
time. Writes one JSON document; ratios compare paired runs. Three kinds of prompts:

- random tokens (the default). At temperature 0 every arm's answers are first compared with answers
  of `generate`.
- `--prompt-tokens` measures prompts of random tokens: the time to an answer's only token.
- `--task-prompts FILE` has the prompts of several tasks, in the model's chat template. Times
  include the prompts. Text drafts are used, and the tokens that a pass emits are reported by task.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from engine.models.gguf.folder import file_of
from engine.models.importing import import_transformers
from loadtest.arguments import integers, numbers
from loadtest.checkpoints import lengthened
from loadtest.results import add_output_argument, document, shown_ratio, table, write
from loadtest.statistics import median_of_ratios
from research.analysis.llama_cpp_arm import AS_IT_IS, NUM_CHECKED, TYPES
from research.analysis.loading import add_format_arguments, models_of, random_prompts
from research.analysis.peer_arms import GENERATE, OFF, OWN, Arm, Own, Prompts, Transformers, llama_cpp_arms

_RATIOS = {OWN: "polydraft_to_this", OFF: "off_to_this"}
"""Arms with which every arm is compared, and the names of the ratios."""
_TASK_RATIOS = {OWN: "own_to_this", OFF: "off_to_this"}
Cells = list[dict[str, Any]]
Save = Callable[[Cells], None]
"""Writes the cells measured so far: a run that is stopped leaves them."""


class TaskPrompt(NamedTuple):
    """A prompt in the model's tokens."""

    task: str
    tokens: tuple[int, ...]


def read_prompts(file: Path, folder: str, per_task: int) -> list[TaskPrompt]:
    """Return some prompts of each task, as user messages in a model's chat template."""
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(folder)
    by_task: dict[str, list[TaskPrompt]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").strip().split("\n"):
        record = json.loads(line)
        task = record["task"]
        if len(by_task[task]) == per_task:
            continue
        messages = [{"role": "user", "content": record["prompt"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        by_task[task].append(TaskPrompt(task, tuple(tokens)))
    return [prompt for prompts in by_task.values() for prompt in prompts]


def seconds_in_turns(
    arms: Mapping[str, Arm], batches: Sequence[Prompts], temperature: float, num_tokens: int
) -> dict[str, list[float]]:
    """Return the seconds of each batch of prompts, by arm; num_tokens: of an answer."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number, batch in enumerate(tqdm(batches, desc=f"temperature {temperature:g}", unit="batch")):
        for name in names[::-1] if number % 2 else names:
            began = time.perf_counter()
            answers = arms[name](batch, temperature)  # on the host, so nothing is pending
            seconds[name].append(time.perf_counter() - began)
            assert sum(map(len, answers)) == len(batch) * num_tokens, f"{name} stopped early"
    return seconds


def warm_up(arms: Mapping[str, Arm], batch: Prompts, temperature: float, seconds: float) -> None:
    """Run every arm at least once, and for some seconds."""
    for arm in arms.values():
        deadline = time.perf_counter() + seconds
        arm(batch, temperature)
        while time.perf_counter() < deadline:
            arm(batch, temperature)


def compared(seconds: Mapping[str, list[float]], rates: Mapping[str, float], ratios: Mapping[str, str]) -> Any:
    """Return each arm's rate, seconds, and ratios with intervals to the arms that `ratios`
    names.
    """
    return {
        name: {
            "tokens_per_second": rates[name],
            "seconds": runs,
            **{key: median_of_ratios(runs, seconds[own])._asdict() for own, key in ratios.items() if own in seconds},
        }
        for name, runs in seconds.items()
    }


def measure_random(arms: Mapping[str, Arm], options: argparse.Namespace, save: Save) -> Cells:
    """Return a cell for each temperature, number of requests and length of random prompts."""
    lengths = options.prompt_tokens or [options.prompt]
    cells = []
    for temperature, count, length in itertools.product(options.temperature, options.concurrency, lengths):
        first, *batches = [random_prompts(count, length, 100 * count + repeat) for repeat in range(options.repeats + 1)]
        warm_up(arms, first, temperature, options.warm_up)
        seconds = seconds_in_turns(arms, batches, temperature, options.tokens)
        num_tokens = count * (length if options.prompt_tokens else options.tokens)
        rates = {name: num_tokens / statistics.median(runs) for name, runs in seconds.items()}
        cells.append(
            {
                "temperature": temperature,
                "concurrency": count,
                "prompt": length,
                "arms": compared(seconds, rates, _RATIOS),
            }
        )
        save(cells)
    return cells


def measure_tasks(
    arms: Mapping[str, Arm],
    own: Own,
    prompts: Sequence[TaskPrompt],
    options: argparse.Namespace,
    save: Save,
) -> Cells:
    """Return a cell for each temperature and number of requests."""
    cells = []
    for temperature, count in itertools.product(options.temperature, options.concurrency):
        # Batches of transformers have prompts of one length.
        taking = {name: arm for name, arm in arms.items() if name != GENERATE or count == 1}
        tokens = [prompt.tokens for prompt in prompts]
        batches = [tokens[start : start + count] for start in range(0, len(tokens), count)]
        warm_up(taking, batches[-1], temperature, options.warm_up)
        own.emitted.clear()
        seconds = seconds_in_turns(taking, batches, temperature, options.tokens)
        num_tokens = len(prompts) * options.tokens
        rates = {name: num_tokens / sum(runs) for name, runs in seconds.items()}
        cells.append(
            {
                "temperature": temperature,
                "concurrency": count,
                "arms": compared(seconds, rates, _TASK_RATIOS),
                "tokens_per_pass": tokens_per_pass(own, prompts),
            }
        )
        save(cells)
    return cells


def tokens_per_pass(own: Own, prompts: Sequence[TaskPrompt]) -> dict[str, float]:
    """Return the tokens that a pass with drafts emitted, by task."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for prompt in set(prompts):
        for emitted in own.emitted[prompt.tokens]:
            counts[prompt.task][0] += emitted.num_tokens
            counts[prompt.task][1] += emitted.num_passes
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    return {task: counts[task][0] / max(1, counts[task][1]) for task in tasks}


def markdown(result: dict[str, Any], own: str = OWN) -> str:
    """Return a table with a row per concurrency and arm; own: the arm of this engine, with
    which all arms are compared.
    """
    is_of_prompts = result["options"].get("prompt_tokens") not in (None, "None")
    rows = []
    for cell in result["cells"]:
        first = [f"{cell['prompt']:,}", cell["concurrency"]] if is_of_prompts else [cell["concurrency"]]
        for name, arm in cell["arms"].items():
            ratio = "-" if name == own else shown_ratio(arm[_RATIOS[own]])
            rows.append([*first, name, f"{arm['tokens_per_second']:.0f}", ratio])
    head = ["prompt", "c"] if is_of_prompts else ["c"]
    return table([*head, "arm", "tok/s", f"{own} is (95 % interval)"], rows)


def tasks_markdown(result: dict[str, Any]) -> str:
    """Return the table of speeds with prompts of tasks."""
    rows = []
    for cell in result["cells"]:
        for name, arm in cell["arms"].items():
            row = [
                f"{cell['temperature']:g}",
                cell["concurrency"],
                name,
                f"{arm['tokens_per_second']:.0f}",
            ]
            for own in (OFF, OWN):
                row.append("-" if name == own else shown_ratio(arm[_TASK_RATIOS[own]]))
            rows.append(row)
    return table(["temperature", "c", "arm", "tok/s", "plain is", "with drafts is (95 % interval)"], rows)


def passes_markdown(result: dict[str, Any]) -> str:
    """Return the table of tokens per pass with drafts, by task."""
    tasks = list(result["cells"][0]["tokens_per_pass"])
    rows = []
    for cell in result["cells"]:
        counts = [f"{cell['tokens_per_pass'][task]:.2f}" for task in tasks]
        rows.append([f"{cell['temperature']:g}", cell["concurrency"], *counts])
    return table(["temperature", "c", *tasks], rows)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = argparse.ArgumentParser(prog="python -m research.analysis.peers", description=__doc__.splitlines()[0])
    result.add_argument("target", help="folder of the target (demo.bench_pair writes one), or a GGUF file")
    result.add_argument("draft", nargs="?", help="the same of the draft model (default: none)")
    result.add_argument("--concurrency", type=integers, default=[1, 8], help="prompts at once (default 1,8)")
    result.add_argument("--temperature", type=numbers, default=[1.0], help="temperatures, e.g. 0,0.8 (default 1)")
    result.add_argument("--dtype", default="auto", help="type of weights, as the daemon takes it (default auto)")
    add_format_arguments(result)
    result.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of all arms")
    result.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    result.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    prompts = result.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-tokens",
        type=integers,
        help="measure prompts of these lengths, e.g. 512,4096, in tokens of prompts a second; a checkpoint for shorter "
        "texts is used as if its positions reached that far",
    )
    prompts.add_argument(
        "--task-prompts",
        type=Path,
        help="prompts by task, e.g. analysis/task_prompts/spec_bench.jsonl: JSON lines with task and prompt",
    )
    result.add_argument("--per-task", type=int, default=8, help="most prompts of a task (default 8)")
    result.add_argument("--repeats", type=int, default=4, help="runs of every arm, with random prompts (default 4)")
    result.add_argument(
        "--warm-up",
        type=float,
        default=2.0,
        help="seconds of warm-up of an arm, in which the controller tries shapes",
    )
    result.add_argument("--threads", type=int, default=2, help="threads of all arms")
    result.add_argument("--shapes", nargs="*", default=[], help="also fixed shapes, e.g. block:1x5 bv_race:4x5")
    result.add_argument(
        "--llama-cpp-types",
        nargs="*",
        default=[],
        choices=[*TYPES, AS_IT_IS],
        help="also measure llama.cpp, with weights of these types (needs llama-cpp-python); file: a GGUF file as it "
        "is, the default for such a target",
    )
    result.add_argument(
        "--without",
        nargs="+",
        default=[],
        help="arms to omit, by a part of their names, e.g. assisted continuous",
    )
    add_output_argument(result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cells."""
    options = parser().parse_args(arguments)
    options.target, options.draft = models_of(options)
    if file_of(Path(options.target)) is not None:
        options.llama_cpp_types = options.llama_cpp_types or [AS_IT_IS]
    pair = _about(options)
    names = sorted(vars(options).keys() - {"target", "draft", "output", "task_prompts"})

    def save(cells: Cells, **more: Any) -> None:
        what = "this engine and its peers, in one process"
        write(document(what, options, names, cells=cells, pair=pair, **more), options.output)

    compare = _compare_tasks if options.task_prompts else _compare_random
    save(**compare(options, save))
    return 0


def _about(options: argparse.Namespace) -> Any:
    """Return the bench pair's description, or the names of another pair."""
    about = Path(options.target).parent / "pair.json"
    if about.is_file():
        return json.loads(about.read_text())
    names = {}
    for model in ("target", "draft"):
        if folder := getattr(options, model):
            file = file_of(Path(folder))
            names[model] = file.name if file else Path(folder).name
    return names


def _compare_random(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    """Compare all arms with prompts of random tokens, and print the tables."""
    lengths = options.prompt_tokens or [options.prompt]
    if options.prompt_tokens:
        options.prompt, options.tokens = max(lengths), 1
    with tempfile.TemporaryDirectory() as place:
        for model in ("target", "draft"):
            if folder := getattr(options, model):
                longer = lengthened(Path(folder), max(lengths) + options.tokens, Path(place) / model)
                setattr(options, model, str(longer))
        theirs = Transformers(options)
        arms = Own(options, with_text_drafts=False).arms(options.shapes)
        arms[GENERATE] = theirs.generate
        if options.draft is not None:
            arms["transformers assisted"] = theirs.assisted
        arms["transformers continuous batching"] = theirs.continuous
        arms = _without(arms | llama_cpp_arms(options), options.without)
        checked = random_prompts(NUM_CHECKED, min(lengths), 0)
        expected = theirs.generate(checked, 0.0)
        equal = {name: arm(checked, 0.0) == expected for name, arm in arms.items()}
        cells = measure_random(arms, options, save)
    result = {"greedy_answers_equal_generate": equal, "cells": cells}
    for name in _RATIOS:
        if name in arms:
            print(markdown({"options": vars(options), **result}, name))
    print(json.dumps(equal))
    return result


def _compare_tasks(options: argparse.Namespace, save: Save) -> dict[str, Any]:
    """Compare all arms with the prompts of tasks, and print the tables."""
    prompts = read_prompts(options.task_prompts, options.target, options.per_task)
    lengths = [len(prompt.tokens) for prompt in prompts]
    options.prompt = max(lengths)
    own = Own(options, with_text_drafts=True)
    arms = own.arms(options.shapes)
    if "transformers" not in options.without:
        arms[GENERATE] = Transformers(options).generate
    arms = _without(arms | llama_cpp_arms(options), options.without)
    cells = measure_tasks(arms, own, prompts, options, save)
    about = {
        "prompts": len(prompts),
        "prompt_tokens": {"median": statistics.median(lengths), "longest": max(lengths)},
    }
    result = {"cells": cells, "about": about}
    print(tasks_markdown(result))
    print(passes_markdown(result))
    return result


def _without(arms: Mapping[str, Arm], omitted: Sequence[str]) -> dict[str, Arm]:
    """Return the arms whose names have none of the omitted parts; arms of `_RATIOS` stay."""
    return {name: arm for name, arm in arms.items() if name in _RATIOS or not any(part in name for part in omitted)}


if __name__ == "__main__":
    sys.exit(main())

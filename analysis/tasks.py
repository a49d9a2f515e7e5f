"""`python -m analysis.tasks`: answers to the prompts of several tasks, compared with llama.cpp and transformers.

Same weights (a GGUF file is read by llama.cpp as it is), same prompts in the model's own chat template, same number of
tokens, no end token. Batches of prompts take turns among the arms. Times include the prompts. Reports tokens a second
by requests at once and temperature, and by task how many tokens a pass emits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from analysis.llama_cpp_arm import AS_IT_IS, LlamaCpp, check_library
from analysis.loading import add_format_arguments, config_of, load_engine, models_of
from analysis.peers import GENERATE, OFF, OWN, Answers, Prompts, Transformers
from engine.config import MODEL, PROMPT_LOOKUP, SpeculationConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.models.gguf.folder import file_of
from engine.models.importing import import_transformers
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.request_checks import default_speculation
from engine.start.calibration import measure_points
from loadtest.arguments import integers, numbers
from loadtest.results import add_output_argument, document, shown_ratio, table, write
from loadtest.statistics import median_of_ratios

PROMPTS = Path(__file__).parent / "task_prompts" / "spec_bench.jsonl"
LLAMA_CPP = "llama.cpp"


class TaskPrompt(NamedTuple):
    """A prompt in the model's tokens."""

    task: str
    tokens: list[int]


class Emitted(NamedTuple):
    """Counts of the passes of a request."""

    num_tokens: int
    num_passes: int


class OwnArms:
    """This engine: plain, and as it is served with drafts."""

    def __init__(self, options: argparse.Namespace) -> None:
        drafters = (PROMPT_LOOKUP,) if options.draft is None else (MODEL, PROMPT_LOOKUP)
        limits = SpeculationConfig(drafters=drafters, adaptive=True)
        self._engine = engine = load_engine(config_of(options, speculation=limits, needs_draft=False))
        drafted = default_speculation(limits, engine.facts)
        engine.scheduler.times = times = StepTimes(measure_points(engine, drafted), is_eager=engine.recorded.is_eager)
        if drafted.adapts_shape:
            engine.scheduler.controller = Controller(times, limits.max_draft_length)
        self._speculations = {OFF: Speculation(), OWN: drafted}
        self._num_tokens, self._number = options.tokens, 0
        self.emitted: dict[tuple[str, str], list[Emitted]] = defaultdict(list)
        """Counts of requests, by arm and task."""

    def run(self, name: str, prompts: Sequence[TaskPrompt], temperature: float) -> None:
        """Answer prompts at once."""
        tasks: dict[str, str] = {}
        counts: dict[str, list[int]] = defaultdict(list)
        for prompt in prompts:
            self._number += 1
            request_id = str(self._number)
            tasks[request_id] = prompt.task
            self._engine.submit(
                Request(
                    request_id=request_id,
                    prompt_token_ids=tuple(prompt.tokens),
                    sampling=Sampling(temperature=temperature, seed=self._number),
                    limits=Limits(max_tokens=self._num_tokens, ignore_eos=True),
                    speculation=self._speculations[name],
                    cache_salt=request_id,
                )
            )
        while self._engine.scheduler.has_work:
            for outcome in self._engine.run_step().outcomes:
                if outcome.token_ids:
                    counts[outcome.request_id].append(len(outcome.token_ids))
        for request_id, of_passes in counts.items():
            # The first token is the prompt's.
            found = Emitted(sum(of_passes[1:]), len(of_passes) - 1)
            self.emitted[name, tasks[request_id]].append(found)


class Arms:
    """All arms of a model, by their names."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.own = OwnArms(options)
        self.theirs = None if "transformers" in options.without else Transformers(options)
        self.llama_cpp = None if LLAMA_CPP in options.without else LlamaCpp(options, options.llama_cpp_type)
        self._threads = options.threads

    def names(self, concurrency: int) -> list[str]:
        """Return the arms that answer this many prompts at once: transformers' batches are of prompts of one length."""
        names = [OWN, OFF]
        if self.llama_cpp is not None:
            names.append(LLAMA_CPP)
        if self.theirs is not None and concurrency == 1:
            names.append(GENERATE)
        return names

    def run(self, name: str, prompts: Sequence[TaskPrompt], temperature: float) -> float:
        """Answer prompts at once; return the seconds that it took."""
        torch.set_num_threads(self._threads)
        texts: Prompts = [prompt.tokens for prompt in prompts]
        began = time.perf_counter()
        answers: Answers | None = None
        if name == LLAMA_CPP and self.llama_cpp is not None:
            answers = self.llama_cpp.plain(texts, temperature)
        elif name == GENERATE and self.theirs is not None:
            answers = self.theirs.generate(texts, temperature)
        else:
            self.own.run(name, prompts, temperature)
        taken_s = time.perf_counter() - began
        assert answers is None or len(answers) == len(texts)
        return taken_s


def read_prompts(file: Path, folder: str, per_task: int) -> list[TaskPrompt]:
    """Return some prompts of each task, as user messages in a model's chat template."""
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(folder)
    by_task: dict[str, list[TaskPrompt]] = defaultdict(list)
    for line in file.read_text(encoding="utf-8").strip().split("\n"):
        stated = json.loads(line)
        if len(by_task[stated["task"]]) == per_task:
            continue
        messages = [{"role": "user", "content": stated["prompt"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        by_task[stated["task"]].append(TaskPrompt(stated["task"], tokens))
    return [prompt for prompts in by_task.values() for prompt in prompts]


def measure(
    arms: Arms, prompts: Sequence[TaskPrompt], concurrency: int, temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Answer all prompts in batches, in turns of the arms; return a cell of the result."""
    names = arms.names(concurrency)
    batches = [prompts[first : first + concurrency] for first in range(0, len(prompts), concurrency)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    arms.own.emitted.clear()
    for name in names:
        arms.run(name, batches[-1], temperature)
    arms.own.emitted.clear()
    label = f"temperature {temperature:g}, {concurrency} at once"
    for number, batch in enumerate(tqdm(batches, desc=label, unit="batch")):
        for name in names if number % 2 else names[::-1]:
            seconds[name].append(arms.run(name, batch, temperature))
    num_tokens = len(prompts) * options.tokens
    return {
        "temperature": temperature,
        "concurrency": concurrency,
        "arms": {
            name: {
                "tokens_per_second": num_tokens / sum(taken_s),
                "seconds": taken_s,
                "own_to_this": median_of_ratios(taken_s, seconds[OWN])._asdict(),
                "off_to_this": median_of_ratios(taken_s, seconds[OFF])._asdict(),
            }
            for name, taken_s in seconds.items()
        },
        "tokens_per_pass": {
            task: _tokens_per_pass(arms.own.emitted[OWN, task]) for task in dict.fromkeys(one.task for one in prompts)
        },
    }


def _tokens_per_pass(emitted: Sequence[Emitted]) -> float:
    return sum(one.num_tokens for one in emitted) / max(1, sum(one.num_passes for one in emitted))


def markdown(result: dict[str, Any]) -> str:
    """Return the table of speeds."""
    rows = []
    for cell in result["cells"]:
        first = [f"{cell['temperature']:g}", str(cell["concurrency"])]
        for name, arm in cell["arms"].items():
            off, own = (shown_ratio(arm[key]) for key in ("off_to_this", "own_to_this"))
            compared = [off if name != OFF else "-", own if name != OWN else "-"]
            rows.append([*first, name, f"{arm['tokens_per_second']:.0f}", *compared])
    return table(["temperature", "c", "arm", "tok/s", "plain is", "with drafts is (95 % interval)"], rows)


def tasks_markdown(result: dict[str, Any]) -> str:
    """Return the table of tokens per pass with drafts, by task."""
    tasks = list(result["cells"][0]["tokens_per_pass"])
    rows = [
        [
            f"{cell['temperature']:g}",
            str(cell["concurrency"]),
            *(f"{cell['tokens_per_pass'][task]:.2f}" for task in tasks),
        ]
        for cell in result["cells"]
    ]
    return table(["temperature", "c", *tasks], rows)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = argparse.ArgumentParser(prog="python -m analysis.tasks", description=__doc__.splitlines()[0])
    result.add_argument("target", help="GGUF file, folder or hub name of the model")
    result.add_argument("draft", nargs="?", help="the same of a draft model; without one, text drafts alone")
    result.add_argument("--prompts", type=Path, default=PROMPTS, help="file of prompts by task (default: Spec-Bench's)")
    result.add_argument("--per-task", type=int, default=8, help="most prompts of a task (default 8)")
    result.add_argument("--tokens", type=int, default=64, help="tokens of an answer (default 64)")
    result.add_argument("--concurrency", type=integers, default=[1, 4, 16], help="prompts at once (default 1,4,16)")
    result.add_argument("--temperature", type=numbers, default=[0.0, 0.8], help="temperatures (default 0,0.8)")
    result.add_argument("--dtype", default="auto", help="type of weights, as the daemon takes it (default auto)")
    add_format_arguments(result)
    result.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of all arms")
    result.add_argument("--threads", type=int, default=2, help="threads of all arms")
    result.add_argument("--llama-cpp-type", default=AS_IT_IS, help="llama.cpp's weights (default: the file's)")
    result.add_argument("--without", nargs="+", default=[], help="arms to omit: transformers, llama.cpp")
    add_output_argument(result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cells."""
    options = parser().parse_args(arguments)
    options.target, options.draft = models_of(options)
    if LLAMA_CPP not in options.without:
        check_library()
    prompts = read_prompts(options.prompts, options.target, options.per_task)
    options.prompt = max(len(prompt.tokens) for prompt in prompts)
    arms = Arms(options)
    lengths = {"median": statistics.median(len(prompt.tokens) for prompt in prompts), "longest": options.prompt}
    own = file_of(Path(options.target))
    about = {"model": own.name if own else Path(options.target).name, "prompts": len(prompts), "prompt_tokens": lengths}
    names = sorted(vars(options).keys() - {"target", "draft", "output", "prompts"})
    cells: list[dict[str, Any]] = []
    for temperature, concurrency in itertools.product(options.temperature, options.concurrency):
        cells.append(measure(arms, prompts, concurrency, temperature, options))
        title = "answers to prompts of several tasks, in one process"
        result = document(title, options, names, cells=cells, about=about)
        write(result, options.output)  # a run that is stopped leaves its cells
    print(markdown(result))
    print(tasks_markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

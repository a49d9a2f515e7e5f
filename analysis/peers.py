"""`python -m analysis.peers`: this engine compared with transformers and llama.cpp, in one process, interleaved.

Same weights, same prompts of random tokens, same number of tokens and of threads, no end token. A GGUF file is read by
llama.cpp as it is, and dequantised by transformers. At temperature 0 every arm's answers are first compared with those
of `generate`. `--prompt-tokens` measures prompts: the time to an answer's
only token. Writes one JSON document; ratios are those of paired runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from analysis.arms import make_arms, speculation_of
from analysis.llama_cpp_arm import AS_IT_IS, NUM_CHECKED, TYPES, LlamaCpp, check_library
from analysis.load import Load
from analysis.loading import add_format_arguments, config_of, load_engine, models_of, random_prompts
from engine.models.gguf.folder import file_of
from engine.request import Limits, Request, Sampling, Speculation
from engine.start.calibration import measure_points
from engine.start.number_formats import arithmetic_dtype
from loadtest.arguments import integers
from loadtest.arms import ADAPTIVE
from loadtest.arms import OFF as PLAIN
from loadtest.checkpoints import lengthened
from loadtest.results import add_output_argument, document, shown_ratio, table, write
from loadtest.statistics import median_of_ratios

Prompts = list[list[int]]
Answers = list[list[int]]
Arm = Callable[[Prompts, float], Answers]

OWN, OFF, GENERATE = "polydraft", "polydraft off", "transformers generate"
_RATIOS = {OWN: "polydraft_to_this", OFF: "off_to_this"}
"""Arms with which every arm is compared, and the names of the ratios."""


class Own:
    """This engine with adaptive speculation, a fixed shape, or none."""

    def __init__(self, options: argparse.Namespace) -> None:
        engine = load_engine(config_of(options, needs_draft=False))
        name = PLAIN if options.draft is None else ADAPTIVE
        points = measure_points(engine, speculation_of(name))
        self.engine = make_arms(engine, [name], points, Load((), options.tokens, 0.0))[name].engine
        self.num_tokens = options.tokens
        self._threads = options.threads
        self._number = 0

    def arm(self, name: str) -> Arm:
        """Return an arm by its name (`arms.speculation_of`)."""
        return partial(self._run, speculation=speculation_of(name))

    def _run(self, prompts: Prompts, temperature: float, speculation: Speculation) -> Answers:
        torch.set_num_threads(self._threads)
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            self._number += 1
            answers[str(self._number)] = []
            self.engine.submit(
                Request(
                    request_id=str(self._number),
                    prompt_token_ids=tuple(prompt),
                    sampling=Sampling(temperature=temperature, seed=self._number),
                    limits=Limits(max_tokens=self.num_tokens, ignore_eos=True),
                    speculation=speculation,
                    cache_salt=str(self._number),
                )
            )
        while self.engine.scheduler.has_work:
            for outcome in self.engine.run_step().outcomes:
                answers[outcome.request_id] += outcome.token_ids
        return list(answers.values())


class Transformers:
    """Generation by transformers, with separate models."""

    def __init__(self, options: argparse.Namespace) -> None:
        import transformers

        device = torch.device(options.device)
        dtype = arithmetic_dtype(options.dtype, device) or "auto"

        def load(folder: str) -> Any:
            config = transformers.AutoConfig.from_pretrained(folder)  # of a GGUF file as long as is asked for
            own = file_of(Path(folder))
            place = (folder, {}) if own is None else (str(own.parent), {"gguf_file": own.name})
            model = transformers.AutoModelForCausalLM.from_pretrained(place[0], config=config, dtype=dtype, **place[1])
            model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
            return model.to(device).eval()

        self.target = load(options.target)
        self._threads = options.threads
        self.num_tokens = options.tokens
        if options.draft is None:
            return
        self.draft = load(options.draft)
        self.draft.generation_config.num_assistant_tokens = 5
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.draft.generation_config.assistant_confidence_threshold = 0.0

    def generate(self, prompts: Prompts, temperature: float) -> Answers:
        """Run one static batch."""
        return self._generate(prompts, temperature)

    def assisted(self, prompts: Prompts, temperature: float) -> Answers:
        """Run assisted generation with five drafts, one prompt at a time."""
        return [self._generate([prompt], temperature, assistant_model=self.draft)[0] for prompt in prompts]

    def continuous(self, prompts: Prompts, temperature: float) -> Answers:
        """Run continuous batching."""
        torch.set_num_threads(self._threads)
        outputs = self.target.generate_batch(prompts, generation_config=sampled(self.num_tokens, temperature))
        return [
            outputs[name].generated_tokens for name in sorted(outputs, key=lambda name: int(name.rsplit("_", 1)[1]))
        ]

    def _generate(self, prompts: Prompts, temperature: float, **more: Any) -> Answers:
        torch.set_num_threads(self._threads)
        ids = torch.tensor(prompts, device=self.target.device)
        with torch.inference_mode():
            output = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=sampled(self.num_tokens, temperature),
                **more,
            )
        answers: Answers = output[:, ids.shape[1] :].tolist()
        return answers


def sampled(num_tokens: int, temperature: float) -> Any:
    """Return transformers' configuration of answers of this many tokens, without an end."""
    from transformers import GenerationConfig

    # Omitted fields would come from the checkpoint's generation_config, which may sample.
    filters = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    return GenerationConfig(
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=temperature > 0,
        **filters,
    )


def measure(
    arms: dict[str, Arm], concurrency: int, length: int, options: argparse.Namespace, progress: Any
) -> dict[str, Any]:
    """Run all arms on the same prompts, in turn, in reversed order each time, after a warm-up.

    length: tokens of a prompt.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    prompts = random_prompts(concurrency, length, 100 * concurrency)
    for arm in arms.values():
        deadline = time.perf_counter() + options.warm_up
        arm(prompts, options.temperature)
        while time.perf_counter() < deadline:
            arm(prompts, options.temperature)
        progress.update()
    for repeat in range(1, options.repeats + 1):
        prompts = random_prompts(concurrency, length, 100 * concurrency + repeat)
        for name in list(arms) if repeat % 2 else list(arms)[::-1]:
            began = time.perf_counter()
            answers = arms[name](prompts, options.temperature)  # on the host, so nothing is pending
            elapsed = time.perf_counter() - began
            assert sum(map(len, answers)) == concurrency * options.tokens, f"{name} stopped early"
            seconds[name].append(elapsed)
            progress.update()
    num_tokens = concurrency * (length if options.prompt_tokens else options.tokens)
    return {
        "concurrency": concurrency,
        "prompt": length,
        "arms": {
            name: {
                "tokens_per_second": num_tokens / statistics.median(runs),
                "seconds": runs,
                **{key: median_of_ratios(runs, seconds[own])._asdict() for own, key in _RATIOS.items() if own in arms},
            }
            for name, runs in seconds.items()
        },
    }


def _about(options: argparse.Namespace) -> Any:
    """Return the bench pair's description, or the names of another pair."""
    about = Path(options.target).parent / "pair.json"
    names = {name: Path(folder).name for name in ("target", "draft") if (folder := getattr(options, name))}
    return json.loads(about.read_text()) if about.is_file() else names


def markdown(result: dict[str, Any], own: str = OWN) -> str:
    """Return a table with a row per concurrency and arm; own: the arm of this engine that is compared with the
    others.
    """
    of_prompts = result["options"].get("prompt_tokens") not in (None, "None")
    rows = []
    for cell in result["cells"]:
        first = [f"{cell['prompt']:,}", cell["concurrency"]] if of_prompts else [cell["concurrency"]]
        for name, arm in cell["arms"].items():
            compared = "-" if name == own else shown_ratio(arm[_RATIOS[own]])
            rows.append([*first, name, f"{arm['tokens_per_second']:.0f}", compared])
    return table([*(["prompt"] if of_prompts else []), "c", "arm", "tok/s", f"{own} is (95 % interval)"], rows)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    result = argparse.ArgumentParser(prog="python -m analysis.peers", description=__doc__.splitlines()[0])
    result.add_argument("target", help="folder of the target (demo.bench_pair writes one), or a GGUF file")
    result.add_argument("draft", nargs="?", help="the same of the draft model (default: none, so nothing is drafted)")
    result.add_argument("--concurrency", type=integers, default=[1, 8], help="prompts at once (default 1,8)")
    result.add_argument("--temperature", type=float, default=1.0, help="sampling temperature")
    result.add_argument("--dtype", default="auto", help="type of weights, as the daemon takes it (default auto)")
    add_format_arguments(result)
    result.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of all arms")
    result.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    result.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    result.add_argument(
        "--prompt-tokens",
        type=integers,
        help="measure prompts of these lengths, e.g. 512,4096, in tokens of prompts a second; a checkpoint for shorter "
        "texts is used as if its positions reached that far",
    )
    result.add_argument("--repeats", type=int, default=4, help="runs of every arm")
    result.add_argument(
        "--warm-up", type=float, default=2.0, help="seconds of warm-up of an arm, in which the controller tries shapes"
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
        "--without", nargs="+", default=[], help="arms to omit, by a part of their names, e.g. assisted continuous"
    )
    add_output_argument(result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cells."""
    options = parser().parse_args(arguments)
    options.target, options.draft = models_of(options)
    if file_of(Path(options.target)) is not None:
        options.llama_cpp_types = options.llama_cpp_types or [AS_IT_IS]
    about, lengths = _about(options), options.prompt_tokens or [options.prompt]
    if options.prompt_tokens:
        options.prompt, options.tokens = max(lengths), 1
    with tempfile.TemporaryDirectory() as place:
        room, folders = max(lengths) + options.tokens, (options.target, options.draft)
        options.target, options.draft = (
            folder and str(lengthened(Path(folder), room, Path(place) / str(number)))
            for number, folder in enumerate(folders)
        )
        found = _compared(options, lengths)
    names = vars(options).keys() - {"target", "draft", "output"}
    what = "this engine and transformers, in one process; prompts of random tokens"
    result = document(what, options, sorted(names), **found, pair=about)
    write(result, options.output)
    for name in _RATIOS:
        if name in result["greedy_answers_equal_generate"]:
            print(markdown(result, name))
    print(json.dumps(result["greedy_answers_equal_generate"]))
    return 0


def _arms(options: argparse.Namespace, theirs: Transformers) -> dict[str, Arm]:
    """Return the arms that the command line names."""
    if options.llama_cpp_types and "llama.cpp" not in options.without:
        check_library()
    own, has_draft = Own(options), options.draft is not None
    arms: dict[str, Arm] = {OWN: own.arm(ADAPTIVE)} if has_draft else {}
    arms |= {OFF: own.arm(PLAIN), **{f"polydraft {shape}": own.arm(shape) for shape in options.shapes}}
    arms[GENERATE] = theirs.generate
    if has_draft:
        arms["transformers assisted"] = theirs.assisted
    arms["transformers continuous batching"] = theirs.continuous
    for kind in options.llama_cpp_types if "llama.cpp" not in options.without else ():
        llama_cpp = LlamaCpp(options, kind)
        name = "llama.cpp" if kind == AS_IT_IS else f"llama.cpp {kind}"
        arms[name] = llama_cpp.plain
        if has_draft:
            arms[f"{name} with 3 drafts"] = llama_cpp.drafted
    omitted = {name for name in arms if name not in _RATIOS and any(part in name for part in options.without)}
    return {name: arm for name, arm in arms.items() if name not in omitted}


def _compared(options: argparse.Namespace, lengths: Sequence[int]) -> dict[str, Any]:
    theirs = Transformers(options)
    arms = _arms(options, theirs)
    checked = random_prompts(NUM_CHECKED, min(lengths), 0)
    expected = theirs.generate(checked, 0.0)
    equal = {name: arm(checked, 0.0) == expected for name, arm in arms.items()}
    cells = list(itertools.product(options.concurrency, lengths))
    with tqdm(total=len(cells) * (options.repeats + 1) * len(arms), desc="runs", unit="run") as progress:
        measured = [measure(arms, count, length, options, progress) for count, length in cells]
    return {"greedy_answers_equal_generate": equal, "cells": measured}


if __name__ == "__main__":
    sys.exit(main())

"""Arms of `research.analysis.peers`: this engine and transformers; llama.cpp: `llama_cpp_arm.py`.

An arm answers several prompts at once, with the same number of tokens each, and returns the
answers.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.config import MODEL, PROMPT_LOOKUP, SpeculationConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.models.gguf.folder import file_of
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.request_checks import default_speculation
from engine.start.distribution_check import run_to_end
from engine.start.measuring import measure_prices
from engine.start.number_formats import arithmetic_dtype
from research.analysis.arms import speculation_of
from research.analysis.llama_cpp_arm import AS_IT_IS, LlamaCpp, check_library
from research.analysis.loading import config_of, load_engine

Prompts = Sequence[Sequence[int]]
Answers = list[list[int]]
Arm = Callable[[Prompts, float], Answers]
"""Takes prompts and a temperature."""
OWN, OFF, GENERATE = "polydraft", "polydraft off", "transformers generate"


class Emitted(NamedTuple):
    """Tokens and passes of an answer, without the pass of its prompt, which emits one token."""

    num_tokens: int
    num_passes: int


class Own:
    """This engine, as it is served with drafts, with a fixed shape, or without drafts."""

    def __init__(self, options: argparse.Namespace, with_text_drafts: bool) -> None:
        drafters = (PROMPT_LOOKUP,) if with_text_drafts else ()
        if options.draft is not None or not with_text_drafts:
            drafters = (MODEL, *drafters)
        limits = SpeculationConfig(drafters=drafters, adaptive=True)
        engine = load_engine(config_of(options, speculation=limits, needs_draft=False))
        self.served = default_speculation(limits, engine.facts)
        times = StepTimes(measure_prices(engine, self.served))
        engine.scheduler.times = times
        if self.served.adapts_shape:
            engine.scheduler.controller = Controller(times, limits.max_draft_length)
        self.engine = engine
        self.emitted: dict[tuple[int, ...], list[Emitted]] = defaultdict(list)
        """Counts of the answers of the arm with the served drafts, by prompt."""
        self._num_tokens = options.tokens
        self._threads = options.threads
        self._number = 0

    def arms(self, shapes: Sequence[str]) -> dict[str, Arm]:
        """Return the arms by name; shapes: as of `arms.speculation_of`."""
        speculations = {OFF: Speculation()}
        if self.served != Speculation():
            speculations = {OWN: self.served, **speculations}
        speculations |= {f"{OWN} {shape}": speculation_of(shape) for shape in shapes}
        return {name: partial(self._run, speculation=one) for name, one in speculations.items()}

    def _run(self, prompts: Prompts, temperature: float, speculation: Speculation) -> Answers:
        torch.set_num_threads(self._threads)
        requests = []
        for prompt in prompts:
            self._number += 1
            requests.append(
                Request(
                    request_id=str(self._number),
                    prompt_token_ids=tuple(prompt),
                    sampling=Sampling(temperature=temperature, seed=self._number),
                    limits=Limits(max_tokens=self._num_tokens, ignore_eos=True),
                    speculation=speculation,
                    cache_salt=str(self._number),
                )
            )
        answers = list(run_to_end(self.engine, requests).values())
        if speculation is self.served:
            for prompt, answer in zip(prompts, answers, strict=True):
                num_passes = sum(bool(outcome.token_ids) for _, outcome in answer.steps)
                self.emitted[tuple(prompt)].append(Emitted(len(answer.tokens) - 1, num_passes - 1))
        return [answer.tokens for answer in answers]


class Transformers:
    """Generation by transformers, with separate models."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._device = torch.device(options.device)
        self._dtype = arithmetic_dtype(options.dtype, self._device) or "auto"
        self._threads = options.threads
        self.num_tokens = options.tokens
        self.target = self._load(options.target)
        if options.draft is None:
            return
        self.draft = self._load(options.draft)
        self.draft.generation_config.num_assistant_tokens = 5
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.draft.generation_config.assistant_confidence_threshold = 0.0

    def _load(self, folder: str) -> Any:
        import transformers

        # The configuration of a GGUF file's folder has as many positions as were asked for.
        config = transformers.AutoConfig.from_pretrained(folder)
        load = partial(transformers.AutoModelForCausalLM.from_pretrained, config=config, dtype=self._dtype)
        file = file_of(Path(folder))
        model = load(folder) if file is None else load(str(file.parent), gguf_file=file.name)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = None
        return model.to(self._device).eval()

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
        names = sorted(outputs, key=lambda name: int(name.rsplit("_", 1)[1]))
        return [outputs[name].generated_tokens for name in names]

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


def llama_cpp_arms(options: argparse.Namespace) -> dict[str, Arm]:
    """Return llama.cpp's arms by type of weights; raise ConfigError without its library."""
    if "llama.cpp" in options.without or not options.llama_cpp_types:
        return {}
    check_library()
    arms: dict[str, Arm] = {}
    for kind in options.llama_cpp_types:
        llama_cpp = LlamaCpp(options, kind)
        name = "llama.cpp" if kind == AS_IT_IS else f"llama.cpp {kind}"
        arms[name] = llama_cpp.plain
        if options.draft is not None:
            arms[f"{name} with 3 drafts"] = llama_cpp.drafted
    return arms

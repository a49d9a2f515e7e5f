"""What the papers' tables share: texts of the target with both laws along them, and answers by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from engine.analysis.loading import read_prompts
from engine.analysis.pair import answers_of, laws_along
from engine.engine import Engine
from engine.request import Limits, Request, Sampling, Speculation
from engine.speculation.theory import Law

TASKS = ("dialogues", "gsm8k", "humaneval", "mgsm", "alpaca")
"""The task sets of SpecTr-GBV, with held-out dialogues in place of LM1B."""

Progress = Callable[[str], None]
"""Called after every piece of work, with what it was."""


@dataclass(frozen=True)
class Pair:
    """A pair behind an idle engine."""

    engine: Engine
    target: str
    """Folder or name, for its tokenizer."""
    name: str
    most_prompts: int
    """Prompts of each task."""
    tokens: int
    """Of an answer."""
    prompt_length: int = 128

    def prompts(self, task: str) -> list[tuple[int, ...]]:
        """The task's prompts as tokens, the ends of long ones."""
        if task == "dialogues":
            return read_prompts(None, self.target, self.most_prompts, self.prompt_length)
        file = Path(str(files("engine").joinpath("analysis", "papers", "prompts", f"{task}.jsonl")))
        return read_prompts(file, self.target, self.most_prompts, self.prompt_length)


@dataclass(frozen=True)
class Step:
    """What one step of an answer did."""

    start: int
    """Tokens of the answer before it."""
    drafted: int
    """Tokens in each of its chains; 0 in a plain step."""
    accepted: int
    emitted: int


def followed(
    pair: Pair, prompt: tuple[int, ...], speculation: Speculation, seed: int, num_tokens: int
) -> tuple[list[int], list[Step]]:
    """One answer of the engine at temperature 1, step by step: its tokens, and its steps."""
    pair.engine.scheduler.blocks.forget_all()  # passes beside the scheduler may have written anywhere
    limits = Limits(max_tokens=num_tokens, ignore_eos=True)
    pair.engine.scheduler.submit(
        Request(
            request_id="0",
            prompt_token_ids=prompt,
            sampling=Sampling(seed=seed),
            limits=limits,
            speculation=speculation,
        )
    )
    tokens: list[int] = []
    steps = []
    while pair.engine.scheduler.has_work:
        for outcome in pair.engine.run_step().outcomes:
            if outcome.token_ids:
                emitted = len(outcome.token_ids)
                steps.append(Step(len(tokens), outcome.draft_length, outcome.num_accepted, emitted))
                tokens += outcome.token_ids
    return tokens, steps


def recorded_laws(
    pair: Pair, prompts: Sequence[tuple[int, ...]], temperature: float, positions: int
) -> list[tuple[Law, Law]]:
    """(p, q) at positions spread over the text that the target writes behind the prompts."""
    answers = answers_of(pair.engine, list(prompts), Speculation(), temperature, pair.tokens)
    texts = [(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True) if len(answer.tokens) > 1]
    wanted = max(1, -(-positions // len(texts)))
    laws: list[tuple[Law, Law]] = []
    for number, (prompt, tokens) in enumerate(texts):
        target_NV, draft_NV = laws_along(pair.engine, prompt, tokens, temperature)
        step = max(1, len(tokens) // wanted)
        for position in range(number % step, len(tokens), step):
            p, q = (rows[position].double().cpu().numpy() for rows in (target_NV, draft_NV))
            laws.append((p / p.sum(), q / q.sum()))
    return laws[:positions]


def made_up_laws(vocabulary: int, count: int, disturbance: float = 0.6) -> list[tuple[Law, Law]]:
    """Pairs of laws over large vocabularies: Zipf's logits in random order, and the same with noise."""
    laws = []
    for seed in range(count):
        random = np.random.default_rng(seed)
        logits = -1.2 * np.log(1 + random.permutation(vocabulary)) * random.uniform(0.9, 1.5)
        noisy = logits + random.normal(0, disturbance, vocabulary)
        p, q = (np.exp(one - one.max()) for one in (logits, noisy))
        laws.append((p / p.sum(), q / q.sum()))
    return laws

"""Shared parts of the papers' tables.

Texts of the target with both distributions along them, and answers by task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.request import Speculation
from engine.speculation.theory import Law
from engine.step.engine import Engine
from research.analysis.loading import read_prompts
from research.analysis.pair import answers_of, laws_along

Progress = Callable[[str], None]
"""Callback with the name of each completed piece of work."""
Text = tuple[tuple[int, ...], list[int]]
"""(prompt, tokens of the answer)."""


@dataclass(frozen=True)
class ServedPair:
    """A pair with an idle engine."""

    engine: Engine
    target: str
    """Folder or name, for its tokenizer."""
    name: str
    most_prompts: int
    """Prompts of each task."""
    tokens: int
    """Tokens of an answer."""
    prompt_length: int = 128

    def dialogues(self, times: int = 1) -> list[tuple[int, ...]]:
        """Return held-out dialogues as tokens: at most `times` times the prompts of a task."""
        return read_prompts("dialogues", self.target, times * self.most_prompts, self.prompt_length)

    def prompts(self, task: str) -> list[tuple[int, ...]]:
        """Return the task's prompts as tokens; of long ones the end."""
        if task == "dialogues":
            return self.dialogues()
        file = Path(__file__).parent / "prompts" / f"{task}.jsonl"
        return read_prompts(file, self.target, self.most_prompts, self.prompt_length)


def texts_of(pair: ServedPair, prompts: Sequence[tuple[int, ...]], temperature: float) -> list[Text]:
    """Return the target's continuations of the prompts that are longer than one token."""
    answers = answers_of(pair.engine, prompts, Speculation(), temperature, pair.tokens)
    return [(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True) if len(answer.tokens) > 1]


def recorded_distributions(
    pair: ServedPair, texts: Sequence[Text], temperature: float, positions: int
) -> list[tuple[Law, Law]]:
    """Return (p, q) at positions spread over the texts: the same positions at every temperature."""
    wanted = max(1, -(-positions // len(texts)))
    laws: list[tuple[Law, Law]] = []
    for number, (prompt, tokens) in enumerate(texts):
        target_NV, draft_NV = laws_along(pair.engine, prompt, tokens, temperature)
        step = max(1, len(tokens) // wanted)
        for position in range(number % step, len(tokens), step):
            p, q = (rows[position].double().cpu().numpy() for rows in (target_NV, draft_NV))
            laws.append((p / p.sum(), q / q.sum()))
    return laws[:positions]


def synthetic_laws(vocabulary: int, count: int, disturbance: float = 0.6) -> list[tuple[Law, Law]]:
    """Return synthetic pairs of distributions over large vocabularies.

    Zipf's logits in random order, and the same with noise.
    """
    laws = []
    for seed in range(count):
        random = np.random.default_rng(seed)
        logits = -1.2 * np.log(1 + random.permutation(vocabulary)) * random.uniform(0.9, 1.5)
        noisy = logits + random.normal(0, disturbance, vocabulary)
        p, q = (np.exp(one - one.max()) for one in (logits, noisy))
        laws.append((p / p.sum(), q / q.sum()))
    return laws

"""Load of a measurement: the requests that every arm answers, and their options."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.request import Limits, Request, Sampling, Speculation


@dataclass(frozen=True)
class Load:
    """Requests of every arm."""

    prompts: Sequence[tuple[int, ...]]
    num_tokens: int
    """Mean tokens of an answer."""
    temperature: float

    @property
    def longest_answer(self) -> int:
        """Return the most tokens of an answer."""
        return self.num_tokens * 3 // 2

    @property
    def longest_text(self) -> int:
        """Return the tokens of the longest prompt and the longest answer."""
        return max(map(len, self.prompts)) + self.longest_answer

    def requests(self, speculation: Speculation, seed_stable: bool = False) -> Iterator[Request]:
        """Yield requests indefinitely; they are the same for all arms, except for the speculation."""
        number = 0
        while True:
            length = random.Random(number).randint(max(1, self.num_tokens // 2), self.longest_answer)
            yield Request(
                request_id=str(number),
                prompt_token_ids=self.prompts[number % len(self.prompts)],
                sampling=Sampling(temperature=self.temperature, seed=number, seed_stable=seed_stable),
                limits=Limits(max_tokens=length, ignore_eos=True),
                speculation=speculation,
            )
            number += 1


def add_load_arguments(parser: argparse.ArgumentParser, num_tokens: int) -> None:
    """Add the arguments of the requests, except the prompts, and of the output."""
    parser.add_argument(
        "--prompt-length", type=int, default=256, help="last tokens of a prompt that are used (default 256)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=num_tokens,
        help=f"tokens of an answer, in the mean (default {num_tokens})",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature (default 1)")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")

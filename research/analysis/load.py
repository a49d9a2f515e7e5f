"""Load of a measurement: drafts, the requests that every arm answers, and their options."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.request import Limits, Request, Sampling, Speculation
from engine.speculation.verification import RULES
from loadtest.arms import parse

PROMPTS_HELP = "dialogues (default) or gutenberg, both embedded, or JSON lines with prompt, text or messages"
_PROMPTS_HELP = f"{PROMPTS_HELP}; random:N for N random tokens"


@dataclass(frozen=True)
class SpeculationSetup:
    """Drafts of a request, and the rule that verifies them."""

    rule: str
    method: str
    num_drafts: int
    draft_length: int
    tree: tuple[int, ...] = ()

    @staticmethod
    def parse(text: str) -> SpeculationSetup:
        """Parse `rule:KxL` or `rule/method:KxL`.

        A tree with the number of children by depth is `rule:2.2.1`.
        """
        try:
            arm = parse(text)
        except ValueError as error:
            raise ConfigError(f"--shapes {error}") from error
        if arm.rule not in RULES:
            raise ConfigError(f"--shapes: unknown rule {arm.rule!r}; choose from {', '.join(RULES)}")
        if not arm.num_drafts:
            raise ConfigError(f"--shapes {text}: must look like bv_race:4x5 or traversal:2.2.1")
        method = arm.method or RULES[arm.rule].draft_methods[0]
        return SpeculationSetup(arm.rule, method, arm.num_drafts, arm.draft_length, arm.tree)

    @property
    def size(self) -> str:
        """Return chains x length, or the tree."""
        return ".".join(map(str, self.tree)) or f"{self.num_drafts}x{self.draft_length}"

    @property
    def first_drafts(self) -> int:
        """Return the number of drafts at the root."""
        return self.tree[0] if self.tree else self.num_drafts

    @property
    def key(self) -> str:
        """Return the name of the cell in the saved results."""
        return f"{self.rule}/{self.method}/{self.size}"

    @property
    def speculation(self) -> Speculation:
        """Return the speculation of a request."""
        return Speculation(
            rule=self.rule,
            num_drafts=self.num_drafts,
            draft_length=self.draft_length,
            draft_method=self.method,
            tree=self.tree,
        )


@dataclass(frozen=True)
class Load:
    """Requests of every arm."""

    prompts: Sequence[tuple[int, ...]]
    num_tokens: int
    """Mean tokens of an answer."""
    temperature: float
    top_k: int = 0
    """0 uses all tokens, as in `Sampling`."""
    top_p: float = 1.0

    @staticmethod
    def of(prompts: Sequence[tuple[int, ...]], options: argparse.Namespace) -> Load:
        """Return the load of the options of `add_load_arguments`."""
        return Load(prompts, options.tokens, options.temperature, options.top_k, options.top_p)

    @property
    def longest_answer(self) -> int:
        """Return the most tokens of an answer."""
        return self.num_tokens * 3 // 2

    @property
    def longest_text(self) -> int:
        """Return the tokens of the longest prompt and the longest answer."""
        return max(map(len, self.prompts)) + self.longest_answer

    def requests(self, speculation: Speculation, seed_stable: bool = False) -> Iterator[Request]:
        """Yield requests indefinitely.

        They are the same for all arms, except for the speculation.
        """
        number = 0
        while True:
            length = random.Random(number).randint(max(1, self.num_tokens // 2), self.longest_answer)
            yield Request(
                request_id=str(number),
                prompt_token_ids=self.prompts[number % len(self.prompts)],
                sampling=Sampling(
                    temperature=self.temperature,
                    top_k=self.top_k,
                    top_p=self.top_p,
                    seed=number,
                    seed_stable=seed_stable,
                ),
                limits=Limits(max_tokens=length, ignore_eos=True),
                speculation=speculation,
            )
            number += 1


LOAD_NAMES = ("prompts", "prompt_length", "tokens", "temperature", "top_k", "top_p")


def add_load_arguments(parser: argparse.ArgumentParser, num_tokens: int, several: bool = False) -> None:
    """Add the arguments of the requests (`LOAD_NAMES`).

    several: whether they may have several kinds of prompts.
    """
    if several:
        parser.add_argument("--prompts", action="append", help=f"{_PROMPTS_HELP}; may be repeated")
    else:
        parser.add_argument("--prompts", default="dialogues", help=_PROMPTS_HELP)
    parser.add_argument(
        "--prompt-length", type=int, default=256, help="last tokens of a prompt that are used (default 256)"
    )
    parser.add_argument(
        "--tokens", type=int, default=num_tokens, help=f"tokens of an answer, in the mean (default {num_tokens})"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature (default 1)")
    parser.add_argument("--top-k", type=int, default=0, help="sample from this number of tokens (default 0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from tokens of this mass (default 1: all)")

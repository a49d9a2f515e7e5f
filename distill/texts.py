"""Texts that the target samples at temperature 1, with its states at every token.

A *batch* is a file: `token_ids` [B, T], `taps` [B, T, X] and `last` [B, T, D], the states after the final norm, from
which the target's distribution below each token follows. Training reads the files and needs no further pass of the
target. Batch n is a function of the seed and n, so that an interrupted run samples what it would have sampled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from distill.target import Target
from engine.errors import ConfigError

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class TextSizes:
    """Amount of text that is sampled."""

    num_batches: int
    batch_size: int
    """Texts that are sampled together."""
    length: int
    """Tokens of a text, with its prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return self.num_batches * self.batch_size * self.length


class Texts:
    """Sampled texts on disk."""

    def __init__(self, folder: Path, sizes: TextSizes) -> None:
        self.folder, self.sizes = folder, sizes

    def file(self, number: int) -> Path:
        """File of a batch."""
        return self.folder / f"{number:05d}.safetensors"

    def check(self, settings: dict[str, Any]) -> None:
        """Write the settings of the texts; raises ConfigError if the folder holds other texts."""
        file = self.folder / "settings.json"
        if file.exists():
            stored = json.loads(file.read_text(encoding="utf8"))
            if changed := [name for name, value in settings.items() if stored.get(name) != value]:
                raise ConfigError(f"{self.folder}: texts with another {', '.join(changed)}; choose another --texts")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings) + "\n", encoding="utf8")

    def sample(self, target: Target, prompts: Prompts, seed: int) -> None:
        """Sample the batches that are missing; raises ConfigError if the disk is too small."""
        self.folder.mkdir(parents=True, exist_ok=True)
        missing = [number for number in range(self.sizes.num_batches) if not self.file(number).exists()]
        state_bytes = 2 * target.config.hidden_size * (len(target.taps) + 1)
        needed = len(missing) * self.sizes.batch_size * self.sizes.length * state_bytes
        if needed > (free := shutil.disk_usage(self.folder).free):
            raise ConfigError(
                f"{self.folder}: these texts and states need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
                "are free; lower --tokens, or choose another disk with --texts"
            )
        batch_tokens = self.sizes.batch_size * self.sizes.length
        total = self.sizes.num_tokens
        with tqdm(
            total=total, initial=total - len(missing) * batch_tokens, desc="sample", unit="token", unit_scale=True
        ) as bar:
            for number in missing:
                chosen = np.random.default_rng((seed, number)).integers(len(prompts), size=self.sizes.batch_size)
                tensors = sample_batch(target, [prompts[index] for index in chosen], self.sizes.length, seed, number)
                partial = self.file(number).with_suffix(".part")
                save_file(tensors, partial)
                partial.replace(self.file(number))
                bar.update(batch_tokens)

    def rows(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Some texts, counted over all batches."""
        parts: list[dict[str, Tensor]] = []
        for number in numbers:
            file, row = divmod(number, self.sizes.batch_size)
            with safe_open(self.file(file), "pt") as opened:
                parts.append({name: opened.get_slice(name)[row] for name in opened.keys()})  # noqa: SIM118
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


def sample_batch(target: Target, prompts: Prompts, length: int, seed: int, number: int) -> dict[str, Tensor]:
    """Continue prompts to texts of `length` tokens, and return the target's states at every token with them."""
    from transformers import DynamicCache

    cache = DynamicCache(config=target.model.config)
    taps: list[Tensor] = []
    last: list[Tensor] = []

    def logits_of(token_ids_BN: Tensor) -> Tensor:
        observed = target.observe(token_ids_BN, cache)
        if not taps:
            target.check_logits(observed)
        taps.append(observed.taps_BTX.to("cpu", torch.bfloat16))
        last.append(observed.last_BTD.to("cpu", torch.bfloat16))
        return observed.logits_BV

    generator = torch.Generator(target.device).manual_seed((seed << 32) + number)
    token_ids_BT = continued(logits_of, prompts, length, generator)
    return {
        "token_ids": token_ids_BT.to("cpu", torch.int32),
        "taps": torch.cat(taps, 1),
        "last": torch.cat(last, 1),
    }


def continued(
    logits_of: Callable[[Tensor], Tensor], prompts: Sequence[Sequence[int]], length: int, generator: torch.Generator
) -> Tensor:
    """Sample texts at temperature 1: [B, length] tokens, through end tokens (a new turn or text follows one).

    logits_of: takes the next tokens [B, N] of all texts, each once, and returns logits [B, V] after the last of them.
    """
    known_BT = torch.full((len(prompts), length), -1)
    for row, prompt in enumerate(prompts):
        kept = torch.tensor(prompt[: length - 1])
        known_BT[row, : len(kept)] = kept
    known_BT = known_BT.to(generator.device)
    token_ids_BN = known_BT[:, : min(length - 1, *map(len, prompts))]
    fed, position = [], 0
    while True:
        logits_BV = logits_of(token_ids_BN)
        fed.append(token_ids_BN)
        position += token_ids_BN.shape[1]
        if position == length:
            return torch.cat(fed, 1)
        drawn_B = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(1)
        known_B = known_BT[:, position]
        token_ids_BN = torch.where(known_B >= 0, known_B, drawn_B).unsqueeze(1)

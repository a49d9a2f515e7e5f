"""The training loop: batches, learning rate, checkpoints.

A step is a function of the settings, the texts and the state before it. So a run that is resumed from a checkpoint ends
with the weights of an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from distill.losses import LOSSES, TextBatch
from distill.texts import Texts
from engine.errors import ConfigError
from engine.models.heads.head import Head
from engine.models.loading import arithmetic_dtype

NUM_VALIDATION = 16
"""Texts that are not trained on."""
_WARM_UP_SHARE = 0.03
_CHECKPOINTS = 20


@dataclass(frozen=True)
class TrainingPlan:
    """Length and sizes of a training run."""

    epochs: int
    batch_size: int
    learning_rate: float
    draft_length: int
    tv_weight: float
    """Final weight of total variation against KL."""
    seed: int

    def num_steps(self, num_texts: int) -> int:
        """Steps of the whole run."""
        return self.epochs * ((num_texts - NUM_VALIDATION) // self.batch_size)

    def rate(self, progress: float) -> float:
        """Learning rate: linear warm-up, then a cosine to one hundredth of the peak."""
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * min(1.0, progress / _WARM_UP_SHARE + 0.01) * cosine

    def variation_share(self, progress: float) -> float:
        """Weight of total variation: none at first, because a head that agrees nowhere learns little from it."""
        return self.tv_weight * min(1.0, max(0.0, (progress - 0.1) / 0.3))


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=on_gpu)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 for products of matrices, where the device has arithmetic of that type."""
    is_fast = device.type == "cuda" or arithmetic_dtype("bfloat16", device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_fast)


@dataclass
class Training:
    """A head in training; its state is saved in `folder`."""

    head: Head
    kind: str
    texts: Texts
    schedule: TrainingPlan
    settings: dict[str, Any]
    """Values that a checkpoint must agree with."""
    file: Path
    losses: list[float] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizer = build_optimizer(self.head, self.schedule.learning_rate, 0.01)
        self.num_texts = self.texts.sizes.num_batches * self.texts.sizes.batch_size
        self.num_steps = self.schedule.num_steps(self.num_texts)
        if not self.num_steps:
            raise ConfigError(
                f"{self.num_texts} texts, of which {NUM_VALIDATION} are not trained on, fill no batch of "
                f"{self.schedule.batch_size}; raise --tokens or lower --batch"
            )
        if self.file.exists():
            self._resume()

    @property
    def step(self) -> int:
        """Steps that are done."""
        return len(self.losses)

    def run(self, most_steps: int | None = None, log: Callable[[str], None] = tqdm.write) -> None:
        """Train to the end, or for at most `most_steps` more; save checkpoints."""
        end = self.num_steps if most_steps is None else min(self.num_steps, self.step + most_steps)
        every = max(1, self.num_steps // _CHECKPOINTS)
        with tqdm(total=self.num_steps, initial=self.step, desc=f"train {self.kind}", unit="step") as bar:
            while self.step < end:
                self._take_step()
                bar.set_postfix(loss=f"{np.mean(self.losses[-20:]):.3f}", refresh=False)
                bar.update()
                if self.step % every == 0 or self.step == self.num_steps:
                    self.validations.append({"step": self.step, "acceptance": self.validate()})
                    log(f"step {self.step}: acceptance by depth {self.validations[-1]['acceptance']}")
                    self.save()

    def _take_step(self) -> None:
        step, schedule = self.step, self.schedule
        progress = step / self.num_steps
        for group in self._optimizer.param_groups:
            group["lr"] = schedule.rate(progress)
        generator = torch.Generator().manual_seed((schedule.seed << 32) + step)
        batch = TextBatch.of(self.texts.rows(self._numbers(step)), self.head.device)
        with autocast(self.head.device):
            share = schedule.variation_share(progress)
            found = LOSSES[self.kind](self.head, batch, schedule.draft_length, share, generator)
        found.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.losses.append(found.loss.item())

    def _numbers(self, step: int) -> list[int]:
        """The texts of a step: an epoch is a permutation of those that are trained on."""
        epoch, place = divmod(step, self.num_steps // self.schedule.epochs)
        order = np.random.default_rng((self.schedule.seed, epoch)).permutation(self.num_texts - NUM_VALIDATION)
        size = self.schedule.batch_size
        return [int(number) + NUM_VALIDATION for number in order[place * size : (place + 1) * size]]

    @torch.no_grad()
    def validate(self) -> list[float]:
        """Acceptance at temperature 1 of one drafted token by depth, on texts that are not trained on."""
        batch = TextBatch.of(self.texts.rows(range(NUM_VALIDATION)), self.head.device)
        with autocast(self.head.device):
            losses = LOSSES[self.kind]
            found = losses(self.head, batch, self.schedule.draft_length, 1.0, torch.Generator().manual_seed(0))
        return [round(value, 4) for value in found.acceptance_L.tolist()]

    def save(self) -> None:
        """Write a checkpoint; the file is always whole."""
        state = {
            "settings": self.settings,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "losses": self.losses,
            "validations": self.validations,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self.file)

    def _resume(self) -> None:
        state = torch.load(self.file, map_location=self.head.device, weights_only=True)
        if state["settings"] != self.settings:
            changed = [name for name, value in self.settings.items() if state["settings"].get(name) != value]
            raise ConfigError(
                f"{self.file}: from a run with another {', '.join(changed)}; choose another --output, or remove it"
            )
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.losses, self.validations = state["losses"], state["validations"]

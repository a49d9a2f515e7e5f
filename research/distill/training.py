"""The training loop: batches, learning rate, checkpoints.

A step is a function of the settings, the texts and the state before it. So a run that is resumed
from a checkpoint ends with the weights of an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from tqdm import tqdm

from engine.errors import ConfigError
from engine.heads.head import Head
from engine.start.number_formats import arithmetic_dtype
from research.distill.losses import Losses, TextBatch, eagle_losses
from research.distill.states import States
from research.distill.texts import TextPlace

NUM_VALIDATION = 16
"""Texts that are not trained on, the first ones."""
_CONTEXT = 32
"""Tokens before an answer that a head reads in training.

An EAGLE-3 head knows a text by the state that each row reads, and attends to little else.
"""
_SORTED_STEPS = 16
"""Steps whose texts are sorted by length, so that texts of a step need little filling."""
_WARM_UP_SHARE = 0.03
NUM_CHECKPOINTS = 10


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
        """Weight of total variation: none at first.

        A head that agrees nowhere learns little from it.
        """
        return self.tv_weight * min(1.0, max(0.0, (progress - 0.1) / 0.3))


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
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
    states: States
    places: Sequence[TextPlace]
    """All texts."""
    schedule: TrainingPlan
    settings: dict[str, Any]
    """Values that a checkpoint must agree with."""
    file: Path
    losses: list[float] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    _orders: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    """[steps, texts] of the epoch that is trained."""

    def __post_init__(self) -> None:
        self._trained = [place.cropped(_CONTEXT) for place in self.places]
        self._optimizer = build_optimizer(self.head, self.schedule.learning_rate, 0.01)
        num_texts = len(self.places)
        self.num_steps = self.schedule.num_steps(num_texts)
        if not self.num_steps:
            raise ConfigError(
                f"{num_texts} texts, of which {NUM_VALIDATION} are not trained on, fill no batch of "
                f"{self.schedule.batch_size}; raise --tokens or lower --batch"
            )
        if self.file.exists():
            self._resume()

    @property
    def step(self) -> int:
        """Steps that are done."""
        return len(self.losses)

    def run(self, most_steps: int | None = None, log: Callable[[str], None] = tqdm.write) -> None:
        """Train to the end, or for at most `most_steps` more; validate and save checkpoints."""
        end = self.num_steps if most_steps is None else min(self.num_steps, self.step + most_steps)
        every = max(1, self.num_steps // NUM_CHECKPOINTS)
        with tqdm(total=self.num_steps, initial=self.step, desc="train", unit="step") as bar:
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
        losses = self._losses(self._numbers(step), schedule.variation_share(progress))
        losses.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.losses.append(losses.loss.item())

    def _numbers(self, step: int) -> Sequence[int]:
        """The texts of a step, which have similar lengths.

        An epoch has all texts that are trained on once.
        """
        size, num_steps = self.schedule.batch_size, self.num_steps // self.schedule.epochs
        epoch, place = divmod(step, num_steps)
        if epoch not in self._orders:
            chance = np.random.default_rng((self.schedule.seed, epoch))
            order = NUM_VALIDATION + chance.permutation(len(self.places) - NUM_VALIDATION)[: num_steps * size]
            groups = np.array_split(order, range(size * _SORTED_STEPS, len(order), size * _SORTED_STEPS))
            lengths = np.array([one.length for one in self._trained])
            by_length = np.concatenate([group[np.argsort(lengths[group], kind="stable")] for group in groups])
            self._orders = {epoch: chance.permutation(by_length.reshape(num_steps, size))}
        return self._orders[epoch][place].tolist()  # type: ignore[no-any-return]

    def _losses(self, numbers: Sequence[int], share: float, is_whole: bool = False) -> Losses:
        """Losses of some texts.

        Share, is_whole: see `TrainingPlan.variation_share` and `TextBatch`.
        """
        rows = self.states.rows([self._trained[number] for number in numbers])
        batch = TextBatch.of(rows, self.head.device, is_whole)
        with autocast(self.head.device):
            return eagle_losses(self.head, batch, self.schedule.draft_length, share)

    def train_for(self, num_steps: int) -> None:
        """Train for some steps, without checkpoints."""
        for _ in range(num_steps):
            self._take_step()

    @torch.no_grad()
    def coverage(self) -> float:
        """Return the share of the target's probability that the head's tokens have.

        Where answers are sampled from texts that are not trained on.
        """
        shares = []
        for place in self.places[:NUM_VALIDATION]:
            batch = TextBatch.of(self.states.rows([place]), self.head.device, is_whole=True)
            shares.append(batch.teacher(self.head, batch.counts_RL.flatten().nonzero().squeeze(1)).covered_N)
        return round(float(torch.cat(shares).mean()), 4)

    def held_out_prompts(self) -> list[tuple[int, ...]]:
        """Return beginnings of texts that are not trained on.

        Up to the first answer, or a quarter of a text.
        """
        prompts = []
        for place in self.places[:NUM_VALIDATION]:
            token_ids, counts, *_ = self.states.rows([place])
            end = max(int(counts[0].to(torch.int8).argmax()) + 1, place.length // 4)
            prompts.append(tuple(token_ids[0, :end].tolist()))
        return prompts

    @torch.no_grad()
    def validate(self) -> list[float]:
        """Acceptance at temperature 1 of one drafted token by depth.

        On texts that are not trained on.
        """
        losses = [self._losses(range(first, first + 4), 1.0, is_whole=True) for first in range(0, NUM_VALIDATION, 4)]
        acceptance_L = torch.stack([one.acceptance_L for one in losses]).mean(0)
        return [round(value, 4) for value in acceptance_L.tolist()]

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

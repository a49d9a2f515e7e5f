"""The target's states at every token of the texts, computed once and stored with them.

A file of states belongs to a file of texts: `taps` [T, X] and `last` [T, D], the states after the
final norm, from which the target's distribution below each token follows. Training reads the files
and needs no further pass.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from engine.errors import ConfigError
from research.distill.target import Target
from research.distill.texts import TextPlace, num_tokens_of, write_tensors

TOKENS_OF_PASS = 2048


class TextRows(NamedTuple):
    """Some texts with the target's states, filled up to the longest one."""

    token_ids_RL: Tensor
    counts_RL: Tensor
    """Whether the distribution below a token is learned."""
    taps_RLX: Tensor
    last_RLD: Tensor
    """Target's states after the final norm."""
    lengths_R: Tensor


class States:
    """States of the texts of a folder at some taps."""

    def __init__(self, texts: Path, taps: Sequence[int]) -> None:
        self.folder = texts / f"states-{'-'.join(map(str, taps))}"

    def file(self, texts: Path) -> Path:
        """File of the states of a batch of texts."""
        return self.folder / texts.name

    def compute(self, target: Target, files: Sequence[Path]) -> None:
        """Compute the states that are missing; raises ConfigError if the disk is too small."""
        missing = [file for file in files if not self.file(file).exists()]
        num_tokens = sum(map(num_tokens_of, missing))
        needed = num_tokens * target.state_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        if needed > (free := shutil.disk_usage(self.folder).free):
            raise ConfigError(
                f"{self.folder}: the states of these texts need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
                "are free; lower --tokens, or choose another disk with --texts"
            )
        with tqdm(total=num_tokens, desc="states", unit="token", unit_scale=True) as bar:
            for file in missing:
                tensors = load_file(file)
                lengths = tensors["lengths"].tolist()
                write_tensors(states_of(target, tensors["token_ids"], lengths), self.file(file))
                bar.update(sum(lengths))

    def rows(self, places: Sequence[TextPlace]) -> TextRows:
        """Return some texts with their states."""
        texts = [self._text(place) for place in places]
        longest = max(place.length for place in places)
        lengths_R = torch.tensor([place.length for place in places])
        token_ids, counts, taps, last = (_filled(parts, longest) for parts in zip(*texts, strict=True))
        return TextRows(token_ids, counts, taps, last, lengths_R)

    def _text(self, place: TextPlace) -> tuple[Tensor, ...]:
        part = slice(place.first, place.first + place.length)
        with safe_open(place.file, "pt") as texts, safe_open(self.file(place.file), "pt") as states:
            names = ((texts, "token_ids"), (texts, "counts"), (states, "taps"), (states, "last"))
            return tuple(opened.get_slice(name)[part] for opened, name in names)


def _filled(parts: Sequence[Tensor], length: int) -> Tensor:
    filled = parts[0].new_zeros((len(parts), length, *parts[0].shape[1:]))
    for row, part in zip(filled, parts, strict=True):
        row[: len(part)] = part
    return filled


def states_of(target: Target, token_ids_T: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return the states at every token of texts that lie one after the other."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    taps_TX = torch.empty((len(token_ids_T), len(target.taps) * target.config.hidden_size), dtype=torch.bfloat16)
    last_TD = torch.empty((len(token_ids_T), target.config.hidden_size), dtype=torch.bfloat16)
    for numbers in _passes(lengths):
        longest = lengths[numbers[-1]]
        spans = [slice(starts[number], starts[number] + lengths[number]) for number in numbers]
        observed = target.observe(_filled([token_ids_T[span].long() for span in spans], longest))
        if longest == lengths[numbers[0]]:
            target.check_logits(observed)
        for row, span in enumerate(spans):
            taps_TX[span] = observed.taps_BTX[row, : span.stop - span.start].to("cpu", torch.bfloat16)
            last_TD[span] = observed.last_BTD[row, : span.stop - span.start].to("cpu", torch.bfloat16)
    return {"taps": taps_TX, "last": last_TD}


def _passes(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of texts of similar lengths, the shortest first, that one pass computes."""
    together: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if together and (len(together) + 1) * lengths[number] > TOKENS_OF_PASS:
            yield together
            together = []
        together.append(number)
    yield together

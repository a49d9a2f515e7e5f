"""Texts on disk: what the target samples, and whole texts that are given.

A *batch* is a file of texts: `token_ids` and `counts` [T] of all texts one after the other, and
`lengths` [N]. Sampled batches and batches of given texts take turns. Sampled batch n is a function
of the settings and n. So an interrupted run samples what it would have sampled, and a longer run
begins with the texts of a shorter one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from engine.errors import ConfigError
from research.distill.dialogues import LearnedText

GIVEN, SAMPLED = "given", "sampled"


class TextPlace(NamedTuple):
    """Place of a text in a file."""

    file: Path
    first: int
    length: int
    before: int
    """Number of leading tokens below which nothing is learned."""
    after: int
    """The same at its end."""

    def cropped(self, context: int) -> TextPlace:
        """Return the place of the part in which something is learned.

        With some tokens before it.
        """
        start = max(0, self.before - context)
        length = self.length - start - self.after
        return self._replace(first=self.first + start, length=length, before=self.before - start, after=0)


class Texts:
    """The texts of a folder."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        self.folder, self.batch_size = folder, batch_size

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

    def file(self, source: str, number: int) -> Path:
        """File of a batch."""
        return self.folder / f"{source}-{number:05d}.safetensors"

    def files(self, num_tokens: float) -> list[Path]:
        """Return the files of the first batches that have this many tokens together.

        As far as they are there.
        """
        files: list[Path] = []
        total = 0
        for file in self._in_turns():
            if total >= num_tokens or not file.exists():
                break
            files.append(file)
            total += num_tokens_of(file)
        return files

    def _in_turns(self) -> Iterator[Path]:
        """Yield the files of sampled batches, each with a batch of given texts after it.

        As long as there are some.
        """
        for number in count():
            yield self.file(SAMPLED, number)
            if (given := self.file(GIVEN, number)).exists():
                yield given

    def num_given(self) -> int:
        """Return the number of tokens of all given texts."""
        return sum(num_tokens_of(file) for file in self.folder.glob(f"{GIVEN}-*.safetensors"))

    def add(self, source: str, number: int, texts: Sequence[LearnedText]) -> None:
        """Write a batch, without texts in which nothing is learned."""
        texts = [text for text in texts if any(text.counts[1:])]
        tensors = {
            "token_ids": torch.tensor([token for text in texts for token in text.token_ids], dtype=torch.int32),
            "counts": torch.tensor([one for text in texts for one in text.counts], dtype=torch.bool),
            "lengths": torch.tensor([len(text.token_ids) for text in texts], dtype=torch.int32),
        }
        write_tensors(tensors, self.file(source, number))

    def give(self, texts: Iterator[LearnedText]) -> None:
        """Write whole texts."""
        for number in count():
            if not (batch := list(islice(texts, self.batch_size))):
                return
            self.add(GIVEN, number, batch)

    def sample(self, texts_of: Callable[[int], Sequence[LearnedText]], num_tokens: int, bar: tqdm[Any]) -> None:
        """Sample the batches that are missing up to a number of tokens in all texts.

        texts_of: samples a batch.
        """
        total = 0
        for file in self._in_turns():
            if total >= num_tokens:
                return
            if not file.exists():
                number = int(file.stem.rpartition("-")[2])
                self.add(SAMPLED, number, texts_of(number))
            total += num_tokens_of(file)
            bar.n = min(total, num_tokens)
            bar.refresh()


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a file that is whole whenever it is there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    save_file(tensors, partial)
    partial.replace(file)


def lengths_of(file: Path) -> list[int]:
    """Return the lengths of a batch's texts."""
    with safe_open(file, "pt") as opened:
        lengths: list[int] = opened.get_tensor("lengths").tolist()
    return lengths


def num_tokens_of(file: Path) -> int:
    """Return the number of tokens of a batch."""
    return sum(lengths_of(file))


def first_texts(file: Path, number: int) -> list[LearnedText]:
    """Return the first texts of a batch."""
    tensors = load_file(file)
    texts: list[LearnedText] = []
    first = 0
    for length in tensors["lengths"].tolist()[:number]:
        part = slice(first, first + length)
        token_ids = tensors["token_ids"][part].tolist()
        texts.append(LearnedText(token_ids, tensors["counts"][part].tolist()))
        first += length
    return texts


def places_of(files: Sequence[Path]) -> list[TextPlace]:
    """Return the places of all texts of some batches."""
    places = []
    for file in files:
        tensors, first = load_file(file), 0
        for length in tensors["lengths"].tolist():
            learned = tensors["counts"][first : first + length].nonzero().flatten().tolist()
            places.append(TextPlace(file, first, length, learned[0], length - 1 - learned[-1]))
            first += length
    return places


def learned_counts(files: Sequence[Path], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return [V] how often each token follows a token whose distribution is learned."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for file in files:
        tensors = load_file(file)
        token_ids, counts = tensors["token_ids"][1:].numpy(), tensors["counts"][:-1].numpy()
        counts_V += np.bincount(token_ids[counts], minlength=vocab_size)
    return counts_V

"""Prompts that fill a gap in a text, with the marks of the model's family.

A *mark* is a token that says which part follows: the text before the gap (*prefix*), the text after
it (*suffix*), or the answer (*middle*). Marks are inserted as token ids. What clients send is text:
a spelling of a mark or of a special token in it becomes ordinary tokens.

Not for: fields of requests (`openai/infilling.py`, `llama_cpp/infill.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import INFILL_MARKS, ConfigError
from server.text.tokenizer import Tokenizer

_REPOSITORY = "repository"
"""Name of the repository in prompts with several files; clients do not send one."""
_FILE = "file"
"""Name of the edited file in such prompts."""
_SNIPPET = "\n\n--- snippet ---\n\n"
"""Text before a further text, for families without a mark between files."""


@dataclass(frozen=True)
class Family:
    """Spellings of a family's marks. Without a middle the answer follows the prefix."""

    prefix: str
    suffix: str
    middle: str = ""
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()
    """Further tokens that end an answer."""


FAMILIES = (
    # Qwen2.5-Coder and later.
    Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        repository="<|repo_name|>",
        file="<|file_sep|>",
        ends=("<|fim_pad|>", "<|endoftext|>"),
    ),
    # CodeGemma.
    Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", file="<|file_separator|>"),
    # Granite 4.
    Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=("<|fim_pad|>", "<|end_of_text|>")),
    # StarCoder2.
    Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        repository="<repo_name>",
        file="<file_sep>",
        ends=("<fim_pad>", "<|endoftext|>"),
    ),
    # StarCoder, Granite.
    Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<filename>", "<|endoftext|>")),
    # SantaCoder.
    Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    # CodeLlama.
    Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # DeepSeek-Coder: a mark before the prefix, one at the gap, one after the suffix.
    Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<｜end▁of▁sentence｜>", "<|EOT|>")),
    # Codestral.
    Family("[PREFIX]", "[SUFFIX]"),
)
"""Known families. The first one whose marks are all in the vocabulary counts."""


@dataclass(frozen=True)
class FurtherText:
    """Text of another file, to be read before the edited one."""

    name: str
    text: str


@dataclass(frozen=True)
class Gap:
    """Texts around a gap as token ids."""

    prefix: Sequence[int]
    suffix: Sequence[int]
    opening: Sequence[int] = ()
    """Beginning of the answer, which the model continues."""
    further: Sequence[int] = ()
    """Texts of other files, with the marks between them."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts."""
        return len(self.prefix) + len(self.suffix) + len(self.opening) + len(self.further)


class Infill:
    """Marks of a model, and prompts with them."""

    def __init__(self, tokenizer: Tokenizer, family: Family) -> None:
        """The tokenizer has the marks of the family."""
        self._tokenizer = tokenizer
        self._family = family
        self._ids = {
            text: token
            for text in (family.prefix, family.suffix, family.middle, family.repository, family.file, *family.ends)
            if text and (token := tokenizer.token_of(text)) is not None
        }
        self.ends = frozenset(self._ids.values())
        """Tokens that end an answer: a mark never belongs to it."""
        self._controls = self.ends | tokenizer.special_ids
        self._begin = tokenizer.encode("")

    @property
    def num_marks(self) -> int:
        """Number of tokens of a prompt besides texts, without further files."""
        return len(self._begin) + (3 if self._family.middle else 2)

    @property
    def marks(self) -> str:
        """Marks in the order of a prompt, for the log."""
        family = self._family
        if not family.middle:
            return f"{family.suffix} {family.prefix}"
        return f"{family.prefix} {family.suffix} {family.middle}"

    def prefix_ids(self, text: str) -> list[int]:
        """Return the tokens of a text before a gap."""
        return self._tokenizer.encode_as_text(text, self._controls)

    def inner_ids(self, text: str) -> list[int]:
        """Return the tokens of a text inside another one."""
        return self._tokenizer.encode_inside(text, self._controls)

    def further_ids(self, texts: Sequence[FurtherText]) -> list[list[int]]:
        """Return the tokens of each further text, with its mark or separator."""
        mark = self._ids.get(self._family.file)
        if mark is None:
            return [self.inner_ids(_SNIPPET + further.text) for further in texts]
        return [[mark, *self.inner_ids(f"{further.name}\n{further.text}")] for further in texts]

    def with_heads(self, further: Sequence[Sequence[int]]) -> list[int]:
        """Return further texts after the repository's mark, and before the edited file's."""
        tokens = [token for text in further for token in text]
        mark = self._ids.get(self._family.file)
        if mark is None or not further:
            return tokens
        tokens += [mark, *self.inner_ids(f"{_FILE}\n")]
        repository = self._ids.get(self._family.repository)
        if repository is None:
            return tokens
        return [repository, *self.inner_ids(f"{_REPOSITORY}\n"), *tokens]

    def prompt(self, gap: Gap, begins: bool = True) -> list[int]:
        """Return the prompt of a gap. begins: begin with the tokenizer's initial tokens."""
        begin = self._begin if begins else []
        prefix = [self._ids[self._family.prefix], *gap.prefix]
        suffix = [self._ids[self._family.suffix], *gap.suffix]
        if not self._family.middle:
            return [*begin, *gap.further, *suffix, *prefix, *gap.opening]
        middle = self._ids[self._family.middle]
        return [*begin, *gap.further, *prefix, *suffix, middle, *gap.opening]


def infill_of(tokenizer: Tokenizer, marks: Sequence[str] = ()) -> Infill | None:
    """Return the infilling of a model; None if its vocabulary has no marks.

    marks: spellings of prefix, suffix and, unless the suffix comes first, middle; empty to find the
    family. Raises ConfigError if the vocabulary lacks a mark.
    """
    if marks:
        for mark in marks:
            if tokenizer.token_of(mark) is None:
                raise ConfigError(f"--fim-tokens: {mark!r} is not a token of this model; name tokens of its vocabulary")
        prefix, suffix, *middle = marks
        return Infill(tokenizer, Family(prefix, suffix, "".join(middle)))
    families: tuple[Family, ...] = FAMILIES
    if stored := tokenizer.stored_setting(INFILL_MARKS):
        families = (Family(**stored), *FAMILIES)
    for family in families:
        needed = filter(None, (family.prefix, family.suffix, family.middle, family.file))
        if all(tokenizer.token_of(mark) is not None for mark in needed):
            return Infill(tokenizer, family)
    return None

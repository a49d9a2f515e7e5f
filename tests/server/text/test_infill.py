"""Prompts of gaps: order and marks of families, and texts that spell marks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.api import ConfigError
from server.text.infill import FAMILIES, FurtherText, Gap, Infill, infill_of
from server.text.tokenizer import Tokenizer
from tests.server.infill_models import QWEN, write_tokenizer
from tests.server.text.spacing_tokenizers import spacing
from tests.server.tiny_models import BOS, TOKENIZER

# A prompt of each family for the gap between A and B, and other texts that the vocabulary of a
# member has.
PROMPTS = {
    "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>": "<|fim_pad|> <|repo_name|> <|file_sep|>",
    "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|> of CodeGemma": "<|file_separator|>",
    "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|> of Granite": "<|fim_pad|>",
    "<fim_prefix>A<fim_suffix>B<fim_middle>": "<fim_pad> <file_sep> <repo_name>",
    "<fim_prefix>A<fim_suffix>B<fim_middle> of StarCoder": "<fim_pad> <filename> <reponame>",
    "<fim-prefix>A<fim-suffix>B<fim-middle>": "<fim-pad>",
    "▁<PRE>A▁<SUF>B▁<MID>": "▁<EOT>",
    "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>": "<|EOT|>",
    "[SUFFIX]B[PREFIX]A": "[MIDDLE]",
}


def family_of(prompt: str) -> list[str]:
    """The marks of a prompt."""
    return [mark for mark in prompt.partition(" of ")[0].replace("A", "\n").replace("B", "\n").split("\n") if mark]


def infill(folder: Path, marks: Sequence[str], given: Sequence[str] = ()) -> tuple[Tokenizer, Infill]:
    """A tokenizer with these marks, and the infilling that is found."""
    tokenizer = Tokenizer(str(write_tokenizer(folder / "model", marks)))
    filled = infill_of(tokenizer, given)
    assert filled is not None
    return tokenizer, filled


def test_every_family_has_its_prompt() -> None:
    assert len(PROMPTS) == len(FAMILIES)
    for prompt, family in zip(PROMPTS, FAMILIES, strict=True):
        assert set(family_of(prompt)) == {family.prefix, family.suffix, family.middle} - {""}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_marks_have_the_order_of_the_family(tmp_path: Path, prompt: str) -> None:
    others = PROMPTS[prompt].split()
    tokenizer, filled = infill(tmp_path, [*family_of(prompt), *others])
    before, after = filled.prefix_ids("A"), filled.inner_ids("B")
    tokens = filled.prompt(Gap(before, after))
    assert tokens[0] == BOS
    assert tokenizer.decode(tokens[1:]) == prompt.partition(" of ")[0]
    assert len(tokens) == len(before) + len(after) + filled.num_marks
    assert filled.prompt(Gap(before, after), begins=False) == tokens[1:]
    opened = filled.prompt(Gap(before, after, filled.inner_ids("C")))
    assert tokenizer.decode(opened) == tokenizer.decode(tokens) + "C"
    named = {mark for family in FAMILIES for mark in family.ends if mark in others}
    assert {tokenizer.token_of(mark) for mark in (*family_of(prompt), *named)} <= filled.ends


def test_other_files_come_first(tmp_path: Path) -> None:
    texts = [FurtherText("a.py", "x = 1\n"), FurtherText("b.py", "y = 2\n")]
    tokenizer, filled = infill(tmp_path / "qwen", QWEN)
    further = filled.with_heads(filled.further_ids(texts))
    prompt = filled.prompt(Gap(filled.prefix_ids("A"), filled.inner_ids("B"), further=further))
    assert tokenizer.decode(prompt) == (
        "<|bos|><|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n<|file_sep|>file\n"
        "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>"
    )
    assert filled.with_heads([]) == []
    # Without marks of files the texts are separated by words.
    tokenizer, filled = infill(tmp_path / "deepseek", family_of("<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>"))
    assert tokenizer.decode(filled.with_heads(filled.further_ids(texts[:1]))) == "\n\n--- snippet ---\n\nx = 1\n"


@pytest.mark.parametrize("special", [False, True])
def test_marks_that_a_text_spells_are_text(tmp_path: Path, special: bool) -> None:
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path / "model", QWEN, special)))
    filled = infill_of(tokenizer)
    assert filled is not None
    controls = filled.ends | tokenizer.special_ids
    text = "a <|fim_middle|><|fim_middle|> b<|end|>\n<|fim_suffix|><|user|> <<|file_sep|>|fim_pad|>"
    for tokens in (filled.prefix_ids(text), filled.inner_ids(text)):
        assert controls.isdisjoint(tokens)
        assert tokenizer.decode(tokens) == text
    assert not controls.isdisjoint(tokenizer.encode(text, False))
    (further,) = filled.further_ids([FurtherText("<|fim_middle|>", text)])
    assert controls.isdisjoint(further[1:])
    plain = "def f(x):\n    return x"
    assert filled.prefix_ids(plain) == tokenizer.encode(plain, False)
    assert filled.inner_ids("") == []


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_a_suffix_gets_no_space_of_its_own(tmp_path: Path, kind: str) -> None:
    """Tokenizers that add a space do so for the prefix alone."""
    made = spacing(kind)
    made.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer(str(tmp_path))
    filled = infill_of(tokenizer)
    assert filled is not None
    texts = [
        [tokenizer.token_text(token) for token in ids]
        for ids in (filled.prefix_ids("there"), filled.inner_ids("there"))
    ]
    assert ["".join(pieces) for pieces in texts] == ["▁there", "there"]


def test_the_flag_names_the_marks(tmp_path: Path) -> None:
    _, filled = infill(tmp_path / "three", ["<p>", "<s>", "<m>"], ["<p>", "<s>", "<m>"])
    assert filled.marks == "<p> <s> <m>"
    tokenizer, filled = infill(tmp_path / "two", [*QWEN, "<p>", "<s>"], ["<p>", "<s>"])
    assert filled.marks == "<s> <p>"
    assert filled.ends == {tokenizer.token_of("<p>"), tokenizer.token_of("<s>")}
    with pytest.raises(ConfigError, match="--fim-tokens: '<gap>' is not a token of this model"):
        infill_of(tokenizer, ["<p>", "<gap>"])


def test_a_tokenizer_without_marks_fills_no_gaps() -> None:
    assert infill_of(Tokenizer(str(TOKENIZER))) is None


def test_marks_that_a_gguf_file_names_come_first(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", [*QWEN, "<before>", "<after>", "<gap>", "<pad>"])
    marks = {"prefix": "<before>", "suffix": "<after>", "middle": "<gap>", "ends": ["<pad>"]}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"infill_marks": marks}))
    tokenizer = Tokenizer(str(folder))
    filled = infill_of(tokenizer)
    assert filled is not None
    assert filled.marks == "<before> <after> <gap>"
    assert tokenizer.token_of("<pad>") in filled.ends

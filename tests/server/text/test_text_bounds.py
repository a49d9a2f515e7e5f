"""The bound of a tokenizer by its description; `test_texts.py` has it against real ones."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.text_bounds import byte_characters, longest_token

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
UNKNOWN = {"content": "<unk>", "lstrip": False, "rstrip": False}
WORD = "longest"


def bpe(*pieces: str, **more: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {piece: n for n, piece in enumerate(pieces)}, "unk_token": "<unk>"}
    return {**model, "fuse_unk": False, **more}


def bound(model: dict[str, Any] | None = None, **more: Any) -> int | None:
    description = {"model": model or bpe("a", WORD), "added_tokens": [UNKNOWN], "normalizer": None}
    return longest_token({**description, "pre_tokenizer": None, **more})


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def test_the_longest_piece_counts_also_if_it_was_added() -> None:
    assert bound() == len(WORD)
    assert bound(bpe("a")) == len("<unk>")
    assert bound(added_tokens=[]) == len(WORD)


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_an_added_token_that_takes_white_space_has_no_bound(side: str) -> None:
    assert bound(added_tokens=[UNKNOWN, {**UNKNOWN, side: True}]) is None


@pytest.mark.parametrize(
    ("normalizer", "factor"),
    [
        ({"type": "NFC"}, 4),
        ({"type": "NFKC"}, 4),
        ({"type": "NFD"}, 1),
        ({"type": "NFKD"}, 1),
        ({"type": "Lowercase"}, 1),
        ({"type": "Prepend", "prepend": "_"}, 1),
        ({"type": "Strip"}, None),
        ({"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}, 2),
        ({"type": "Replace", "pattern": {"String": "abc"}, "content": "de"}, 2),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "bcd"}, 1),
        ({"type": "Replace", "pattern": {"String": "a"}, "content": ""}, None),
        ({"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}, None),
        (sequence("normalizers"), 1),
        (sequence("normalizers", {"type": "NFC"}, sequence("normalizers", {"type": "NFKC"})), 16),
        (
            sequence("normalizers", {"type": "NFC"}, {"type": "Replace", "pattern": {"String": "abc"}, "content": "d"}),
            12,
        ),
        (sequence("normalizers", {"type": "NFC"}, {"type": "Strip"}), None),
    ],
)
def test_a_normalizer_may_join_characters(normalizer: dict[str, Any], factor: int | None) -> None:
    assert bound(normalizer=normalizer) == (None if factor is None else factor * len(WORD))


@pytest.mark.parametrize(
    ("splits", "is_bounded"),
    [
        ({"type": "Digits"}, True),
        ({"type": "Metaspace"}, True),
        ({"type": "Punctuation", "behavior": "Isolated"}, True),
        ({"type": "Split", "behavior": "MergedWithPrevious"}, True),
        ({"type": "Split", "behavior": "Removed"}, False),
        ({"type": "Whitespace"}, False),
        (sequence("pretokenizers", {"type": "Digits"}, sequence("pretokenizers", {"type": "Metaspace"})), True),
        (sequence("pretokenizers", {"type": "Digits"}, sequence("pretokenizers", {"type": "Whitespace"})), False),
    ],
)
def test_text_between_pieces_may_be_dropped(splits: dict[str, Any], is_bounded: bool) -> None:
    assert bound(pre_tokenizer=splits) == (len(WORD) if is_bounded else None)


@pytest.mark.parametrize(
    ("model", "is_bounded"),
    [
        (bpe("a", WORD, fuse_unk=True), False),
        (bpe("a", WORD, unk_token=None), False),
        (bpe(*BYTES, WORD, unk_token=None, byte_fallback=True), True),
        (bpe(*BYTES, WORD, unk_token=None, byte_fallback=False), False),
        (bpe(*BYTES[1:], WORD, unk_token=None, byte_fallback=True), False),
        (bpe(*BYTES[:-1], WORD, unk_token=None, byte_fallback=True), False),
        ({"type": "Unigram", "vocab": [[one, 0.0] for one in (*BYTES, WORD)], "byte_fallback": True}, True),
        ({"type": "Unigram", "vocab": [[one, 0.0] for one in (*BYTES, WORD)], "byte_fallback": False}, False),
        ({"type": "Unigram", "vocab": [[one, 0.0] for one in (*BYTES[1:], WORD)], "byte_fallback": True}, False),
        ({"type": "WordPiece", "vocab": {WORD: 0}, "unk_token": "<unk>", "fuse_unk": False}, False),
    ],
)
def test_characters_that_are_not_known_may_be_joined(model: dict[str, Any], is_bounded: bool) -> None:
    assert bound(model) == (len(WORD) if is_bounded else None)


def test_a_vocabulary_of_bytes_knows_every_character() -> None:
    whole = bpe(*byte_characters(), WORD, unk_token=None)
    splits = sequence("pretokenizers", {"type": "Digits"}, {"type": "ByteLevel"})
    assert bound(whole, pre_tokenizer=splits) == bound(whole, pre_tokenizer={"type": "ByteLevel"}) == len(WORD)
    assert bound(whole, pre_tokenizer={"type": "Digits"}) is None
    less = bpe(*list(byte_characters())[:-1], WORD)
    assert bound(less, pre_tokenizer=splits) is None


def test_bytes_have_the_characters_of_byte_level_vocabularies() -> None:
    found = byte_characters()
    known = {"!": 0x21, "~": 0x7E, "¡": 0xA1, "¬": 0xAC, "®": 0xAE, "ÿ": 0xFF, "Ċ": 0x0A, "Ġ": 0x20}
    assert found | known == found
    assert (found[chr(256)], found[chr(289)], found[chr(322)], found[chr(323)]) == (0, 0x7F, 0xA0, 0xAD)
    assert sorted(found.values()) == list(range(256))

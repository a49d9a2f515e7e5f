"""Bound on the number of characters per token, derived from a tokenizer's description.

A text longer than the context times this bound is refused before it is encoded. The bound holds for
every text. A tokenizer that drops or joins characters without limit (removed white space, runs of
unknown characters that become one token) has no bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# At most four characters become one of Unicode's composed characters.
_COMPOSED = 4
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def longest_token(described: Mapping[str, Any]) -> int | None:
    """Return the maximum number of characters per token, or None if there is no bound.

    described: content of `tokenizer.json`.
    """
    model, added = described["model"], described["added_tokens"]
    shrinks = _shrinking(described["normalizer"])
    if shrinks is None or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    splits = _parts(described["pre_tokenizer"], "pretokenizers")
    if any(part["type"] not in _PRE_TOKENIZERS or part.get("behavior") == "Removed" for part in splits):
        return None
    if model["type"] not in ("BPE", "Unigram") or not _knows_every_character(model, splits):
        return None
    pieces = model["vocab"] if model["type"] == "BPE" else [piece for piece, _ in model["vocab"]]
    return shrinks * max(map(len, [*pieces, *(token["content"] for token in added)]))


def _parts(step: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    if step is None:
        return ()
    if step["type"] == "Sequence":
        return [part for inner in step[name] for part in _parts(inner, name)]
    return (step,)


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return the most characters that the normalizer turns into one; None for no bound."""
    factor = 1
    for part in _parts(normalizer, "normalizers"):
        if part["type"] == "Replace":
            replaced, content = part["pattern"].get("String"), part["content"]
            if replaced is None or not content:
                return None
            factor *= -(-len(replaced) // len(content))
        elif part["type"] in _NORMALIZERS:
            factor *= _NORMALIZERS[part["type"]]
        else:
            return None
    return factor


def _knows_every_character(model: Mapping[str, Any], splits: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each character outside the vocabulary becomes at least one token."""
    vocab = model["vocab"] if model["type"] == "BPE" else {piece for piece, _ in model["vocab"]}
    if model.get("byte_fallback") and all(piece in vocab for piece in _BYTES):
        return True
    if model["type"] == "Unigram":
        return False
    if any(part["type"] == "ByteLevel" for part in splits):
        return all(character in vocab for character in byte_characters())
    return bool(model["unk_token"] is not None and not model["fuse_unk"])


def byte_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}

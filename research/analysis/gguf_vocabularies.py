"""Writes small vocabularies as GGUF files without weights.

They compare splits of texts with llama.cpp's.

A small vocabulary shows each place at which a text is split: bytes are joined to pairs and pairs to
longer tokens at random, also across words and white space, so a wrong piece has other tokens. Not
for: models.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel

_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_USER_DEFINED = ("<think>", "    ")
_SPACE = "▁"
_WITHOUT_TOKENS = "\x7f"
"""Characters whose bytes have no token in byte-level vocabularies, as some bytes of SmolLM2's."""


def byte_level(pre: str, alphabet: Sequence[str], seed: int, num_longer: int = 2000) -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary.

    alphabet: texts whose bytes are joined with each other. num_longer: number of merges of two
    tokens, of which one is a pair.
    """
    draw = random.Random(seed)
    characters = sorted(set(ByteLevel.alphabet()) - set(_spelled(_WITHOUT_TOKENS)))
    spelled = sorted({character for text in alphabet for character in _spelled(text)}.intersection(characters))
    merges = [(left, right) for left in spelled for right in spelled]
    draw.shuffle(merges)
    tokens = dict.fromkeys([*characters, *(left + right for left, right in merges)])
    longer: list[tuple[str, str]] = []
    while len(longer) < num_longer:
        (left, right), other = draw.choice(merges), draw.choice(spelled)
        pair = draw.choice(((left + right, other), (other, left + right)))
        if "".join(pair) not in tokens:
            tokens["".join(pair)] = None
            longer.append(pair)
    texts = [*tokens, *_CONTROLS, *_USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": _types(len(tokens)),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in [*merges, *longer]],
        "tokenizer.ggml.bos_token_id": texts.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": texts.index("<|im_end|>"),
    }


def sentence_piece(texts: Sequence[str], seed: int, **stated: Any) -> dict[str, Any]:
    """Return the metadata of a vocabulary whose tokens are merged by their scores.

    No two scores are equal.

    texts: of which a part of all strings of two to four characters are tokens. stated: further
    statements of the file, such as `add_space_prefix`.
    """
    draw = random.Random(seed)
    marked = [_SPACE + text.replace(" ", _SPACE).replace("\0", "") for text in texts]
    characters = sorted({character for text in marked for character in text})
    rare = set(draw.sample(characters, len(characters) // 8)) - {_SPACE}
    """Characters that are no tokens, so they become bytes."""
    pieces = dict.fromkeys(character for character in characters if character not in rare)
    for text in marked:
        for length in (2, 3, 4):
            strings = [text[begin : begin + length] for begin in range(len(text) - length + 1)]
            pieces |= dict.fromkeys(piece for piece in strings if draw.random() < 1 / length and not rare & set(piece))
    scores = [-float(number) for number in range(len(pieces))]
    draw.shuffle(scores)
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|im_end|>", "<think>"]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [*map(int, types), int(TokenType.CONTROL), int(TokenType.USER_DEFINED)],
        "tokenizer.ggml.scores": [0.0] * 259 + scores + [0.0] * 2,
        **{f"tokenizer.ggml.{key}": value for key, value in stated.items()},
    }


def with_texts(metadata: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return a vocabulary with further tokens, which the file calls ordinary text."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = {
        "tokenizer.ggml.tokens": [*tokens, *texts],
        "tokenizer.ggml.token_type": [*types, *[int(TokenType.NORMAL)] * len(texts)],
    }
    return {**metadata, **added}


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write metadata as a GGUF file without tensors, and return its path."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _spelled(text: str) -> str:
    """Return the characters of a text's bytes."""
    ((spelled, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(spelled)


def _types(num_normal: int) -> list[int]:
    kinds = [
        *[TokenType.NORMAL] * num_normal,
        *[TokenType.CONTROL] * len(_CONTROLS),
        *[TokenType.USER_DEFINED] * len(_USER_DEFINED),
    ]
    return [int(kind) for kind in kinds]

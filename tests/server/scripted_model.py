"""A model folder whose answers are known: a Llama in which each token of a script is followed by the next one.

The chat template ends a prompt with a mark for the tools on offer and the number of results so far. The embedding of a
mark, and of each piece of a script, has its own direction, and the output weights turn it into the piece that
follows. Any other token is followed by the end. Attention runs over the whole context and adds zero.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.server.tiny_models import EOS, VOCAB_SIZE, llama_config, llama_weights, write_folder

POSITIONS = 1 << 17
_TEMPLATE = Path(__file__).parent / "templates" / "hermes.jinja"
_PIECE = 16
"""Characters."""
_SHARPNESS = 100.0
"""Logit of the next piece; that of all others is zero."""


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_scripted(folder: Path, scripts: Mapping[str, Sequence[str]], otherwise: str) -> Path:
    """Write a model that answers as scripted.

    scripts: by the name of a function on offer, the answers after 0, 1, ... results. otherwise: the answer to a chat
    without these functions.
    """
    answers = {f"<|{name}-{number}|>": text for name in scripts for number, text in enumerate(scripts[name])}
    answers["<|otherwise|>"] = otherwise
    pieces = _pieces(answers)
    tokens = [*pieces, *(piece for of_one in pieces.values() for piece in of_one)]
    numbers = {token: VOCAB_SIZE + number for number, token in enumerate(tokens)}
    paths = [[numbers[mark], *(numbers[piece] for piece in of_one), EOS] for mark, of_one in pieces.items()]
    following = {one: next_one for path in paths for one, next_one in itertools.pairwise(path)}
    config = llama_config(1) | {
        "vocab_size": VOCAB_SIZE + len(tokens), "max_position_embeddings": POSITIONS, "tie_word_embeddings": False,
        "hidden_size": _width(len(tokens)), "head_dim": 16,
    }  # fmt: skip
    write_folder(folder, config, _weights(following, len(tokens)))
    _add_tokens(folder / "tokenizer.json", numbers, set(pieces))
    (folder / "chat_template.jinja").write_text(_template(scripts))
    return folder


def _pieces(answers: Mapping[str, str]) -> dict[str, list[str]]:
    """Each answer in pieces, none of which occurs twice."""
    used: set[str] = set()
    pieces: dict[str, list[str]] = {}
    for mark, text in answers.items():
        at, pieces[mark] = 0, []
        while at < len(text):
            ends = range(at + _PIECE, len(text) - _PIECE)
            end = next((end for end in ends if text[at:end] not in used), len(text))
            assert text[at:end] not in used, f"{text[at:end]!r} ends two answers"
            used.add(text[at:end])
            pieces[mark].append(text[at:end])
            at = end
    return pieces


def _width(num_tokens: int) -> int:
    """A direction for each token and one for all others, rounded up to equal heads and the lines of a cache."""
    return -(-(num_tokens + 1) // 64) * 64


def _weights(following: Mapping[int, int], num_tokens: int) -> dict[str, Any]:
    hidden = _width(num_tokens)
    embedding = np.zeros((VOCAB_SIZE + num_tokens, hidden), np.float32)
    embedding[:VOCAB_SIZE, -1] = 1
    embedding[VOCAB_SIZE:] = np.eye(num_tokens, hidden, dtype=np.float32)
    output = np.zeros_like(embedding)
    sharpness = _SHARPNESS / np.sqrt(hidden)
    output[EOS, -1] = sharpness
    for one, next_one in following.items():
        output[next_one, one - VOCAB_SIZE] = sharpness
    weights = llama_weights(1, hidden)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"][:] = 0
    return weights | {"model.embed_tokens.weight": embedding, "lm_head.weight": output}


def _add_tokens(path: Path, numbers: Mapping[str, int], marks: set[str]) -> None:
    tokenizer = json.loads(path.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": number, "content": token, "special": token in marks, **plain} for token, number in numbers.items()
    ]
    path.write_text(json.dumps(tokenizer))


def _template(scripts: Mapping[str, Sequence[str]]) -> str:
    """The template of the hermes format with a mark at its end."""
    lengths = {name: len(answers) - 1 for name, answers in scripts.items()}
    mark = f"""
    {{%- set lengths, seen = {json.dumps(lengths)}, namespace(name='', results=0) %}}
    {{%- for tool in tools or [] if tool.function.name in lengths %}}
    {{%- set seen.name = tool.function.name %}}
    {{%- endfor %}}
    {{%- for message in messages if message.role == 'tool' %}}{{% set seen.results = seen.results + 1 %}}{{% endfor %}}
    {{%- if add_generation_prompt %}}
    {{%- set number = [seen.results, lengths[seen.name] or 0] | min | string %}}
    {{{{- '<|' + seen.name + '-' + number + '|>' if seen.name else '<|otherwise|>' }}}}
    {{%- endif %}}
    """
    return _TEMPLATE.read_text() + mark.strip()

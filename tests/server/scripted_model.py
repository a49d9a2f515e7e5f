"""A Llama that continues scripts, chosen by a mark in its prompt.

Every script has a mark, a token. Each of its pieces is a token, too, in the order in which it
is written. Attention finds the last of these tokens in the text: of the marks the one of the
last script, and pieces before marks. This token is the state. The output weights turn a state
into the token that follows it. A token that occurs several times in scripts, such as
`<tool_call>`, is no state: there a neuron for the pair of state and token decides. Any other
text is followed by the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from server.text.text_bounds import byte_characters
from tests.server.tiny_models import llama_config, write_folder

POSITIONS = 1 << 17
_TEMPLATE = Path(__file__).parent / "templates" / "hermes.jinja"
_PIECE = 16
"""Characters."""
_HEAD = 64
_OTHER = -1
"""Stands for any token that no script has."""
CUT = "\x1f"
"""Ends a piece of a script; one for a grammar has the free text alone."""
_BYTE_LETTERS = {byte: letter for letter, byte in byte_characters().items()}


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def byte_level(text: str) -> str:
    """A text as byte-level tokenizers spell it."""
    return "".join(_BYTE_LETTERS[byte] for byte in text.encode())


def write_scripted(folder: Path, scripts: Mapping[str, Sequence[str]], otherwise: str) -> Path:
    """Write a model with the embedded pair's tokenizer that answers as scripted.

    scripts: by the name of a function on offer, the answers after 0, 1, ... results.
    otherwise: the answer to a chat without these functions. The chat template ends a prompt
    with the mark of the answer.
    """
    answers = {f"<|{name}-{number}|>": text for name in scripts for number, text in enumerate(scripts[name])}
    answers["<|otherwise|>"] = otherwise
    write_folder(folder, llama_config(1))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write_answers(folder, tokenizer, byte_level, answers, "<|end|>")
    (folder / "chat_template.jinja").write_text(_template(scripts))
    return folder


def write_answers(
    folder: Path, tokenizer: dict[str, Any], spell: Callable[[str], str], answers: Mapping[str, str], end: str
) -> dict[str, int]:
    """Write config, weights and tokenizer of a model with these answers; return its added tokens.

    tokenizer: a tokenizer.json without the tokens of the scripts; added tokens without a place in
    its vocabulary get their ids behind it. spell: a text as the vocabulary writes it. answers: by
    mark; of several marks in a prompt the last one counts. end: token that ends.
    """
    from safetensors.numpy import save_file

    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["added_tokens"] += [added_token(mark) for mark in answers]
    added = [one["content"] for one in tokenizer["added_tokens"]]
    split = {mark: _pieces(text, added) for mark, text in answers.items()}
    first = len(vocabulary)
    for piece in (piece for pieces in split.values() for piece in pieces if piece not in added):
        vocabulary.setdefault(spell(piece), len(vocabulary))
    num_pieces = len(vocabulary) - first
    size = len(vocabulary)
    for token in tokenizer["added_tokens"]:
        token["id"] = vocabulary.get(token["content"], size)
        size += token["id"] == size
    numbers = {token["content"]: int(token["id"]) for token in tokenizer["added_tokens"]}
    paths = {
        numbers[mark]: [numbers.get(piece, vocabulary.get(spell(piece))) for piece in pieces]
        for mark, pieces in split.items()
    }
    weights = _Weights(paths, range(first, first + num_pieces), size, numbers[end])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"eos_token_id": numbers[end], "bos_token_id": None, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(llama_config(1) | weights.config() | named))
    save_file(weights.arrays(), folder / "model.safetensors", metadata={"format": "pt"})
    return numbers


def added_token(token: str, special: bool = False) -> dict[str, Any]:
    """An added token without an id."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": token, "special": special, **plain}


def _pieces(text: str, added: Sequence[str]) -> list[str]:
    """A text in added tokens and pieces of at most 16 characters; a piece also ends at `CUT`."""
    pieces: list[str] = []
    for part in text.split(CUT):
        while part:
            begins = {at: token for token in sorted(added, key=len) if (at := part.find(token)) >= 0}
            begin = min(begins, default=len(part))
            pieces.append(part[: min(begin, _PIECE)] or begins[0])
            part = part[len(pieces[-1]) :]
    return pieces


@dataclass(frozen=True)
class _Transition:
    state: int
    token: int | None
    """The token after the state; None if the state itself is the last token."""
    following: int


class _Weights:
    """Weights of the model with these paths, token ids by mark."""

    def __init__(self, paths: Mapping[int, Sequence[int]], pieces: range, size: int, end: int) -> None:
        """pieces: tokens that no prompt has; no others but marks are states."""
        counts = Counter(token for path in paths.values() for token in path)
        self._size, self._end = size, end
        self._ranks = {mark: number for number, mark in enumerate(paths, start=1)}
        self._transitions: list[_Transition] = []
        for mark, path in paths.items():
            state, token = mark, None
            for step, following in enumerate([*path, end]):
                self._transitions.append(_Transition(state, token, following))
                is_state = counts[following] == 1 and following in pieces
                if is_state:
                    self._ranks[following] = len(paths) + 1 + step
                state, token = (following, None) if is_state else (state, following)
        # After a text that a grammar has forced, the script goes on with its next state.
        forced = [
            _Transition(one.state, _OTHER, one.following)
            for one in self._transitions
            if one.token is not None and one.state not in paths and one.following in self._ranks
        ]
        self._pairs = [one for one in self._transitions if one.token is not None] + forced
        places = [(one.state, one.token) for one in self._transitions]
        twice = [place for place, count in Counter(places).items() if count > 1]
        assert not twice, f"(state, token) occur twice: {twice} of {dict(paths)}"
        self._states = {token: number for number, token in enumerate(self._ranks)}
        known = {*counts, *self._ranks}
        self._others = len(known)
        self._tokens = {token: number for number, token in enumerate(known)} | {_OTHER: self._others}
        """Directions of tokens; all that are not in scripts share the last one."""
        self._num_heads = -(-len(self._states) // _HEAD)
        used = self._others + 1 + len(self._states) + len(self._pairs)
        self._hidden = -(-used // 64) * 64
        self._inner = -(-max(1, len(self._pairs)) // 64) * 64

    def config(self) -> dict[str, Any]:
        return {
            "vocab_size": self._size, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False,
            "hidden_size": self._hidden, "intermediate_size": self._inner, "head_dim": _HEAD,
            "num_attention_heads": self._num_heads, "num_key_value_heads": self._num_heads,
            # The last pair of a head does not turn within any context.
            "rope_theta": 1e12,
        }  # fmt: skip

    def _state(self, token: int) -> int:
        return self._others + 1 + self._states[token]

    def arrays(self) -> dict[str, Any]:
        hidden, heads = self._hidden, self._num_heads * _HEAD
        length = np.sqrt(hidden)
        embedding = np.zeros((self._size, hidden), np.float32)
        embedding[:, self._others] = 1
        for token, number in self._tokens.items():
            if token == _OTHER:
                continue
            embedding[token] = np.eye(1, hidden, number, dtype=np.float32)
        query, key, value, output = (np.zeros(shape, np.float32) for shape in 3 * [(heads, hidden)] + [(hidden, heads)])
        unturned = _HEAD // 2 - 1
        query[unturned::_HEAD, : self._others + 1] = np.sqrt(_HEAD) / length
        for token, rank in self._ranks.items():
            key[unturned::_HEAD, self._tokens[token]] = 30 * rank / length
            value[self._states[token], self._tokens[token]] = 1 / length
            output[self._state(token), self._states[token]] = 1
        # A normed row has a token and a state, and behind a pair's neuron three times its
        # direction.
        both, with_pair = (np.sqrt(hidden / square) for square in (2, 11))
        gate, up = (np.zeros((self._inner, hidden), np.float32) for _ in range(2))
        down = np.zeros((hidden, self._inner), np.float32)
        head = np.zeros_like(embedding)
        head[self._end, : self._others + 1] = 20 / length
        for one in self._transitions:
            if one.token is None:
                head[one.following, self._state(one.state)] = 50 / both
            # Within a text that a grammar forces the scripted token may be excluded; after it the
            # script goes on.
            elif one.following in self._states:
                head[one.following, self._state(one.state)] = 35 / both
        for number, one in enumerate(self._pairs):
            gate[number, : self._others + 1] = -60 / both
            assert one.token is not None
            gate[number, self._tokens[one.token]] += 40 / both
            gate[number, self._state(one.state)] += 40 / both
            up[number, : self._others + 1] = 1 / both
            direction = self._others + 1 + len(self._states) + number
            down[direction, number] = 3 / 20
            head[one.following, direction] = 100 / 3 / with_pair
        layer = {
            "self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value, "self_attn.o_proj": output,
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": down,
            "input_layernorm": np.ones(hidden, np.float32), "post_attention_layernorm": np.ones(hidden, np.float32),
        }  # fmt: skip
        return {f"model.layers.0.{name}.weight": array for name, array in layer.items()} | {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": np.ones(hidden, np.float32),
            "lm_head.weight": head,
        }


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

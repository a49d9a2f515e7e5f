"""Facts of a checkpoint's files: which tokens end an answer, and the context.

Transformers takes the end tokens from generation_config.json alone, chat templates use the
tokenizer's, and many fine-tunes change only one of the files. So the ends of all files count, and
differences are reported. Not for: weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from engine.errors import ConfigError, first_line
from engine.models.files import file_fault, inner_object, model_file, read_object

_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
_TOKENIZER_FILES = (_TOKENIZER, "special_tokens_map.json")
_UNLIMITED = 10**9
"""A longer length means that the tokenizer's files state none."""


class Source(NamedTuple):
    """Place of a model's files: a folder, or a hub name with a revision."""

    name: str
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenRoles:
    """Tokens with a role, by all files; padding has no part in it."""

    ends: frozenset[int]
    """Tokens that end an answer."""
    remarks: tuple[str, ...]
    """Differences between the files, for the log."""
    faults: tuple[str, ...]
    """Statements that cannot be used, and what that means for answers."""


def token_roles(model: Source, tokenizer: Source, vocab_size: int, default_ends: object = None) -> TokenRoles:
    """Decide which tokens end an answer.

    The ends of config.json, generation_config.json and the tokenizer are united, except that
    - a token outside the vocabulary, or that is no token at all, is left out;
    - an end in config.json that is ordinary text of the tokenizer is left out if
      generation_config.json names others: it is the default of an architecture, which a fine-tune
      with another vocabulary has left behind;
    - the tokenizer's end is left out if it is its begin token and other files name ends: models
      begin messages with it.

    default_ends: the architecture's own, which count if config.json leaves its ends out and
    nothing else names any.
    """
    files = _Files(model, tokenizer, vocab_size)
    named = {file: files.ids(file, "eos") for file in (_CONFIG, _GENERATION, *_TOKENIZER_FILES)}
    if named[_GENERATION]:
        for token in sorted(named[_CONFIG] - named[_GENERATION]):
            if files.is_text(token):
                named[_CONFIG] -= {token}
                fault = f"{files.shown(token)} as an end, which is text of the tokenizer"
                files.faults.append(f"{model.name}: {_CONFIG} names {fault}; it does not end answers")
    model_ends = named[_CONFIG] | named[_GENERATION]
    for file in _TOKENIZER_FILES if model_ends else ():
        begins_and_ends = (named[file] & files.ids(file, "bos")) - model_ends
        if begins_and_ends:
            named[file] -= begins_and_ends
            files.faults.append(f"{tokenizer.name}: {file} ends texts with its begin token; it does not end answers")
    ends = frozenset[int]().union(*named.values())
    if not ends and "eos_token_id" not in files.stored[_CONFIG]:
        ends = frozenset(token for token in files.usable(_CONFIG, default_ends) if not files.is_text(token))
    remarks = []
    begins = {file: files.ids(file, "bos") for file in named}
    if _differ(begins):
        tokens = sorted(frozenset[int]().union(*begins.values()))
        shown = ", ".join(_with_files(files, begins, token) for token in tokens)
        remarks.append(f"files name different begin tokens: {shown}; prompts begin as tokenizer.json has it")
    if _differ(named):
        remarks.append(f"answers end with {', '.join(_with_files(files, named, token) for token in sorted(ends))}")
    if not ends:
        files.faults.append(
            f"{model.name}: no file names an end token, so answers end at max_tokens or a stop only and structured "
            f'output is refused; add "eos_token_id" to {_GENERATION}'
        )
    return TokenRoles(ends=ends, remarks=tuple(remarks), faults=tuple(dict.fromkeys(files.faults)))


def _differ(named: dict[str, frozenset[int]]) -> bool:
    """Whether files that name tokens name different tokens."""
    return len({tokens for tokens in named.values() if tokens}) > 1


def _with_files(files: _Files, named: dict[str, frozenset[int]], token: int) -> str:
    """Return a token with the files that name it, for the log."""
    names = ", ".join(file for file, tokens in named.items() if token in tokens)
    return f"{files.shown(token)} ({names})"


class _Files:
    """The files of a checkpoint that name tokens."""

    def __init__(self, model: Source, tokenizer: Source, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sources = {_CONFIG: model, _GENERATION: model, **dict.fromkeys(_TOKENIZER_FILES, tokenizer)}
        self.stored = {file: _stored(source, file) for file, source in self._sources.items()}
        self.faults: list[str] = []
        self._words = read_tokenizer(tokenizer)
        self._added = frozenset() if self._words is None else frozenset(self._words.get_added_tokens_decoder())

    def ids(self, file: str, role: str) -> frozenset[int]:
        """Return the usable tokens that a file names for a role: `eos`, `bos` or `pad`."""
        value = self.stored[file].get(f"{role}_token_id")
        if file in _TOKENIZER_FILES:
            word = self.stored[file].get(f"{role}_token")
            value = word.get("content") if isinstance(word, dict) else word
        return self.usable(file, value)

    def usable(self, file: str, value: object) -> frozenset[int]:
        """Return the tokens of a stated value: an id or a token's text, or several of them."""
        if not isinstance(value, list):
            value = [] if value in (None, "") else [value]
        tokens = set()
        for name in value:
            token = self._token(name)
            # In a config a text such as "2" means an id, if anything; only special tokens are named
            # by their text.
            if token is None or (isinstance(name, str) and file not in _TOKENIZER_FILES and self.is_text(token)):
                source = self._sources[file].name
                self.faults.append(f"{source}: {file} names {name!r}, which is no token of the model; it is left out")
            else:
                tokens.add(token)
        return frozenset(tokens)

    def _token(self, value: object) -> int | None:
        if isinstance(value, str):
            token = None if self._words is None else self._words.token_to_id(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and value == int(value):
            token = int(value)
        else:
            token = None
        return token if token is not None and 0 <= token < self._vocab_size else None

    def is_text(self, token: int) -> bool:
        """Return whether a token is ordinary text; False for added and unknown ones."""
        return self._words is not None and token not in self._added and self._words.id_to_token(token) is not None

    def shown(self, token: int) -> str:
        """Return a token for the log."""
        word = None if self._words is None else self._words.id_to_token(token)
        return str(token) if word is None else f"{token} {word!r}"


def context_length(config: Any) -> int:
    """Return the positions that a model reaches; config: transformers' of the model.

    Positions scaled by YaRN reach their original length times the factor, even if
    max_position_embeddings is still the original length.
    """
    length = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        return max(length, int(rope["original_max_position_embeddings"] * rope.get("factor", 1)))
    return length


def length_remark(config: Any, tokenizer: Source) -> str:
    """Return the other lengths that a model's files name, for the log; "" if there are none.

    A tokenizer's model_max_length is the length at which it would cut texts,
    and limits nothing here.
    """
    length = context_length(config)
    others = {f"{_CONFIG} (max_position_embeddings)": getattr(config, "max_position_embeddings", None)}
    for_texts = _stored(tokenizer, _TOKENIZER).get("model_max_length")
    if isinstance(for_texts, int | float) and 0 < for_texts < _UNLIMITED:
        others[f"{_TOKENIZER} (model_max_length)"] = int(for_texts)
    shown = ", ".join(f"{name} {other}" for name, other in others.items() if other and other != length)
    if not shown:
        return ""
    return f"the model reaches {length} positions; other lengths: {shown}"


def read_tokenizer(source: Source) -> Tokenizer | None:
    """Return tokenizer.json, or None; raise ConfigError if it cannot be used."""
    path = model_file(source.name, "tokenizer.json", source.revision)
    if path is None:
        return None
    if fault := file_fault(path):
        raise ConfigError(f"{path}: {fault}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class of its own for it
        raise ConfigError(f"{path}: cannot be used ({first_line(error)})") from error


def check_vocabularies(target: Source, draft: Source) -> bool:
    """Whether both models have a tokenizer.json; raise ConfigError if their tokens differ."""
    target_tokenizer = read_tokenizer(target)
    draft_tokenizer = read_tokenizer(draft)
    if target_tokenizer is None or draft_tokenizer is None:
        return False
    target_tokens = target_tokenizer.get_vocab()
    draft_tokens = draft_tokenizer.get_vocab()
    if target_tokens != draft_tokens:
        odd = sum(target_tokens.get(token) != number for token, number in draft_tokens.items())
        raise ConfigError(
            f"{draft.name} and {target.name} have different vocabularies ({len(draft_tokens)} and "
            f"{len(target_tokens)} tokens, {odd} of the draft's differ); choose a draft model of the same family"
        )
    return True


def _stored(source: Source, file: str) -> dict[str, Any]:
    """Return a file's statements, also those of its text model."""
    path = model_file(source.name, file, source.revision)
    if path is None:
        return {}
    stored = read_object(path)
    return {**(inner_object(stored) or {}), **stored}

"""Builds the tokenizer of a GGUF file, with the same tokens as llama.cpp.

Two models of tokenizers are known: `gpt2`, byte-level BPE with merges, and `llama`,
SentencePiece's BPE, which merges the pair whose token has the highest score. transformers'
converters are not used, because they ignore the file's pre-tokenizer. Not for: chat messages, and
files of a transformers folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from engine.errors import ConfigError
from engine.models.files import INFILL_MARKS
from engine.models.gguf.pre_tokenizers import pre_tokenization
from engine.models.gguf.vocabulary import GgufVocabulary, read_vocabulary

_SPACE = "▁"
"""Sign of a space in SentencePiece's tokens."""
_TEMPLATE = "tokenizer.chat_template"
_SHORT_CHATS = ([{"role": "user", "content": "a"}], [{"role": role, "content": "a"} for role in ("system", "user")])
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_KEEP_SPACES_AFTER = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """Contents of the tokenizer's files of a transformers folder."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    """Content of tokenizer_config.json. It has the chat templates if the file has several."""
    chat_template: str | None
    """Content of chat_template.jinja; None if the file has no template, or several."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer, for generation_config.json."""
    begin_id: int | None
    """Begin token that the file names, whether or not texts begin with it."""


@dataclass(frozen=True, kw_only=True)
class _Built:
    """Tokenizer without added tokens, and what its model decides if the file does not."""

    tokenizer: Tokenizer
    adds_begin: bool


def tokenizer_files(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Build the tokenizer of a GGUF file from its metadata.

    Raises ConfigError for a tokenizer model or pre-tokenizer that is not known, and
    for a damaged vocabulary.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise ConfigError(
            f"tokenizer.ggml.model: the tokenizer model {model!r} is not served (known: {known}); name a folder that "
            "has tokenizer.json with --tokenizer"
        )
    vocabulary = read_vocabulary(metadata, _DEFAULT_ROLES.get(model, {}))
    built = _BUILDERS[model](metadata, vocabulary)
    _add_tokens(built.tokenizer, vocabulary, str(metadata.get("general.name", "")))
    begin = _added_role(metadata, vocabulary, "bos", built.adds_begin)
    end = _added_role(metadata, vocabulary, "eos", False)
    _add_around(built.tokenizer, vocabulary, begin, end)
    templates = _templates(metadata, vocabulary, begin)
    config = _config(vocabulary, begin, end)
    if len(templates) > 1:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return TokenizerFiles(
        tokenizer=built.tokenizer,
        config=config,
        chat_template=templates.get("default") if len(templates) == 1 else None,
        end_ids=vocabulary.ends,
        begin_id=vocabulary.roles.get("bos"),
    )


def _byte_level(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> _Built:
    """Return byte-level BPE with the file's merges and pre-tokenizer."""
    if not vocabulary.merges:
        raise ConfigError("tokenizer.ggml.merges is missing, which byte-level BPE needs; convert the model again")
    split = pre_tokenization(str(metadata.get("tokenizer.ggml.pre") or "default"))
    model = BPE(dict(vocabulary.ids), list(vocabulary.merges), ignore_merges=split.has_whole_pieces)
    tokenizer = Tokenizer(model)
    unknown = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.ids.keys()
    tokenizer.pre_tokenizer = split.build(unknown)
    tokenizer.decoder = decoders.ByteLevel()
    return _Built(tokenizer=tokenizer, adds_begin=split.adds_begin)


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> _Built:
    """Return BPE by scores, in which characters without a token become tokens of their bytes."""
    if not vocabulary.scores:
        raise ConfigError("tokenizer.ggml.scores is missing, by which tokens are merged; convert the model again")
    if missing := sum(byte not in vocabulary.ids for byte in _BYTES):
        raise ConfigError(f"tokenizer.ggml.tokens lacks {missing} of the 256 tokens of bytes; convert the model again")
    _check_order(vocabulary)
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer = Tokenizer(BPE(dict(vocabulary.ids), _merges_by_score(vocabulary), byte_fallback=True))
    normalizing: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        normalizing.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizing)
    tokenizer.decoder = decoders.Sequence(decoding)
    return _Built(tokenizer=tokenizer, adds_begin=True)


_BUILDERS: dict[Any, Callable[[Mapping[str, Any], GgufVocabulary], _Built]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}
_DEFAULT_ROLES: dict[Any, dict[str, int]] = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""Roles of files that name none.

llama.cpp also takes token 11 of byte-level BPE for both ends, which is text in most vocabularies,
so no default is taken there.
"""


def _check_order(vocabulary: GgufVocabulary) -> None:
    """Raise ConfigError for scores that leave the order of merges open.

    llama.cpp merges the leftmost of equal scores, and merges here have an order. Of 600 lines none
    differed with two tokens a score, 2 with ten, and 38 with a hundred.
    """
    pairs = zip(vocabulary.scores, vocabulary.types, strict=True)
    normal = [score for score, kind in pairs if kind == TokenType.NORMAL]
    if 2 * len(set(normal)) < len(normal):
        raise ConfigError(
            f"tokenizer.ggml.scores has {len(set(normal))} different scores for {len(normal)} tokens, so it does not "
            "say which tokens are merged first; convert the model again from its tokenizer.model"
        )


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return all divisions of tokens into two, by the token's score."""
    parts = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind != TokenType.BYTE}
    by_score = sorted(range(len(vocabulary.tokens)), key=lambda number: -vocabulary.scores[number])
    merges = []
    for token in map(vocabulary.tokens.__getitem__, by_score):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in parts and right in parts:
                merges.append((left, right))
    return merges


def _add_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary, name: str) -> None:
    """Add the tokens that are found in a text before it is split.

    name: the model's, because llama.cpp drops white space after the special tokens of Phi-3,
    as its author does.
    """
    drops_spaces = any(family in name.lower() for family in ("phi-3", "phi3"))

    def added(number: int, special: bool) -> AddedToken:
        text = vocabulary.tokens[number]
        strips = drops_spaces and text not in _KEEP_SPACES_AFTER
        return AddedToken(text, normalized=False, special=special, rstrip=strips)

    tokenizer.add_special_tokens([added(number, True) for number in sorted(vocabulary.controls)])
    tokenizer.add_tokens([added(number, False) for number in sorted(vocabulary.user_defined)])


def _added_role(metadata: Mapping[str, Any], vocabulary: GgufVocabulary, role: str, by_default: bool) -> str | None:
    """Return the token added at a text's end, `bos` or `eos`, or None."""
    key = f"tokenizer.ggml.add_{role}_token"
    if not metadata.get(key, by_default):
        return None
    text = vocabulary.text(role)
    if text is None:
        raise ConfigError(
            f"{key} adds a token to each text, but tokenizer.ggml.{role}_token_id does not name it; name a folder that "
            "has tokenizer.json with --tokenizer"
        )
    return text


def _add_around(tokenizer: Tokenizer, vocabulary: GgufVocabulary, begin: str | None, end: str | None) -> None:
    """Add the begin and end tokens to each text."""
    ids = [(text, vocabulary.ids[text]) for text in dict.fromkeys((begin, end)) if text is not None]
    if ids:
        single = [text for text in (begin, "$A", end) if text is not None]
        pair = [*single, *(f"{text}:1" for text in (begin, "$B", end) if text is not None)]
        tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _templates(metadata: Mapping[str, Any], vocabulary: GgufVocabulary, begin: str | None) -> dict[str, str]:
    """Return the chat templates by name; the one without a name is `default`.

    llama.cpp begins each chat with the begin token if the file adds one to texts, so templates that
    do not begin with it are changed to do so.
    """
    stored = {"default": metadata.get(_TEMPLATE)}
    stored |= {str(name): metadata.get(f"{_TEMPLATE}.{name}") for name in metadata.get(f"{_TEMPLATE}s", ())}
    texts = {name: str(text) for name, text in stored.items() if text}
    if begin is None:
        return texts
    special = _special_tokens(vocabulary)
    for name, text in texts.items():
        if not _begins_with(begin, text, special):
            texts[name] = "{{ bos_token }}" + text
    return texts


def _begins_with(begin: str, template: str, special: Mapping[str, str]) -> bool:
    """Return whether a template begins a chat with this token, or renders none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in _SHORT_CHATS:
        try:
            ((chat, *_), _) = render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=True, **special
            )
        except Exception:  # templates raise jinja2's errors and any others
            continue
        return str(chat).startswith(begin)
    return True


def _special_tokens(vocabulary: GgufVocabulary) -> dict[str, str]:
    """Return the texts of the special tokens by their names in tokenizer_config.json."""
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{name}_token": vocabulary.text(role) for name, role in roles.items()}
    return {name: text for name, text in named.items() if text is not None}


def _config(vocabulary: GgufVocabulary, begin: str | None, end: str | None) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": begin is not None,
        "add_eos_token": end is not None,
        **_special_tokens(vocabulary),
        **_infill_marks(vocabulary),
    }


def _infill_marks(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Return the marks for filling gaps, if the file names those of prefix, suffix and middle."""
    roles = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid", "repository": "fim_rep", "file": "fim_sep"}
    marks = {name: text for name, role in roles.items() if (text := vocabulary.text(role)) is not None}
    if not {"prefix", "suffix", "middle"} <= set(marks):
        return {}
    padding = vocabulary.text("fim_pad")
    ends = [] if padding is None else [padding]
    return {INFILL_MARKS: {**marks, "ends": ends}}

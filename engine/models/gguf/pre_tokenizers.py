r"""Splits of a text before byte-level BPE, by `tokenizer.ggml.pre`.

A split is a sequence of regular expressions in Oniguruma's syntax. Each divides the pieces of the
previous one: its matches become pieces, and so does the text between matches. The table has
llama.cpp's splits (llama-vocab.cpp and unicode.cpp), which may differ from the split that a model
was trained with: llama.cpp knows no upper and lower case outside ASCII, so `tekken` and `gpt-4o`
divide at ASCII's cases alone.

Not for: vocabularies and merges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from engine.errors import ConfigError

_CONTRACTIONS = r"'(?:[stmd]|re|ve|ll)"
_CONTRACTIONS_OF_ANY_CASE = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT_2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTIONS_OF_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN_2 = rf"{_CONTRACTIONS_OF_ANY_CASE}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN_3_5 = rf"{_CONTRACTIONS_OF_ANY_CASE}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED_CODER = rf"{_CONTRACTIONS_OF_ANY_CASE}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

_NOT_LOWER, _NOT_UPPER = r"[^\P{L}a-z]", r"[^\P{L}A-Z]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_TO_LOWER = rf"{_BEFORE_WORD}{_NOT_LOWER}*{_NOT_UPPER}+"
_FROM_UPPER = rf"{_BEFORE_WORD}{_NOT_LOWER}+{_NOT_UPPER}*"
_SYMBOLS_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_TO_LOWER}|{_FROM_UPPER}|\p{{N}}|{_SYMBOLS_WITH_SLASH}|{_SPACES}"
_ENDING = rf"(?:{_CONTRACTIONS_OF_ANY_CASE})?"
_GPT_4O = rf"{_TO_LOWER}{_ENDING}|{_FROM_UPPER}{_ENDING}|\p{{N}}{{1,3}}|{_SYMBOLS_WITH_SLASH}|{_SPACES}"

_PUNCTUATION = r"[\p{P}$+<=>^~|]+"
_PUNCTUATION_OF_FALCON = r"[\p{P}$+<=>^~|`]+"
_THREE_DIGITS = r"[0-9][0-9][0-9]"

_LINE_BREAK = r"[\r\n]"
_DEEPSEEK_HAN = r"[[\u0800-\u9fa5\uac00-\ud7ff]&&\S]+"
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+"
_DEEPSEEK_LETTERS = (
    r"A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    r"\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    r"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    r"\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    r"\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    r"\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    r"\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    r"\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    r"\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_3_HAN = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
_DEEPSEEK_3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, kw_only=True)
class PreTokenization:
    """Treatment of texts by llama.cpp for a name in `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]
    """Regular expressions in order; characters outside ASCII are escapes."""
    has_whole_pieces: bool = False
    """A piece that is a token is not made by merges (`ignore_merges`)."""
    adds_begin: bool = False
    """Texts begin with the begin token if the file does not say otherwise."""

    def build(self, unknown: Iterable[str] = ()) -> pre_tokenizers.PreTokenizer:
        """Return the splits, followed by the spelling of bytes as characters.

        unknown: characters of bytes that have no token. They become pieces, because llama.cpp drops
        them after merges; the library drops them first, and would merge their neighbours.
        """
        splits = [pre_tokenizers.Split(Regex(_spelled(pattern)), "isolated") for pattern in self.patterns]
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        without_token = "|".join(map(re.escape, sorted(unknown)))
        dropped = [pre_tokenizers.Split(Regex(without_token), "isolated")] if without_token else []
        return pre_tokenizers.Sequence([*splits, spelling, *dropped])


def _spelled(pattern: str) -> str:
    """Return a pattern with its `\\u` and `\\U` escapes replaced by their characters."""
    return re.sub(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}", lambda match: chr(int(match[0][2:], 16)), pattern)


_GROUPS = {
    "default": PreTokenization(patterns=(_PUNCTUATION, _GPT_2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat mellum a.x-4.0 granite-docling": PreTokenization(
        patterns=(_GPT_2,)
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenization(
        patterns=(r"\p{N}", _GPT_2)
    ),
    "falcon": PreTokenization(patterns=(_PUNCTUATION_OF_FALCON, _GPT_2, _THREE_DIGITS)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenization(
        patterns=(_LLAMA_3,), has_whole_pieces=True, adds_begin=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": PreTokenization(patterns=(_LLAMA_3,)),
    "qwen2 deepseek-r1-qwen stablelm2 megrez kormo hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe": (
        PreTokenization(patterns=(_QWEN_2,))
    ),
    "qwen35": PreTokenization(patterns=(_QWEN_3_5,)),
    "seed-coder": PreTokenization(patterns=(_SEED_CODER,)),
    "tekken": PreTokenization(patterns=(_TEKKEN,), has_whole_pieces=True, adds_begin=True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenization(patterns=(_GPT_4O,)),
    "deepseek-llm": PreTokenization(
        patterns=(
            _LINE_BREAK,
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            _DEEPSEEK_PUNCTUATION,
            r"\s+\z",
            _DEEPSEEK_HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenization(
        patterns=(_LINE_BREAK, r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}"),
    ),
    "deepseek-v3 hunyuan-dense": PreTokenization(patterns=(r"\p{N}{1,3}", _DEEPSEEK_3_HAN, _DEEPSEEK_3)),
    "poro-chat bloom gpt3-finnish": PreTokenization(patterns=(_BLOOM,)),
    "viking": PreTokenization(patterns=(_BLOOM, r"\p{N}")),
}
PRE_TOKENIZERS = {name: kind for names, kind in _GROUPS.items() for name in names.split()}
"""Treatment of a text by the name in `tokenizer.ggml.pre`."""


def pre_tokenization(name: str) -> PreTokenization:
    """Return the treatment of a name; raise ConfigError, with the known names."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ConfigError(
            f"tokenizer.ggml.pre: the pre-tokenizer {name!r} is not known, so texts would get wrong tokens; take the "
            f"model in transformers' format, or a file with one of {known}"
        )
    return PRE_TOKENIZERS[name]

"""Special tokens never spell their name; other added tokens are text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.config import GrammarConfig
from engine.grammar.grammar_process import GrammarMatcher
from engine.grammar.grammar_tokens import GrammarTokens, Vocabulary, read_vocabulary
from server.text.structured import Structure
from server.text.tools import ToolUse
from server.wire.fields import Tool
from tests.wrong import instead

END = "<|im_end|>"
SPECIAL = [END, "<|im_start|>", "<file_sep>", "[TOOL_CALLS]"]
TEXT = ["<tool_call>", "</tool_call>", "<think>", "<b>", "hello_world"]


def byte_level() -> Tokenizer:
    """A tokenizer in the manner of Qwen and SmolLM2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "o"), ("to", "o"), ("too", "l"), ('"', ":")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer in the manner of Llama 2 and Gemma."""
    merges = [("▁", "t"), ("t", "o"), ("to", "o"), ("too", "l")]
    letters = [chr(code) for code in range(33, 127)] + ["▁"]
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), *letters, *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer: Tokenizer = request.param()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in TEXT])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def numbers(folder: Path) -> dict[str, int]:
    """Number of each added token."""
    return {
        token["content"]: token["id"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }


def vocabulary(folder: Path, numbers: dict[str, int]) -> Vocabulary:
    return Vocabulary(str(folder), None, 512, [numbers[END]], GrammarConfig())


@pytest.fixture(scope="module")
def tokenizer(folder: Path, numbers: dict[str, int]) -> LLTokenizer:
    return read_vocabulary(vocabulary(folder, numbers))


def allowed(tokenizer: LLTokenizer, grammar: str, answer: Sequence[int]) -> set[int]:
    """Return the tokens that may follow an answer."""
    matcher = GrammarMatcher(tokenizer, grammar)
    (mask,) = matcher.masks(answer, [()])
    assert matcher.fault == ""
    assert mask is not None
    return {*np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()}


def walked(tokenizer: LLTokenizer, grammar: str) -> bytes:
    """Return the text of an answer that always takes the highest allowed token."""
    answer: list[int] = []
    while tokens := allowed(tokenizer, grammar, answer) - {*tokenizer.eos_tokens}:
        answer.append(max(tokens))
    assert not {token for token in answer if tokenizer.is_special_token(token)}
    return tokenizer.decode_bytes(answer)


@pytest.mark.parametrize("word", [*SPECIAL, *TEXT])
@pytest.mark.parametrize("spelling", ["const", "regex", "lark"])
def test_an_answer_spells_every_word_of_a_grammar(tokenizer: LLTokenizer, word: str, spelling: str) -> None:
    """The library's mask allows the tokens that its tokenizer would choose."""
    text = f"open {word} now"
    quoted = json.dumps(text)
    grammars = {
        "const": json.dumps({"grammars": [{"json_schema": {"const": text}}]}),
        "regex": f"start: /open {re.escape(word).replace('/', chr(92) + '/')} now/",
        "lark": f"start: {quoted}",
    }
    expected = quoted if spelling == "const" else text
    assert walked(tokenizer, grammars[spelling]) == expected.encode()


def test_a_special_token_that_spells_its_name_is_noticed(folder: Path, numbers: dict[str, int]) -> None:
    """The library's own reading lets an answer end where its grammar names the end."""

    def with_special(_: Callable[..., list[int]], self: GrammarTokens, text: str) -> list[int]:
        self._encoder.encode_special_tokens = False
        tokens: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return tokens

    with instead(GrammarTokens, "__call__", with_special):
        tokenizer = read_vocabulary(vocabulary(folder, numbers))
        answer = tokenizer.tokenize_str("open ")
        with pytest.raises(AssertionError):
            assert numbers["<file_sep>"] not in allowed(tokenizer, 'start: "open <file_sep>"', answer)


def test_a_mark_is_one_token_or_its_letters(tokenizer: LLTokenizer, numbers: dict[str, int]) -> None:
    """Both go on with what follows the mark, in forced text and after free text."""
    (x,) = tokenizer.tokenize_str("x")
    letters = tokenizer.greedy_tokenize("<tool_call"), tokenizer.greedy_tokenize(">")
    for grammar in ('start: "<tool_call>" "x"', 'start: trigger "x"\ntrigger[lazy]: /(?s:.*)<tool_call>/'):
        assert numbers["<tool_call>"] in allowed(tokenizer, grammar, [])
        assert allowed(tokenizer, grammar, [numbers["<tool_call>"]]) == {x}
        assert allowed(tokenizer, grammar, [*letters[0], *letters[1]]) == {x}


def test_special_tokens_are_named_by_number(tokenizer: LLTokenizer, numbers: dict[str, int]) -> None:
    number = numbers["[TOOL_CALLS]"]
    assert allowed(tokenizer, f'start: <[{number}]> "x"', []) == {number}
    assert numbers["<file_sep>"] not in allowed(tokenizer, r"start: /(?s:.*)/", [])


def test_an_end_inside_a_grammar_does_not_end_the_answer(tokenizer: LLTokenizer, numbers: dict[str, int]) -> None:
    """A grammar that names an end before its own allows no token there."""
    (a,) = tokenizer.tokenize_str("a")
    assert allowed(tokenizer, f'start: "a" <[{numbers[END]}]> "b"', [a]) == set()
    assert allowed(tokenizer, 'start: "a"', [a]) == {numbers[END]}


def test_text_is_encoded_without_a_space_before_it(tokenizer: LLTokenizer) -> None:
    for text in ("tool", " tool", "a  tool", "ünï ☃", '{"tool":"<b>"}'):
        assert tokenizer.decode_bytes(tokenizer.tokenize_str(text)) == text.encode()
    assert len(tokenizer.tokenize_str("tool")) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_calls_may_begin_with_the_mark_s_token_or_its_letters(tmp_path: Path, is_special: bool, forced: bool) -> None:
    """Also where the mark is a special token."""
    tokenizer = byte_level()
    marks = ["<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in marks])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    numbers: dict[str, int] = {word: tokenizer.token_to_id(word) for word in (END, *marks)}
    function = {"name": "now", "strict": True, "parameters": {"type": "object", "properties": {}}}
    use = ToolUse((Tool.model_validate({"type": "function", "function": function}),), "hermes", True, forced)
    lark = use.structure(Structure(), lambda text: numbers[text] if is_special else None).grammar
    read = read_vocabulary(vocabulary(tmp_path, numbers))
    body = read.tokenize_str('\n{"name":"now","arguments":{}}\n')
    spelled = [[numbers[mark]] for mark in marks], [read.greedy_tokenize(mark) for mark in marks]
    for opens, closes in itertools.product(*zip(*spelled, strict=True)):
        before = [] if forced else read.tokenize_str("So ")
        answer = [*before, *opens, *body, *closes]
        for count in range(len(before), len(answer)):
            assert answer[count] in allowed(read, lark, answer[:count])
        assert numbers[END] in allowed(read, lark, answer)
        assert numbers[END] not in allowed(read, lark, answer[:-1])
    if is_special:
        assert numbers["</tool_call>"] not in allowed(read, lark, [])

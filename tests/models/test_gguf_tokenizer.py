"""Tokens of GGUF files equal llama.cpp's, recorded for every pre-tokenizer.

`polydraft analyze gguf-tokens --golden tests/models/golden/gguf_tokens.json` records them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from tqdm import tqdm

from engine.errors import ConfigError
from engine.models.files import INFILL_MARKS
from engine.models.gguf import pre_tokenizers
from engine.models.gguf.file import open_file
from engine.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from engine.models.gguf.tokenizer import TokenizerFiles, tokenizer_files
from research.analysis.__main__ import main
from research.analysis.gguf_lines import lines
from research.analysis.gguf_tokens import END_TEXTS, GOLDEN_LINES, compare, explanation, small_vocabularies
from research.analysis.gguf_vocabularies import byte_level, with_texts, write_vocabulary
from server.text.tokenizer import Tokenizer
from tests.wrong import instead

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gguf_tokens.json").read_text())
RECORDED = {name: entry["ids"] for entry in GOLDEN["tokens"] for name in entry["vocabularies"]}
"""llama.cpp's tokens of each golden line, by vocabulary."""
FIRST_OF_EACH = [entry["vocabularies"][0] for entry in GOLDEN["tokens"]]
BYTE_LEVEL = [name for name in FIRST_OF_EACH if name in PRE_TOKENIZERS]
PREFIX = "tokenizer.ggml."


@cache
def small() -> dict[str, dict[str, Any]]:
    """Metadata of the small vocabularies, by name."""
    return dict(small_vocabularies(GOLDEN["lines"], GOLDEN["seed"]))


def tokens_of(metadata: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens of the golden lines."""
    encoded = tokenizer_files(metadata).tokenizer.encode_batch(GOLDEN["lines"])
    return [list(one.ids) for one in encoded]


def stated(name: str, **values: Any) -> dict[str, Any]:
    """Return a vocabulary's metadata with other statements; None is left out."""
    changed = {**small()[name], **{PREFIX + key: value for key, value in values.items()}}
    return {key: value for key, value in changed.items() if value is not None}


def refusal(metadata: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        tokenizer_files(metadata)
    return str(refused.value)


def test_golden_tokens_are_of_these_lines_and_names() -> None:
    assert GOLDEN["lines"] == list(GOLDEN_LINES)
    assert set(GOLDEN["ends"]) == set(END_TEXTS)
    assert set(RECORDED) == set(small()) >= set(PRE_TOKENIZERS)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FIRST_OF_EACH)
def test_tokens_of_a_file_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "small.gguf", small()[name])
    assert tokens_of(open_file(path).metadata) == RECORDED[name]


def test_names_of_one_pre_tokenizer_have_the_recorded_tokens_of_one() -> None:
    """Names with equal recorded tokens are treated equally, and no others."""
    treatments = [
        {PRE_TOKENIZERS[name] for name in entry["vocabularies"] if name in PRE_TOKENIZERS} for entry in GOLDEN["tokens"]
    ]
    assert all(len(found) <= 1 for found in treatments)
    distinct = [found for found in treatments if found]
    assert len(frozenset().union(*distinct)) == len(distinct)


@pytest.mark.slow
def test_another_pre_tokenizer_is_noticed() -> None:
    for other in BYTE_LEVEL:
        assert (tokens_of(small()[other]) == RECORDED["smollm"]) == (other == "smollm")


def test_files_without_a_pre_tokenizer_have_the_default() -> None:
    assert tokens_of(stated("default", pre=None)) == RECORDED["default"]


@pytest.mark.parametrize("name", ["smollm", "llama"])
def test_merges_in_another_order_are_noticed(name: str) -> None:
    merges, scores = small()[name].get(f"{PREFIX}merges"), small()[name].get(f"{PREFIX}scores")
    other = stated(name, merges=merges and merges[::-1], scores=scores and [-score for score in scores])
    assert tokens_of(other) != RECORDED[name]


def test_tokens_without_bytes_are_noticed() -> None:
    files = tokenizer_files(small()["llama"])
    files.tokenizer.model.byte_fallback = False
    assert [list(one.ids) for one in files.tokenizer.encode_batch(GOLDEN["lines"])] != RECORDED["llama"]


def test_space_prefix_is_noticed() -> None:
    assert tokens_of(stated("llama", add_space_prefix=False)) != RECORDED["llama"]
    assert tokens_of(stated("llama", add_space_prefix=True)) == RECORDED["llama"]


def test_bytes_without_a_token_are_noticed() -> None:
    """llama.cpp drops them after merges, so their neighbours stay apart."""
    with instead(pre_tokenizers.PreTokenization, "build", lambda build, split, unknown: build(split)):
        assert tokens_of(small()["smollm"]) != RECORDED["smollm"]


def test_whole_pieces_are_noticed() -> None:
    """`llama-bpe` takes a piece that is a token as it is; no merge makes `Hello` here."""
    metadata = with_texts(small()["llama-bpe"], ["Hello"])
    number = metadata[f"{PREFIX}tokens"].index("Hello")
    assert tokens_of(metadata)[0][1] == number
    assert number not in tokens_of({**metadata, f"{PREFIX}pre": "dbrx"})[0]


def test_texts_begin_with_the_begin_token_where_llama_cpp_adds_it() -> None:
    begin = small()["smollm"][f"{PREFIX}bos_token_id"]
    expected = RECORDED["smollm"][0]
    assert tokens_of(stated("smollm", add_bos_token=True))[0] == [begin, *expected]
    assert RECORDED["llama-bpe"][0][0] == begin, "by default with this pre-tokenizer"
    assert tokens_of(stated("llama-bpe", add_bos_token=False))[0] == RECORDED["llama-bpe"][0][1:]
    files = tokenizer_files(stated("llama", add_eos_token=True))
    assert files.tokenizer.encode("").tokens == ["<s>", "</s>"]
    assert files.tokenizer.encode("", add_special_tokens=False).tokens == []


def test_user_defined_tokens_are_found_if_special_tokens_are_text() -> None:
    tokenizer = tokenizer_files(small()["smollm"]).tokenizer
    tokenizer.encode_special_tokens = True
    tokens = tokenizer.encode("<|im_end|><think>").tokens
    assert "<|im_end|>" not in tokens
    assert tokens[-1] == "<think>"


@pytest.mark.parametrize("texts", END_TEXTS)
def test_ends_are_those_of_llama_cpp(texts: str) -> None:
    """llama.cpp takes these texts for control tokens, whatever the file calls them."""
    metadata = with_texts(byte_level("default", "ab", GOLDEN["seed"], num_longer=0), texts.split())
    files = tokenizer_files(metadata)
    assert [metadata[f"{PREFIX}tokens"][token] for token in files.end_ids] == GOLDEN["ends"][texts]
    assert set(files.end_ids) <= set(files.tokenizer.get_added_tokens_decoder())


def test_named_ends_and_roles_count() -> None:
    named = stated("smollm", eot_token_id=70, eom_token_id=71, fim_pad_token_id=72, padding_token_id=10**9)
    files = tokenizer_files(named)
    assert {70, 71, 72} <= set(files.end_ids)
    assert files.begin_id == small()["smollm"][f"{PREFIX}bos_token_id"]
    assert files.config["bos_token"] == "<|im_start|>"
    assert "pad_token" not in files.config, "an id outside the vocabulary names no token"


def test_named_marks_of_gaps_are_stored() -> None:
    """Under llama.cpp's present and former names; a file that names only some has none."""
    tokens = small()["smollm"][f"{PREFIX}tokens"]
    named = stated("smollm", fim_pre_token_id=70, fim_suf_token_id=71, fim_mid_token_id=72, fim_pad_token_id=73)
    marks = {"prefix": tokens[70], "suffix": tokens[71], "middle": tokens[72], "ends": [tokens[73]]}
    assert tokenizer_files(named).config[INFILL_MARKS] == marks
    former = stated("smollm", prefix_token_id=70, suffix_token_id=71, middle_token_id=72, fim_sep_token_id=74)
    assert tokenizer_files(former).config[INFILL_MARKS] == marks | {"file": tokens[74], "ends": []}
    assert INFILL_MARKS not in tokenizer_files(stated("smollm", fim_pre_token_id=70)).config


def test_tokens_of_a_served_folder_and_their_texts_are_equal(tmp_path: Path) -> None:
    """The daemon's tokenizer of a written folder has the same tokens, and texts come back."""
    for name in ("smollm", "llama"):
        folder = tmp_path / name
        folder.mkdir()
        files = tokenizer_files(stated(name, add_bos_token=True))
        files.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(files.config))
        served = Tokenizer(str(folder))
        expected = files.tokenizer.encode_batch(GOLDEN["lines"])
        assert [served.encode(line) for line in GOLDEN["lines"]] == [list(one.ids) for one in expected]
        for line in GOLDEN["lines"]:
            assert served.decode(served.encode(line, False)) == line or "<" in line or "\x7f" in line
        served.close()


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", None])
def test_other_models_of_tokenizers_are_refused_by_name(model: str | None) -> None:
    told = refusal(stated("smollm", model=model))
    assert repr(model) in told
    assert "gpt2, llama" in told


def test_unknown_pre_tokenizers_are_refused_by_name() -> None:
    told = refusal(stated("smollm", pre="kimi-k2"))
    assert "'kimi-k2'" in told
    assert all(name in told for name in PRE_TOKENIZERS)


def test_damaged_vocabularies_are_refused() -> None:
    """Each refusal names the key."""
    tokens, scores = small()["llama"][f"{PREFIX}tokens"], small()["llama"][f"{PREFIX}scores"]
    damaged = {
        "tokens is missing": stated("smollm", tokens=None),
        "'<s>' twice": stated("llama", tokens=[*tokens[:-1], "<s>"]),
        "merges is missing": stated("smollm", merges=None),
        "'a zz'": stated("smollm", merges=["a zz"]),
        "'ab'": stated("smollm", merges=["ab"]),
        "scores is missing": stated("llama", scores=None),
        "scores has 5 entries": stated("llama", scores=scores[:5]),
        "scores has 1 different": stated("llama", scores=[-1000.0] * len(tokens)),
        "lacks 1 of the 256": stated("llama", tokens=["<byte>" if text == "<0x0A>" else text for text in tokens]),
        "bos_token_id does not name": stated("llama-bpe", bos_token_id=None),
        "eos_token_id does not name": stated("smollm", eos_token_id=None, add_eos_token=True),
    }
    for reason, metadata in damaged.items():
        assert reason in refusal(metadata)


def templates(name: str, texts: Mapping[str, str], **values: Any) -> TokenizerFiles:
    metadata = stated(name, **values)
    named = {f"tokenizer.chat_template.{key}": text for key, text in texts.items() if key}
    listed = {"tokenizer.chat_templates": [key for key in texts if key]}
    return tokenizer_files({**metadata, "tokenizer.chat_template": texts.get(""), **named, **listed})


def test_chat_templates_write_the_begin_token_where_llama_cpp_adds_it() -> None:
    """A rendered chat decides, and not the words of the template."""
    plain = "{{ messages[0]['content'] + eos_token }}"
    assert templates("smollm", {"": plain}).chat_template == plain
    for mention in ("", "{# bos_token <s> #}", "{% if false %}{{ bos_token }}{% endif %}", "{% set begin = '<s>' %}"):
        assert templates("llama", {"": mention + plain}).chat_template == "{{ bos_token }}" + mention + plain
    for begun in ("{{ bos_token }}" + plain, "<s>" + plain, "{{ '<' }}s>" + plain):
        assert templates("llama", {"": begun}).chat_template == begun
    for unknown in ("{{ raise_exception('no') }}", "{{ messages[1]['content'] + bos_token }}", "{% broken"):
        changed = templates("llama", {"": unknown}).chat_template
        assert changed == ("{{ bos_token }}" + unknown if "messages" in unknown else unknown)
    assert templates("llama", {}).chat_template is None


def test_named_chat_templates_are_in_the_configuration() -> None:
    files = templates("smollm", {"": "A", "tool_use": "B"})
    assert files.chat_template is None
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    assert files.config["chat_template"] == named


def test_white_space_after_special_tokens_of_phi_3_is_dropped() -> None:
    phi = tokenizer_files({**small()["llama"], "general.name": "Phi-3 Mini"}).tokenizer
    other = tokenizer_files(small()["llama"]).tokenizer
    ended, begun = ("<|im_end|>\n1", "<|im_end|>1"), ("<s>\n1", "<s>1")
    assert len({tuple(phi.encode(text).ids) for text in ended}) == 1
    assert len({tuple(other.encode(text).ids) for text in ended}) == 2
    assert len({tuple(phi.encode(text).ids) for text in begun}) == 2, "its begin token keeps the white space"


def test_types_of_tokens_decide_which_are_special() -> None:
    metadata = with_texts(small()["smollm"], ["<|a|>", "<|b|>", "<|c|>", "<|d|>"])
    kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED, TokenType.UNUSED)
    metadata[f"{PREFIX}token_type"][-4:] = map(int, kinds)
    added = tokenizer_files(metadata).tokenizer.get_added_tokens_decoder().values()
    special = {token.content: token.special for token in added if token.content in ("<|a|>", "<|b|>", "<|c|>", "<|d|>")}
    assert special == {"<|a|>": True, "<|b|>": True, "<|c|>": False}


def test_newer_characters_explain_a_difference_and_others_do_not() -> None:
    assert explanation("a\u1c89b") is not None
    assert explanation("aéb 中 😀") is None


class OtherTokenizer:
    """The tokenizer of another vocabulary, in the place of llama.cpp."""

    def __init__(self, name: str) -> None:
        self._tokenizer = tokenizer_files(small()[name]).tokenizer

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        self._tokenizer.encode_special_tokens = not parse_special
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def test_comparison_counts_each_differing_line() -> None:
    compared = lines(120, 3, ["<|im_end|>"], None)
    files = tokenizer_files(small()["smollm"])
    with tqdm(disable=True) as progress:
        equal = compare(files, OtherTokenizer("smollm"), compared, progress).summary()
        other = compare(files, OtherTokenizer("gpt-2"), compared, progress).summary()
    assert equal["lines"] == sum(equal["lines_by_kind"].values()) == len(compared)
    assert not equal["differences"]
    assert other["differences"]["tokens"] == other["differences"]["tokens as text"] > 5
    assert other["unexplained"] > 5
    assert {one["kind"] for one in other["examples"]} <= set(other["lines_by_kind"])


def test_comparison_needs_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        path = write_vocabulary(tmp_path / "small.gguf", small()["smollm"])
        assert main(["gguf-tokens", str(path)]) == 2
        assert "pip install llama-cpp-python" in capsys.readouterr().err

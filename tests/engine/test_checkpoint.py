"""End tokens and context length follow from all files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from engine.errors import ConfigError
from engine.models.checkpoint import Source, TokenRoles, context_length, length_remark, token_roles
from engine.models.files import read_object

WORDS = {"a": 5, "b": 6}


def written(folder: Path, added: dict[str, int], **files: Any) -> Source:
    """A folder with these JSON files, and a tokenizer of `WORDS` and added tokens."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": word, **shape} for word, number in added.items()],
        "model": {"type": "WordLevel", "vocab": WORDS | added, "unk_token": "a"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Source(str(folder))


def roles(source: Source, vocab_size: int, default: object = None) -> TokenRoles:
    return token_roles(source, source, vocab_size, default)


LLAMA = {"<|end_of_text|>": 128001, "<|eom_id|>": 128008, "<|eot_id|>": 128009, "<|begin_of_text|>": 128000}
QWEN = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
GEMMA = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<end_of_turn>": 106}
PHI = {"<|endoftext|>": 32000, "<|assistant|>": 32001, "<|end|>": 32007}
GLM = {"<|endoftext|>": 151329, "<|user|>": 151336, "<|observation|>": 151338}
OSS = {"<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002, "<|end|>": 200007, "<|call|>": 200012}
DEEPSEEK = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1}
S = {"<s>": 1, "</s>": 2}

# What the published files of these families say (end tokens of config, generation config,
# tokenizer), and the ends.
FAMILIES: dict[str, tuple[dict[str, int], int, Any, Any, str, set[int]]] = {
    "llama 3 instruct": (LLAMA, 128256, [128001, 128008, 128009], [128001, 128008, 128009], "<|eot_id|>",
                         {128001, 128008, 128009}),
    "llama 3 base": (LLAMA, 128256, 128001, 128001, "<|end_of_text|>", {128001}),
    "qwen 2.5 instruct": (QWEN, 152064, 151645, [151645, 151643], "<|im_end|>", {151645, 151643}),
    "qwen 2.5 base": (QWEN, 151936, 151643, 151643, "<|endoftext|>", {151643}),
    "gemma 3": (GEMMA, 262208, [1, 106], [1, 106], "<eos>", {1, 106}),
    "phi 3": (PHI, 32064, 32000, [32000, 32001, 32007], "<|endoftext|>", {32000, 32001, 32007}),
    "mistral": (S, 32768, 2, 2, "</s>", {2}),
    "glm 4": (GLM, 151552, [151329, 151336, 151338], [151329, 151336, 151338], "<|endoftext|>",
              {151329, 151336, 151338}),
    # Not <|end|>, which also ends the analysis that comes before an answer.
    "gpt-oss": (OSS, 201088, 200002, [200002, 199999, 200012], "<|return|>", {200002, 199999, 200012}),
    "deepseek v3": (DEEPSEEK, 129280, 1, 1, "<｜end▁of▁sentence｜>", {1}),
    # Fine-tunes that change the tokenizer alone, or whose config names nothing.
    "a tuned base": (QWEN, 151936, 151643, 151643, "<|im_end|>", {151643, 151645}),
    "a tokenizer alone": (QWEN, 151936, None, None, "<|im_end|>", {151645}),
    "one file alone": (S, 100, None, [2], "", {2}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_all_files_count(family: str, tmp_path: Path) -> None:
    added, size, config, generation, word, ends = FAMILIES[family]
    source = written(
        tmp_path,
        added,
        config={"eos_token_id": config},
        generation_config={"eos_token_id": generation},
        tokenizer_config={"eos_token": word or None},
    )
    found = roles(source, size)
    assert found.ends == ends
    assert found.faults == ()
    named = {frozenset(one if isinstance(one, list) else [one]) for one in (config, generation) if one is not None}
    named |= {frozenset([added[word]])} if word else set()
    assert len(found.remarks) == (len(named) > 1), "one line says which file names which token"
    for token in ends if found.remarks else ():
        assert str(token) in found.remarks[0]


@pytest.mark.parametrize("form", ["text", "object", "map"])
def test_a_tokenizer_names_its_end_in_several_ways(form: str, tmp_path: Path) -> None:
    word: Any = {"content": "</s>", "lstrip": False} if form == "object" else "</s>"
    file = "special_tokens_map" if form == "map" else "tokenizer_config"
    source = written(tmp_path, S, config={}, **{file: {"eos_token": word}})
    assert roles(source, 100).ends == {2}


def test_a_text_model_may_be_a_part_of_the_config(tmp_path: Path) -> None:
    inner = {"eos_token_id": [1, 106]}
    assert roles(written(tmp_path, GEMMA, config={"text_config": inner}), 262208).ends == {1, 106}
    assert roles(written(tmp_path, GEMMA, config={"eos_token_id": 1, "text_config": inner}), 262208).ends == {1}


@pytest.mark.parametrize("value", [-1, 100, 2.5, "<none>", "a", True, [2, 10**30], {"id": 2}])
def test_unknown_end_tokens_are_dropped_by_name(value: Any, tmp_path: Path) -> None:
    source = written(tmp_path, S, config={"eos_token_id": 2}, generation_config={"eos_token_id": value})
    found = roles(source, 100)
    assert found.ends == {2}
    (fault,) = found.faults
    assert "generation_config.json names" in fault
    assert "no token of the model" in fault


@pytest.mark.parametrize("value", [2.0, "</s>", ["</s>", 2]])
def test_other_spellings_of_a_token_are_understood(value: Any, tmp_path: Path) -> None:
    found = roles(written(tmp_path, S, config={"eos_token_id": value}), 100)
    assert (found.ends, found.faults) == ({2}, ())


def test_ends_that_would_be_wrong_do_not_end_answers(tmp_path: Path) -> None:
    """A default that is text of another vocabulary, and a begin token called the end."""
    end = {"eos_token_id": 151645}
    stale = roles(written(tmp_path, QWEN, config={"eos_token_id": 5}, generation_config=end), 151936)
    assert stale.ends == {151645}
    assert "names 5 'a' as an end, which is text of the tokenizer" in stale.faults[0]
    begin = {"eos_token": "<|im_start|>", "bos_token": "<|im_start|>"}
    begun = roles(written(tmp_path, QWEN, config=end, generation_config=end, tokenizer_config=begin), 151936)
    assert begun.ends == {151645}
    assert "begin token" in begun.faults[0]


def test_a_single_file_that_names_an_end_is_believed(tmp_path: Path) -> None:
    """Text may be the end if no other file names one; a begin token may not."""
    assert roles(written(tmp_path, S, config={"eos_token_id": 5}), 100).ends == {5}
    begin = {"eos_token": "<s>", "bos_token": "<s>"}
    assert roles(written(tmp_path, S, config={"eos_token_id": 2}, tokenizer_config=begin), 100).ends == {2}


def test_the_first_token_may_be_an_end(tmp_path: Path) -> None:
    found = roles(written(tmp_path, {"</s>": 0}, config={"eos_token_id": 0}, tokenizer_config={"eos_token": ""}), 7)
    assert (found.ends, found.faults) == ({0}, ())


def test_a_remark_says_which_file_names_which_token(tmp_path: Path) -> None:
    files = {"config": {"eos_token_id": [2, 7]}, "generation_config": {"eos_token_id": 2}}
    found = roles(written(tmp_path, S, **files, tokenizer_config={"eos_token": "<s>"}), 9)
    (remark,) = found.remarks
    assert remark == (
        "answers end with 1 '<s>' (tokenizer_config.json), 2 '</s>' (config.json, generation_config.json), "
        "7 (config.json)"
    )


def test_a_model_may_have_no_tokenizer(tmp_path: Path) -> None:
    """Tokens are named by their numbers then, and texts are no tokens."""
    files = {"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": 5}}
    source = written(tmp_path, S, **files, tokenizer_config={"eos_token": "</s>"})
    (tmp_path / "tokenizer.json").unlink()
    found = roles(source, 100)
    assert found.ends == {2, 5}
    assert found.remarks == ("answers end with 2 (config.json), 5 (generation_config.json)",)
    told = "tokenizer_config.json names '</s>', which is no token of the model; it is left out"
    assert found.faults == (f"{tmp_path}: {told}",)


def test_begin_end_and_padding_may_be_one_token(tmp_path: Path) -> None:
    """GPT-2 has this, and so do models whose training pads with the end token."""
    token = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    config = {"eos_token_id": 151643, "bos_token_id": 151643}
    found = roles(written(tmp_path, QWEN, config=config, tokenizer_config=token), 151936)
    assert (found.ends, found.remarks, found.faults) == ({151643}, (), ())
    alone = roles(written(tmp_path, QWEN, config={"eos_token_id": None}, tokenizer_config=token), 151936)
    assert alone.ends == {151643}


def test_an_architectures_own_end_counts_if_nothing_is_said(tmp_path: Path) -> None:
    """Not if config.json says there is none, nor if the tokenizer has text in its place."""
    assert roles(written(tmp_path, S, config={}), 100, 2).ends == {2}
    assert roles(written(tmp_path, S, config={"eos_token_id": None}), 100, 2).ends == set()
    assert roles(written(tmp_path, S, config={}), 100, 5).ends == set()
    unusable = roles(written(tmp_path, S, config={}), 100, 500)
    assert unusable.ends == set()
    assert "config.json names 500, which is no token of the model" in unusable.faults[0]


def test_a_model_without_an_end_is_warned_about(tmp_path: Path) -> None:
    (fault,) = roles(written(tmp_path, S, config={}), 100).faults
    assert "no file names an end token" in fault
    assert 'add "eos_token_id" to generation_config.json' in fault


def test_different_begin_tokens_are_reported(tmp_path: Path) -> None:
    config = {"eos_token_id": 2, "bos_token_id": 2}
    found = roles(written(tmp_path, S, config=config, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}), 9)
    (remark,) = found.remarks
    assert "1 '<s>' (tokenizer_config.json), 2 '</s>' (config.json)" in remark


def test_unreadable_config_is_named(tmp_path: Path) -> None:
    source = written(tmp_path, S, config={"eos_token_id": 2})
    (tmp_path / "tokenizer_config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: this is a git-lfs pointer.*git lfs pull"):
        roles(source, 9)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: cannot be used"):
        roles(source, 9)


@pytest.mark.parametrize("largest", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinite_numbers_of_transformers_are_read(largest: str, tmp_path: Path) -> None:
    """Read infinity as transformers 4 writes it, and as transformers 5 writes it."""
    path = tmp_path / "config.json"
    path.write_text(f'{{"time_step_limit": [0.0, {largest}]}}')
    assert read_object(path) == {"time_step_limit": [0.0, float("inf")]}
    path.write_text(f"[{largest}]")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be used .it has no JSON object"):
        read_object(path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [("version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"), ("{}", "cannot be used (")],
)
def test_unreadable_tokenizer_is_named(content: str, fault: str, tmp_path: Path) -> None:
    source = written(tmp_path, S, config={"eos_token_id": 2})
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: ") as refused:
        roles(source, 9)
    assert fault in str(refused.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("rope", "stated", "for_texts", "length", "others"),
    [
        (None, 4096, None, 4096, ""),
        (None, 4096, 1e30, 4096, ""),
        (None, 32768, 131072, 32768, "tokenizer_config.json (model_max_length) 131072"),
        (YARN, 32768, 131072, 131072, "config.json (max_position_embeddings) 32768"),
        (YARN, 131072, None, 131072, ""),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0}, 131072, 131072, 131072, ""),
        # It reaches the stated length in one family and the product in another.
        ({"rope_type": "linear", "factor": 8.0}, 131072, None, 131072, ""),
    ],
    ids=["plain", "unlimited tokenizer", "tokenizer", "yarn", "yarn in both", "llama 3", "linear"],
)  # fmt: skip
def test_the_context_length_of_all_files(
    rope: Any, stated: int, for_texts: Any, length: int, others: str, tmp_path: Path
) -> None:
    config = transformers.Qwen2Config(max_position_embeddings=stated, rope_scaling=rope, sliding_window=1024)
    source = written(tmp_path, S, tokenizer_config={} if for_texts is None else {"model_max_length": for_texts})
    assert context_length(config) == length
    remark = length_remark(config, source)
    assert remark == (f"the model reaches {length} positions; other lengths: {others}" if others else "")


@pytest.mark.parametrize("config", [SimpleNamespace(), SimpleNamespace(max_position_embeddings=0)])
def test_a_model_that_names_no_length_reaches_a_million(config: Any, tmp_path: Path) -> None:
    assert context_length(config) == 1048576
    assert length_remark(config, written(tmp_path, S)) == ""
    rope = {name: value for name, value in YARN.items() if name != "factor"}
    assert context_length(SimpleNamespace(max_position_embeddings=64, rope_parameters=rope)) == 32768

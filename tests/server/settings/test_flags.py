"""The command line: help by groups, suggestions, and the flags and keys of other servers."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from engine.api import ConfigError
from loadtest.cli import parser as bench_parser
from server.cli import main
from server.settings.flags import faults, parse_flags
from server.settings.foreign_flags import FOREIGN, NAMES, SWITCHES
from server.settings.groups import RARE
from server.settings.model_checks import with_quantization
from server.settings.settings import Serve


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("POLYDRAFT_"):
            monkeypatch.delenv(name)


def printed_help(capsys: pytest.CaptureFixture[str], word: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_flags([word])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_has_the_usual_flags_by_group_and_all_of_them_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    usual, every = (printed_help(capsys, word) for word in ("--help", "--help=all"))
    for text in (usual, every):
        titles = re.findall(r"^([A-Za-z]+):$", text, re.MULTILINE)
        assert titles == ["general", "model", "speculation", "scheduling", "memory", "HTTP", "batches", "observability"]
        assert "list[str]" not in text
        assert "None" not in text
        assert max(map(len, text.splitlines())) <= 110
    for name, field in Serve.model_fields.items():
        flag = re.compile(rf"^  --{name.replace('_', '-')}\b", re.MULTILINE)
        if name != "model":
            assert flag.search(every), name
            assert bool(flag.search(usual)) == (field.json_schema_extra != RARE), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--spec-rull", "x"], "--spec-rull: unknown flag (did you mean --spec-rule?)"),
        (["--no-calibrat"], "--no-calibrat: unknown flag (did you mean --calibrate?)"),
        (["--max_num_seq=4"], "--max-num-seq: unknown flag (did you mean --max-num-seqs?)"),
        (["--max-num-seq", "4"], "did you mean --max-num-seqs"),  # no abbreviations
        (["--wholly-different"], "--wholly-different: unknown flag"),
        (["a", "--model", "b"], "--model b: MODEL is a already"),
        (["a", "b"], "b: unexpected"),
        (["a", "--served-model-name", "b", "c"], "c: unexpected; one MODEL is served, and a flag of several values is"),
        (["--help=some"], "the only value is all"),
    ],
)
def test_unknown_words_are_refused_with_a_suggestion(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_flags(words)


def test_the_other_commands_suggest_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert "unknown command 'srve' (did you mean serve?)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_parser().parse_args(["--concurency", "3"])
    assert "unknown flag --concurency (did you mean --concurrency?)" in capsys.readouterr().err


DRAFT = '{"model": "d", "method": "draft_model", "num_speculative_tokens": 3}'


@pytest.mark.parametrize(
    ("pasted", "ours"),
    [
        # vLLM
        (f"--model m --speculative-config '{DRAFT}'", "m --draft-model d --draft-length 3"),
        (f"m --speculative_config='{DRAFT}'", "m --draft-model d --draft-length 3"),
        (
            'm --speculative-config \'{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}\'',
            "m --draft-model d --draft-length 3",
        ),
        ("m --speculative-algorithm EAGLE3 --speculative-draft-model-path d", "m --draft-model d"),
        (
            'm --speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\'',
            "m --draft-model mtp --draft-length 3",
        ),
        ("m --speculative-eagle-topk 2 --speculative-num-draft-tokens 6", "m --num-drafts 2"),
        (
            "m --no-cache-prompt --reasoning-format deepseek -sm none --spec-type ngram-simple",
            "m --no-enable-prefix-caching --reasoning-parser auto --spec-drafters prompt_lookup",
        ),
        (
            'm --speculative-config \'{"model": "d", "speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0)]"}\'',
            "m --draft-model d --draft-tree 2,1",
        ),
        (
            'm --speculative-config \'{"model": "d", "speculative_token_tree": [[0], [0, 0], [0, 1]]}\'',
            "m --draft-model d --draft-tree 1,2 --spec-rule traversal",
        ),
        (
            'm --speculative-config \'{"model": "d", "speculative_token_tree": "[(0,), (1,), (0, 0)]"}\'',
            "m --draft-model d",
        ),
        ("m --speculative-algorithm NEXTN --speculative-num-steps 3", "m --draft-model mtp --draft-length 3"),
        (
            'm --speculative-config \'{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}\'',
            "m --spec-drafters prompt_lookup --max-copied-tokens 8",
        ),
        (
            "m --speculative-model [ngram] --num-speculative-tokens 4",
            "m --spec-drafters prompt_lookup --draft-length 4",
        ),
        ("m -tp 2 --max_model_len 4k", "m --tensor-parallel-size 2 --max-model-len 4000"),
        ("m --max-model-len 4K --max-num-batched-tokens=2.5k", "m --max-model-len 4096 --max-num-batched-tokens 2500"),
        ("m --max-model-len auto", "m"),
        ("m --max-model-len -1", "m"),
        ("m --sleep-idle-seconds -1", "m"),
        (
            "m --enforce-eager --enable-auto-tool-choice --tool-call-parser hermes --disable-log-requests --seed 7 "
            "--swap-space 4 -O3 --pipeline-parallel-size 1 --kv-cache-dtype auto --load-format safetensors",
            "m --enforce-eager --kv-cache-dtype auto --tool-call-parser hermes",
        ),
        ("m --dtype half --generation-config vllm", "m --dtype float16 --generation-config neutral"),
        ("m --no-enable-chunked-prefill --allowed-origins '[\"*\"]'", "m --allowed-origins *"),
        ("m --disable-log-stats", "m --no-enable-log-stats"),
        ("m --served_model_name a --served_model_name b,c", "m --served-model-name a,b,c"),
        # SGLang
        (
            "--model-path m --tp 2 --context-length 4096 --mem-fraction-static 0.8 --max-running-requests 8 "
            "--disable-radix-cache --speculative-algorithm STANDALONE --speculative-draft-model-path d "
            "--speculative-num-steps 3 --speculative-eagle-topk 2 --disable-cuda-graph",
            "m --tensor-parallel-size 2 --max-model-len 4096 --gpu-memory-utilization 0.8 --max-num-seqs 8 "
            "--enforce-eager --no-enable-prefix-caching --draft-model d --draft-length 3 --num-drafts 2",
        ),
        # llama.cpp
        (
            "-m m -md d -c 4096 -t 4 -np 8 --draft-max 7 --alias x --jinja -ngl 99",
            "m --draft-model d --max-model-len 4096 --num-threads 4 --max-num-seqs 8 --draft-length 7 "
            "--served-model-name x",
        ),
    ],
)
def test_flags_of_other_servers_become_settings(pasted: str, ours: str) -> None:
    assert parse_flags(shlex.split(pasted)) == parse_flags(ours.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trust-remote-code"], "--trust-remote-code: not served; code of a model is never run"),
        (["-ctk", "q8_0"], "keys and values have one type; choose it by --kv-cache-dtype"),
        (["--rope-scaling", "{}"], "config.json"),
        (["--top-p", "0.9"], "send it in requests"),
        (["--speculative-config", '{"method": "medusa", "model": "d"}'], "method medusa: not served; draft by a small"),
        (["--speculative-config", '{"method": "eagle3"}'], "names no draft model"),
        (["--speculative-config", '{"model": "d", "speculative_token_tree": "4"}'], "not a list of paths"),
        (["--speculative-config", '{"method": "mtp", "model": "d"}'], "inside the target; leave out model"),
        (["--speculative-config", '{"method": "mtp", "revision": "r"}'], "inside the target; leave out revision"),
        (["--speculative-config", '{"num_speculative_tokens": 5}'], 'names no draft model; add "model"'),
        (["--speculative-config", "{model: d}"], "not valid JSON"),
        (["--speculative-config", '{"modle": "d"}'], "unknown key 'modle' (did you mean model?)"),
        (["--speculative-config", '{"model": "d", "rejection_sample_method": "typical"}'], "may change answers"),
        (["--speculative-algorithm", "EAGLE"], "method eagle: not served"),
        (["-tp", "2", "--tensor-parallel-size", "3"], "both set tensor-parallel-size"),
        (["--speculative-config", DRAFT, "--draft-model", "other"], "both set draft-model"),
    ],
)
def test_flags_that_would_change_an_answer_are_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_flags(["m", *words])


def test_every_flag_of_another_server_is_understood_or_refused() -> None:
    """None is an unknown flag, none is a setting here, and each without effect leaves a line."""
    assert not NAMES & set(Serve.model_fields)
    plain = parse_flags([])
    for name, foreign in FOREIGN.items():
        words = [f"--{name}"] if name in SWITCHES else [f"--{name}", "3"]
        if foreign.is_refused:
            with pytest.raises(ConfigError, match="not served; "):
                parse_flags(words)
        else:
            assert parse_flags(words) == plain


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_file_of_vllm_is_read(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "model": "m",
        "max-model-len": "8K",
        "speculative_config": json.loads(DRAFT),
        "enforce-eager": True,
        "enable-chunked-prefill": True,
        "trust-remote-code": False,
        "served-model-name": ["a", "b"],
    }
    path = tmp_path / f"vllm.{kind}"
    path.write_text(json.dumps(values))  # which is YAML, too
    ours = "m --enforce-eager --max-model-len 8192 --draft-model d --draft-length 3 --served-model-name a,b".split()
    read = parse_flags(["--config", str(path)])
    assert read.model_dump() == {**parse_flags(ours).model_dump(), "config": str(path)}
    assert "enable-chunked-prefill has no effect here" in caplog.text
    path.write_text('{"trust_remote_code": true}')
    with pytest.raises(ConfigError, match="trust-remote-code: not served"):
        parse_flags(["--config", str(path)])


def test_a_value_outside_a_choice_gets_one_line() -> None:
    with pytest.raises(ValueError) as caught:
        parse_flags(["--tool-call-parser", "hermess", "--dtype", "int3"])
    first, second = faults(caught.value)  # type: ignore[arg-type]
    assert first.startswith("--dtype: choose from auto, float32, bfloat16, float16")
    assert "(did you mean hermes?)" in second


def test_an_unknown_variable_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("POLYDRAFT_MAX_MODEL_LENGTH", "4096")
    parse_flags([])
    assert "POLYDRAFT_MAX_MODEL_LENGTH in the environment is no setting (did you mean max_model_len?)" in caplog.text


@pytest.mark.parametrize(
    ("stored", "wanted", "message"),
    [
        ({}, "awq", "are quantised while they are loaded only by one of int8, fp8, int4"),
        ({"quant_method": "gptq"}, "awq", "is quantised by gptq"),
        ({"quant_method": "gptq"}, "fp8", "is quantised by gptq"),
        ({"quant_method": "gptq"}, "gptq_marlin", ""),
        ({"quant_method": "compressed-tensors"}, "compressed_tensors", ""),
        ({"quant_method": "fp8"}, "fp8", ""),
        ({}, None, ""),
    ],
)
def test_quantization_is_what_the_checkpoint_says(
    tmp_path: Path, stored: dict[str, str], wanted: str | None, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stored} if stored else {}))
    config = parse_flags([str(tmp_path)]).engine_config()
    if not message:
        assert with_quantization(config, wanted) == config
        return
    with pytest.raises(ConfigError, match=message):
        with_quantization(config, wanted)


def test_quantization_of_plain_weights_is_a_format_of_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = parse_flags([str(tmp_path)]).engine_config()
    assert with_quantization(config, "fp8").model.weights == "fp8"
    same = parse_flags([str(tmp_path), "--weights", "int4"]).engine_config()
    assert with_quantization(same, "int4") == same
    with pytest.raises(ConfigError, match="--quantization fp8 contradicts --weights int4"):
        with_quantization(same, "fp8")

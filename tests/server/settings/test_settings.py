"""Settings: their sources, the precedence of sources, and the configuration of the engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.api import ConfigError
from server.settings.flags import faults, parse_flags
from server.settings.settings import Serve, read_config_file


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the caller's shell."""
    for name in os.environ:
        if name.startswith("POLYDRAFT_"):
            monkeypatch.delenv(name)


def parse(*arguments: str) -> Serve:
    """Settings as `polydraft serve` reads them."""
    return parse_flags(arguments)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A TOML file with some settings."""
    path = tmp_path / "polydraft.toml"
    path.write_text('port = 1111\nmax-num-seqs = 11\nnum_drafts = 2\napi-key = ["from-file"]\n')
    return path


def test_flag_beats_environment_beats_file_beats_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source hides those below it, setting by setting."""
    monkeypatch.setenv("POLYDRAFT_PORT", "2222")
    monkeypatch.setenv("POLYDRAFT_MAX_NUM_SEQS", "22")
    settings = parse("--config", str(file), "--port", "3333")
    assert settings.port == 3333
    assert settings.max_num_seqs == 22
    assert settings.num_drafts == 2
    assert settings.draft_length == Serve.model_fields["draft_length"].default


def test_the_environment_can_name_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """POLYDRAFT_CONFIG is `--config`."""
    monkeypatch.setenv("POLYDRAFT_CONFIG", str(file))
    assert parse().port == 1111
    assert parse("--port", "3333").port == 3333


@pytest.mark.parametrize("dashes", [False, True])
@pytest.mark.parametrize("kind", ["json", "toml"])
def test_a_file_may_be_toml_or_json(tmp_path: Path, kind: str, dashes: bool) -> None:
    """Both kinds hold any setting, its name with dashes or underscores."""
    values: dict[str, Any] = {"model": "a-model", "max_num_seqs": 5, "calibrate": False, "api_key": ["a", "b"]}
    named = {name.replace("_", "-") if dashes else name: value for name, value in values.items()}
    path = tmp_path / f"settings.{kind}"
    # JSON's spelling of these values is also TOML's.
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in named.items())
    path.write_text(json.dumps(named) if kind == "json" else lines)
    settings = parse("--config", str(path))
    assert {name: getattr(settings, name) for name in values} == values


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", "prot = 8000", "unknown setting 'prot'"),
        ("a.json", '{"port": 8000, "colour": "red"}', "unknown setting 'colour'"),
        ("a.toml", "port = ", "not valid"),
        ("a.json", '{"port": }', "not valid"),
        ("a.json", "[8000]", "must hold a table"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, content: str, words: str) -> None:
    """An unknown setting, bad syntax and a file that is no table are errors of configuration."""
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        parse("--config", str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The message names the file and the reason."""
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file"):
        read_config_file(str(tmp_path / "none.toml"), Serve.model_fields)


def test_a_bad_value_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are checked wherever they come from."""
    monkeypatch.setenv("POLYDRAFT_PORT", "many")
    with pytest.raises(ValidationError, match="port"):
        parse()


def test_keys_can_be_repeated_or_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment takes one key, or several between commas."""
    assert parse("--api-key", "a", "--api-key", "b").api_key == ["a", "b"]
    monkeypatch.setenv("POLYDRAFT_API_KEY", "one-key")
    assert parse().api_key == ["one-key"]
    monkeypatch.setenv("POLYDRAFT_API_KEY", "a,b")
    assert parse().api_key == ["a", "b"]
    assert parse("--api-key", "c").api_key == ["c"]


@pytest.mark.parametrize("value", ["4GB", "4 G", "G", "1e9", "", "many"])
def test_an_amount_that_cannot_be_read_says_how_to_write_one(value: str) -> None:
    """Letters of powers are understood, and units of bytes are not guessed."""
    with pytest.raises(ValidationError) as caught:
        parse("m", "--kv-cache-memory-bytes", value)
    (line,) = faults(caught.value)
    assert line.startswith("--kv-cache-memory-bytes: must be a number, which may end with K, M, G")
    assert line.endswith(f"(got {value!r})")


@pytest.mark.parametrize(
    ("value", "amount"),
    [("1.5G", 3 << 29), (" 4K ", 4096), ("1_000", 1000), (" 4096", 4096), ("+5", 5), ("2k", 2000)],
)
def test_amounts_are_read_as_pydantic_reads_numbers(value: str, amount: int) -> None:
    """With letters of powers besides."""
    assert parse("m", "--kv-cache-memory-bytes", value).kv_cache_memory_bytes == amount


@pytest.mark.parametrize("value", ["", " ", "a,,b", "a,"])
def test_an_empty_key_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A variable that is set to nothing must not open the daemon."""
    monkeypatch.setenv("POLYDRAFT_API_KEY", value)
    with pytest.raises(ValidationError, match="must not be empty"):
        parse()


def test_without_a_model_the_embedded_pair_is_served() -> None:
    """A named model comes without a draft unless one is named."""
    embedded = parse().engine_config().model
    assert Path(embedded.target, "config.json").is_file()
    assert embedded.draft is not None
    assert Path(embedded.draft, "config.json").is_file()
    assert parse().served_name() == "polydraft-demo"
    named = parse("some/model")
    assert (named.served_name(), named.engine_config().model.draft) == ("some/model", None)
    assert parse("some/model", "--served-model-name", "x").served_name() == "x"


def test_settings_reach_the_engine_config() -> None:
    """Flags reach the field of the engine's configuration that they are about."""
    config = parse(
        "m", "--draft-model", "d", "--dtype", "float32", "--device", "cpu", "--num-threads", "3", "--block-size", "8",
        "--num-gpu-blocks-override", "99", "--max-num-seqs", "5", "--max-num-batched-tokens", "777",
        "--max-model-len", "128", "--spec-rule", "block", "--num-drafts", "1", "--draft-length", "6",
        "--max-num-drafts", "2", "--max-draft-length", "7", "--no-calibrate", "--weights", "int8",
        "--draft-weights", "int4", "--activations", "float32",
        "--max-prompt-tokens-per-step", "44", "--draft-window", "33", "--seed-shape", "2,4",
        "--grammar-start-timeout", "0.5", "--grammar-mask-timeout", "0.2", "--grammar-memory-bytes", "1234",
    ).engine_config()  # fmt: skip
    model, cache, scheduler, speculation = config.model, config.cache, config.scheduler, config.speculation
    assert (model.target, model.draft, model.dtype, model.device, model.num_threads) == ("m", "d", "float32", "cpu", 3)
    assert (cache.block_size, cache.num_blocks) == (8, 99)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.max_model_len) == (5, 777, 128)
    assert (speculation.rule, speculation.num_drafts, speculation.draft_length) == ("block", 1, 6)
    assert (speculation.max_num_drafts, speculation.max_draft_length) == (2, 7)
    assert (scheduler.max_prompt_tokens, speculation.draft_window, model.weights) == (44, 33, "int8")
    assert (model.draft_weights, model.activations) == ("int4", "float32")
    assert (speculation.seed_shape, parse().engine_config().speculation.seed_shape) == ((2, 4), None)
    grammars = config.grammars
    assert (grammars.start_timeout_s, grammars.mask_timeout_s, grammars.memory_bytes) == (0.5, 0.2, 1234)
    assert not config.calibrate


def test_every_setting_is_described() -> None:
    """`--help` explains each flag."""
    shown = Serve.model_json_schema()["properties"]
    assert all(field.description for field in Serve.model_fields.values())
    assert not [name for name, field in shown.items() if "\n" in field["description"]]


def test_spaces_and_line_ends_around_keys_are_no_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Secret that was made of a file ends with the file's last line end."""
    monkeypatch.setenv("POLYDRAFT_API_KEY", "alpha, beta\n")
    assert parse_flags([]).api_key == ["alpha", "beta"]


def test_tokens_that_fill_gaps_are_two_or_three() -> None:
    assert parse().fim_tokens == []
    assert parse("--fim-tokens", "[PREFIX],[SUFFIX]").fim_tokens == ["[PREFIX]", "[SUFFIX]"]
    assert parse("--fim-tokens", '["<p>", "<s,>", "<m>"]').fim_tokens == ["<p>", "<s,>", "<m>"]
    for wrong in ("<p>", "<p>,<p>", "<p>,<s>,<m>,<x>", "<p>,"):
        with pytest.raises(ValidationError) as refused:
            parse("--fim-tokens", wrong)
        assert "--fim-tokens: must be two or three different tokens" in faults(refused.value)[0]

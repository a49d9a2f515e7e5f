"""Text to tokens and back: whole characters only, and defaults from the model's own files."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import ConfigError, RequestError
from server.openai.generation_defaults import generation_defaults
from server.text.tokenizer import GenerationDefaults, Tokenizer
from server.wire.errors import to_api_error
from tests.server.text.spacing_tokenizers import spacing
from tests.server.tiny_models import BOS, EOS, TOKENIZER

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
EMOJI = "A family 👨‍👩‍👧 waves 👋🏽 in 東京 — naïve."


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    """The embedded pair's tokenizer, which spells rare characters byte by byte."""
    tokenizer = Tokenizer(str(TOKENIZER))
    yield tokenizer
    tokenizer.close()


QUESTION = [{"role": "user", "content": "a secret"}]


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ 'a' }}\n{{ messages[0].content + 1 }}", "TypeError on line 2"),
        ("{% if messages %}{{ messages | nothing_like_it }}{% endif %}", "TemplateRuntimeError on line 1"),
        ("\n\n{{ messages[0].absent.more }}", "UndefinedError on line 3"),
        ("{{ [].index(messages[0].content) }}", "ValueError on line 1"),
        ("{{ messages.append.__globals__ }}{{ messages.append.__globals__.x }}", "SecurityError on line 1"),
    ],
)
def test_a_mistake_in_a_template_is_the_operator_s(
    template: str, fault: str, rendering_log: pytest.LogCaptureFixture
) -> None:
    """500, and a line in the log that names the place and nothing of the conversation."""
    with pytest.raises(RequestError, match=fault) as failed:
        Tokenizer(str(TOKENIZER), template).render_chat(QUESTION)
    answer = to_api_error(failed.value)
    assert (answer.status, answer.body.code) == (500, "chat_template_failed")
    assert f"the chat template fails ({fault})" in rendering_log.text
    assert "a secret" not in rendering_log.text + answer.body.message


@pytest.mark.parametrize(
    ("template", "variables", "param"),
    [
        ("{{ raise_exception('not these') }}", {}, "messages"),
        ("{{ raise_exception('not these') }}{{ 1 + 'a' }}", {"x": 1}, "messages"),
        ("{{ messages[0].content }}{% if x is defined %}{{ x + 1 }}{% endif %}", {"x": "a"}, "chat_template_kwargs"),
    ],
)
def test_refusal_of_a_template_is_the_clients_mistake(template: str, variables: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        Tokenizer(str(TOKENIZER), template).render_chat(QUESTION, variables=variables)
    answer = to_api_error(refused.value)
    assert (answer.status, answer.body.param) == (400, param)


@settings(deadline=None)
@given(text=TEXT)
def test_tokens_come_back_as_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Token by token, without a replacement character."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.step(token) for token in tokens]
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


def test_a_partial_character_is_held_back(tokenizer: Tokenizer) -> None:
    """An emoji of several tokens appears with its last one."""
    tokens = tokenizer.encode(EMOJI, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.step(token) for token in tokens]
    assert "" in parts, "this text has no character of several tokens; the test proves nothing"
    for end in range(len(parts) + 1):
        assert EMOJI.startswith("".join(parts[:end]))
    assert "".join(parts) == EMOJI


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_spaces_before_words_are_kept(kind: str, tmp_path: Path) -> None:
    """Spaces of the first token of an answer, which follows a prompt, and of a single token."""
    inner = spacing(kind)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = Tokenizer(str(tmp_path))
    tokens = [inner.token_to_id(piece) for piece in ("▁world", "▁and", "▁all")]
    assert inner.decode(tokens) == "world and all", "this decoder takes no space; the test proves nothing"
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.step(token) for token in tokens] == [" world", " and", " all"]
    assert [tokenizer.spell(token) for token in tokens] == [
        (word, word.encode()) for word in (" world", " and", " all")
    ]
    if kind == "llama":  # the other has no decoder of bytes
        euro = [inner.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
        assert b"".join(tokenizer.spell(token)[1] for token in euro) == "€".encode()
    tokenizer.close()


def test_bytes_that_are_no_character_are_replaced(tmp_path: Path) -> None:
    """Decoding a released byte, a beginning of a character, and text changes the first."""
    inner = spacing("llama")
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = Tokenizer(str(tmp_path))
    tokens = [inner.token_to_id(piece) for piece in ("<0x0A>", "<0xE2>", "▁world", "▁and")]
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.step(token) for token in tokens) == "\n\ufffd world and"
    tokenizer.close()


def test_a_character_cut_off_by_the_end_is_never_sent(tokenizer: Tokenizer) -> None:
    """When an answer ends within a character, its text ends before it."""
    tokens = tokenizer.encode("ok 👋", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.step(token) for token in tokens[:-1]).rstrip() == "ok"


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    """An end token has no text for the client by default."""
    tokens = [*tokenizer.encode("ok", add_special_tokens=False), EOS]
    for skip, expected in ((True, "ok"), (False, "ok" + tokenizer.token_text(EOS))):
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
        assert "".join(detokenizer.step(token) for token in tokens) == expected


def test_a_special_token_without_a_role_is_special(tmp_path: Path) -> None:
    """Decoding omits it, which matters to readers of marks in the text."""
    from transformers import AddedToken, PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    made.add_tokens([AddedToken("<mark>", special=True), AddedToken("<plain>", special=False)])
    made.save_pretrained(tmp_path)
    tokenizer = Tokenizer(str(tmp_path))
    (mark,), (plain,) = (tokenizer.encode(text, False) for text in ("<mark>", "<plain>"))
    assert tokenizer.decode([mark, plain], skip_special_tokens=True) == "<plain>"
    assert tokenizer.special_token("<mark>") == tokenizer.token_of("<mark>")
    assert tokenizer.special_token("<plain>") is None
    assert (tokenizer.is_special(mark), tokenizer.is_special(plain)) == (True, False)
    tokenizer.close()


def test_a_chat_goes_through_the_template(tokenizer: Tokenizer) -> None:
    """One BOS at the start, and the end is where the assistant begins."""
    tokens = asyncio.run(tokenizer.run_chat([{"role": "user", "content": "hello"}]))
    assert tokens.count(BOS) == 1
    assert tokens[0] == BOS
    assert tokenizer.token_text(tokens[-1]) == "<|assistant|>"
    with pytest.raises(RequestError, match="chat template refuses"):
        asyncio.run(tokenizer.run_chat([{"role": "wizard", "content": "hello"}]))


def test_another_template_can_be_given() -> None:
    """`--chat-template` replaces the model's own."""
    tokenizer = Tokenizer(str(TOKENIZER), "{{ messages[0].content }}!")
    tokens = asyncio.run(tokenizer.run_chat([{"role": "user", "content": "hello"}]))
    tokenizer.close()
    assert tokenizer.decode(tokens) == "hello!"


def test_work_runs_outside_the_event_loop(tokenizer: Tokenizer) -> None:
    """`run` uses the tokenizer's own threads."""
    name = asyncio.run(tokenizer.run(lambda: threading.current_thread().name))
    assert name.startswith("tokenizer")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """ConfigError names the folder and the way out."""
    with pytest.raises(ConfigError, match="--tokenizer"):
        Tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="no such model folder"):
        Tokenizer(str(tmp_path / "nothing"))


def test_sampling_defaults_come_from_the_model(tmp_path: Path) -> None:
    """Without generation_config.json, or for what it leaves out, they are neutral."""
    assert generation_defaults(str(tmp_path)) == GenerationDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.5, "top_k": 7, "top_p": None, "max_length": 20}))
    assert generation_defaults(str(tmp_path)) == GenerationDefaults(temperature=0.5, top_k=7)


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": "hot"}', '{"top_k": 2.5}'])
def test_bad_sampling_defaults_are_refused(tmp_path: Path, content: str) -> None:
    """It stops the start, and not the first request."""
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json: cannot be used"):
        generation_defaults(str(tmp_path))


def test_a_template_gets_more_variables_and_leaves_the_last_message_open() -> None:
    """chat_template_kwargs and continue_final_message, as transformers has them."""
    template = (
        "{{ mood }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = Tokenizer(str(TOKENIZER), template)
    messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Once upon"}]
    glad = asyncio.run(tokenizer.run_chat(messages, variables={"mood": "glad"}))
    assert tokenizer.decode(glad) == "glad[user]Go on.[end][assistant]Once upon[end][assistant]"
    opened = asyncio.run(tokenizer.run_chat(messages, continue_final_message=True))
    assert tokenizer.decode(opened) == "[user]Go on.[end][assistant]Once upon"
    tokenizer.close()


def test_special_tokens_are_known_by_their_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_token("<|end|>") == tokenizer.token_of("<|end|>")
    assert tokenizer.special_token("the") is None
    assert tokenizer.special_token("</think>") is None


@pytest.mark.parametrize(
    "content",
    [{"repetition_penalty": 0}, {"temperature": -1}, {"top_p": 1.5}, {"top_k": -2}, {"min_p": 2}, {"temperature": 3}],
)
def test_defaults_beyond_the_bounds_of_requests_stop_the_start(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"{next(iter(content))}.*--generation-config neutral"):
        generation_defaults(str(tmp_path))


def test_values_that_are_off_in_transformers_are_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "num_beams": 1}))
    assert generation_defaults(str(tmp_path)) == GenerationDefaults(temperature=0.0)
    assert caplog.text == ""


def test_defaults_that_are_not_applied_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"suppress_tokens": [1], "max_new_tokens": 9, "typical_p": 1.0, "eos_token_id": 2}))
    assert generation_defaults(str(tmp_path)) == GenerationDefaults()
    assert "not applied: max_new_tokens, suppress_tokens" in caplog.text

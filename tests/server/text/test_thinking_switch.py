"""A template's settings of thinking are found by rendering; the nearest serves every wish."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server.text import thinking_switch
from server.text.content_forms import ContentForm
from server.text.dialogue import dialogue_of
from server.text.thinking_switch import Setting, ThinkingSettings, _Search
from server.text.tokenizer import Tokenizer
from tests.server.call_spellings import TEMPLATES
from tests.server.tiny_models import TOKENIZER
from tests.wrong import instead

ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
FOUND: dict[str, tuple[Any, Any, str]] = {
    "qwen3": (OFF, ON, ""),
    "qwen38": (OFF, ON, "low low medium xhigh xhigh xhigh"),
    "mistral_small4": ({"reasoning_effort": "none"}, {"reasoning_effort": "high"}, "high high high high high high"),
    "glm47": (OFF, ON, ""),
    "glm52": (OFF, ON, "high high high high max max"),
    "gemma4": (OFF, ON, ""),
    "kimi_k25": ({"thinking": False}, {"thinking": True}, ""),
    "nemotron_nano2": ("/no_think", {}, ""),
    "minimax_m2": (None, None, ""),
    "minimax_m3": ({"thinking_mode": "disabled"}, {"thinking_mode": "enabled"}, ""),
    "hy3": ({"reasoning_effort": "no_think"}, {"reasoning_effort": "high"}, "low low high high high high"),
    "step35": (None, None, "low low medium high high high"),
    "gpt_oss": (None, None, "low low medium high high high"),
    "deepseek_v31": ({"thinking": False}, {"thinking": True}, ""),
    "qwen2_5": (None, None, ""),
}
"""Settings that turn thoughts off and on, and the words for the requested efforts."""


def switch_of(template: str) -> ThinkingSettings:
    tokenizer = Tokenizer(str(TOKENIZER), template)
    found = dialogue_of(tokenizer, "auto", "auto").thinking
    tokenizer.close()
    return found


def of_family(name: str) -> ThinkingSettings:
    return switch_of((TEMPLATES / "families" / f"{name}.jinja").read_text())


@pytest.mark.parametrize("name", FOUND)
def test_settings_of_families_are_found(name: str) -> None:
    switch = of_family(name)
    off, on, words = FOUND[name]
    assert switch.off == (Setting(word=off) if isinstance(off, str) else off and Setting(off))
    assert switch.on == (None if on is None else Setting(on))
    assert {effort: switch.word_of(effort) for effort in switch.efforts} == dict(
        zip(LEVELS, words.split(), strict=False)
    )
    assert bool(switch) == (FOUND[name] != (None, None, ""))


ASK = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "off", "words"),
    [
        # The words that a switch has do not matter, and words in the template are no switch.
        (ASK + "{{ '' if no_thoughts_of_thinking else '<think>' }}", {"no_thoughts_of_thinking": True}, ""),
        (ASK + "{# enable_thinking #}{{ messages[0].thinking or messages[0]['reasoning_effort'] }}", None, ""),
        (ASK + "{{ 'Think hard.' if reasoning_effort == 'high' }}", None, "minimal low medium high xhigh max"),
        (ASK + "{{ raise_exception('no') if reasoning_effort == 'none' }}", None, ""),
        (ASK + "Effort: {{ reasoning_strength | upper }}", None, "low low medium high high high"),
        (
            ASK + "{{ raise_exception('no') if (thinking_mode or '') not in ('', 'Low', 'High') }}{{ thinking_mode }}",
            None,
            "Low Low High High High High",
        ),
        # Words of effort that close the thoughts, as those of Solar Open.
        (
            ASK + "{{ '<think></think>' if reasoning_effort in ('low', 'minimal') }}",
            {"reasoning_effort": "minimal"},
            "minimal low medium high xhigh max",
        ),
        # Switches that are named by an effort, as those of Nemotron 3.
        (ASK + "{{ '{medium}' if medium_effort }}{{ '{low}' if low_effort }}", None, "low_effort low_effort "
         + "medium_effort medium_effort medium_effort medium_effort"),
    ],
)  # fmt: skip
def test_any_name_and_word_is_found(template: str, off: Any, words: str) -> None:
    switch = switch_of(template)
    assert switch.off == (off and Setting(off))
    assert [switch.word_of(effort) for effort in switch.efforts] == words.split()


def test_a_word_search_is_noticed() -> None:
    """A wrong variant takes the template's words for what it does."""
    with instead(_Search, "_knows", lambda right, self, *_, **__: True):
        assert of_family("gpt_oss").off == Setting({"reasoning_effort": "none"})
    with instead(thinking_switch, "_nearest", lambda right, effort, accepted: accepted[0]):
        assert of_family("qwen38").word_of("high") == "low"


def test_the_log_line_has_the_table() -> None:
    assert str(of_family("hy3")) == (
        "off by default; off: reasoning_effort=no_think; on: reasoning_effort=high; efforts: minimal low, low low, "
        "medium high, high high, xhigh high, max high; accepted words: no_think (closed), low (opened), high (opened)"
    )
    assert of_family("hy3").card()["efforts"]["medium"] == "high"


PARTS = {"smolvlm": "Assistant:", "llava": "<|im_start|>assistant\n"}


@pytest.fixture(params=PARTS)
def vision(request: pytest.FixtureRequest) -> Iterator[tuple[Tokenizer, str]]:
    name = request.param
    tokenizer = Tokenizer(str(TOKENIZER), (TEMPLATES / "families" / f"{name}.jinja").read_text())
    yield tokenizer, PARTS[name]
    tokenizer.close()


def test_templates_that_show_parts_alone_are_served(vision: tuple[Tokenizer, str]) -> None:
    """SmolVLM, Idefics and LLaVA: every role, with an empty answer too."""
    tokenizer, end = vision
    turns = [("system", "Be brief."), ("user", "Hello."), ("assistant", ""), ("assistant", "Hi."), ("user", "Go on.")]
    prompt = tokenizer.render_chat([{"role": role, "content": text} for role, text in turns])
    assert prompt.endswith(end)
    places = [prompt.index(text) for _, text in turns if text]
    assert places == sorted(places)


def test_one_role_may_need_parts() -> None:
    """Mistral 3.1 reads the first part of a system prompt."""
    template = "{% for m in messages %}[{{ m.content[0].text if m.role == 'system' else m.content }}]{% endfor %}"
    tokenizer = Tokenizer(str(TOKENIZER), template)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    assert tokenizer.render_chat(messages) == "[Be brief.][Hello.]"
    assert tokenizer._content_form == ContentForm(frozenset({"system"}))
    tokenizer.close()


def test_thoughts_may_be_parts() -> None:
    """Mistral's templates show earlier thoughts in no other place."""
    tokenizer = Tokenizer(str(TOKENIZER), (TEMPLATES / "families" / "mistral_small4.jinja").read_text())
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "So?")
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    assert "[INST]Hello.[/INST]Hi." in tokenizer.render_chat(turns)
    turns[1] |= thought
    assert "[/INST][THINK]So?[/THINK]Hi." in tokenizer.render_chat(turns)
    tokenizer.close()

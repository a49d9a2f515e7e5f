"""The format of calls is the one that reads the template's call back."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.api import ConfigError, RequestError
from server.text.dialogue import Dialogue, dialogue_of
from server.text.shipped_templates import SHIPPED
from server.text.tokenizer import Tokenizer
from server.text.tools import tool_use_of
from server.wire.fields import ChatRequest
from tests.server.call_spellings import RESPONSE_TEMPLATE, TEMPLATES
from tests.server.families import FAMILIES, write_family
from tests.server.text.call_cases import FORM_OF
from tests.server.text.layouts import LAYOUTS
from tests.server.tiny_models import TinyModels

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.thought }}CALLS{% endfor %}"
UNREAD = TOOLS + TURNS.replace(
    "CALLS",
    "{% for c in m.tool_calls or [] %}<call {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{# <tool_call>, [TOOL_CALLS] and <function= are words of other formats #}",
)
"""Calls in a format without a reader."""
NO_CALLS, NO_TOOLS = TOOLS + TURNS.replace("CALLS", ""), TURNS.replace("CALLS", "")
THOUGHTS = (
    "{% for m in messages %}"
    "{% if m.reasoning_content %}|{{ m.reasoning_content }}|{% endif %}{{ m.content }}{% endfor %}"
)


def found(models: TinyModels, template: str, calls: str = "auto", thoughts: str = "auto") -> Dialogue:
    return dialogue_of(Tokenizer(str(models.target), template), calls, thoughts)


def served(dialogue: Dialogue) -> str | None:
    """The format of calls of a dialogue without refusals and warnings."""
    assert (dialogue.tools_refusal, dialogue.warnings) == ("", ())
    return dialogue.call_format


def refused(dialogue: Dialogue) -> str:
    """The answer to a request with a tool."""
    tool = {"type": "function", "function": {"name": "f"}}
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": [tool]})
    with pytest.raises(RequestError) as caught:
        tool_use_of(body, dialogue.call_format, dialogue.tools_refusal)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_value")
    return str(caught.value)


@pytest.mark.parametrize("name", FORM_OF)
def test_the_format_is_the_one_that_reads_a_call_back(models: TinyModels, name: str) -> None:
    tokenizer = Tokenizer(str(models.target), (TEMPLATES / f"{name}.jinja").read_text())
    if name == "response_template":
        tokenizer._fast.response_template = RESPONSE_TEMPLATE
    dialogue = dialogue_of(tokenizer, "auto", "auto")
    assert (dialogue.call_format, dialogue.warnings) == (FORM_OF[name], ())
    assert bool(dialogue.tools_refusal) == (name == "families/deepseek_r1_distill")


def test_calls_that_no_format_reads_are_refused_at_start_and_by_name(models: TinyModels) -> None:
    """Words of a format in the template do not count."""
    dialogue = found(models, UNREAD)
    assert dialogue.call_format is None
    assert dialogue.warnings == (
        "the chat template shows calls in a format that is not read; requests with tools are refused",
    )
    assert "does not read calls in the format" in refused(dialogue)
    assert "no --tool-call-parser of this server reads them" in refused(dialogue)


def test_a_configured_format_that_does_not_read_the_templates_calls_is_a_warning(models: TinyModels) -> None:
    """It is used all the same: the operator may know better."""
    glm = (TEMPLATES / "families" / "glm4.jinja").read_text()
    dialogue = found(models, glm, "hermes")
    assert (dialogue.call_format, dialogue.tools_refusal) == ("hermes", "")
    (warning,) = dialogue.warnings
    assert warning == "--tool-call-parser hermes does not read the calls that the chat template shows; glm reads them"
    assert found(models, glm, "glm").warnings == ()
    assert found(models, UNREAD, "hermes").call_format == "hermes"
    assert "shows" in found(models, UNREAD, "hermes").warnings[0]
    assert served(found(models, NO_CALLS, "hermes")) == "hermes"


def test_a_template_that_shows_no_calls_needs_a_setting(models: TinyModels) -> None:
    assert "does not show calls" in refused(found(models, NO_CALLS))
    assert "the --tool-call-parser of its format" in refused(found(models, NO_CALLS))


def test_a_format_whose_mark_alone_is_a_token_needs_no_calls_in_the_template(tmp_path: Path) -> None:
    """Granite 3 and Phi-4-mini. Of several formats none is taken."""
    (granite,) = (one for one in FAMILIES if one.name == "granite3")
    tokenizer = Tokenizer(str(write_family(tmp_path / "model", granite)))
    assert served(dialogue_of(tokenizer, "auto", "auto")) == "tool_call_list"
    tokenizer._backend.add_tokens(["[TOOL_CALLS]"])
    assert "does not show calls" in refused(dialogue_of(tokenizer, "auto", "auto"))


def test_tools_are_a_text_of_the_system_prompt_where_the_template_expects_them(tmp_path: Path) -> None:
    """Phi-4-mini, with a system prompt and without one."""
    (phi,) = (one for one in FAMILIES if one.name == "phi4_mini")
    tokenizer = Tokenizer(str(write_family(tmp_path / "model", phi)))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    asked = [{"role": "user", "content": "Hello"}]
    told = '<|tool|>[{"name": "f", "parameters": {}}]<|/tool|><|end|><|user|>Hello<|end|><|assistant|>'
    assert tokenizer.render_chat(asked, tools=[tool]) == f"<|system|>{told}"
    assert tokenizer.render_chat([{"role": "system", "content": "Be brief."}, *asked], tools=[tool]) == (
        f"<|system|>Be brief.{told}"
    )
    assert "<|tool|>" not in tokenizer.render_chat(asked)


@pytest.mark.parametrize("setting", ["auto", "hermes"])
def test_one_answer_names_all_that_a_template_without_tools_needs(models: TinyModels, setting: str) -> None:
    """Also if a format is configured already, which changes nothing."""
    assert "has no place for tools; start the server with a --chat-template FILE" in refused(
        found(models, NO_TOOLS, setting)
    )


def test_a_response_template_must_be_there(models: TinyModels) -> None:
    with pytest.raises(ConfigError, match="no response_template"):
        found(models, UNREAD, "response_template")


@pytest.mark.parametrize(
    ("token", "names"),
    [("", "see --chat-template"), ("<|end_of_msg|>", "kimi-k3"), ("<｜User｜>", "deepseek32 or deepseek4")],
)
def test_a_model_without_a_template_says_what_to_do(models: TinyModels, token: str, names: str) -> None:
    tokenizer = Tokenizer(str(models.target), "")
    tokenizer._backend.add_tokens([token] if token else [])
    (warning,) = dialogue_of(tokenizer, "auto", "auto").warnings
    assert "no chat template" in warning
    assert names in warning


def test_the_template_of_the_same_calls_is_advised(models: TinyModels) -> None:
    """DeepSeek V3 and V3.1 begin turns with the same token, and write other calls."""
    for name, template in (("deepseek_v3", "deepseek-tools"), ("deepseek_v31", "deepseek31-tools")):
        tokenizer = Tokenizer(str(models.target), (TEMPLATES / "families" / f"{name}.jinja").read_text())
        tokenizer._backend.add_tokens(["<｜User｜>"])
        assert f"--chat-template {template}," in refused(dialogue_of(tokenizer, "auto", "auto"))


@pytest.mark.parametrize(
    ("template", "setting", "is_said"),
    [
        (THOUGHTS, "auto", True),
        (THOUGHTS, "none", False),
        (THOUGHTS.replace("|{{", "<think>{{").replace("}}|", "}}</think>"), "auto", False),
        # The words are there, and the thoughts stand elsewhere.
        (THOUGHTS + "{% set words = '<think></think>' %}", "auto", True),
        (NO_TOOLS, "auto", False),
    ],
)
def test_thoughts_that_are_not_separated_are_said(
    models: TinyModels, template: str, setting: str, is_said: bool
) -> None:
    assert any("thoughts" in warning for warning in found(models, template, thoughts=setting).warnings) == is_said


def test_a_variant_that_a_template_cannot_render_is_no_fault(
    models: TinyModels, rendering_log: pytest.LogCaptureFixture
) -> None:
    """SmolLM2's template adds texts, so a content of None is a mistake there."""
    template = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
    assert "no place for tools" in found(models, template).tools_refusal
    assert not rendering_log.records


def test_a_template_that_fails_is_reported_once(models: TinyModels, rendering_log: pytest.LogCaptureFixture) -> None:
    assert "fails" in refused(found(models, "{% for m in messages %}{{ m.missing.part }}{% endfor %}"))
    assert len(rendering_log.records) == 1


@pytest.mark.parametrize("name", SHIPPED)
def test_calls_of_shipped_templates_are_recognised(models: TinyModels, name: str) -> None:
    dialogue = found(models, SHIPPED[name].read_text())
    forms = {layout.name: layout.calls for layout in LAYOUTS} | {"deepseek-tools": "deepseek_v3"}
    assert served(dialogue) == forms.get(name, "hermes")


def test_the_template_that_fits_is_named(tmp_path: Path) -> None:
    """One answer has all that is to be done."""
    for name, template in (("smollm2", "chatml-tools"), ("gemma3", "gemma-tools"), ("deepseek_v3", "deepseek-tools")):
        (family,) = (one for one in FAMILIES if one.name == name)
        tokenizer = Tokenizer(str(write_family(tmp_path / name, family)))
        told = refused(dialogue_of(tokenizer, "auto", "auto"))
        assert f"has no place for tools; start the server with --chat-template {template}" in told
        assert "without --tool-call-parser" in told

"""An answer with calls goes back as history, and the next prompt says the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.api import RequestError
from server.text.call_formats import call_marks
from server.text.tokenizer import Tokenizer
from server.text.tools import template_message
from server.wire.fields import Message
from tests.server.call_spellings import SPELL, TEMPLATES, Call
from tests.server.text.call_cases import BEFORE, BOTH, CASES, FORM_OF, PARIS, pieces_of, read
from tests.server.tiny_models import TinyModels

QUESTION = "How is it there?"
IDS = ("a1b2c3d4e", "call_0123456789abcdef0123456789abcdef", "toolu_01A09q90qw90lq917835lq9")
"""Ids as this server makes them, and as others do."""


@pytest.fixture(scope="module", params=FORM_OF)
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(models: TinyModels, template: str) -> Tokenizer:
    return Tokenizer(str(models.target), (TEMPLATES / f"{template}.jinja").read_text())


def called(text: str | None, calls: list[tuple[str, str]], id_like: str = IDS[0], **more: Any) -> list[dict[str, Any]]:
    """A turn of the assistant that calls, and the results."""
    ids = [f"{id_like[:-1]}{number}" for number in range(len(calls))]
    made = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
        for one, (name, arguments) in zip(ids, calls, strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": one, "content": f"result {n}"} for n, one in enumerate(ids)]
    return [{"role": "assistant", "content": text, "tool_calls": made, **more}, *results]


def prompt_of(tokenizer: Tokenizer, template: str, turns: list[dict[str, Any]]) -> str:
    """The next turn's prompt, behind the first question."""
    sent = [{"role": "user", "content": QUESTION}, *turns]
    messages = [template_message(Message.model_validate(one), number) for number, one in enumerate(sent)]
    return tokenizer.render_chat(messages, call_marks=call_marks(FORM_OF[template])).partition(QUESTION)[2]


def said(template: str, prompt: str) -> tuple[str, list[Call]]:
    """Return the assistant's part of a prompt: (text, calls)."""
    if FORM_OF[template] != "llama3_json":
        return read(FORM_OF[template], [prompt])
    turns = [turn.partition("<|end|>")[0] for turn in prompt.split("<|assistant|>")[1:]]
    found = [read("llama3_json", [turn]) for turn in turns if turn]
    return "".join(text for text, _ in found), [call for _, calls in found for call in calls]


@pytest.mark.parametrize("case", CASES)
def test_an_answer_goes_back_as_history(tokenizer: Tokenizer, template: str, case: str) -> None:
    """The same calls in order, the text before them, and every result."""
    form = FORM_OF[template]
    text, reader = pieces_of(form, [BEFORE[form] + SPELL[form](CASES[case])])
    prompt = prompt_of(tokenizer, template, called(text, [(call.name, call.arguments) for call in reader.calls]))
    seen, calls = said(template, prompt)
    assert calls == CASES[case]
    assert BEFORE[form] in seen
    places = [prompt.index(f"result {number}") for number in range(len(calls))]
    assert places == sorted(places)


@pytest.mark.parametrize("id_like", IDS)
def test_ids_of_other_servers_are_taken(tokenizer: Tokenizer, template: str, id_like: str) -> None:
    """A template that wants another id gets one, the same for a call and its result."""
    turns = called(None, [(name, json.dumps(arguments)) for name, arguments in BOTH], id_like)
    prompt = prompt_of(tokenizer, template, turns)
    assert said(template, prompt)[1] == BOTH
    if template == "mistral":
        ids = [part.partition('"')[0] for part in prompt.split('"id": "')[1:]]
        assert ids == [part.partition('"')[0] for part in prompt.split('"call_id": "')[1:]]
        assert len(set(ids)) == 2


@pytest.mark.parametrize("arguments", ['{"city": "Par', '{"x": NaN}', '{"x": -Infinity}', '{"x": 1e999}'])
def test_arguments_that_are_no_json_go_back_as_they_were_written(
    tokenizer: Tokenizer, template: str, arguments: str
) -> None:
    prompt = prompt_of(tokenizer, template, called("", [("weather", arguments)]))
    assert said(template, prompt)[1] == [("weather", {"partial_json": arguments})]


def test_thoughts_may_stand_beside_calls(tokenizer: Tokenizer, template: str) -> None:
    """Whether a template shows them is its own matter; the calls are shown in any case."""
    turns = called(None, [(PARIS[0], json.dumps(PARIS[1]))], reasoning_content="They ask about <tool_call> Paris.")
    assert PARIS in said(template, prompt_of(tokenizer, template, turns))[1]


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "messages.1.tool_calls"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "messages.1.tool_calls"),
        ("{{ messages[0].content }}{{ messages[1].tool_calls | tojson }}", "messages.2.content"),
    ],
)
def test_parts_that_a_template_does_not_show_are_refused_by_name(models: TinyModels, text: str, refused: str) -> None:
    tokenizer = Tokenizer(str(models.target), text)
    with pytest.raises(RequestError) as caught:
        prompt_of(tokenizer, "hermes", called(None, [(PARIS[0], json.dumps(PARIS[1]))]))
    assert caught.value.param == refused
    assert "does not show it" in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_calls_that_are_shown_without_content_alone_go_back(models: TinyModels, content: str | None) -> None:
    """DeepSeek-R1-Distill; the text is at its original position, before the calls."""
    template = "families/deepseek_r1_distill"
    tokenizer = Tokenizer(str(models.target), (TEMPLATES / f"{template}.jinja").read_text())
    prompt = prompt_of(tokenizer, template, called(content, [(PARIS[0], json.dumps(PARIS[1]))]))
    assert prompt.startswith(f"<｜Assistant｜>{content or ''}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function")
    assert said(template, prompt)[1] == [PARIS]
    assert prompt.endswith("<｜tool▁output▁begin｜>result 0<｜tool▁output▁end｜><｜tool▁outputs▁end｜>")


def test_a_system_prompt_that_is_refused_is_said_by_the_user(models: TinyModels) -> None:
    """Gemma 1 and 2: in the first message, which stays the same in later turns."""
    tokenizer = Tokenizer(str(models.target), (TEMPLATES / "families" / "gemma2.jinja").read_text())
    turns = [("system", "Be brief."), ("user", "Hello."), ("assistant", "Hi."), ("user", "A"), ("user", "B")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert tokenizer.render_chat(messages).endswith(
        "<start_of_turn>user\nBe brief.\n\nHello.<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n"
        "<start_of_turn>user\nA\n\nB<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(RequestError, match="refuses these messages: System role not supported"):
        tokenizer.render_chat([messages[0], messages[2]])


# What templates of Mistral, Gemma and newer Qwen models demand.
LATE = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('a late system prompt') }}{% endfor %}"
ALTERNATE = (
    "{% for m in messages | rejectattr('role', 'in', ['system', 'tool']) | rejectattr('tool_calls') %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}"
    "{% endfor %}"
)
SHOWN = "{% for m in messages %}[{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}]{% endfor %}"


def test_turns_of_agents_fit_templates_that_want_them_to_alternate(models: TinyModels) -> None:
    """Coding agents send several system prompts, and texts of the user in a row."""
    turns = [
        {"role": "system", "content": "You code."},
        {"role": "system", "content": "Skills."},
        {"role": "user", "content": "The folder is x."},
        {"role": "system", "content": "It is Monday."},
        {"role": "user", "content": "Write a file."},
    ]
    later = [*called(None, [("f", "{}")]), {"role": "user", "content": "Go on."}]
    strict, late_only = (Tokenizer(str(models.target), text + SHOWN) for text in (LATE + ALTERNATE, LATE))
    assert strict.render_chat(turns).strip() == (
        "[system: You code.\n\nSkills.][user: The folder is x.\n\nIt is Monday.\n\nWrite a file.]"
    )
    messages = [template_message(Message.model_validate(one), number) for number, one in enumerate([*turns, *later])]
    assert strict.render_chat(messages).strip().endswith("[tool: result 0\n\nGo on.]")
    assert late_only.render_chat(turns).strip() == (
        "[system: You code.\n\nSkills.][user: The folder is x.][user: It is Monday.][user: Write a file.]"
    )


def test_a_system_prompt_without_a_place_is_said_by_the_user(models: TinyModels) -> None:
    tokenizer = Tokenizer(
        str(models.target), "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    assert tokenizer.render_chat(messages) == "[Be brief.\n\nHello.]"

"""Thoughts are separated from text for any pieces, and over HTTP in every API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.probe import Probe
from server.text.reasoning import Reasoning, Thought, is_closed, is_open, reasoning_of
from server.text.thought_marks import MARKS, THINK, ThoughtMarks
from server.text.thought_probe import found_marks
from server.text.tokenizer import Tokenizer
from tests.grid import slow_fixture
from tests.server.daemon_process import MODEL, Daemon, Daemons
from tests.server.event_stream import open_stream
from tests.server.tiny_models import TOKENIZER

QWEN = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
# (whether the prompt has begun the thinking, answer, thoughts, what is said)
CASES = [
    (False, "<think>\nIs it?\nYes.\n</think>\n\nIt is.", "Is it?\nYes.", "It is."),
    (False, "Just <b>words</b>.", "", "Just <b>words</b>."),
    (False, "\n <think>a</think>b", "a", "b"),
    (False, "say <think>no</think>", "", "say <think>no</think>"),
    (False, "<thin air", "", "<thin air"),
    (False, "<think></think>b", "", "b"),
    (False, "<think>a </thin k></think> b </think> c", "a </thin k>", "b </think> c"),
    (True, "a\n</think>\n\nb ", "a", "b "),
    (True, "cut in the middle </thi", "cut in the middle </thi", ""),
    (True, "<think>a</think>b", "<think>a", "b"),
    (False, "", "", ""),
]


def split(starts_inside: bool, pieces: list[str]) -> tuple[str, str]:
    """(thoughts, what is said)."""
    reasoning = Reasoning(starts_inside)
    parts = [part for i, piece in enumerate(pieces) for part in reasoning.feed(piece, i == len(pieces) - 1)]
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    return thought, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize("case", CASES, ids=[case[1][:20] for case in CASES])
def test_thoughts_are_split_off(case: tuple[bool, str, str, str]) -> None:
    begun, answer, thoughts, said = case
    assert split(begun, [answer]) == (thoughts, said)
    assert split(begun, list(answer) or [""]) == (thoughts, said)


@given(st.sampled_from(CASES), st.data())
@settings(max_examples=200, deadline=None)
def test_thoughts_in_any_pieces_are_split_alike(case: tuple[bool, str, str, str], data: st.DataObject) -> None:
    begun, answer, *expected = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    pieces = [answer[i:j] for i, j in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert list(split(begun, pieces)) == expected


def test_nothing_of_a_tag_is_ever_released_early() -> None:
    reasoning = Reasoning(True)
    assert reasoning.feed("so </th") == [Thought("so")]
    assert reasoning.feed("ink>") == []
    assert reasoning.feed("\n") == []
    assert reasoning.feed("yes") == ["yes"]


def marks_of(template: str, setting: str = "auto") -> ThoughtMarks | None:
    """The marks that are found with the embedded pair's tokenizer, which has no marks as tokens."""
    tokenizer = Tokenizer(str(TOKENIZER), template)
    found = found_marks(setting, Probe(tokenizer))
    tokenizer.close()
    return found


def test_template_shows_whether_a_model_thinks() -> None:
    """The prompt counts, and words and comments of the template do not."""
    shown = "{{ messages[-1].content }}"
    assert marks_of(shown + QWEN) == THINK
    assert marks_of(shown + "{# <think></think>,\n<|channel|>x<|message|> #}") is None
    assert marks_of(shown + "{% set words = '<think></think> [THINK] <|channel|>analysis<|message|>' %}") is None
    assert marks_of(shown, "deepseek_r1") == THINK
    assert marks_of(shown + QWEN, "none") is None
    assert is_open("<|assistant|><think>\n")
    assert not is_open("<think>\n\n</think>\n\n")


def test_tokens_prove_marks_that_few_models_have() -> None:
    """Many models have the tokens of <think> and do not think."""
    for marks, expected in ((MARKS["apertus"], MARKS["apertus"]), (THINK, None)):
        tokenizer = Tokenizer(str(TOKENIZER), "{{ messages[-1].content }}")
        tokenizer._backend.add_tokens([marks.open, marks.close])
        assert found_marks("auto", Probe(tokenizer)) == expected
        tokenizer.close()


SHOWS = (
    "{% for m in messages %}{% if m.reasoning_content %}{{ OPEN + m.reasoning_content + CLOSE }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
DROPS = "{% for m in messages %}{{ m.content.split(CLOSE)[-1] }}{% endfor %}"
OPENS = "{{ messages[-1].content }}[a]{{ OPEN if add_generation_prompt }}"


@pytest.mark.parametrize("template", [SHOWS, DROPS, OPENS], ids=["shown", "dropped", "opened"])
@pytest.mark.parametrize("name", [name for name, marks in MARKS.items() if not marks.lead])
def test_marks_are_those_that_are_rendered(name: str, template: str) -> None:
    """Also if the template builds them from parts."""
    marks = MARKS[name]
    built = "{% set OPEN = " + " + ".join(map(repr, marks.open)) + " %}{% set CLOSE = " + repr(marks.close) + " %}"
    assert marks_of(built + template) == marks


@pytest.mark.parametrize(
    ("opening", "closing"), [("<think:opensource>", "</think:opensource>"), ("<mm:think>", "</mm:think>")]
)
def test_unknown_tags_are_marks_if_a_thought_stands_between_them(opening: str, closing: str) -> None:
    built = f"{{% set OPEN = {opening!r} %}}{{% set CLOSE = {closing!r} + '\n' %}}"
    assert marks_of(built + SHOWS) == ThoughtMarks(opening, closing)


@pytest.mark.parametrize("name", [name for name, marks in MARKS.items() if not marks.lead])
def test_marks_of_every_family_are_read(name: str) -> None:
    marks = MARKS[name]
    text = f"{marks.open}So it is.{marks.close}\n\nYes <think>."
    for pieces in ([text], list(text)):
        reasoning = Reasoning(False, marks)
        parts = [part for i, piece in enumerate(pieces) for part in reasoning.feed(piece, i == len(pieces) - 1)]
        assert "".join(part.text for part in parts if isinstance(part, Thought)) == "So it is."
        assert "".join(part for part in parts if isinstance(part, str)) == "Yes <think>."
    assert is_open(f"<|assistant|>{marks.open}", marks)
    assert is_closed(f"{marks.open}{marks.close}\n", marks)


# A random model thinks what a grammar makes it think.
ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 1}
GRAMMAR = {"structured_outputs": {"regex": "<think>[a-z]{3,8}</think>[A-Z]{2,6}"}}
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
)


@pytest.fixture(scope="module")
@slow_fixture
def thinking(daemons: Daemons, pair_arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """Daemon whose template opens the thoughts if a variable is set."""
    template = Path(tmp_path_factory.mktemp("thinking")) / "template.jinja"
    template.write_text(TEMPLATE)
    return daemons.get(
        *pair_arguments, "--no-calibrate", "--chat-template", str(template), "--tool-call-parser", "hermes"
    )


@pytest.fixture
def client(thinking: Daemon) -> Iterator[httpx.Client]:
    with thinking.client() as client:
        yield client


def test_a_chat_has_thoughts_beside_its_content(client: httpx.Client) -> None:
    """Whole and streamed, with the number of their tokens."""
    whole = client.post("/v1/chat/completions", json=ASKED | GRAMMAR | {"seed": 3}).json()
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"]
    assert message["reasoning_content"].islower()
    assert message["content"].isupper()
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 1 < counted < whole["usage"]["completion_tokens"]

    with open_stream(client, "/v1/chat/completions", **ASKED, **GRAMMAR, seed=3) as stream:
        deltas = [choice["delta"] for chunk in stream.read() for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


def test_thinking_that_the_prompt_has_begun(client: httpx.Client) -> None:
    """Text before a closing tag is a thought; if the answer is cut, all of it is."""
    call = ASKED | {"max_tokens": 6, "reasoning_effort": "high"}
    message = client.post("/v1/chat/completions", json=call).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] is None
    plain = client.post("/v1/chat/completions", json=call | {"reasoning_effort": "none"}).json()["choices"][0][
        "message"
    ]
    assert plain["content"]
    assert "reasoning_content" not in plain


def test_thinking_is_switched_at_the_top_of_a_body_too(client: httpx.Client) -> None:
    """Switches of hosted models; each sets the same variable of the template."""

    def prompt_tokens(path: str = "/v1/chat/completions", **more: Any) -> int:
        body = client.post(path, json=ASKED | {"max_tokens": 1} | more).json()
        return int(body["usage"].get("prompt_tokens") or body["usage"]["input_tokens"])

    on, off = (prompt_tokens(chat_template_kwargs={"enable_thinking": value}) for value in (True, False))
    assert on > off
    for asked in ({"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"reasoning_effort": "max"}):
        assert prompt_tokens(**asked) == on
    for asked in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "auto"}}):
        assert prompt_tokens(**asked) == off
    response = {"model": MODEL, "input": "hello", "max_output_tokens": 1}
    for asked in ({"enable_thinking": True}, {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}):
        answer = client.post("/v1/responses", json=response | asked)
        assert answer.json()["usage"]["input_tokens"] == on, answer.text


def test_a_grammar_begins_with_the_answer(client: httpx.Client) -> None:
    """Structured output behind an opened tag is what is said, not a thought."""
    grammar = {"structured_outputs": {"regex": "[A-Z]{2,6}"}, "reasoning_effort": "high"}
    message = client.post("/v1/chat/completions", json=ASKED | grammar).json()["choices"][0]["message"]
    assert message["content"].isupper()


def test_a_budget_needs_tags_that_are_tokens(client: httpx.Client) -> None:
    for path, field, value in (
        ("/v1/chat/completions", "thinking_token_budget", 5),
        ("/v1/messages", "thinking", {"type": "enabled", "budget_tokens": 5}),
    ):
        refused = client.post(path, json=ASKED | {"max_tokens": 9, field: value})
        assert refused.status_code == 400
        assert "cannot be ended" in refused.json()["error"]["message"]
        assert field in refused.json()["error"]["message"]


def test_thoughts_go_back_to_the_model(client: httpx.Client) -> None:
    """A template that shows them again gets them under either name; only from the assistant."""

    def count(**more: Any) -> int:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **more}]
        answer = client.post("/v1/chat/completions", json=ASKED | {"messages": turns, "max_tokens": 1})
        return int(answer.json()["usage"]["prompt_tokens"])

    assert count(reasoning_content="abc def") == count(reasoning="abc def") > count()
    bad = ASKED | {"messages": [{"role": "user", "content": "a", "reasoning": "b"}]}
    assert client.post("/v1/chat/completions", json=bad).status_code == 400


def test_responses_have_a_reasoning_item(client: httpx.Client) -> None:
    text = {"format": {"type": "text"}}
    call = {"model": MODEL, "input": "hello", "text": text, "seed": 3, "temperature": 1, **GRAMMAR}
    body = client.post("/v1/responses", json=call).json()
    thought, message = body["output"]
    assert (thought["type"], message["type"]) == ("reasoning", "message")
    assert thought["content"][0]["text"].islower()
    assert message["content"][0]["text"].isupper()
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 1


def test_a_reasoning_item_goes_back(client: httpx.Client) -> None:
    """A client that stores nothing sends the output as it came."""
    call = {"model": MODEL, "seed": 3, "temperature": 1, "include": ["reasoning.encrypted_content"], **GRAMMAR}
    user = {"role": "user", "content": "hello"}
    output = client.post("/v1/responses", json=call | {"input": [user]}).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]

    def num_tokens(items: list[Any]) -> int:
        answer = client.post("/v1/responses", json=call | {"input": [user, *items, user]})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["input_tokens"])

    assert num_tokens(output) > num_tokens(output[1:])
    bad = {"type": "reasoning", "content": [{"no": "text"}]}
    assert client.post("/v1/responses", json=call | {"input": [user, bad]}).status_code == 400


def test_a_grammar_is_refused_by_the_endpoints_own_name(client: httpx.Client) -> None:
    bad = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no such type"}}}
    for stream in (False, True):
        answer = client.post("/v1/responses", json={"model": MODEL, "input": "a", "text": bad, "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "text.format"


def test_strict_tools_leave_the_thinking_a_thought(client: httpx.Client) -> None:
    """They bind the calls, not the answer's beginning."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    call = ASKED | {"max_tokens": 6, "reasoning_effort": "high", "tools": [tool]}
    answer = client.post("/v1/chat/completions", json=call)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"] is None


def test_messages_have_a_thinking_block(thinking: Daemon) -> None:
    """If the prompt has begun the thinking; the budget is within max_tokens."""
    asked: Any = {"model": MODEL, "messages": ASKED["messages"], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with anthropic.Anthropic(base_url=thinking.url, api_key="unused", max_retries=0) as client:
        assert client.messages.create(**asked, max_tokens=1000).content[0].type == "thinking"
        with client.messages.stream(**asked, max_tokens=9) as stream:
            assert stream.get_final_message().content[0].type == "thinking"


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{"reasoning_effort": "high"}, {"reasoning_effort": "none"}, {"enable_thinking": True}]
)
def test_thinking_fields_unknown_to_the_template_are_reported(http: httpx.Client, asked: dict[str, Any]) -> None:
    """A hint has no effect on a model without levels of thinking."""
    plain, hinted = (http.post("/v1/chat/completions", json=ASKED | {"seed": 1} | more) for more in ({}, asked))
    assert hinted.json()["choices"] == plain.json()["choices"]
    assert hinted.headers["x-polydraft-ignored-fields"] == next(iter(asked))


WRAPPED = [
    ("<think>a</think>\n<answer>\nIt is <b>so</b>.\n</answer>\n", "It is <b>so</b>."),
    ("<think>a</think><answer>b</answer> c </answer>", "b</answer> c"),
    ("<think>a</think><answer> cut </ans", "cut </ans"),
    ("<think>a</think><answer></answer>", ""),
    ("<think>a</think> <b>no</b></answer>", "<b>no</b></answer>"),
    ("<think>a</think><answe", "<answe"),
    ("Say <answer>b</answer>", "Say <answer>b</answer>"),
    ("<answer>b\n\nc</answer>", "b\n\nc"),
]


@given(st.sampled_from(WRAPPED), st.data())
@settings(max_examples=300, deadline=None)
def test_tags_around_the_rest_are_dropped(case: tuple[str, str], data: st.DataObject) -> None:
    """GLM-4.1V, Hunyuan and Granite 3.3 write such answers."""
    answer, expected = case
    reader = reasoning_of(False, replace(THINK, wrapper=("<answer>", "</answer>")))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[i:j] for i, j in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    parts = [part for i, piece in enumerate(pieces) for part in reader.feed(piece, i == len(pieces) - 1)]
    assert "".join(part for part in parts if isinstance(part, str)) == expected
    assert "".join(part.text for part in parts if isinstance(part, Thought)) == ("a" if "think" in answer else "")


@pytest.mark.parametrize(
    ("template", "wrapper"),
    [
        # Granite 3.3 asks for the tags, Hunyuan drops them, MiniMax M2 shows results in them.
        ("{{ messages[-1].content }}Write <response></response>.<think>", ("<response>", "</response>")),
        (
            "{% for m in messages %}{{ m.content.split('<answer>')[-1].replace('</answer>', '') }}{% endfor %}<think>",
            ("<answer>", "</answer>"),
        ),
        (
            "{% for m in messages %}{{ '<response>' + m.content + '</response>' if m.role == 'tool' else m.content }}"
            "{% endfor %}<think>",
            ("", ""),
        ),
    ],
)
def test_tags_around_the_rest_are_those_that_the_template_uses(template: str, wrapper: tuple[str, str]) -> None:
    marks = marks_of(template)
    assert marks is not None
    assert marks.wrapper == wrapper


def test_tags_stay_if_the_template_has_none() -> None:
    (_, said) = reasoning_of(False, THINK).feed("<think>a</think><response>b</response>", True)
    assert said == "<response>b</response>"

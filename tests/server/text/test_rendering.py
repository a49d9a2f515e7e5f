"""Conversations through templates that take or show less than others."""

from __future__ import annotations

import copy
import itertools
import json
import re
from typing import Any

import pytest
from jinja2 import Template

from server.text.rendering import _MarkedCopies
from tests.server.text.conversations import (
    ANSWER,
    SHORT,
    USER,
    Turn,
    Wish,
    called,
    refused,
    rendered,
    result,
    says,
    shown,
    template,
)
from tests.wrong import instead


def all_calls(messages: list[Turn]) -> list[Turn]:
    return [call for one in messages for call in one.get("tool_calls", ())]


TOOL = {"type": "function", "function": {"name": "cook", "parameters": {}}}


def test_prompt_is_the_templates_text() -> None:
    turns = [says("system", "Be brief."), USER, called(SHORT, content="So."), result(SHORT), USER]
    expected = template()(turns, [TOOL], [{"text": "Paper", "id": 3}])
    assert rendered(template(), *turns, tools=[TOOL], documents=[{"text": "Paper", "id": 3}]) == expected


def test_empty_parts_need_not_be_shown() -> None:
    silent = template(shows=lambda _: "")
    assert rendered(silent, says("user", ""), says("assistant", None), says("user", "  ")) == ""


def test_a_template_that_takes_nothing_says_why() -> None:
    def render(messages: Any, *_: Any) -> str:
        raise ValueError(f"first of {len(messages)}" if "\n\n" not in str(messages) else "later")

    error = refused(render, USER, USER)
    assert (str(error), error.param) == ("the chat template refuses these messages: first of 2", "messages")
    assert refused(template(), says("user", "\ud800")).param == "messages"


def test_ids_become_nine_letters_and_digits_where_a_template_wants_them() -> None:
    """The same for a call and its result, another for another; those that are so stay."""
    ids = ("call_1", "call_2", SHORT)

    def is_short(messages: list[Turn]) -> bool:
        found = [call["id"] for call in all_calls(messages)]
        found += [one["tool_call_id"] for one in messages if "tool_call_id" in one]
        return all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in found)

    text = rendered(template(is_short), USER, called(*ids, x=1), *map(result, ids))
    first = re.findall("!([a-zA-Z0-9]{9}) f", text)
    assert first == re.findall("<tool ([a-zA-Z0-9]{9})>", text)
    assert len(set(first)) == 3
    assert first[2] == SHORT
    assert text == rendered(template(is_short), USER, called(*ids, x=1), *map(result, ids))
    assert "call_1" in rendered(template(), USER, called(*ids, x=1), *map(result, ids))
    assert re.search("<tool [a-zA-Z0-9]{9}>", rendered(template(is_short), USER, result("call_1")))


def test_arguments_become_text_where_a_template_wants_it() -> None:
    """Refused as objects, or written as Python writes them."""
    wants_text = template(
        lambda messages: all(isinstance(c["function"]["arguments"], str) for c in all_calls(messages))
    )
    as_text = json.dumps({"city": "Zürich"}, ensure_ascii=False)
    for render in (wants_text, template()):
        assert as_text in rendered(render, USER, called(SHORT, city="Zürich"), result(SHORT))
    as_json = template(shows=lambda one: one["role"] + str(one["content"]) + json.dumps(all_calls([one])))
    assert '"arguments": {"city": 1}' in rendered(as_json, USER, called(SHORT, city=1), result(SHORT))


def test_calls_of_a_turn_are_taken_apart_where_a_template_wants_one() -> None:
    """Each with its result; results of other calls stay behind them."""
    one_each = template(lambda messages: all(len(one.get("tool_calls", ())) < 2 for one in messages))
    ids, other = ("a" * 9, "b" * 9), "c" * 9
    turns = [USER, called(*ids, content="So.", x=1), *(result(one, one[0]) for one in (ids[1], ids[0], other)), USER]
    text = rendered(one_each, *turns)
    parts = re.findall(r"<(\w+)[^>]*>([^<!]*)(?:!(\w))?", text)
    assert parts == [
        ("user", "Hi", ""),
        ("assistant", "So.", "a"),
        ("tool", "a", ""),
        ("assistant", "", "b"),
        ("tool", "b", ""),
        ("tool", "c", ""),
        ("user", "Hi", ""),
    ]


def test_system_prompts_become_one_where_a_template_wants_it() -> None:
    one_system = template(lambda messages: all(one["role"] != "system" for one in messages[1:]))
    turns = [says("system", "A."), says("system", "B."), USER, ANSWER, says("system", "C.")]
    assert rendered(one_system, *turns) == "<system>A.\n\nB.<user>Hi<assistant>Ho<user>C."


def test_turns_of_one_role_become_one_where_a_template_wants_it() -> None:
    """User text next to results of calls moves into the last of them."""

    def alternates(messages: list[Turn]) -> bool:
        roles = [one["role"] for one in messages]
        return all(a != b and (a, b) != ("tool", "user") for a, b in itertools.pairwise(roles))

    turns = [says("user", "A"), says("user", "B"), called(SHORT, x=1), result(SHORT, "12"), says("user", "C")]
    text = rendered(template(alternates), *turns)
    assert re.findall(r"<(\w+)[^>]*>([^<!]*)", text) == [("user", "A\n\nB"), ("assistant", ""), ("tool", "12\n\nC")]


def without(*roles: str) -> Any:
    return template(shows=lambda one: "" if one["role"] in roles else shown(one))


def test_a_system_prompt_that_is_not_shown_is_said_by_the_user() -> None:
    """In the first message, whether omitted or refused; without one it is refused by name."""
    turns = [says("system", "A."), says("user", "B"), ANSWER, says("user", "C")]
    no_system = template(lambda messages: all(one["role"] != "system" for one in messages))
    for render in (without("system"), no_system):
        assert rendered(render, *turns) == "<user>A.\n\nB<assistant>Ho<user>C"
        assert rendered(render, *turns[1:3], turns[0]) == "<user>B<assistant>Ho<user>A."
    assert refused(without("system"), turns[0], ANSWER).param == "messages.0.content"


@pytest.mark.parametrize(
    ("turns", "more", "param", "words"),
    [
        ([USER, ANSWER], {}, "messages.1.content", "put its text into another"),
        ([USER, called(SHORT, x=1)], {}, "messages.1.tool_calls", "leave the calls"),
        ([USER, called(SHORT)], {}, "messages.1.tool_calls", "leave the calls"),
    ],
)
def test_parts_not_shown_are_refused_by_name(turns: list[Turn], more: Any, param: str, words: str) -> None:
    error = refused(without("assistant"), *turns, **more)
    assert error.param == param
    assert str(error).startswith(f"{param}: the chat template of this model does not show it")
    assert words in str(error)


def test_tools_and_documents_without_a_place_are_refused() -> None:
    def no_place(messages: Any, *_: Any) -> str:
        return "".join(map(shown, messages))

    assert refused(no_place, USER, tools=[TOOL]).param == "tools"
    error = refused(no_place, USER, documents=[{"text": "Paper"}])
    assert (error.param, "put them into a message" in str(error)) == ("documents", True)
    assert rendered(no_place, USER, documents=[{"number": 3}]) == "<user>Hi"


def test_names_must_be_shown_where_they_tell_participants_apart() -> None:
    nameless = template(shows=lambda one: shown({key: value for key, value in one.items() if key != "name"}))
    one, other = says("user", "A", name="Ann"), says("user", "B", name="Bob")
    assert rendered(nameless, one, one) == "<user>A<user>A"
    assert rendered(nameless, one, says("assistant", "B", name="Bob")) == "<user>A<assistant>B"
    error = refused(nameless, one, other)
    assert (error.param, "put the name into the content" in str(error)) == ("messages.0.name", True)
    assert rendered(template(), one, other) == "<user Ann>A<user Bob>B"


def test_names_of_tools_need_not_be_shown() -> None:
    """Their calls identify the results."""
    nameless = template(shows=lambda one: shown({key: value for key, value in one.items() if key != "name"}))
    turns = [{**result(SHORT, name), "name": name} for name in ("Ann", "Bob")]
    assert rendered(nameless, *turns).endswith(">Bob")


@pytest.mark.parametrize("part", ["name", "keys", "values"])
@pytest.mark.parametrize("is_text", [True, False])
def test_every_part_of_a_call_must_be_shown(part: str, is_text: bool) -> None:
    def parts(call: Turn) -> dict[str, str]:
        given = call["function"]["arguments"]
        found = {"name": call["function"]["name"], "keys": str(given), "values": str(given)}
        return found if is_text else found | {"keys": "".join(given), "values": "".join(given.values())}

    def shows(one: Turn) -> str:
        calls = one.get("tool_calls", ())
        return f"<{one['role']}>" + "".join(
            some for c in calls for name, some in parts(c).items() if name not in hidden
        )

    def wish(messages: list[Turn]) -> bool:
        return all(isinstance(call["function"]["arguments"], str) == is_text for call in all_calls(messages))

    hidden = {part, "keys", "values"} if is_text and part != "name" else {part}
    assert refused(template(wish, shows), called(SHORT, city="Paris")).param == "messages.0.tool_calls"
    hidden = set()
    assert "Paris" in rendered(template(wish, shows), called(SHORT, city="Paris"))


def test_a_document_is_not_shown_by_another_part() -> None:
    def no_place(messages: Any, *_: Any) -> str:
        return "".join(map(shown, messages))

    assert refused(no_place, says("user", "Paper"), documents=[{"text": "Paper"}]).param == "documents"


def test_a_text_beside_calls_stands_before_them() -> None:
    """The text is at its original position: before the mark that begins calls."""

    def calls_only(one: Turn) -> str:
        if calls := one.get("tool_calls"):
            return "<assistant>" + "".join(
                f"[CALL]{c['function']['name']}{json.dumps(c['function']['arguments'])}" for c in calls
            )
        return shown(one)

    turns = [USER, called(SHORT, content="So.", x=1), result(SHORT), called(SHORT, SHORT, content="And.", x=2)]
    before = copy.deepcopy(turns)
    text = rendered(template(shows=calls_only), *turns, marks=["never", "[CALL]"])
    assert '<assistant>So.[CALL]f0{"x": 1}<tool' in text
    assert text.endswith('<assistant>And.[CALL]f0{"x": 2}[CALL]f1{"x": 2}')
    assert turns == before
    assert refused(template(shows=calls_only), *turns, marks=("never",)).param == "messages.1.content"


def test_a_result_names_its_call_next_to_a_text_that_is_not_shown() -> None:
    """gpt-oss's template repeats the name of the last call before its result."""

    def names_results(messages: Any, *_: Any) -> str:
        text = name = ""
        for one in messages:
            for call in one.get("tool_calls", ()):
                name = call["function"]["name"]
            text += f"[CALL]{all_calls([one])}" if one.get("tool_calls") else f"<{name}>{one['content']}"
        return text

    text = rendered(names_results, USER, called(SHORT, content="So."), result(SHORT), marks=["[CALL]"])
    assert text.startswith("<>HiSo.[CALL]")
    assert text.endswith("<f0>12")


def alternates(messages: list[Turn]) -> bool:
    """Whether no turn follows one of the same role."""
    return all(one["role"] != other["role"] for one, other in itertools.pairwise(messages))


@pytest.mark.parametrize(
    ("wish", "turns", "expected"),
    [
        (lambda m: all(one["role"] != "system" for one in m[1:]), [says("system", "A"), says("system", "B")],
         "<system>A\n\nB"),
        (alternates, [says("user", "A"), says("user", "B")], "<user>A\n\nB"),
        (alternates, [ANSWER, says("system", "A"), says("system", "B")], "<assistant>Ho<system>A\n\nB"),
    ],
    ids=["systems", "users", "later systems"],
)  # fmt: skip
def test_two_turns_are_enough_to_become_one(wish: Wish, turns: list[Turn], expected: str) -> None:
    assert rendered(template(wish), *turns) == expected


def test_turns_of_one_call_stay_where_another_is_taken_apart() -> None:
    """Each new turn has a content, which templates may look at."""
    ids = [letter * 9 for letter in "abc"]
    turns = [called(ids[2], content="One."), result(ids[2], "3"), called(*ids[:2], content="Two."), result(ids[0], "1")]
    shows = template(lambda messages: all(len(one.get("tool_calls", ())) < 2 for one in messages), strictly)
    assert rendered(shows, *turns) == "<assistant>One.c f0{}<tool>3<assistant>Two.a f0{}<tool>1<assistant>b f1{}"


def strictly(one: Turn) -> str:
    """A turn, whose content must be there."""
    calls = (
        f"{call['id'][0]} {call['function']['name']}{call['function']['arguments']}"
        for call in one.get("tool_calls", ())
    )
    return f"<{one['role']}>{one['content'] or ''}{''.join(calls)}"


def test_a_first_turn_that_is_no_system_prompt_stays() -> None:
    one_system = template(lambda messages: all(one["role"] != "system" for one in messages[1:]))
    assert rendered(one_system, USER, says("system", "A")) == "<user>Hi<user>A"
    named = [says("system", "A", name="Ann"), says("system", "B", name="Bob")]
    assert rendered(one_system, *named) == "<system Ann>A\n\nB"


def test_no_form_is_tried_twice() -> None:
    """A template may take long, and a conversation may be a client's largest."""
    for turns, num_forms in (
        ([USER, called(SHORT, x=1), result(SHORT)], 2),
        ([USER, called("call_1", x=1), result("call_1")], 4),
        ([USER, called("a" * 9, "b" * 9, x=1), result("a" * 9), result("b" * 9)], 4),
        ([says("system", "A"), USER, ANSWER], 4),
        ([USER, ANSWER], 1),
    ):
        tried: list[str] = []

        def note(messages: Any, *_: Any, tried: list[str] = tried) -> str:
            tried.append(json.dumps(messages))
            raise ValueError

        refused(note, *turns)
        assert len(tried) == num_forms, turns


def test_short_ids_take_every_letter_in_every_place() -> None:
    """Else ids of different calls would soon be the same."""
    short = template(lambda messages: len(messages[-1]["tool_call_id"]) == 9)
    found = [rendered(short, result(f"call_{number}", ""))[6:15] for number in range(600)]
    for place in range(9):
        assert len({one[place] for one in found}) > 50


def test_a_template_may_show_less_in_several_ways() -> None:
    """Parts that are still missing after a change are found, too."""

    def as_python(one: Turn) -> str:
        calls = "".join(f"{c['function']['name']}{c['function']['arguments']}" for c in one.get("tool_calls", ()))
        return f"<{one['role']}>{one.get('content') or ''}{calls}"

    turns = [says("system", "A"), says("user", "B"), called(SHORT, city=1), result(SHORT)]
    text = rendered(template(shows=lambda one: "" if one["role"] == "system" else as_python(one)), *turns)
    assert text == '<user>A\n\nB<assistant>f0{"city": 1}<tool>12'
    hidden = template(shows=lambda one: "" if one["role"] in ("system", "tool") else as_python(one))
    assert refused(hidden, *turns).param == "messages.2.content"
    assert refused(without("system", "assistant"), turns[0], USER, ANSWER).param == "messages.1.content"


def test_marks_of_calls_are_no_place_for_anything_else() -> None:
    """Neither for an answer without calls, nor for calls that are not shown themselves."""
    assert refused(without("assistant"), USER, ANSWER, marks=["<user>"]).param == "messages.1.content"
    error = refused(without("assistant"), USER, called(SHORT, content="So."), marks=["<user>"])
    assert error.param in ("messages.1.content", "messages.1.tool_calls")
    calls_alone = template(shows=lambda one: shown({**one, "content": ""} if "tool_calls" in one else one))
    nameless = [USER, {**called(SHORT, content="So."), "name": "Ann"}, says("assistant", "Ho", name="Bob")]
    hidden = template(shows=lambda one: shown({key: one[key] for key in one if key != "name"}))
    assert refused(hidden, *nameless, marks=["!"]).param == "messages.1.name"
    assert rendered(calls_alone, *nameless, marks=["!"]).startswith("<user>Hi<assistant Ann>So.!")


def test_calls_that_are_shown_without_content_alone_may_be_taken_apart() -> None:
    """Each of the new turns has a content of None, too; the text is before the first call."""

    def shows(one: Turn) -> str:
        return shown(one) if one["content"] is None or "tool_calls" not in one else "<hidden>"

    one_each = template(lambda messages: all(len(one.get("tool_calls", ())) < 2 for one in messages), shows)
    ids = ("a" * 9, "b" * 9)
    turns = [USER, called(*ids, content="So.", x=1), *(result(one) for one in ids)]
    text = rendered(one_each, *turns, marks=["!"])
    assert re.findall("(So[.])?!", text) == ["So.", ""]


class _Searched(str):
    """Text that counts how often it is searched for a word."""

    searches = 0

    def __contains__(self, word: object) -> bool:
        _Searched.searches += 1
        return str.__contains__(self, str(word))


@pytest.mark.parametrize("shows", [True, False])
def test_a_prompt_is_not_searched_for_each_message(shows: bool) -> None:
    """The time would grow with the square of the number of messages."""

    def render(messages: Any, tools: Any, documents: Any) -> str:
        return _Searched(template()(messages if shows else messages[:-1], tools, documents))

    turns = [USER, ANSWER] * 200
    if shows:
        assert rendered(render, *turns) == render(turns, [], [])
    else:
        assert refused(render, *turns).param == "messages.399.content"
    assert _Searched.searches == 0


# (template, what it shows of a turn with text and a call, and its result)
LATE_TEXT = {
    "after the call": (
        "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function | tojson }}</call>{% endif %}{{ m.content }}"
    ),
    "after the result": (
        "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function | tojson }}</call>{% set ns.text = m.content %}"
        "{% elif m.role == 'tool' %}{{ m.content + ns.text }}<end>{% else %}{{ m.content }}{% endif %}"
    ),
}


@pytest.mark.parametrize("shows", LATE_TEXT.values(), ids=LATE_TEXT)
def test_text_next_to_a_call_stays_before_it(shows: str) -> None:
    """Gemma 4 shows it after the results and closes the turn.

    With the format's mark the text is before the call, in its own message without.
    """
    turns = [USER, called("a", content="Let me see.", x=1), result("a")]
    parts = "{% set ns = namespace(text='') %}{% for m in messages %}[{{ m.role }}]" + shows + "{% endfor %}"

    def render(messages: Any, *_: Any) -> str:
        return str(Template(parts).render(messages=messages))

    marked = rendered(render, *turns, marks=("<call>",))
    assert "[assistant]Let me see.<call>{" in marked
    assert marked.count("Let me see.") == 1
    assert "[assistant]Let me see.[assistant]<call>{" in rendered(render, *turns)
    with instead(_MarkedCopies, "misplaced", lambda right, self, places: []):
        assert "Let me see.<call>" not in rendered(render, *turns, marks=("<call>",))


def test_a_result_before_its_call_is_refused() -> None:
    def render(messages: Any, *_: Any) -> str:
        return "".join(map(shown, sorted(messages, key=lambda one: one["role"] != "tool")))

    assert "out of order" in str(refused(render, USER, called("a", x=1), result("a")))


def test_a_system_prompt_that_moves_with_the_last_question_is_said_by_the_first() -> None:
    """Mistral's older templates show it before the user's last message."""

    def render(messages: Any, *_: Any) -> str:
        last = max(number for number, one in enumerate(messages) if one["role"] == "user")
        system = "".join(one["content"] for one in messages if one["role"] == "system")
        return "".join(
            f"<{one['role']}>{system if number == last else ''}{one['content']}"
            for number, one in enumerate(messages)
            if one["role"] != "system"
        )

    first, later = [says("system", "Be brief."), USER], [ANSWER, says("user", "And?")]
    assert rendered(render, *first, *later).startswith(rendered(render, *first))

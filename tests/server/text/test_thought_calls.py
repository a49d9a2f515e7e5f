"""A whole, valid call in open thoughts ends them, in every format; a mark alone does not."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import Request
from server.serving.choice import Choice
from server.serving.filters import TextOptions
from server.text.argument_types import follows
from server.text.reasoning import Reasoning, Thought
from server.text.thought_calls import ThoughtCalls
from server.text.tokenizer import Tokenizer
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.server.call_spellings import RESPONSE_TEMPLATE, SPELL
from tests.server.serving.test_stops_and_thoughts import steps
from tests.server.step_results import stats
from tests.server.text.call_cases import BOTH, PARIS, TOOLS
from tests.server.tiny_models import EOS, TOKENIZER
from tests.wrong import instead

FORMATS = [form for form in SPELL if form not in ("harmony", "llama3_json")]
"""Formats whose calls begin with a mark, next to thoughts that are no messages."""
OPEN = "<think>"


def use_of(form: str, tools: tuple[Tool, ...] = TOOLS) -> ToolUse:
    return ToolUse(tools, form, parallel=True, forced=False)


def reader(form: str, tools: tuple[Tool, ...] = TOOLS) -> Reasoning:
    return Reasoning(False, calls=ThoughtCalls(use_of(form, tools), RESPONSE_TEMPLATE))


def split(reasoning: Reasoning, pieces: list[str]) -> tuple[str, str]:
    """(thoughts, the rest of the answer)."""
    parts = [part for i, piece in enumerate(pieces) for part in reasoning.feed(piece, i == len(pieces) - 1)]
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    return thoughts, "".join(part for part in parts if isinstance(part, str))


def check(form: str, answer: str, thoughts: str, rest: str) -> None:
    """Whole, and cut at every character."""
    for pieces in ([answer], list(answer), *([answer[:cut], answer[cut:]] for cut in range(1, len(answer), 7))):
        assert split(reader(form), pieces) == (thoughts, rest), pieces


@pytest.mark.parametrize("form", FORMATS)
def test_a_whole_call_ends_open_thoughts(form: str) -> None:
    call = SPELL[form]([PARIS])
    check(form, f"{OPEN}\nI look it up.\n{call}", "I look it up.", call)
    check(form, f"{OPEN}{SPELL[form](BOTH)}", "", SPELL[form](BOTH))


@pytest.mark.parametrize("form", FORMATS)
def test_the_closing_mark_after_a_call_is_dropped(form: str) -> None:
    """Written by the model, or forced by a budget; in a later call's text it stays."""
    call = SPELL[form]([PARIS])
    check(form, f"{OPEN}So.\n{call}\n</think>\n\nDone.", "So.", f"{call}\nDone.")
    check(form, f"{OPEN}So. {call} And so</think>It is.", "So.", f"{call} And soIt is.")
    quoted = SPELL[form]([("weather", {"city": "a</think>b"})])
    check(form, f"{OPEN}So.{call}{quoted}", "So.", call + quoted)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_whole_valid_call_stays_a_thought(form: str) -> None:
    """A mark alone, another function, a cut call, and a call that the closing mark cuts."""
    mark, call = SPELL[form]([PARIS])[:12], SPELL[form]([PARIS])
    unknown = SPELL[form]([("rm", {"a": 1})])
    for thought in (f"They write {mark} so", f"Not {unknown} now", f"Or {call[: call.index('Par') + 3]}"):
        check(form, f"{OPEN}{thought}</think>\nYes.", thought.rstrip(), "Yes.")
        check(form, f"{OPEN}{thought}", thought, "")
    real = f"{OPEN}Or {call[: call.index('Par') + 3]}</think>{call}"
    check(form, real, f"Or {call[: call.index('Par') + 3]}", call)


def test_a_call_without_a_required_argument_is_none() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = (Tool(type="function", function=Function(name="weather", parameters=schema)),)
    wrong = SPELL["hermes"]([("weather", {})])
    assert split(reader("hermes", tools), [f"{OPEN}{wrong}</think>a"]) == (wrong, "a")


@pytest.mark.parametrize(
    ("schema", "arguments", "expected", "exact"),
    [
        ({"properties": {"x": {"type": "string"}}}, {"x": "a"}, True, True),
        ({"properties": {"x": {"type": "string"}}}, {"x": 1}, False, False),
        ({"properties": {"x": {"type": "string", "pattern": "b"}}}, {"x": "a"}, True, False),
        ({"properties": {"x": {"items": {"type": "integer"}}}}, {"x": [1, "a"]}, False, False),
        ({"properties": {"x": {"properties": {}, "required": ["y"]}}}, {"x": {}}, False, False),
        ({}, {"z": 1}, True, False),
    ],
)
def test_arguments_of_strict_functions_follow_their_whole_schema(
    schema: dict[str, Any], arguments: dict[str, Any], expected: bool, exact: bool
) -> None:
    """A keyword that is not checked may be broken; extra names may be, too."""
    assert follows(arguments, schema, is_exact=False) == expected
    assert follows(arguments, schema, is_exact=True) == exact


def test_a_lone_closing_mark_is_an_empty_thought() -> None:
    for pieces in (["</think>\n\nHello"], list("</think>\n\nHello")):
        assert split(Reasoning(False), pieces) == ("", "Hello")
    assert split(Reasoning(False), ["</thing"]) == ("", "</thing")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = Tokenizer(str(TOKENIZER))
    yield made
    made.close()


def run(tokenizer: Tokenizer, text: str, **options: Any) -> Choice:
    use = use_of("hermes")
    choice = Choice(
        Request(request_id="x", prompt_token_ids=(1,), num_logprobs=0),
        tokenizer,
        TextOptions(thoughts=lambda: reader("hermes"), tools=use, **options),
    )
    for step in steps(choice.request, [*tokenizer.encode(text, False), EOS]):
        if choice.finish_reason is None:
            choice.add(step, stats())
    return choice


def test_a_choice_has_the_call_and_counts_only_thoughts(tokenizer: Tokenizer) -> None:
    """Stop strings count from the call on; every token has its logprob."""
    call = SPELL["hermes"]([PARIS])
    thought = f"{OPEN}STOP, I say <tool_call> and look. "
    choice = run(tokenizer, thought + call, stops=["STOP"])
    assert (choice.finish_reason, choice.thoughts) == ("tool_calls", "STOP, I say <tool_call> and look.")
    assert [made.name for made in choice.calls] == ["weather"]
    num_open, num_written = (len(tokenizer.encode(text, False)) for text in (OPEN, thought))
    assert num_written - num_open <= choice.num_thought <= num_written, "the mark of no call is a thought"
    assert abs(choice.num_thought - run(tokenizer, thought).num_thought) <= 1
    assert len(choice.logprobs or ()) == choice.num_tokens
    stopped = run(tokenizer, f"{OPEN}So.{call} Then STOP it", stops=["STOP"])
    assert (stopped.stop_string, stopped.text.strip()) == ("STOP", "Then")


def test_thoughts_read_before_calls_are_noticed(tokenizer: Tokenizer) -> None:
    """A wrong variant that reads thoughts alone first loses the call."""
    with instead(ThoughtCalls, "feed", lambda right, self, text, **_: (text, None)):
        assert not run(tokenizer, OPEN + SPELL["hermes"]([PARIS])).calls

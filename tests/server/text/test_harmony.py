"""Answers of gpt-oss in channels, for any pieces, and over HTTP.

The model is scripted by its weights and drafts for itself. Its tokens and its template have
the format of gpt-oss.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.harmony import HarmonyMessages
from server.text.reasoning import Thought
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.grid import slow_fixture
from tests.server.call_spellings import TEMPLATES
from tests.server.daemon_process import Daemon, Daemons
from tests.server.event_stream import open_stream
from tests.server.scripted_model import added_token, byte_level, write_answers
from tests.server.tiny_models import TOKENIZER, VOCAB_SIZE

MODEL = "harmony"
SPECIAL = ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
RETURN, CALL = VOCAB_SIZE, VOCAB_SIZE + 1
CHANNEL, MESSAGE, ANALYSIS, FINAL_WORD = (VOCAB_SIZE + number for number in (3, 4, 6, 7))
END = 2
THOUGHT = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
HEAD = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
ANSWERS = {
    "<|ask-plain|>": f"{THOUGHT}The user says go.<|end|>{FINAL}Gone: 3 < 4.",
    "<|ask-call|>": f"{THOUGHT}It wants a sum.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    f'I shall add.<|end|>{HEAD}{{"a": 41}}<|call|>',
    "<|ask-result|>": f"{THOUGHT}Two and forty.<|end|>{FINAL}It is 42.",
    "<|ask-json|>": f"{THOUGHT}JSON is wanted.<|end|>{FINAL}nothing of the kind",
}
# (prompt's end, answer, thoughts, text, calls)
ASSISTANT = "<|end|><|start|>assistant"
ADD = [("add", '{"a": 1}')]
CASES = [
    (ASSISTANT, f"{THOUGHT}a b<|end|>{FINAL} c d", "a b", " c d", []),
    (ASSISTANT, "<|channel|>final<|message|>only <|en", "", "only <|en", []),
    (ASSISTANT, f"{THOUGHT}a<|end|><|start|>assistant{THOUGHT}b<|end|>{FINAL}c", "a\n\nb", "c", []),
    (ASSISTANT, f'{THOUGHT}a<|end|>{HEAD}{{"a": 1}}<|call|>', "a", "", ADD),
    (ASSISTANT, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "", "", ADD),
    (ASSISTANT, '<|channel|>analysis to=add code<|message|>{"a": 1}', "", "", ADD),
    (ASSISTANT, "<|channel|>commentary<|message|>First.<|end|>" + FINAL + "Then.", "", "First.\n\nThen.", []),
    (ASSISTANT, f"{THOUGHT}cut in the middle", "cut in the middle", "", []),
    (ASSISTANT, f"{THOUGHT}cut<|end|><|start|>assistant<|channel|>fin", "cut", "", []),
    (ASSISTANT, "no channel at all", "", "no channel at all", []),
    (ASSISTANT, "Word", "", "Word", []),
    (ASSISTANT, f"{THOUGHT}a{FINAL}b", "a", "b", []),
    (ASSISTANT, f"{THOUGHT}a{THOUGHT}b{FINAL}c", "a\n\nb", "c", []),
    (ASSISTANT, "<|channel|>two such words<|message|>a", "", "<|channel|>two such words<|message|>a", []),
    (ASSISTANT, "<|channel|>final<|message|>a<|end|>b", "", "ab", []),
    (
        ASSISTANT,
        '<|channel|>commentary to=functions.other json<|message|>{"a": 1}',
        "",
        '<|channel|>commentary to=functions.other json<|message|>{"a": 1}',
        [],
    ),
    (ASSISTANT + THOUGHT, f"a<|end|>{FINAL}b", "a", "b", []),
    ("and this is the fir", "st half", "", "st half", []),
    (ASSISTANT + "<|channel|>final<|message|>so ", "far", "", "far", []),
]


def split(prompt_end: str, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(thoughts, text, calls)."""
    reader = HarmonyMessages(prompt_end)
    add = Tool(type="function", function=Function(name="add", parameters=PARAMETERS))
    calls = ToolCalls(ToolUse((add,), "harmony", parallel=True, forced=False), None)
    thoughts, said = "", ""
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        for part in reader.feed(piece, is_last):
            if isinstance(part, Thought):
                thoughts += part.text
            else:
                said += "".join(one for one in calls.feed(part, False) if isinstance(one, str))
    said += "".join(one for one in calls.feed("", True) if isinstance(one, str))
    return thoughts, said, [(one.name, one.arguments) for one in calls.calls]


@pytest.mark.parametrize("case", CASES, ids=[case[1][:40] for case in CASES])
def test_messages_are_separated(case: tuple[str, str, str, str, list[tuple[str, str]]]) -> None:
    end, answer, *expected = case
    assert list(split(end, [answer])) == expected
    assert list(split(end, list(answer))) == expected


@given(st.sampled_from(CASES), st.data())
@settings(max_examples=200, deadline=None)
def test_messages_in_any_pieces_are_separated_alike(case: Any, data: st.DataObject) -> None:
    end, answer, *expected = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    pieces = [answer[i:j] for i, j in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert list(split(end, pieces)) == expected


def write_harmony(folder: Path) -> Path:
    """A scripted model with gpt-oss's marks; `<|end|>` ends no answer."""
    folder.mkdir()
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    words = [(mark, True) for mark in SPECIAL] + [(word, False) for word in ("analysis", "final", "assistant")]
    for number, (word, is_special) in enumerate(words):
        tokenizer["model"]["vocab"][word] = VOCAB_SIZE + number
        tokenizer["added_tokens"].append(added_token(word, is_special))
    write_answers(folder, tokenizer, byte_level, ANSWERS, "<|return|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [RETURN, CALL]}))
    shutil.copy(TEMPLATES / "harmony.jinja", folder / "chat_template.jinja")
    described = json.loads((TOKENIZER / "tokenizer_config.json").read_text()) | {"eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_harmony(tmp_path_factory.mktemp("harmony") / "model")


@pytest.fixture(scope="module")
@slow_fixture
def daemon(daemons: Daemons, folder: Path) -> Daemon:
    return daemons.get(str(folder), "--draft-model", str(folder), "--served-model-name", MODEL, "--no-calibrate")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client


def ask(question: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"<|ask-{question}|>"}], "temperature": 0, **more}


def chat(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The choice of a whole answer. The streamed one has the same parts."""
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    message = choice["message"]
    with open_stream(client, "/v1/chat/completions", **body) as stream:
        streamed = [choice for chunk in stream.read() for choice in chunk["choices"]]
    for name in ("content", "reasoning_content"):
        assert "".join(one["delta"].get(name) or "" for one in streamed) == (message.get(name) or "")
    calls = [call["function"] for one in streamed for call in one["delta"].get("tool_calls", ())]
    made = message.get("tool_calls") or []
    assert "".join(one["arguments"] for one in calls) == "".join(one["function"]["arguments"] for one in made)
    assert streamed[-1]["finish_reason"] == choice["finish_reason"]
    return choice


def test_a_chat_has_thoughts_and_text(client: httpx.Client) -> None:
    choice = chat(client, ask("plain"))
    assert choice["message"]["reasoning_content"] == "The user says go."
    assert choice["message"]["content"] == "Gone: 3 < 4."
    assert choice["finish_reason"] == "stop"
    asked = chat(client, ask("plain", skip_special_tokens=True))
    assert asked["message"] == choice["message"]


def test_a_call_ends_the_answer_and_goes_back(client: httpx.Client, folder: Path) -> None:
    """The second turn has the thoughts, the text and the call of the first in its prompt."""
    choice = chat(client, ask("call", tools=[TOOL]))
    message = choice["message"]
    assert message["reasoning_content"] == "It wants a sum."
    assert message["content"] == "I shall add."
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 41})
    assert choice["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42 <|ask-result|>"}
    asked = ask("call", tools=[TOOL])
    asked["messages"] += [message, result]
    assert chat(client, asked)["message"]["content"] == "It is 42."


def test_responses_have_an_item_for_each_part(daemon: Daemon) -> None:
    tool: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    question: Any = [{"role": "user", "content": "<|ask-call|>"}]
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="unused") as client:
        first = client.responses.create(model=MODEL, input=question, tools=[tool], temperature=0)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        call: Any = first.output[-1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "42 <|ask-result|>"}
        items: Any = [*question, *(item.to_dict() for item in first.output), output]
        assert client.responses.create(model=MODEL, input=items, tools=[tool]).output_text == "It is 42."


def test_messages_have_a_block_for_each_part(daemon: Daemon) -> None:
    tool: Any = {"name": "add", "input_schema": PARAMETERS}
    turns: Any = [{"role": "user", "content": "<|ask-call|>"}]
    with anthropic.Anthropic(base_url=daemon.url, api_key="unused", max_retries=0) as client:
        with client.messages.stream(model=MODEL, messages=turns, tools=[tool], max_tokens=90) as stream:
            first = stream.get_final_message()
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.stop_reason == "tool_use"
        use: Any = first.content[-1]
        turns.append({"role": "assistant", "content": [block.to_dict() for block in first.content]})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "42 <|ask-result|>"}
        turns.append({"role": "user", "content": [result]})
        made = client.messages.create(model=MODEL, messages=turns, tools=[tool], max_tokens=90)
    assert [getattr(block, "text", "") for block in made.content] == ["", "It is 42."]


@pytest.mark.parametrize("enabled", [True, False])
def test_structured_output_begins_in_the_final_channel(client: httpx.Client, enabled: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    choice = chat(client, ask("json", response_format=wanted, speculation={"enabled": enabled}))
    assert choice["message"]["reasoning_content"] == "JSON is wanted."
    assert json.loads(choice["message"]["content"]) == {"a": 7}


def test_structured_output_has_no_other_channel(client: httpx.Client) -> None:
    """The script writes text and a call in the channel of commentary."""
    more: dict[str, Any] = {"structured_outputs": {"regex": "[A-Z]{3}"}, "thinking_token_budget": 40}
    choice = chat(client, ask("call", **more, max_tokens=200))
    assert choice["message"]["reasoning_content"] == "It wants a sum."
    assert choice["message"]["content"].isupper()


@pytest.mark.parametrize("budget", [0, 1])
def test_a_budget_closes_the_channel_of_thoughts(client: httpx.Client, budget: int) -> None:
    """None is opened after it is spent: the next channel is the likeliest other one."""
    body = ask("plain", thinking_token_budget=budget, return_token_ids=True, logit_bias={str(FINAL_WORD): 40})
    choice = client.post("/v1/chat/completions", json=body | {"max_tokens": 60}).json()["choices"][0]
    tokens, thoughts = choice["token_ids"], choice["message"].get("reasoning_content", "")
    if budget:
        assert tokens[:3] == [CHANNEL, ANALYSIS, MESSAGE]
        assert tokens[4] == END
        assert len(thoughts) in range(1, len("The user says go."))
        assert "The user says go.".startswith(thoughts)
    else:
        assert tokens[:2] == [CHANNEL, FINAL_WORD]
        assert not thoughts
    assert tokens.count(ANALYSIS) == budget


def test_a_forced_call_has_no_thinking_budget(client: httpx.Client) -> None:
    """Its grammar contains the thoughts."""
    asked = ask("call", tools=[TOOL], tool_choice="required")
    refused = client.post("/v1/chat/completions", json={**asked, "thinking_token_budget": 3})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thinking_token_budget"


def test_history_is_rendered_for_the_template(folder: Path) -> None:
    """Thoughts and text next to a call; thoughts before an answer are dropped."""
    tokenizer = Tokenizer(str(folder))
    calls = [
        {"type": "function", "id": name, "function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "sub")
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Text.", "reasoning_content": "Why.", "thinking": "Why.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "add", "content": "2"},
        {"role": "tool", "tool_call_id": "sub", "content": "0"},
    ]
    text = tokenizer.render_chat(messages)
    places = [text.index(part) for part in ("Text.", "Why.", "to=functions.add", '"2"', "to=functions.sub", '"0"')]
    assert places == sorted(places)
    answered = tokenizer.render_chat(
        [messages[0], {"role": "assistant", "content": "Text.", "thinking": "Why."}, messages[0]]
    )
    assert "Why." not in answered
    tokenizer.close()


def test_effort_reaches_the_template(client: httpx.Client) -> None:
    """The model knows three levels. The nearest one stands in for others, and a header says so."""

    def answer(**more: Any) -> tuple[int, str]:
        made = client.post("/v1/chat/completions", json=ask("plain", max_tokens=1, **more))
        return made.json()["usage"]["prompt_tokens"], made.headers.get("x-polydraft-ignored-fields", "")

    low, high = (answer(reasoning_effort=effort) for effort in ("low", "high"))
    assert low[0] != answer(reasoning_effort="medium")[0] != high[0]
    assert (low[1], high[1]) == ("", "")
    for field in ({"reasoning_effort": "none"}, {"reasoning_effort": "minimal"}, {"enable_thinking": False}):
        assert answer(**field) == (low[0], *field)
    assert answer(reasoning_effort="max") == (high[0], "reasoning_effort")

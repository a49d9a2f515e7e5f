"""Stop strings count in the answer and not in its thoughts: every format of thoughts, every API.

The application runs in this process. Its engine answers with a known text, some tokens a step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

from engine.api import Limits, Outcome, Request, StepResults, Submit, ToEngine, TokenLogprob
from server.app import build_app
from server.openai.thinking import thoughts_of
from server.serving.choice import Choice
from server.serving.engine_client import EngineClient
from server.serving.filters import AnswerFilter, TextOptions, filter_of
from server.serving.metrics import ServerMetrics
from server.serving.observer import Observer
from server.settings.settings import Serve
from server.state import Server
from server.text.dialogue import Dialogue
from server.text.harmony import HarmonyMessages
from server.text.line_bounds import LineBounds
from server.text.reasoning import reasoning_of
from server.text.thought_marks import DEEPSEEK_R1, MARKS, THINK, ThoughtMarks
from server.text.tokenizer import GenerationDefaults, Tokenizer
from server.text.tools import ToolUse
from server.wire.fields import ChatRequest, Function, Tool
from tests.server.daemon_process import MODEL
from tests.server.step_results import facts, outcome, stats
from tests.server.tiny_models import EOS, TOKENIZER, VOCAB_SIZE, TinyModels

THOUGHT = "Is it so? STOP, and look. Yes"
ANSWER = "It is so, STOP and more."
CUT = "It is so, "
TOKENS_A_STEP = 3
Read = tuple[str, str, str | None]
"""Thoughts, content and stop string of a choice."""


@dataclass(frozen=True)
class Format:
    """A format of thoughts; the prompt ends with `prompt`."""

    marks: ThoughtMarks
    prompt: str = "Hello"

    @property
    def opening(self) -> str:
        return "" if self.prompt.endswith(self.marks.open) else self.marks.open

    @property
    def border(self) -> str:
        """The text between thoughts and answer."""
        return self.marks.close + self.marks.between + self.marks.lead + self.marks.wrapper[0]

    @property
    def text(self) -> str:
        """All that the model writes."""
        return self.opening + THOUGHT + self.border + ANSWER + self.marks.wrapper[1]


FORMATS = {name: Format(marks) for name, marks in MARKS.items()} | {
    "harmony": Format(MARKS["harmony"], "<|start|>assistant"),
    "opened by the prompt": Format(THINK, THINK.open),
    "an answer between tags": Format(replace(THINK, wrapper=("<answer>", "</answer>"))),
}
del FORMATS["solar_open"]  # its thoughts end with the token that ends this tokenizer's answers


def stops_of(form: Format) -> dict[str, tuple[list[str], str | None]]:
    """Stop strings by place, and the one that ends the answer."""
    crossing = [form.border, THOUGHT[-3:] + form.border, form.border + ANSWER[:3], THOUGHT[-3:] + ANSWER[:3]]
    return {
        "in the thoughts": (["Is it", "look.", form.marks.close, form.marks.open], None),
        "in the answer": (["look.", "STOP"], "STOP"),
        "across the border": ([*crossing, "Yes"], None),
    }


class ScriptedEngine(EngineClient):
    """A client whose engine answers each request with the same tokens at once."""

    answer: Sequence[int] = ()

    def _send(self, message: ToEngine) -> None:
        if not isinstance(message, Submit):
            return
        for request in message.requests():
            for step in steps(request, [*self.answer, EOS]):
                asyncio.get_running_loop().call_soon(self._deliver, StepResults([step], stats()))


def steps(request: Request, tokens: Sequence[int]) -> Iterator[Outcome]:
    """Yield the steps of an answer; the last token is an end token."""
    for begin in range(0, len(tokens), TOKENS_A_STEP):
        run = list(tokens[begin : begin + TOKENS_A_STEP])
        yield msgspec.structs.replace(
            outcome(1, 0, 0),
            request_id=request.request_id,
            token_ids=run,
            finish_reason="stop" if run[-1] == EOS else None,
            logprobs=[] if request.num_logprobs is None else [TokenLogprob(-1.0, [])] * len(run),
        )


@pytest.fixture(scope="module")
def server(models: TinyModels) -> Iterator[Server]:
    """A server whose prompts are the text of the last message."""
    settings = Serve(model=str(models.target), served_model_name=MODEL)
    client = ScriptedEngine(settings.engine_config(), 8)
    client.facts = facts(vocab_size=VOCAB_SIZE, max_model_len=1000)
    tokenizer = Tokenizer(str(TOKENIZER), "{{ messages[-1]['content'] }}")
    observer = Observer(ServerMetrics(MODEL, compat=False), logs_requests=False)
    yield Server(settings, client, tokenizer, GenerationDefaults(), observer, MODEL, Dialogue(None))
    tokenizer.close()


class Ways:
    """Ways to ask for the same answer."""

    def __init__(self, client: httpx.AsyncClient, prompt: str, stops: Sequence[str]) -> None:
        self._client = client
        self._chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 300}
        self._stops = list(stops)

    async def whole(self, **more: Any) -> list[Read]:
        answer = await self._post("/v1/chat/completions", stop=self._stops, logprobs=True, **more)
        read = []
        for choice in answer["choices"]:
            message = choice["message"]
            assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] // len(answer["choices"])
            assert choice["finish_reason"] == "stop"
            read.append((message["reasoning_content"], message["content"], choice["stop_reason"]))
        return read

    async def two(self) -> list[Read]:
        return await self.whole(n=2)

    async def streamed(self) -> list[Read]:
        thoughts = content = ""
        reason = None
        for chunk in await self._events("/v1/chat/completions", stop=self._stops):
            for choice in chunk.get("choices", ()):
                thoughts += choice["delta"].get("reasoning_content") or ""
                content += choice["delta"].get("content") or ""
                assert CUT.startswith(content) or content in ANSWER
                reason = choice.get("stop_reason") or reason
        return [(thoughts, content, reason)]

    async def messages(self) -> list[Read]:
        answer = await self._post("/v1/messages", stop_sequences=self._stops, model=MODEL)
        thought, text = answer["content"]
        assert answer["stop_reason"] == ("stop_sequence" if answer["stop_sequence"] else "end_turn")
        return [(thought["thinking"], text["text"], answer["stop_sequence"])]

    async def streamed_messages(self) -> list[Read]:
        thoughts = content = ""
        reason = None
        for event in await self._events("/v1/messages", stop_sequences=self._stops, model=MODEL):
            delta = event.get("delta", {})
            thoughts += delta.get("thinking", "")
            content += delta.get("text", "")
            reason = delta.get("stop_sequence") or reason
        return [(thoughts, content, reason)]

    async def _post(self, path: str, **more: Any) -> dict[str, Any]:
        answer = await self._client.post(path, json=self._chat | more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def _events(self, path: str, **more: Any) -> list[dict[str, Any]]:
        answer = await self._client.post(path, json=self._chat | more | {"stream": True})
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


WAYS = (Ways.whole, Ways.two, Ways.streamed, Ways.messages, Ways.streamed_messages)


async def table(server: Server, form: Format) -> dict[tuple[str, str], set[Read]]:
    """Ask for the answer in each way with the stop strings of each place."""
    transport = httpx.ASGITransport(build_app(server))
    read = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for place, (stops, _) in stops_of(form).items():
            for way in WAYS:
                read[place, way.__name__] = set(await way(Ways(client, form.prompt, stops)))
    return read


@pytest.mark.parametrize("name", FORMATS)
def test_stop_strings_count_in_the_answer_alone(server: Server, name: str) -> None:
    """Whole, with two choices, streamed, and as a message."""
    form = FORMATS[name]
    assert isinstance(server.client, ScriptedEngine)
    server.client.answer = server.tokenizer.encode(form.text, False)
    read = asyncio.run(table(replace(server, thoughts=form.marks), form))
    for (place, way), answers in read.items():
        stop = stops_of(form)[place][1]
        assert answers == {(THOUGHT, ANSWER if stop is None else CUT, stop)}, (place, way)


@pytest.mark.parametrize(
    ("prompt", "continues", "is_inside"),
    [
        ("Hello", False, True),
        ("Hello<think>\n\n</think>\n\n", False, False),
        ("Hello<think>\nIt is", True, True),
        ("Hello. It is so and", True, False),
    ],
)
def test_deepseek_r1_thinks_unless_the_prompt_is_beyond_thoughts(
    server: Server, prompt: str, continues: bool, is_inside: bool
) -> None:
    """A closed prompt and a continued answer have no thoughts."""
    body = ChatRequest(messages=[{"role": "user", "content": "x"}], continue_final_message=continues)
    settings = server.settings.model_copy(update={"reasoning_parser": DEEPSEEK_R1})
    serving = replace(server, settings=settings, thoughts=THINK)
    thoughts = thoughts_of(serving, body, server.tokenizer.encode(prompt, False), 100, None)
    assert thoughts.reader is not None
    assert thoughts.reader().is_inside is is_inside


def run(tokenizer: Tokenizer, form: Format, text: str, options: TextOptions, min_tokens: int = 0) -> Choice:
    """Return the complete choice of an answer with this text."""
    thoughts = partial(reasoning_of, False, form.marks)
    if form.marks.lead:
        thoughts = partial(HarmonyMessages, form.prompt)
    request = Request(request_id="x", prompt_token_ids=(1,), limits=Limits(min_tokens=min_tokens))
    choice = Choice(request, tokenizer, replace(options, thoughts=thoughts))
    for step in steps(request, [*tokenizer.encode(text, False), EOS]):
        if choice.finish_reason is None:
            choice.add(step, stats())
    return choice


@pytest.mark.parametrize("name", ["qwen3", "harmony"])
def test_tokens_of_thoughts_count_for_min_tokens(server: Server, name: str) -> None:
    """A stop string among the first `min_tokens` tokens ends nothing; the next one does."""
    form = FORMATS[name]
    num_before = len(server.tokenizer.encode(form.text[: form.text.rindex("STOP") + len("STOP")], False))
    text = form.text + " STOP"
    early, late = (run(server.tokenizer, form, text, TextOptions(["STOP"]), num) for num in (5, num_before))
    assert (early.text, late.text) == (CUT, ANSWER + " ")


JSON_CALL = '{"a": 1}'
CALLS = {
    "hermes": ("qwen3", f'<tool_call>\n{{"name": "add", "arguments": {JSON_CALL}}}\n</tool_call>'),
    "harmony": ("harmony", f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{JSON_CALL}"),
}


@pytest.mark.parametrize("call_format", CALLS)
def test_a_stop_string_in_the_thoughts_loses_no_call(server: Server, call_format: str) -> None:
    """Nor does one in the header of a channel; one in the arguments ends the call."""
    name, call = CALLS[call_format]
    form = FORMATS[name]
    tool = Tool(type="function", function=Function(name="add"))
    use = ToolUse((tool,), call_format, parallel=True, forced=False)
    text = form.opening + THOUGHT + form.marks.close + form.marks.between + call
    for stop, reason, arguments in (
        ("look.", "tool_calls", JSON_CALL),
        ("commentary", "tool_calls", JSON_CALL),
        (": 1", "stop", '{"a"'),
    ):
        choice = run(server.tokenizer, form, text, TextOptions([stop], tools=use))
        assert (choice.finish_reason, choice.thoughts) == (reason, THOUGHT)
        assert [(made.name, made.arguments) for made in choice.calls] == [("add", arguments)]


def test_hidden_tokens_in_thoughts_end_nothing(server: Server) -> None:
    """A stop string that spells a special token is looked for in the answer, too."""
    tokenizer = server.tokenizer
    thought, answer = (tokenizer.encode(text, False) for text in ("<think>a<|user|>b", "</think>c<|user|>d"))
    options = TextOptions(["<|user|>"], thoughts=partial(reasoning_of, False, THINK))
    request = Request(request_id="x", prompt_token_ids=(1,))
    choice = Choice(request, tokenizer, options)
    for step in steps(request, [*thought, *answer, EOS]):
        if choice.finish_reason is None:
            choice.add(step, stats())
    assert (choice.thoughts, choice.text, choice.stop_reason) == ("ab", "c", "<|user|>")


def test_a_stop_string_counts_from_the_token_after_min_tokens_on(server: Server) -> None:
    made = filter_of(TextOptions(["b"]), server.tokenizer, min_tokens=2)
    released = ["".join(map(str, made.feed("b", 5, number))) for number in (1, 2, 3)]
    assert (released, made.stop, made.finish_reason) == (["b", "b", ""], "b", "stop")


def test_an_answer_has_a_filter_only_if_an_option_needs_one(server: Server) -> None:
    tools = [Tool(function=Function(name="add"))]
    parallel, single = (ToolUse(tools, "hermes", is_parallel, forced=False) for is_parallel in (True, False))
    plain = [TextOptions(), TextOptions(echo=True, reports_token_ids=True), TextOptions(tools=parallel)]
    filtered = [
        TextOptions(["a"]),
        TextOptions(thoughts=partial(reasoning_of, False, THINK)),
        TextOptions(tools=single),
        TextOptions(line_bounds=LineBounds),
    ]
    made = [filter_of(options, server.tokenizer, 0) for options in (*plain, *filtered)]
    assert [isinstance(each, AnswerFilter) for each in made] == [False] * 3 + [True] * 4
    assert [list(each.feed("text", 5, 1)) for each in made[:3]] == [["text"]] * 3

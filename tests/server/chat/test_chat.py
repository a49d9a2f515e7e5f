"""The terminal chat without a terminal: origins of text, the conversation, control characters."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.output.vt100 import Vt100_Output

from server.chat.conversation import ChatError, Conversation, client_of, served_model
from server.chat.origin import ACCEPTED, OWN, UNKNOWN, Origins
from server.chat.terminal import Terminal, _fitting, _whole_message, main
from tests.wrong import instead


def step(tokens: list[str], num_accepted: int) -> dict[str, Any]:
    return {"chains": [], "tokens": tokens, "num_accepted": num_accepted}


@pytest.mark.parametrize(
    ("parts", "runs"),
    [
        ([("ab c", [step(["a", "b", " c"], 2)])], [("a", ACCEPTED), ("b", ACCEPTED), (" c", OWN)]),
        # Text that was held back, say by a stop string, comes after its step.
        ([("a", [step(["ab", "c"], 1)]), ("bc", [])], [("ab", ACCEPTED), ("c", OWN)]),
        # An end token is in no text.
        ([("a", [step(["a", "</s>"], 1)])], [("a", ACCEPTED)]),
        ([("ab", [step(["<s>", "a"], 1), step(["b"], 0)])], [("a", OWN), ("b", OWN)]),
        # A character of several tokens has the origin of the first.
        ([("é!", [step(["\ufffd", "\ufffd", "!"], 1)])], [("é", ACCEPTED), ("!", OWN)]),
        ([("x\ud7ff", [step(["x"], 0)])], [("x", OWN), ("\ud7ff", UNKNOWN)]),
        ([("plain", [])], [("plain", UNKNOWN)]),
    ],
)
def test_text_has_the_origin_of_its_tokens(parts: list[tuple[str, Any]], runs: list[tuple[str, str]]) -> None:
    origins = Origins()
    found = [run for text, steps in parts for run in origins.add(text, steps)]
    assert [*found, *origins.rest()] == runs


def test_no_text_is_lost_however_it_arrives() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        tokens = ["".join(draw.choices("ab \n", k=draw.randint(1, 3))) for _ in range(20)]
        spoken = "".join(token for token in tokens if draw.random() < 0.8)
        cuts = sorted(draw.choices(range(len(spoken) + 1), k=5))
        origins, found = Origins(), []
        for begin, end in zip([0, *cuts], [*cuts, len(spoken)], strict=True):
            taken, tokens = tokens[:4], tokens[4:]
            found += origins.add(spoken[begin:end], [step(taken, draw.randint(0, len(taken)))])
        assert "".join(text for text, _ in [*found, *origins.rest()]) == spoken


class Daemon:
    """Answers chats with the number of messages, and remembers the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if body["messages"][-1]["content"] == "refuse":
            return httpx.Response(400, json={"error": {"message": "no"}})
        words = ["one ", "two ", f"{len(body['messages'])}"]
        chunks: list[dict[str, Any]] = [
            {"choices": [{"delta": {"reasoning_content": "hm "}, "drafts": [step(["hm "], 0)]}]},
            {"choices": [{"delta": {"content": "".join(words)}, "drafts": [step(words, 2)]}]},
        ]
        if body["messages"][-1]["content"] == "break":
            chunks.append({"error": {"message": "the engine has stopped"}})
        metrics = {"speculative_decoding": None, "tokens_per_second": 7.0}
        if body["messages"][-1]["content"] in ("long", "full"):
            chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
            metrics |= {"max_tokens": 3} if body["messages"][-1]["content"] == "full" else {}
        chunks.append({"choices": [], "metrics": metrics})
        frames = [f"data: {json.dumps(chunk)}" for chunk in chunks]
        return httpx.Response(200, text="\n\n".join([": comment", *frames, "data: [DONE]", ""]))


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def conversation(daemon: Daemon) -> Iterator[Conversation]:
    with httpx.Client(transport=httpx.MockTransport(daemon), base_url="http://daemon") as client:
        yield Conversation(client, "m", options={"seed": 1})


def test_turns_add_up_and_thoughts_are_left_out(daemon: Daemon, conversation: Conversation) -> None:
    pieces = list(conversation.ask("a"))
    assert [tuple(piece) for piece in pieces] == [
        ("hm ", OWN, True),
        ("one ", ACCEPTED, False),
        ("two ", ACCEPTED, False),
        ("1", OWN, False),
    ]
    conversation.system, conversation.speculates = "be brief", False
    list(conversation.ask("b"))
    assert [(one["role"], one["content"]) for one in daemon.bodies[1]["messages"]] == [
        ("system", "be brief"),
        ("user", "a"),
        ("assistant", "one two 1"),
        ("user", "b"),
    ]
    assert [body["speculation"]["enabled"] for body in daemon.bodies] == [True, False]
    assert daemon.bodies[1]["seed"] == 1
    conversation.clear()
    assert conversation.messages == []


def test_a_cut_answer_names_its_bound(conversation: Conversation) -> None:
    conversation.options = {"max_tokens": 9}
    cuts = []
    for message in ("long", "full", "a"):
        list(conversation.ask(message))
        cuts.append(conversation.cut)
    assert cuts == [
        "cut after 9 tokens; /set max_tokens N sets another bound",
        "the context is full; /new begins a new conversation",
        "",
    ]


def test_what_has_arrived_stays_and_what_was_refused_goes(conversation: Conversation) -> None:
    with pytest.raises(ChatError, match=r"^no$"):
        list(conversation.ask("refuse"))
    assert conversation.messages == []
    with pytest.raises(ChatError, match="the engine has stopped"):
        list(conversation.ask("break"))
    assert [one["content"] for one in conversation.messages] == ["break", "one two 1"]
    answer = conversation.ask("more")
    next(answer)
    answer.close()  # nothing but a thought has come
    assert len(conversation.messages) == 2


def test_a_model_cannot_move_the_cursor(conversation: Conversation) -> None:
    written, pieces = io.StringIO(), [("a\x1b[2J\x9b1A\r\x07b\n", OWN, False)]
    with (
        instead(Conversation, "ask", lambda *_: iter(pieces)),
        create_app_session(output=Vt100_Output(written, lambda: Size(24, 80), term="xterm")),
    ):
        Terminal(conversation)._answer("x")
    text = written.getvalue()
    assert "a\ufffd[2J\ufffd1A\ufffd\ufffdb" in text
    assert "\x1b[2J" not in text
    assert not {"\x9b", "\x07"} & set(text)


def test_without_a_terminal_or_a_daemon_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "needs a terminal" in capsys.readouterr().err
    with client_of("http://127.0.0.1:9") as client, pytest.raises(ChatError, match="start one: polydraft serve"):
        served_model(client, None, lambda: None)
    for address in ("localhost:8000", "http://localhost:port", "ftp://localhost", ""):
        with pytest.raises(ChatError, match="it looks like http://localhost:8000"):
            client_of(address)


def said(conversation: Conversation, *commands: str) -> str:
    """Return the text that the terminal shows for some commands."""
    written = io.StringIO()
    with create_app_session(output=Vt100_Output(written, lambda: Size(24, 80), term="xterm")):
        for command in commands:
            Terminal(conversation)._command(*command.split(maxsplit=1))
    return written.getvalue()


def test_settings_are_set_and_removed(conversation: Conversation) -> None:
    said(conversation, "/set temperature 0.5", '/set stop ["a", "b"]', "/set reasoning_effort high", "/set seed")
    assert conversation.body().items() > {"temperature": 0.5, "stop": ["a", "b"], "reasoning_effort": "high"}.items()
    assert "seed" not in conversation.body()
    assert "did you mean temperature" in said(conversation, "/set temprature 1")
    assert "temperature 0.5" in said(conversation, "/set")


def test_a_saved_conversation_goes_on(conversation: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "a talk.json"
    conversation.system, conversation.messages = "Be brief.", [{"role": "user", "content": "\u00e9"}]
    said(conversation, f"/save {path}")
    saved = conversation.body()
    conversation.clear()
    conversation.system, conversation.options = "", {}
    assert "1 messages are loaded" in said(conversation, f"/load {path}")
    assert conversation.body() == saved
    path.write_text('{"messages": [5]}')
    assert "not a conversation" in said(conversation, f"/load {path}")
    assert "cannot be written" in said(conversation, f"/save {tmp_path}")
    assert "/save: name a file" in said(conversation, "/save")
    assert "home directory" in said(conversation, "/load ~nobody-has-it/x")
    assert conversation.body() == saved


def test_lines_between_quotes_are_one_message() -> None:
    lines = iter(['"""a', " b ", "", 'c"""', '"""d"""', '  e "" '])
    read = partial(_whole_message, lambda *_: next(lines))
    assert [read(), read(), read()] == ["a\n b\n\nc", "d", 'e ""']


def test_the_status_fits_the_terminal() -> None:
    parts = ["m" * 20, "speculation on", "no drafts"]
    assert _fitting(parts, 60) == f"{parts[0]} · speculation on · no drafts"
    assert _fitting(parts, 40) == f"{parts[0]} · speculation on"
    assert _fitting(parts, 10) == "m" * 9 + "…"
    assert _fitting(["模型模型", "x"], 5) == "模型…"

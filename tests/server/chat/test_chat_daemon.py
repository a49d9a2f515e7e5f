"""`polydraft chat` in a pseudo-terminal, with a real daemon."""

from __future__ import annotations

import os
import re
import sys

import pexpect
import pytest

from server.chat.conversation import ChatError, client_of, served_model
from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon

GREEN, BLUE = "\x1b[0;32m", "\x1b[0;34m"


class Chat:
    """The command in a terminal of 120 columns, which says where its cursor is when it is asked."""

    def __init__(self, *arguments: str) -> None:
        wrong_width = {"COLUMNS": "40"}
        environment = {**os.environ, **wrong_width, "POLYDRAFT_API_KEY": KEYS[0], "TERM": "xterm-256color"}
        command = ["-m", "server.cli", "chat", *arguments]
        self.process = pexpect.spawn(
            sys.executable, command, env=environment, encoding="utf-8", dimensions=(24, 120), timeout=60
        )

    def until_prompt(self, words: str) -> str:
        """Wait for the next prompt, whose status line has the words; return the output."""
        self.process.expect_exact("\x1b[6n")
        printed: str = self.process.before
        self.process.send("\x1b[3;1R")
        self.process.expect_exact(words)
        return printed

    def say(self, text: str) -> None:
        self.process.send(f"{text}\r")


@pytest.mark.slow
def test_a_conversation_in_a_terminal(measured_seat: Daemon) -> None:
    """Answers are coloured by origin; /spec switches speculation."""
    chat = Chat("--url", measured_seat.url, "--max-tokens", "30", "--seed", "7")
    try:
        chat.until_prompt(f"{MODEL} · speculation on")
        chat.say("hello")
        first = chat.until_prompt(" tokens per pass · ")
        chat.process.expect(r"[0-9]\.[0-9]{2}x plain decoding · [0-9]+ tokens/s · rule bv_race")
        assert GREEN in first
        assert BLUE in first
        chat.say("/spec off")
        chat.until_prompt("speculation off")
        chat.say("hello again")
        second = chat.until_prompt("no drafts")
        assert BLUE in second
        assert GREEN not in second
        chat.say("/spec")
        chat.until_prompt("speculation on")
        chat.say("/nonsense")
        assert "unknown; /help lists" in chat.until_prompt("speculation on")
        chat.say("/new")
        chat.until_prompt("speculation on")
        chat.say("hello")
        assert words(chat.until_prompt(" tokens per pass")) == words(first), "a new conversation with the same seed"
        chat.process.sendeof()
        chat.process.expect(pexpect.EOF)
    finally:
        chat.process.close(force=True)
    assert chat.process.exitstatus == 0


def words(printed: str) -> list[str]:
    """The answer's words, which the prompt line with the message comes before."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.rpartition("\x1b[?2004l")[2]).split()


def test_a_missing_key_and_a_wrong_model_are_explained(one_seat: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(one_seat.url) as client, pytest.raises(ChatError, match="set POLYDRAFT_API_KEY"):
        served_model(client, None, lambda: None)
    monkeypatch.setenv("POLYDRAFT_API_KEY", KEYS[1])
    with client_of(one_seat.url) as client, pytest.raises(ChatError, match=f"other: the daemon serves {MODEL}"):
        served_model(client, "other", lambda: None)

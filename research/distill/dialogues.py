"""Prompts and whole conversations of files, in the target's tokens.

A file has JSON lines. A line is a conversation (`messages`, or `turns` as texts or as pairs of role
and text), one message (`prompt`), a question with or without its `answer`, or plain `text`, which
is continued without a template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError

Message = dict[str, str]


class LearnedText(NamedTuple):
    """A text of the target, or one that is given."""

    token_ids: list[int]
    counts: list[bool]
    """Whether the target's distribution below each token is learned, because an answer's next token
    is sampled from it.
    """


class FileDialogue(NamedTuple):
    """A line of a file."""

    messages: list[Message]
    text: str = ""
    """Text without a template, if there are no messages."""

    @property
    def questions(self) -> list[Message]:
        """Messages that the target does not write."""
        return [message for message in self.messages if message["role"] != "assistant"]


def read_dialogues(file: Path) -> list[FileDialogue]:
    """Return the conversations of a file.

    Raise ConfigError if it cannot be read, or if a line has none.
    """
    return [dialogue for _, dialogue in read_records(file)]


def read_records(file: Path) -> list[tuple[dict[str, Any], FileDialogue]]:
    """Return the lines of a file with their conversations.

    Raise ConfigError as `read_dialogues` does.
    """
    try:
        lines = file.read_text(encoding="utf8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a file that can be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    records = [_record(line, f"{file}:{number}") for number, line in numbered]
    if not records:
        raise ConfigError(f"{file}: there is no line in it")
    return records


def _record(line: str, place: str) -> tuple[dict[str, Any], FileDialogue]:
    try:
        record = json.loads(line)
        if "text" in record:
            return record, FileDialogue([], str(record["text"]))
        messages = _messages(record)
        if messages and all(isinstance(text, str) for one in messages for text in (one["role"], one["content"])):
            return record, FileDialogue(messages)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ConfigError(f"{place}: not a JSON object with messages, turns, prompt, question or text")


def _messages(record: dict[str, Any]) -> list[Message]:
    """Return the messages of a line."""
    if "messages" in record:
        return [{"role": one["role"], "content": one["content"]} for one in record["messages"]]
    if "turns" in record:
        turns = [("user", one) if isinstance(one, str) else one for one in record["turns"]]
        return [{"role": role, "content": content} for role, content in turns]
    asked = {"role": "user", "content": record["prompt"] if "prompt" in record else record["question"]}
    answers = [record["answer"]] if "answer" in record and "prompt" not in record else []
    return [asked, *({"role": "assistant", "content": answer} for answer in answers)]


class ChatTokens:
    """Conversations in a model's chat template and tokens."""

    def __init__(self, folder: str, end_tokens: Sequence[int]) -> None:
        from transformers import PreTrainedTokenizerFast

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self._folder, self._end_tokens = folder, frozenset(end_tokens)

    def text_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text without a template."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def message_tokens(self, messages: Sequence[Message], begins_answer: bool = False) -> list[int]:
        """Return the tokens of a conversation, with those that begin an answer or without.

        Raise ConfigError.
        """
        if not self.tokenizer.chat_template:
            raise ConfigError(f"{self._folder}: has no chat template; give texts as `text`, without roles")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begins_answer)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def marked(self, messages: Sequence[Message], length: int) -> LearnedText:
        """Return at most `length` tokens of a conversation.

        The distributions of all answers count in it.
        """
        token_ids = self.message_tokens(messages)
        counts = [False] * len(token_ids)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.message_tokens(messages[:number], True)
            whole = self.message_tokens(messages[: number + 1])
            first, end = len(before), len(whole)
            if token_ids[:first] != before or token_ids[:end] != whole:
                continue  # this template writes earlier answers in another way
            ends = [place for place in range(first, end) if token_ids[place] in self._end_tokens]
            end = ends[0] + 1 if ends else end
            counts[first - 1 : end - 1] = [True] * (end - first)
        return LearnedText(token_ids[:length], counts[:length])

    def given(self, dialogue: FileDialogue, length: int) -> LearnedText:
        """Return a text as it is in its file."""
        if dialogue.messages:
            return self.marked(dialogue.messages, length)
        token_ids = self.text_tokens(dialogue.text)[:length]
        return LearnedText(token_ids, [True] * len(token_ids))

"""The target's answers, sampled by the engine itself.

By its compiled passes, with many requests at once.

A text is a function of the seed and its number, so that an interrupted run samples what it would
have sampled. Answers of one conversation follow each other; conversations are answered side by
side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.request import Limits, Request, Sampling
from engine.start.distribution_check import run_to_end
from engine.step.engine import Engine
from research.distill.dialogues import ChatTokens, FileDialogue, LearnedText, Message

_LEAST_ROOM = 16
"""Tokens that an answer must have room for."""


class TextPlan(NamedTuple):
    """Settings of texts."""

    length: int
    """Most tokens of a text, with its prompt."""
    answer_tokens: int
    """Most tokens of one answer in a conversation."""
    temperatures: tuple[float, ...]
    """Temperatures of texts, which take turns."""
    seed: int


class _Question(NamedTuple):
    """A text that the target continues."""

    number: int
    token_ids: list[int]
    most_tokens: int


class Sampler:
    """Continues texts and answers conversations."""

    def __init__(self, engine: Engine, chat: ChatTokens | None, plan: TextPlan) -> None:
        self._engine, self._chat, self._plan = engine, chat, plan
        self.progress: Callable[[int], object] = lambda _: None
        """Is called with numbers of new tokens."""

    def continued(self, prompts: Sequence[Sequence[int]], first_number: int) -> list[LearnedText]:
        """Return prompts with what follows them, through end tokens.

        Another turn or text follows one.
        """
        most = self._plan.length - 1
        questions = [
            _Question(first_number + place, list(prompt[:most]), self._plan.length - len(prompt[:most]))
            for place, prompt in enumerate(prompts)
        ]
        answers = self._answers(questions, ignore_eos=True)
        return [
            LearnedText(asked.token_ids + answer, [False] * (len(asked.token_ids) - 1) + [True] * (len(answer) + 1))
            for asked, answer in zip(questions, answers, strict=True)
        ]

    def sampled(self, dialogues: Sequence[FileDialogue], first_number: int) -> list[LearnedText]:
        """Return what the target writes after prompts of a file.

        Answers to messages, or the rest of a text.
        """
        answered = [one for one in dialogues if one.messages]
        plain = [one for one in dialogues if not one.messages]
        assert self._chat is not None
        prompts = [self._chat.text_tokens(one.text) for one in plain]
        return self._answered(answered, first_number) + self.continued(prompts, first_number + len(answered))

    def _answered(self, dialogues: Sequence[FileDialogue], first_number: int) -> list[LearnedText]:
        """Return conversations with the target's answers to all questions that have room."""
        chat, plan = self._chat, self._plan
        assert chat is not None
        histories: list[list[Message]] = [[] for _ in dialogues]
        waiting = {place: list(dialogue.questions) for place, dialogue in enumerate(dialogues)}
        while waiting:
            questions = []
            for place, messages in list(waiting.items()):
                asked = histories[place] + _next_turn(messages)
                token_ids = chat.message_tokens(asked, begins_answer=True)
                room = min(plan.length - len(token_ids), plan.answer_tokens)
                if room < _LEAST_ROOM:
                    del waiting[place]
                    continue
                histories[place] = asked
                questions.append(_Question(place, token_ids, room))
            numbered = [one._replace(number=first_number + one.number) for one in questions]
            for asked_of, answer in zip(questions, self._answers(numbered), strict=True):
                histories[asked_of.number].append({"role": "assistant", "content": chat.text_of(answer)})
                if len(answer) == asked_of.most_tokens or not waiting[asked_of.number]:
                    del waiting[asked_of.number]
        return [chat.marked(messages, plan.length) for messages in histories if messages]

    def given(self, dialogue: FileDialogue) -> LearnedText:
        """Return a text as it is in its file."""
        assert self._chat is not None
        return self._chat.given(dialogue, self._plan.length)

    def _answers(self, questions: Sequence[_Question], ignore_eos: bool = False) -> list[list[int]]:
        """Return the engine's answers in the questions' order."""
        temperatures = self._plan.temperatures
        requests = [
            Request(
                request_id=str(place),
                prompt_token_ids=tuple(one.token_ids),
                sampling=Sampling(
                    temperature=temperatures[one.number % len(temperatures)],
                    seed=(self._plan.seed << 32) + one.number,
                ),
                limits=Limits(max_tokens=one.most_tokens, ignore_eos=ignore_eos),
            )
            for place, one in enumerate(questions)
        ]
        answers = run_to_end(self._engine, requests, self.progress)
        return [answers[str(place)].tokens for place in range(len(questions))]


def _next_turn(messages: list[Message]) -> list[Message]:
    """Take the messages up to the next one of the user from those that wait, and return them."""
    turn = []
    while messages:
        turn.append(messages.pop(0))
        if turn[-1]["role"] == "user":
            break
    return turn

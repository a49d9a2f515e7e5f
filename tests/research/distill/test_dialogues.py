"""Prompts and conversations of files, in the target's template.

They are answered turn by turn, with the answers marked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import ConfigError
from research.analysis.loading import load_engine
from research.distill.dialogues import ChatTokens, FileDialogue, read_dialogues
from research.distill.sampling import Sampler, TextPlan
from tests.wrong import instead

TARGET = str(Path(__file__).parents[3] / "server" / "demo" / "target")
QUESTIONS = ["Hi!", "Do you have any pets?"]


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    model = ModelConfig(target=TARGET, num_threads=1)
    engine = load_engine(EngineConfig(model=model, cache=CacheConfig(memory_bytes=1 << 26)))
    chat = ChatTokens(TARGET, engine.facts.eos_token_ids)
    return Sampler(engine, chat, TextPlan(160, 24, (0.0,), 1))


def asked(*questions: str) -> FileDialogue:
    return FileDialogue([{"role": "user", "content": question} for question in questions])


def learned(sampler: Sampler, text: Any) -> str:
    """Return the tokens whose distributions are learned, as text."""
    after = zip(text.token_ids[1:], text.counts, strict=False)
    decoded: str = sampler._chat.tokenizer.decode([token for token, counts in after if counts])  # type: ignore[union-attr]
    return decoded


LINES = {
    "messages": {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
    "turns": {"turns": ["a", "b"]},
    "turns with roles": {"turns": [["user", "a"], ["assistant", "b"], ["user", "c"]]},
    "prompt": {"prompt": "a", "answer": "not given with a prompt"},
    "question": {"question": "a"},
    "question and answer": {"question": "a", "answer": "b"},
}
ROLES = {
    "messages": "su",
    "turns": "uu",
    "turns with roles": "uau",
    "prompt": "u",
    "question": "u",
    "question and answer": "ua",
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_every_type_are_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / "prompts.jsonl"
    # A separator of lines in Unicode is a part of a text.
    file.write_text(json.dumps({**LINES[name], "other": "\u2028"}, ensure_ascii=False) + "\n\n", encoding="utf8")
    (dialogue,) = read_dialogues(file)
    assert "".join(message["role"][0] for message in dialogue.messages) == ROLES[name]


@pytest.mark.parametrize("line", ["[]", "{}", '{"messages": [{}]}', '{"turns": [3]}', '{"prompt": 1}', "{"])
def test_lines_without_a_conversation_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n', encoding="utf8")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: not a JSON object"):
        read_dialogues(file)


def test_turns_are_answered_one_after_the_other(sampler: Sampler) -> None:
    """The second answer follows the first one, which the target has written."""
    whole, first = sampler.sampled([asked(*QUESTIONS), asked(QUESTIONS[0])], 0)
    begin = sampler._chat.message_tokens(asked(QUESTIONS[0]).messages, begins_answer=True)  # type: ignore[union-attr]
    assert whole.token_ids[: len(begin)] == begin
    answers = learned(sampler, whole).split("<|end|>")
    assert learned(sampler, first) == f"{answers[0]}<|end|>"
    assert len(answers) == 3
    text = sampler._chat.tokenizer.decode(whole.token_ids)  # type: ignore[union-attr]
    turns = [f"<|user|>{one}<|end|><|assistant|>{said}<|end|>" for one, said in zip(QUESTIONS, answers, strict=False)]
    assert text == "<|bos|>" + "".join(turns)


def test_an_answer_without_room_ends_its_conversation(sampler: Sampler) -> None:
    short = Sampler(sampler._engine, sampler._chat, TextPlan(40, 24, (0.0,), 1))
    (text,) = short.sampled([asked(*QUESTIONS * 3)], 0)
    assert len(text.token_ids) <= 40
    assert any(text.counts)


def test_given_conversations_count_their_answers(sampler: Sampler) -> None:
    messages = [*asked("a").messages, {"role": "assistant", "content": "b c"}, *asked("d").messages]
    text = sampler.given(FileDialogue(messages))
    assert learned(sampler, text) == "b c<|end|>"
    with instead(ChatTokens, "message_tokens", lambda right, one, messages, *rest: right(one, messages[-1:], *rest)):
        # A template that forgets earlier turns.
        assert not any(sampler.given(FileDialogue(messages)).counts)


@pytest.mark.slow
def test_plain_texts_are_continued(sampler: Sampler) -> None:
    (text,) = sampler.sampled([FileDialogue([], "Once upon a time")], 0)
    prompt = sampler._chat.text_tokens("Once upon a time")  # type: ignore[union-attr]
    assert text.token_ids[: len(prompt)] == prompt
    assert text.counts == [False] * (len(prompt) - 1) + [True] * (160 - len(prompt) + 1)

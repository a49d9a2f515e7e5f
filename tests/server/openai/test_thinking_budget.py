"""Thoughts that the engine follows: a budget ends them, structured output follows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import pytest
import tokenizers

from tests.grid import slow_fixture
from tests.server.daemon_process import MODEL, Daemon, Daemons
from tests.server.event_stream import open_stream
from tests.server.tiny_models import VOCAB_SIZE, llama_config, llama_weights, write_folder

OPENS, CLOSES = VOCAB_SIZE, VOCAB_SIZE + 1
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking %}<think>\n{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
)
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "thinker",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 1,
    "max_tokens": 40,
    "ignore_eos": True,
    "return_token_ids": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "bv_race": {"rule": "bv_race", "num_drafts": 4, "draft_length": 4},
    "tree": {"rule": "traversal", "tree": [2, 2, 1]},
}
CAPITALS: dict[str, Any] = {"structured_outputs": {"regex": "[A-Z]{2,6}"}, "ignore_eos": False, "max_tokens": 80}


def write_thinking(folder: Path, num_layers: int) -> Path:
    """A model whose two last tokens are the tags."""
    weights = llama_weights(num_layers)
    name = "model.embed_tokens.weight"
    more = np.random.default_rng(5).normal(scale=float(weights[name].std()), size=(2, weights[name].shape[1]))
    weights[name] = np.concatenate([weights[name], more.astype(weights[name].dtype)])
    write_folder(folder, {**llama_config(num_layers), "vocab_size": VOCAB_SIZE + 2}, weights)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
@slow_fixture
def thinking(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    folder = tmp_path_factory.mktemp("thinking")
    target, draft = write_thinking(folder / "target", 2), write_thinking(folder / "draft", 1)
    return daemons.get(
        str(target), "--draft-model", str(draft), "--no-calibrate", "--served-model-name", ASKED["model"]
    )


@pytest.fixture
def client(thinking: Daemon) -> Iterator[httpx.Client]:
    with thinking.client() as client:
        yield client


def answer(client: httpx.Client, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """(tokens, message) of an answer."""
    response = client.post(CHAT, json=ASKED | fields)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["token_ids"], choice["message"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [0, 1, 13])
def test_thoughts_are_closed_at_their_budget(client: httpx.Client, shape: str, budget: int) -> None:
    """Opened by the prompt; what comes after them is the rest of the answer."""
    more = {"thinking_token_budget": budget, "speculation": SHAPES[shape], "reasoning_effort": "high"}
    for seed in range(4):
        tokens, message = answer(client, **more, seed=seed)
        assert tokens.index(CLOSES) == budget
        assert len(tokens) == 40
        assert message["content"]
        assert bool(message.get("reasoning_content")) == bool(budget)


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "off"])
def test_at_temperature_0_the_answer_is_that_of_plain_decoding(client: httpx.Client, shape: str) -> None:
    fields = {"thinking_token_budget": 6, "reasoning_effort": "high", "temperature": 0}
    plain, other = (answer(client, **fields, speculation=SHAPES[name]) for name in ("off", shape))
    assert other == plain


def test_thoughts_that_the_answer_opens_have_the_budget_too(client: httpx.Client) -> None:
    """A bias makes it open them; without one it says something else, and no budget touches it."""
    tokens, _ = answer(client, thinking_token_budget=5, logit_bias={str(OPENS): 100})
    assert tokens[:7] == [OPENS] * 6 + [CLOSES]
    said = answer(client, thinking_token_budget=5, seed=1)
    assert CLOSES not in said[0]
    assert said == answer(client, seed=1, speculation=None)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_structured_output_comes_after_the_thoughts(client: httpx.Client, shape: str) -> None:
    more = CAPITALS | {"reasoning_effort": "high", "thinking_token_budget": 9, "speculation": SHAPES[shape]}
    for seed in range(3):
        tokens, message = answer(client, **more, seed=seed)
        assert tokens.index(CLOSES) == 9
        assert message["reasoning_content"]
        assert re.fullmatch("[A-Z]{2,6}", message["content"])
    with open_stream(client, CHAT, **ASKED | more | {"seed": 2}) as stream:
        deltas = [choice["delta"] for chunk in stream.read() for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]


def test_structured_output_may_come_without_thoughts(client: httpx.Client) -> None:
    """If the prompt has not closed the thoughts, the model chooses."""
    none = CAPITALS | {"reasoning_effort": "none", "logit_bias": {str(OPENS): 100}}
    open_to_both = CAPITALS | {"thinking_token_budget": 4}
    assert re.fullmatch("[A-Z]{2,6}", answer(client, **none)[1]["content"])
    assert re.fullmatch("[A-Z]{2,6}", answer(client, **open_to_both, logit_bias={str(OPENS): -100})[1]["content"])
    tokens, message = answer(client, **open_to_both, logit_bias={str(OPENS): 100})
    assert tokens[:6] == [OPENS] * 5 + [CLOSES]
    assert re.fullmatch("[A-Z]{2,6}", message["content"])


def test_messages_have_the_budget_of_their_own_api(thinking: Daemon) -> None:
    with anthropic.Anthropic(base_url=thinking.url, api_key="unused", max_retries=0) as client:
        made = client.messages.create(
            model=ASKED["model"],
            max_tokens=30,
            messages=[{"role": "user", "content": "hello"}],
            thinking={"type": "enabled", "budget_tokens": 7},
            extra_body={"seed": 3},
        )
    assert [block.type for block in made.content] == ["thinking", "text"]


def test_budget_without_thoughts_changes_nothing(http: httpx.Client) -> None:
    """It is kept by itself."""
    body = {"model": MODEL, "messages": ASKED["messages"], "max_tokens": 4, "seed": 1}
    plain, bounded = (http.post(CHAT, json=body | more).json() for more in ({}, {"thinking_token_budget": 2}))
    assert bounded["choices"] == plain["choices"]

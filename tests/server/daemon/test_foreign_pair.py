"""A pair that no program of this project wrote, by the recipe of docs/models.md.

Tokenizer by tokenizers, with tokens added to it afterwards; the target (Qwen2, head not tied, wider
than the tokenizer) in shards by transformers; the draft (Llama, tied head of another width,
bfloat16) in shards by huggingface_hub.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import huggingface_hub
import openai
import pytest
import tokenizers
import torch
import transformers

from loadtest.cli import main as bench
from research.analysis.__main__ import main as analyze
from tests.grid import slow_fixture
from tests.server.daemon_process import ROOT, Daemon, Daemons
from tests.server.weather_tools import USER, WEATHER

PAGE = (ROOT / "docs" / "models.md").read_text()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class ForeignPair:
    """Folders, and what wrote them."""

    target: Path
    draft: Path
    model: Any
    tokenizer: Any


def trained_tokenizer() -> Any:
    """Byte-level pairs learned from the dialogues; marks are added afterwards."""
    records = files("loadtest").joinpath("prompts", "heldout_dialogues.jsonl").read_text(encoding="utf8").splitlines()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(records[:50], trainer)
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    inner.add_tokens(["<think>", "</think>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ForeignPair:
    folder = tmp_path_factory.mktemp("foreign")
    target, draft = folder / "the target", folder / "draft"
    tokenizer = trained_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    torch.manual_seed(0)
    common = {**SIZES, "max_position_embeddings": 512, "initializer_range": 0.12}
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(vocab_size=576, num_hidden_layers=3, tie_word_embeddings=False, **common)
    )
    model.generation_config.eos_token_id = ends
    model.save_pretrained(target, max_shard_size="150KB")
    small = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=500, num_hidden_layers=1, tie_word_embeddings=True, **common)
    )
    small.resize_token_embeddings(len(tokenizer))
    small.to(torch.bfloat16).config.save_pretrained(draft)
    huggingface_hub.save_torch_model(small, draft, max_shard_size="40KB")
    for one in (target, draft):
        tokenizer.save_pretrained(one)
    return ForeignPair(target, draft, model.eval(), tokenizer)


def test_foreign_pair_has_the_expected_files(pair: ForeignPair) -> None:
    for folder, at_least in ((pair.target, 3), (pair.draft, 2)):
        assert len(list(folder.glob("model-*.safetensors"))) >= at_least
        assert (folder / "model.safetensors.index.json").exists()
    shapes = [json.loads((folder / "config.json").read_text()) for folder in (pair.target, pair.draft)]
    assert [one["vocab_size"] for one in shapes] == [576, 505]
    assert [one["tie_word_embeddings"] for one in shapes] == [False, True]
    assert len(pair.tokenizer) == 505


@pytest.fixture
@slow_fixture
def daemon(pair: ForeignPair, daemons: Daemons) -> Daemon:
    return daemons.get(str(pair.target), "--draft-model", str(pair.draft), "--no-calibrate", "--num-threads", "1")


@pytest.mark.parametrize("rule", ["block", "bv_race", "traversal"])
def test_answers_are_those_of_transformers(pair: ForeignPair, daemon: Daemon, rule: str) -> None:
    """Greedy, through the chat template with its added tokens."""
    messages = [{"role": "user", "content": "Hello <think>there</think>, what is the time?"}]
    prompt = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        written = pair.model.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :].tolist()
    body: dict[str, Any] = {"messages": messages, "max_tokens": 40, "temperature": 0}
    body |= {"return_token_ids": True, "speculation": {"rule": rule, "num_drafts": 1 if rule == "block" else 3}}
    with daemon.client() as client:
        body["model"] = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["prompt_token_ids"] == prompt[0].tolist()
    assert {505 - 1, 505 - 2} & set(answer["prompt_token_ids"]), "the added tokens are in the prompt"
    assert answer["choices"][0]["token_ids"] == written
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_a_model_whose_template_has_no_tools_says_so(daemon: Daemon) -> None:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="unused", max_retries=0) as client:
        (card,) = client.models.list()
        with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
            client.chat.completions.create(model=card.id, messages=[USER], tools=[WEATHER])  # type: ignore[arg-type,list-item]


@pytest.mark.slow
def test_the_recipe_of_the_page_runs(
    pair: ForeignPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands, word by word, with sizes that take seconds."""
    section = PAGE[PAGE.index("## Your own pair") :]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    commands = [shlex.split(line) for line in block[1].splitlines()]
    assert [command[:3] for command in commands[:2]] == [
        ["polydraft", "analyze", "selfcheck"],
        ["polydraft", "analyze", "pair"],
    ]
    assert commands[2][:2] == ["polydraft", "bench"]
    monkeypatch.chdir(tmp_path)
    lines: list[dict[str, Any]] = [{"prompt": "Once upon"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    names = {"MODEL": str(pair.target), "DRAFT": str(pair.draft)}
    served = shlex.quote(names["MODEL"]) + " --draft-model " + shlex.quote(names["DRAFT"])
    selfcheck, measure, over_http = (
        [served if word == "MODEL --draft-model DRAFT" else names.get(word, word) for word in command]
        for command in commands
    )
    assert analyze([*selfcheck[2:], "--answers", "300", "--rules", "block,bv_race,spectr_gbv"]) == 0
    small = "--rules block,bv_race --num-drafts 2 --tokens 8 --positions 4 --concurrency 1"
    assert analyze([*measure[2:], *small.split()]) == 0
    assert "recommended" in capsys.readouterr().err
    assert Path("pair/pair.json").exists()
    small = "--concurrency 1 --repeats 2 --max-tokens 6 --rules block,again"
    assert bench([*over_http[2:], *small.split()]) == 0
    (cell,) = json.loads(Path("bench.json").read_text())["cells"]
    assert cell["task"] == "prompts.jsonl"

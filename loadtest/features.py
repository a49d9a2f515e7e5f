"""`python -m loadtest.features`: gain and cost of predictions, seed-stable sampling and the prefix
cache.

Uses the embedded pair, with interleaved arms in one run. Predictions: the model's answer at
temperature 0 with one word replaced, an unrelated text (useless), none. Prefix cache: cached tokens
over a conversation of 20 turns with speculation on and off, and unshared prompts on two daemons,
one without the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import httpx
from tqdm import tqdm

from loadtest.bench import environment
from loadtest.client import key_headers, served_model
from loadtest.daemon import running_daemon
from loadtest.results import add_output_argument, document, with_interval, write
from loadtest.statistics import median_of_ratios, ratio_of_sums
from loadtest.workload import Prompt, load

_SPECULATION: dict[str, dict[str, Any]] = {"off": {"enabled": False}, "bv_race": {"rule": "bv_race"}}


class Caller:
    """Sends whole requests to one daemon."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, headers=key_headers(), timeout=600)
        self.model = served_model(url)

    def call(self, prompt: Prompt, **more: Any) -> dict[str, Any]:
        """Return the body of the response, with the time as `seconds`."""
        began = time.perf_counter()
        response = self.http.post(prompt.path, json={"model": self.model, **prompt.body, **more})
        if response.status_code != 200:
            raise RuntimeError(f"{prompt.path} answered {response.status_code}: {response.text}")
        return {**response.json(), "seconds": time.perf_counter() - began}

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        body = {"prompt": text, "add_special_tokens": False}
        return list(self.http.post("/tokenize", json=body).raise_for_status().json()["tokens"])


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of the first choice."""
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def with_one_edit(text: str) -> str:
    """Return the text with its middle word replaced."""
    words = text.split(" ")
    words[len(words) // 2] = "otherwise"
    return " ".join(words)


def predictions(caller: Caller, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Measure tokens per pass and speed without a prediction, with a good one, and with a useless
    one.
    """
    source = load("gutenberg")
    prompts = source[:num_prompts]
    common = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    answers = [text_of(caller.call(prompt, **common)) for prompt in prompts]
    guesses: dict[str, list[str | None]] = {
        "none": [None] * num_prompts,
        "one_edit": [with_one_edit(text) for text in answers],
        "useless": [str(other.body["prompt"])[:400] for other in source[1 : num_prompts + 1]],
    }
    counts: dict[str, list[dict[str, Any]]] = {name: [] for name in guesses}
    for number, prompt in enumerate(tqdm(prompts, desc="predictions")):
        names = list(guesses) if number % 2 == 0 else list(guesses)[::-1]
        for name in names:
            guess = guesses[name][number]
            more = {} if guess is None else {"prediction": {"type": "content", "content": guess}}
            answer = caller.call(prompt, **common, **more)
            assert text_of(answer) == answers[number], "a prediction changed the answer"
            counts[name].append(answer)
    return {name: _arm(found, counts["none"]) for name, found in counts.items()}


def seed_stable(caller: Caller, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Measure tokens per pass at temperature 1 by rule, with and without seed-stable sampling."""
    prompts = load("dialogues")[:num_prompts]
    result = {}
    for rule in ("block", "bv_race"):
        for stable in (False, True):
            emitted, passes = [], []
            for seed, prompt in enumerate(tqdm(prompts, desc=f"{rule}, seed-stable {stable}")):
                wish = {"temperature": 1, "max_tokens": max_tokens, "ignore_eos": True, "seed": seed}
                answer = caller.call(prompt, **wish, seed_stable=stable, speculation={"rule": rule})
                emitted.append(float(answer["usage"]["completion_tokens"]))
                passes.append(_num_passes(answer))
            result[f"{rule}, seed-stable" if stable else rule] = _tokens_per_pass(emitted, passes)
    return result


def _num_passes(answer: dict[str, Any]) -> float:
    return float(answer["metrics"]["speculative_decoding"]["num_passes"])


def _tokens_per_pass(emitted: list[float], passes: list[float]) -> dict[str, Any]:
    return with_interval("tokens_per_pass", ratio_of_sums(emitted, passes))


def _arm(answers: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    emitted = [float(answer["usage"]["completion_tokens"]) for answer in answers]
    passes = [_num_passes(answer) for answer in answers]
    details = answers[0]["usage"]["completion_tokens_details"]
    return {
        **_tokens_per_pass(emitted, passes),
        "passes_ratio_to_none": median_of_ratios([_num_passes(answer) for answer in base], passes)._asdict(),
        "speed_ratio_to_none": median_of_ratios(
            [a["seconds"] for a in base], [a["seconds"] for a in answers]
        )._asdict(),
        "first_answer": details,
    }


def conversation(caller: Caller, speculation: dict[str, Any], num_turns: int) -> dict[str, Any]:
    """Measure cached and prompt tokens of every turn; its prompt is the whole text before it."""
    questions = [prompt.body["prompt"][:120] for prompt in load("gutenberg")[:num_turns]]
    text: list[int] = []
    cached, prompt_tokens = [], []
    for turn, question in enumerate(questions):
        text += caller.tokens(question)
        answer = caller.call(
            Prompt("/v1/completions", {"prompt": text}),
            temperature=0,
            max_tokens=24,
            ignore_eos=True,
            cache_salt=f"{json.dumps(speculation)}",
            speculation=speculation,
            seed=turn,
        )
        text += caller.tokens(text_of(answer))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        prompt_tokens.append(answer["usage"]["prompt_tokens"])
    return {"cached_tokens": cached, "prompt_tokens": prompt_tokens, "hit_rate": sum(cached) / sum(prompt_tokens)}


def unshared_cost(cached: Caller, uncached: Caller, num_runs: int) -> dict[str, Any]:
    """Measure the time with the cache divided by the time without it, on new prompts."""
    source = load("gutenberg")
    times: dict[str, list[float]] = {"with": [], "without": []}
    for run in tqdm(range(num_runs), desc="unshared prompts"):
        # The leading number makes every block of the prompt new.
        body = {"prompt": f"{run} " + " ".join(str(part.body["prompt"]) for part in source[:4])}
        pair = [("with", cached), ("without", uncached)]
        for name, caller in pair if run % 2 == 0 else pair[::-1]:
            answer = caller.call(Prompt("/v1/completions", body), max_tokens=8, ignore_eos=True, seed=run)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            times[name].append(answer["seconds"])
    return {
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "seconds_with": statistics.median(times["with"]),
        "seconds_without": statistics.median(times["without"]),
        "time_ratio": median_of_ratios(times["with"], times["without"])._asdict(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.features", description=__doc__)
    parser.add_argument(
        "--prompts", type=int, default=24, help="answers of every arm of the predictions, up to 39 (default 24)"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of these answers (default 96)")
    parser.add_argument("--turns", type=int, default=20, help="turns of the conversation (default 20)")
    parser.add_argument("--runs", type=int, default=80, help="unshared prompts (default 80)")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        caller = Caller(stack.enter_context(running_daemon([])))
        uncached = Caller(stack.enter_context(running_daemon(["--no-enable-prefix-caching"])))
        result = document(
            "predictions at temperature 0, seed-stable sampling, prefix cache; one request at a time over HTTP",
            options,
            environment=environment(caller.url),
            predictions=predictions(caller, options.prompts, options.max_tokens),
            seed_stable=seed_stable(caller, 4 * options.prompts, options.max_tokens),
            conversation={name: conversation(caller, wish, options.turns) for name, wish in _SPECULATION.items()},
            unshared_prompts=unshared_cost(caller, uncached, options.runs),
        )
    print(json.dumps(result, indent=1))
    write(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

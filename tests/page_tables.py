"""Tables of README.md and docs/, rendered from docs/results.

A page has each table between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. `python -m
tests.page_tables` writes all tables again after a measurement, and `tests/test_readme.py` compares
them with the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from loadtest import clients, overhead
from loadtest.arms import ADAPTIVE, AGAIN, OFF
from loadtest.results import shown_ratio, table
from research.analysis import peers, quality, shapes, turns
from research.analysis.report import number
from research.analysis.times import chains as steps_by_chains
from research.analysis.times import heads
from tests.models.converted_variants import types_markdown, variants_markdown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

LOADS = {
    "arms-several": "{prompts}",
    "arms-greedy": "{prompts}, temperature 0",
    "arms-dots": "{prompts}, dot products",
    "arms-64": "{prompts}",
    "arms-long": "1,024 random tokens",
    "arms-long-16": "1,024 random tokens",
    "useless-drafter": "{prompts}, random draft model",
}
"""Names of loads of the embedded pair, by the runs that measured them."""
LOADS_ELSEWHERE = {
    "arms-pair": "64 random tokens, 115 M pair",
    "arms-bf16": "{prompts}, AMX",
    "arms-07": "{prompts}, AMX, temperature 0.7",
}
"""The same for another pair and another processor."""

WEIGHTS = {"bf16": "bfloat16", "q8": "int8", "q4": "int4"}
PEERS = {
    **{f"peers-smollm2-{kind}": f"SmolLM2-135M, {weights}" for kind, weights in WEIGHTS.items()},
    "peers-smollm2-file": "SmolLM2-135M, its file (Q4_1)",
    "peers-115m": "115 M pair, bfloat16",
    "peers-115m-q8": "115 M pair, int8",
    "peers-115m-q4": "115 M pair, int4",
    **{f"peers-embedded-{kind}": f"embedded pair, {weights}" for kind, weights in WEIGHTS.items()},
}
"""Models and weights of the runs next to llama.cpp."""
LIMITS = {
    "limits": "embedded, float32 arithmetic",
    "limits-115m-auto": "115 M, bfloat16",
    "limits-115m-int8": "115 M, int8",
    "limits-115m-int4": "115 M, int4",
}
"""Pairs and weights of the runs that measured what limits a pass."""
LOSSES = {
    "quality": {"target": "embedded target", "draft": "embedded draft model"},
    "quality-smollm2": {"target": "SmolLM2-135M"},
}
"""Models whose loss is shown, by run."""


def result(name: str) -> Any:
    """Return the committed result `docs/results/NAME-cpu.json`."""
    return json.loads((ROOT / f"docs/results/{name}-cpu.json").read_text())


def rate(arm: Mapping[str, Any]) -> str:
    """Return an arm's tokens per second."""
    return f"{arm['tokens_per_second']:.0f}"


def requests(number: int) -> str:
    """Return the title of a column for a number of requests."""
    return "1 request" if number == 1 else f"{number} requests"


def cells_of_loads(names: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (load, cell) of runs of arms in turns; names: loads by run."""
    for run, name in names.items():
        for cell in result(run)["cells"]:
            yield name.format(prompts=cell["prompts"]), cell


def loads(names: Mapping[str, str]) -> str:
    """Return adaptive's speed at every load, over plain decoding and over the best fixed shape."""
    head = ["prompts", "requests", "plain, tokens/s", "adaptive over plain (95 % interval)"]
    head += ["adaptive over the best fixed shape", "answers report"]
    rows = []
    for load, cell in cells_of_loads(names):
        adaptive, best = cell["arms"][ADAPTIVE], cell["adaptive_to_best_fixed"]
        row = [load, cell["concurrency"], rate(cell["arms"][OFF]), shown_ratio(adaptive["ratio_to_off"])]
        row += [f"{shown_ratio(best)} {best['arm']}", f"{adaptive['reported_speedup']:.2f}x"]
        rows.append(row)
    return table(head, rows)


def fixed_shapes() -> str:
    """Return the speed of fixed shapes over plain decoding, by the number of requests."""
    numbers = (1, 4, 16)
    ratios: dict[tuple[str, str], dict[int, str]] = {}
    for load, cell in cells_of_loads(LOADS | LOADS_ELSEWHERE):
        for shape, arm in cell["arms"].items():
            if shape not in (OFF, ADAPTIVE, AGAIN) and cell["concurrency"] in numbers:
                ratios.setdefault((load, shape), {})[cell["concurrency"]] = shown_ratio(arm["ratio_to_off"])
    rows = [[*names, *(shown.get(number, "-") for number in numbers)] for names, shown in ratios.items()]
    return table(["prompts", "shape", *map(requests, numbers)], rows)


def published_model() -> str:
    """Return plain decoding, text drafts and llama.cpp on tasks, by temperature and number of
    requests.
    """
    head = ["temperature", "requests", "llama.cpp, tokens/s", "plain, tokens/s", "with drafts, tokens/s"]
    head += ["with drafts over plain", "plain over llama.cpp"]
    rows = []
    for cell in result("tasks-smollm2")["cells"]:
        theirs, plain, drafted = (cell["arms"][name] for name in ("llama.cpp", peers.OFF, peers.OWN))
        row = [f"{cell['temperature']:g}", cell["concurrency"], rate(theirs), rate(plain), rate(drafted)]
        row += [shown_ratio(plain["own_to_this"]), shown_ratio(theirs["off_to_this"])]
        rows.append(row)
    return table(head, rows)


def published_summary() -> str:
    """Return the README's table of a published model."""
    rows = []
    for run, weights in (("peers-smollm2-file", "its file of 4 bits (Q4_1)"), ("peers-smollm2-bf16", "bfloat16")):
        cells = result(run)["cells"]
        theirs = [next(arm for name, arm in cell["arms"].items() if name.startswith("llama.cpp")) for cell in cells]
        rows.append([f"plain over llama.cpp, {weights}", *_few_and_many(cells, theirs, "off_to_this")])
    for run, prompts_of_run in (("tasks-smollm2", "Spec-Bench's tasks"), ("tasks-copying", "tasks that copy")):
        cells = [cell for cell in result(run)["cells"] if cell["temperature"] == 0]
        plain = [cell["arms"][peers.OFF] for cell in cells]
        rows.append([f"text drafts over plain, {prompts_of_run}", *_few_and_many(cells, plain, "own_to_this")])
    return table(["speed of SmolLM2-135M", "1 request", "many requests"], rows)


def _few_and_many(cells: list[dict[str, Any]], arms: list[dict[str, Any]], ratio: str) -> tuple[str, str]:
    return shown_ratio(arms[0][ratio]), f"{shown_ratio(arms[-1][ratio])} at {cells[-1]['concurrency']}"


def copying_tasks() -> str:
    """Return text drafts over plain decoding on tasks that copy."""
    rows = []
    for cell in result("tasks-copying")["cells"]:
        plain, drafted = (cell["arms"][name] for name in (peers.OFF, peers.OWN))
        row = [f"{cell['temperature']:g}", cell["concurrency"], rate(plain), rate(drafted)]
        rows.append([*row, shown_ratio(plain["own_to_this"])])
    head = ["temperature", "requests", "plain, tokens/s", "with drafts, tokens/s", "with drafts over plain"]
    return table(head, rows)


def next_to_llama_cpp() -> str:
    """Return the speeds of this engine and of llama.cpp with the same type of weights."""
    head = ["model, weights", "requests", "llama.cpp, tokens/s", "plain, tokens/s", "with drafts, tokens/s"]
    head += ["plain over llama.cpp", "with drafts over llama.cpp"]
    rows = []
    for run, model in PEERS.items():
        for cell in result(run)["cells"]:
            arms = cell["arms"]
            theirs = next(arm for name, arm in arms.items() if name.startswith("llama.cpp"))
            drafted, drafted_ratio = "-", "-"
            if "smollm2" not in run:
                drafted, drafted_ratio = rate(arms[peers.OWN]), shown_ratio(theirs["polydraft_to_this"])
            row = [model, cell["concurrency"], rate(theirs), rate(arms[peers.OFF]), drafted]
            rows.append([*row, shown_ratio(theirs["off_to_this"]), drafted_ratio])
    return table(head, rows)


def prompts() -> str:
    """Return how fast prompts are read, next to llama.cpp."""
    head = ["weights", "prompt tokens", "llama.cpp, tokens/s", "plain, tokens/s", "with a draft model, tokens/s"]
    rows = []
    for kind, weights in WEIGHTS.items():
        for cell in result(f"peers-prompts-{kind}")["cells"]:
            drafted, plain, theirs = cell["arms"].values()
            row = [weights, f"{cell['prompt']:,}", rate(theirs), rate(plain), rate(drafted)]
            rows.append([*row, shown_ratio(theirs["off_to_this"])])
    return table([*head, "plain over llama.cpp"], rows)


def generate() -> str:
    """Return the speed of this engine over that of transformers."""
    names = (peers.OFF, "transformers generate", "transformers assisted")
    rows = []
    for cell in result("peers-batches")["cells"]:
        ratios = [shown_ratio(cell["arms"][name]["polydraft_to_this"]) for name in names]
        rows.append([cell["concurrency"], rate(cell["arms"][peers.OWN]), *ratios])
    return table(["requests", "with drafts, tokens/s", "over plain", "over generate", "over assisted generation"], rows)


def loss() -> str:
    """Return the loss of weights in few bits."""
    head = ["model", "texts", "weights", "perplexity before", "difference (95 % interval)", "equal greedy tokens"]
    rows = []
    for run, models in LOSSES.items():
        for cell in result(run)["cells"]:
            if cell["model"] in models:
                difference = "{value:+.2%} ({low:+.2%} to {high:+.2%})".format(**cell["difference"])
                row = [models[cell["model"]], cell["texts"], cell["format"], f"{cell['perplexity_before']:.2f}"]
                rows.append([*row, difference, f"{cell['equal_tokens']:.1%}"])
    return table(head, rows)


def chains() -> str:
    """Return tokens per pass and gain in time by the number of chains, for prompts of several
    lengths.
    """
    measured = result("chains")
    rows = []
    for shape, options in measured["options"]["arms"].items():
        if "num_drafts" in options:
            arms = [cell["arms"][shape] for cell in measured["cells"]]
            tokens_a_pass = ", ".join(f"{arm['mean_acceptance_length']:.2f}" for arm in arms)
            rows.append([shape, tokens_a_pass, *(shown_ratio(arm["ratio_to_off"]) for arm in arms)])
    return table(["shape", "tokens a pass", *(f"{cell['context']:,} tokens" for cell in measured["cells"])], rows)


def draft_types() -> str:
    """Return a row per drafter and shape, with its speed over plain decoding by the number of
    requests.
    """
    cells = result("heads")["cells"]
    rows = []
    for name, at_one_request in cells[0]["arms"].items():
        if name != OFF:
            accepted, share = at_one_request["accepted_per_drafting_pass"], at_one_request["share_of_drafting"]
            ratios = [shown_ratio(cell["arms"][name]["ratio_to_off"]) for cell in cells]
            rows.append([name, f"{accepted:.2f}", f"{100 * share:.0f} %", *ratios])
    return table(["drafts", "accepted a pass", "drafting", *(requests(cell["concurrency"]) for cell in cells)], rows)


def heads_chains() -> str:
    """Return the time of several chains of a head, for targets of two sizes."""
    embedded, larger = (heads.markdown(result(name)) for name in ("heads-chains", "heads-chains-larger"))
    return "\n".join([embedded, *larger.splitlines()[2:]])


def limits() -> str:
    """Return times of passes, and the shares that memory and arithmetic need."""
    rows = []
    for run, pair in LIMITS.items():
        for cell in result(run)["cells"]:
            passes = [_pass(cell["least"][number], seconds) for number, seconds in cell["median"]["passes"].items()]
            rows.append([pair, f"{cell['context']:,}", cell["cores"], *passes])
    return table(["pair, weights", "text", "cores", "1 row", "6 rows", "21 rows"], rows)


def _pass(least: Mapping[str, float], seconds: float) -> str:
    shares = f"{least['bytes'] / seconds:.0%}, {least['arithmetic'] / seconds:.0%}"
    return f"{1000 * seconds:.2f} ({shares})"


def steps() -> str:
    """Return the parts of steps on two cores, in milliseconds."""
    rows = []
    for run, pair in LIMITS.items():
        for cell in result(run)["cells"]:
            for shape, step in cell["median"]["steps"].items() if cell["cores"] == 2 else ():
                parts = [f"{1000 * step[part]:.2f}" for part in ("draft", "target", "around")]
                rows.append([pair, f"{cell['context']:,}", shape, *parts])
    return table(["pair, weights", "text", "drafts", "drafting", "target", "other"], rows)


def rules() -> str:
    """Return the acceptance of rules on a pair, and the speed that it gives."""
    head = ["rule, drafts", "shape", "nodes", "alpha*", "acceptance", "tokens a pass (95 % interval)", "closed form"]
    rows = []
    for cell in result("rules")["cells"]:
        accepted = (number(cell["alpha_star"]), number(cell["acceptance"]))
        tokens = f"{cell['tokens_per_pass']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})"
        speedups = ", ".join(f"{speedup:.2f}x" for speedup in cell["speedup"].values())
        row = [f"{cell['rule']}, {cell['draft_method']}", cell["size"], number(cell["nodes_per_pass"], 1), *accepted]
        rows.append([*row, tokens, number(cell["expected_tokens_per_pass"], 2), speedups])
    return table([*head, "speed at 1, 4, 16 requests"], rows)


def device() -> str:
    """Return the speed of a pair of the sizes of Qwen3-8B and Qwen3-0.6B on a CUDA device."""
    sections = json.loads((ROOT / "docs/results/gpu/part-1-h100.json").read_text())["sections"]
    engine, transformers = (sections[name]["found"] for name in ("engine", "generate"))
    rows = []
    for cell in engine["cells"]:
        count, arms = cell["concurrency"], cell["arms"]
        ratios = [shown_ratio(arms[name]["ratio_to_off"]) for name in (ADAPTIVE, "bv_race:4x5", "block:1x5")]
        share = f"{engine['plain_share_of_roofline'][str(count)]:.0%}"
        generated = transformers[f"generate, plain, {count} requests, tokens per second"]
        rows.append([count, rate(arms[OFF]), share, f"{generated:.0f}", *ratios])
    head = ["requests", "plain, tokens/s", "of the bandwidth", "transformers' generate, tokens/s"]
    return table([*head, "adaptive over plain", "4x5 over plain", "1x5 over plain"], rows)


def prefixes() -> str:
    """Return the table of the prefix cache with heads (`tests/research/analysis/test_prefixes.py`
    counts).
    """
    rows = []
    for cell in result("heads-prefix")["cells"]:
        head, *counts = cell.values()
        rows.append([head, *(f"{count:,}" for count in counts)])
    titles = ["head", "cached prompt tokens", "of", "target's bytes per token", "head's bytes per token"]
    return table(titles, rows)


def tried_clients() -> str:
    """Return the table of client libraries."""
    return clients.markdown(json.loads((ROOT / "docs/results/clients.json").read_text()))


def _whole(name: str, markdown: Callable[[Any], str]) -> Callable[[], str]:
    return lambda: markdown(result(name))


TABLES: dict[str, Callable[[], str]] = {
    "arms": _whole("arms-several", turns.summary_markdown),
    "chains": chains,
    "clients": tried_clients,
    "device": device,
    "draft-types": draft_types,
    "fixed-shapes": fixed_shapes,
    "generate": generate,
    "gguf-numbers": _whole("gguf-numbers", quality.markdown),
    "gguf-types": types_markdown,
    "gguf-variants": variants_markdown,
    "growth": _whole("growth", steps_by_chains.markdown),
    "heads-chains": heads_chains,
    "heads-prefix": prefixes,
    "limits": limits,
    "llama-cpp": next_to_llama_cpp,
    "loads": partial(loads, LOADS),
    "loads-elsewhere": partial(loads, LOADS_ELSEWHERE),
    "loss": loss,
    "overhead": _whole("overhead", overhead.markdown),
    "prompts": prompts,
    "published": published_summary,
    "published-model": published_model,
    "rules": rules,
    "shapes-115m": _whole("shapes-115m", shapes.markdown),
    "shapes-dialogues": _whole("shapes-dialogues", shapes.markdown),
    "shapes-prose": _whole("shapes-prose", shapes.markdown),
    "steps": steps,
    "tasks-copying": copying_tasks,
    "tasks-passes": _whole("tasks-smollm2", peers.passes_markdown),
}
"""Tables by their names in the pages."""

_MARKED = re.compile(r"(<!-- ([\w-]+):begin -->\n)(.*?)(<!-- \2:end -->)", re.DOTALL)


def tables_of(page: Path) -> dict[str, str]:
    """Return the tables of a page by name."""
    return {match[2]: match[3].strip() for match in _MARKED.finditer(page.read_text())}


def main() -> None:
    """Write all tables into the pages."""
    for page in PAGES:
        text = page.read_text()
        page.write_text(_MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[4]}", text))


if __name__ == "__main__":
    main()

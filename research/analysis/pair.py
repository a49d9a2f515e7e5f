"""`analyze pair`: quality of a draft model for a target.

The optimum of any rule, and recommended settings.

Three measurements per pair, each cell of the grid saved as it is done, so that an interrupted run
goes on:
- laws: on text that the target wrote, at every position both laws; the optimum alpha* of every
  draft method, the acceptance of every rule at one position, rejections, and the expected length in
  closed form where there is one;
- runs: the engine itself on the prompts: tokens per target pass of every rule, chains and length;
- times: a step of every shape on this machine at several numbers of requests, and plain decoding's.
Expected speedup = tokens per pass x time of a plain step / time of the step.

Not for: serving, or measuring a daemon under load (`polydraft bench`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from engine.attention.inputs import NO_NODES, SequenceInput
from engine.config import EngineFacts
from engine.errors import ConfigError, RequestError
from engine.kernels.torch_kernels import TORCH
from engine.noise import Purpose, uniform
from engine.request import Limits, Request, Sampling, Speculation
from engine.sampling.distribution import DistributionParameters, distribution
from engine.scheduling.request_checks import check_speculation
from engine.speculation import theory
from engine.speculation.conditions import served_rules
from engine.speculation.drafting import children
from engine.speculation.gap import acceptance, optimum
from engine.speculation.verification import RULES
from engine.start.distribution_check import CheckedAnswer, run_to_end
from engine.start.measuring import synthetic_plan, usual_s
from engine.step.engine import Engine
from loadtest.arguments import integers
from loadtest.environment import environment
from loadtest.statistics import ratio_of_sums
from research.analysis.draft_logits import draft_logits, drafts_by_head
from research.analysis.load import PROMPTS_HELP, SpeculationSetup
from research.analysis.loading import add_pair_arguments, load_pair, names_of, read_prompts
from research.analysis.report import print_report, save_plots
from tests.oracles import bounds
from tests.oracles.bounds import Verification

_MOST_QUADRATURES = 100_000
# Number of draws if an acceptance has no closed form.
_DRAWS = 32
# Largest shape: chains, and tokens in a chain.
_LIMITS = (64, 32)
_EPSILONS = (0.05, 0.1, 0.2, 0.4)
# Rules whose expected length in any step follows from the laws along the target's own text, with
# their ratios.
_CLOSED_FORM: dict[str, Verification] = {"token": "token", "block": "block", "bv_race": "block"}


def _temperatures(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    add = parser.add_argument
    add("--prompts", default="dialogues", help=PROMPTS_HELP)
    add("--most-prompts", type=int, default=16, help="prompts used (default 16)")
    add("--prompt-length", type=int, default=256, help="last tokens of a prompt that are used (default 256)")
    add("--tokens", type=int, default=48, help="tokens of an answer (default 48)")
    add("--positions", type=int, default=128, help="positions whose distributions are analysed (default 128)")
    add("--shapes", help="shapes to measure instead of a grid, e.g. block:1x8,bv_race:4x4,traversal:2.2.1")
    add("--rules", help="comma-separated rules (default: all)")
    add(
        "--draft-methods",
        choices=["own", "all"],
        default="own",
        help="the rule's default draft method, or all it supports",
    )
    add("--num-drafts", type=integers, default=[1, 2, 4], help="chains (default 1,2,4)")
    add("--draft-length", type=integers, default=[4], help="tokens in a chain (default 4)")
    add("--temperature", type=_temperatures, default=[1.0], help="temperatures (default 1)")
    add("--concurrency", type=integers, default=[1, 4, 16, 64], help="requests at once (default 1,4,16,64)")
    add("--output", type=Path, default=Path("pair"), help="folder for pair.json and plots (default pair)")
    add("--fresh", action="store_true", help="discard the measurements of an interrupted run")


def shapes_of(options: argparse.Namespace, facts: EngineFacts) -> list[SpeculationSetup]:
    """Return the grid without unsupported combinations, or the named shapes; raise ConfigError."""
    if options.shapes:
        return [SpeculationSetup.parse(text) for text in options.shapes.split(",")]
    names = options.rules.split(",") if options.rules else served_rules(facts)
    if unknown := [name for name in names if name not in RULES]:
        raise ConfigError(f"--rules: unknown rule {unknown[0]!r}; choose from {', '.join(RULES)}")
    shapes = []
    for name in names:
        rule = RULES[name]
        methods = rule.draft_methods if options.draft_methods == "all" else rule.draft_methods[:1]
        for method in methods:
            most = 2 if method == "spechub" else rule.max_drafts or max(options.num_drafts)
            counts = sorted({min(count, most) for count in options.num_drafts})
            shapes += [
                SpeculationSetup(name, method, count, length) for count in counts for length in options.draft_length
            ]
    return shapes


class Results:
    """Measurements, saved after every cell; a run with the same settings resumes."""

    def __init__(self, file: Path, settings: dict[str, Any], fresh: bool) -> None:
        """Open the file; raise ConfigError if it has results of other settings."""
        self.file = file
        self.content: dict[str, Any] = {"settings": settings, "laws": {}, "runs": {}, "times": {}, "plain_s": {}}
        if file.exists() and not fresh:
            try:
                saved = json.loads(file.read_text(encoding="utf8"))
            except ValueError as error:
                raise ConfigError(f"{file}: cannot be read; choose another --output, or add --fresh") from error
            if saved.get("settings") != settings:
                raise ConfigError(f"{file}: holds results of other settings; choose another --output, or add --fresh")
            self.content = saved

    def missing(self, part: str, key: str) -> bool:
        """Whether the cell has not been measured."""
        return key not in self.content[part]

    def save(self, part: str, key: str, value: Any) -> None:
        """Add a cell; the file is replaced atomically."""
        self.content[part][key] = value
        self._write()

    def finish(self, cells: list[dict[str, Any]]) -> None:
        """Add the records that combine all cells, and the settings."""
        self.content["cells"] = cells
        self.content.setdefault("environment", environment())
        self._write()

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".part")
        partial.write_text(json.dumps(self.content, indent=1), encoding="utf8")
        partial.replace(self.file)


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table and the recommendation, write JSON and plots."""
    engine = load_pair(options, max(options.concurrency), *_LIMITS)
    target, draft = names_of(options)
    room = engine.facts.max_model_len - options.tokens - 1
    prompts = read_prompts(options.prompts, target, options.most_prompts, min(room, options.prompt_length))
    settings = {
        "target": Path(target).name,
        "draft": Path(draft).name,
        "device": engine.facts.device,
        "dtype": engine.facts.dtype,
        "threads": torch.get_num_threads(),
        "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest()[:16],
        **{name: getattr(options, name) for name in _GRID},
    }
    results = Results(options.output / "pair.json", settings, options.fresh)
    shapes = shapes_of(options, engine.facts)
    for shape in shapes:
        try:
            check_speculation(shape.speculation, engine.facts, engine.limits)
        except RequestError as error:
            raise ConfigError(f"{shape.key}: {error}") from error
    _measure_laws(engine, options, prompts, shapes, results)
    _measure_runs(engine, options, prompts, shapes, results)
    _measure_times(engine, options, shapes, results)
    report = list(combined(results.content, shapes))
    results.finish(report)
    print_report(report, results.content, options.concurrency)
    save_plots(report, results.content, options.output)
    return {"file": str(results.file), "cells": report}


_GRID = (
    *("shapes", "rules", "draft_methods", "num_drafts", "draft_length", "temperature", "tokens", "positions"),
    "concurrency",
)


def _measure_laws(
    engine: Engine,
    options: argparse.Namespace,
    prompts: list[tuple[int, ...]],
    shapes: list[SpeculationSetup],
    results: Results,
) -> None:
    """Sum over positions of the target's own text, for each temperature."""
    for temperature in options.temperature:
        if not results.missing("laws", str(temperature)):
            continue
        answers = answers_of(engine, prompts, Speculation(), temperature, options.tokens)
        pairs = [(p, a.tokens) for p, a in zip(prompts, answers, strict=True) if len(a.tokens) > 1]
        wanted = max(1, options.positions // len(pairs))
        optima: dict[str, list[float]] = {}
        accepted: dict[str, list[float]] = {}
        lengths: dict[str, list[float]] = {}
        rejected: list[float] = []
        front: list[list[tuple[float, float]]] = []
        for number, (prompt, tokens) in enumerate(tqdm(pairs, desc=f"laws, T = {temperature}", unit="answer")):
            target_NV, draft_NV = laws_along(engine, prompt, tokens, temperature)
            # After drafted tokens, a head drafts from its own states.
            if not drafts_by_head(engine):
                add_closed_forms(target_NV, draft_NV, tokens, shapes, lengths)
            step = max(1, len(tokens) // wanted)
            for position in range(number % step, len(tokens), step):
                p, q = (rows[position].double().cpu().numpy() for rows in (target_NV, draft_NV))
                p, q = p / p.sum(), q / q.sum()
                rejected.append(1 - theory.accept_token(p, q, 1))
                front.append(bounds.pareto_front(p, q, _EPSILONS))
                measure_position(p, q, len(rejected), shapes, optima, accepted)
        found = {
            "positions": len(rejected),
            "rejections_per_token": float(np.mean(rejected)),
            "alpha_star": means_of(optima),
            "acceptance": means_of(accepted),
            "expected_tokens_per_pass": {key: 1 + mean for key, mean in means_of(lengths).items()},
            "over_acceptance": {
                str(epsilon): {"rejection": float(rejection), "bias": float(bias)}
                for epsilon, (rejection, bias) in zip(_EPSILONS, np.mean(front, axis=0), strict=True)
            },
        }
        results.save("laws", str(temperature), found)


def means_of(found: dict[str, list[float]]) -> dict[str, float]:
    return {key: float(np.mean(values)) for key, values in found.items()}


def answers_of(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    speculation: Speculation,
    temperature: float,
    num_tokens: int,
    ignore_eos: bool = False,
) -> list[CheckedAnswer]:
    """Return the engine's answers, with the results of each of their steps."""
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling=Sampling(temperature=temperature, seed=number),
            limits=Limits(max_tokens=num_tokens, ignore_eos=ignore_eos),
            speculation=speculation,
        )
        for number, prompt in enumerate(prompts)
    ]
    return list(run_to_end(engine, requests).values())


def laws_along(
    engine: Engine, prompt: tuple[int, ...], tokens: list[int], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N, V] both laws at every position of an answer."""
    known = (*prompt, *tokens[:-1])
    blocks = tuple(range(-(-len(known) // engine.facts.block_size)))
    part = SequenceInput(known, 0, blocks, NO_NODES, slice(len(prompt) - 1, None))
    laws = []
    for logits_NV in (engine.target.forward([part]), draft_logits(engine, known, len(prompt) - 1)):
        parameters = DistributionParameters.of(
            [Sampling(temperature=temperature)] * len(logits_NV), logits_NV.device, TORCH
        )
        laws.append(distribution(logits_NV, parameters))
    return laws[0], laws[1]


def log_probs(probs_NV: torch.Tensor, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Return [N] the log probability of every token of an answer."""
    index_N1 = torch.tensor(tokens, device=probs_NV.device).unsqueeze(1)
    found: npt.NDArray[np.float64] = probs_NV.gather(1, index_N1).squeeze(1).double().log().cpu().numpy()
    return found


def add_closed_forms(
    target_NV: torch.Tensor,
    draft_NV: torch.Tensor,
    tokens: list[int],
    shapes: list[SpeculationSetup],
    lengths: dict[str, list[float]],
) -> None:
    """Add the expected accepted length of the block rules.

    From every position that a whole block follows.
    """
    log_p, log_q = (log_probs(rows, tokens) for rows in (target_NV, draft_NV))
    for shape in shapes:
        if shape.rule in _CLOSED_FORM and shape.method == "iid" and len(tokens) >= shape.draft_length:
            windows = [np.lib.stride_tricks.sliding_window_view(rows, shape.draft_length) for rows in (log_p, log_q)]
            kept_by = _CLOSED_FORM[shape.rule]
            found = bounds.expected_block_length(windows[0], windows[1], shape.num_drafts, kept_by)
            lengths.setdefault(shape.key, []).extend(found.tolist())


def measure_position(
    p: theory.Law,
    q: theory.Law,
    number: int,
    shapes: list[SpeculationSetup],
    optima: dict[str, list[float]],
    accepted: dict[str, list[float]],
) -> None:
    """Add the optimum of every draft method and the acceptance of every rule at one position."""
    for method, count in sorted({(shape.method, shape.first_drafts) for shape in shapes}):
        best = optimum(method, p, q, count, _MOST_QUADRATURES)
        if best is not None:
            optima.setdefault(f"{method}/{count}", []).append(best)
    for rule, method, count in sorted({(shape.rule, shape.method, shape.first_drafts) for shape in shapes}):
        times = 1 if RULES[rule].has_closed_form(method, count) else _DRAWS
        numbers = torch.from_numpy(uniform(0, number, Purpose.DRAFT, np.arange(count), np.arange(times)[:, None]))
        drawn = children(TORCH, method, torch.from_numpy(q).expand(times, -1), numbers).tolist()
        values = [acceptance(rule, method, p, q, drafted) for drafted in drawn]
        accepted.setdefault(f"{rule}/{method}/{count}", []).append(float(np.mean(values)))


def _measure_runs(
    engine: Engine,
    options: argparse.Namespace,
    prompts: list[tuple[int, ...]],
    shapes: list[SpeculationSetup],
    results: Results,
) -> None:
    """Measure tokens per pass of every shape and temperature with the engine."""
    cells = [(temperature, shape) for temperature in options.temperature for shape in shapes]
    for temperature, shape in tqdm(cells, desc="runs", unit="cell"):
        key = f"{temperature}/{shape.key}"
        if not results.missing("runs", key):
            continue
        answers = answers_of(engine, prompts, shape.speculation, temperature, options.tokens)
        answers = [answer for answer in answers if answer.tokens]
        tokens, steps = [len(a.tokens) for a in answers], [len(a.steps) for a in answers]
        per_pass = ratio_of_sums(tokens, steps)
        found = {"tokens_per_pass": per_pass.ratio, "low": per_pass.low, "high": per_pass.high}
        nodes = sum(step.num_nodes for a in answers for _, step in a.steps) / sum(steps)
        results.save("runs", key, {**found, "nodes_per_pass": nodes, "tokens": sum(tokens)})


def _measure_times(
    engine: Engine, options: argparse.Namespace, shapes: list[SpeculationSetup], results: Results
) -> None:
    """Measure the duration of a step of every shape, by the number of requests.

    Also of a plain step.
    """
    context = min(options.prompt_length + options.tokens // 2, engine.facts.max_model_len // 2)
    cells: list[tuple[int, SpeculationSetup | None]] = [(count, None) for count in options.concurrency]
    cells += [(count, shape) for count in options.concurrency for shape in shapes]
    for count, shape in tqdm(cells, desc="times", unit="cell"):
        part, key = ("plain_s", str(count)) if shape is None else ("times", f"{shape.key}/{count}")
        if results.missing(part, key):
            speculation = Speculation() if shape is None else shape.speculation
            results.save(part, key, usual_s(engine, synthetic_plan(engine, count, context, speculation)))


def combined(content: dict[str, Any], shapes: list[SpeculationSetup]) -> Iterator[dict[str, Any]]:
    """Yield one record per temperature and shape with all of its measurements."""
    for temperature, laws in content["laws"].items():
        for shape in shapes:
            run = content["runs"][f"{temperature}/{shape.key}"]
            best = laws["alpha_star"].get(f"{shape.method}/{shape.first_drafts}")
            own = laws["acceptance"][f"{shape.rule}/{shape.method}/{shape.first_drafts}"]
            yield {
                "temperature": float(temperature),
                "rule": shape.rule,
                "draft_method": shape.method,
                "size": shape.size,
                "num_drafts": shape.num_drafts,
                "draft_length": shape.draft_length,
                "alpha_star": best,
                "acceptance": own,
                "gap": None if best is None else best - own,
                **run,
                "expected_tokens_per_pass": laws["expected_tokens_per_pass"].get(shape.key),
                "speedup": {
                    count: run["tokens_per_pass"] * plain / content["times"][f"{shape.key}/{count}"]
                    for count, plain in content["plain_s"].items()
                },
            }

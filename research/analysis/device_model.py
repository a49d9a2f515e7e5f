"""`analyze plan`: estimated speed of a pair on a device that is not available, from counts,
bandwidth and rates.

A pass reads the weights and the K/V of its texts once, does two operations per weight and row, and
launches a number of kernels that each take a minimum time. A step consists of the passes of the
draft model, one of the target, launches for distributions and verdicts, two reads, and the time in
which the device waits for the host. The tokens per step follow from the acceptance of a single
draft (`tokens_per_step`). `--measured` shows the figures of a session on the device (`make
gpu-check`) next to the estimates. Not for: measurements; nothing is run here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from engine.cuda.recorded.menu import MOST_ROWS
from engine.errors import ConfigError
from loadtest.arguments import integers
from loadtest.results import table
from research.demo.bench_pair import SIZES

PRODUCTS, KERNELS = 4, 6
"""Counts of a layer: matrix products, and kernels between them (`tests/cuda/test_launches.py`
checks them).
"""
LEVEL_LAUNCHES, VERDICT_LAUNCHES, PLAIN_LAUNCHES = 5, 14, 8
"""Launches of a step outside its passes, if it is not recorded: per drafted level, per verdict over
drafts, per plain step.
"""
RECORDED_LAUNCHES = 10
"""Launches of a whole recorded step: its copies, its replays, and the moves of accepted K/V."""
_READ_SHARE, _COMPUTE_SHARE = 0.85, 0.75
"""Shares of a device's bandwidth and operations that matrix products reach."""
_KERNEL_S, _LAUNCH_S, _HOST_READ_S = 6.0e-6, 4.5e-6, 20e-6
"""Minimum times of a recorded kernel with the gap before it, of a launch from the host, and of a
read to the host.
"""
_IDLE_S, _IDLE_PER_ROW_S, _IDLE_PER_DRAFTING_S = 0.5e-3, 0.02e-3, 0.15e-3
"""Time in which the device waits for the host in a step, for each request, and for each that
drafts. These and `_KERNEL_S` fit the steps of an H100 (docs/results/gpu/part-1-h100.json) within 6
%; the last is an estimate.
"""
_BYTES = 2
"""Size of a bfloat16 number."""
_POOL_SHARE = 0.9
_SHAPES = ((1, 2), (1, 3), (1, 5), (2, 5), (4, 5), (8, 4))
_NUM_DRAWN = 20_000


@dataclass(frozen=True)
class Device:
    """Figures of a data sheet; dense bfloat16."""

    bytes_per_s: float
    operations_per_s: float
    memory_bytes: float


DEVICES = {
    "h200": Device(4.8e12, 989e12, 141e9),
    "h100": Device(3.35e12, 989e12, 80e9),
    "a100": Device(2.04e12, 312e12, 80e9),
    "l40s": Device(0.864e12, 362e12, 48e9),
    "rtx4090": Device(1.008e12, 165e12, 24e9),
}


@dataclass(frozen=True)
class DecoderShape:
    """Shape of a decoder like Llama."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Return the number of weights in the products of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def weights(self) -> int:
        """Return the number of weights that a pass reads: layers and output head."""
        return self.layers * self.layer_weights + self.hidden * self.vocabulary

    @property
    def token_bytes(self) -> int:
        """Return the size of K and V of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    def pass_s(self, device: Device, rows: int, texts_tokens: int) -> float:
        """Return the time of a recorded pass over `rows` tokens, after texts with this total
        length.
        """
        read_s = self.weights * _BYTES / (device.bytes_per_s * _READ_SHARE)
        computed_s = 2 * self.weights * rows / (device.operations_per_s * _COMPUTE_SHARE)
        attention_s = texts_tokens * self.token_bytes / (device.bytes_per_s * _READ_SHARE)
        # Reading the weights mostly hides the launch of a product.
        kernels_s = self.layers * (KERNELS + PRODUCTS / 2) * _KERNEL_S
        return max(read_s, computed_s) + attention_s + kernels_s


def model_of(name: str, vocabulary: int) -> DecoderShape:
    """Return a size of `bench_pair`, or the shape in the config.json of a Llama, Qwen or Mistral
    folder.
    """
    try:
        if name in SIZES:
            config = {**vars(SIZES[name]), "vocab_size": vocabulary}
        else:
            config = json.loads((Path(name) / "config.json").read_text(encoding="utf8"))
        heads = config["num_attention_heads"]
        return DecoderShape(
            config["hidden_size"],
            config["num_hidden_layers"],
            config["intermediate_size"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{name}: neither a size ({', '.join(SIZES)}) nor a folder with the config.json of a decoder of the Llama "
            f"kind ({type(error).__name__}: {error})"
        ) from error


@lru_cache(maxsize=64)
def tokens_per_step(num_drafts: int, length: int, acceptance: float, missed: float) -> float:
    """Return the mean tokens of a step of the race of `num_drafts` chains of `length` tokens.

    acceptance: of a single draft, sum min(p, q); missed: the part of the rest (1 - acceptance) on
    tokens that the draft model nearly excludes. The ratio q/p of the other tokens is modelled as
    lognormal, and positions as independent; the result is then sampled as in `docs/speculation.md`.
    The embedded pair, of acceptance 0.75, has 2.81, 3.45, 3.70 and
    4.09 tokens at 1x3, 1x5, 2x5 and 4x5; with 0.6 this model returns 2.83, 3.53, 3.86 and 4.06.
    """
    if not num_drafts:
        return 1.0
    never = missed * (1 - acceptance)
    chance = np.random.default_rng(1)
    normal_NL, is_missed_NL = chance.normal(size=(_NUM_DRAWN, length)), chance.random((_NUM_DRAWN, length)) < never

    def accepted(spread: float) -> float:
        """Return the acceptance of a single draft: the ratios that are not missed have the mean 1 /
        (1 - never).
        """
        middle = -(spread**2) / 2 - math.log(1 - never)
        return (1 - never) * float(norm.cdf(middle / spread) + norm.cdf(-middle / spread - spread) / (1 - never))

    spread = brentq(lambda s: accepted(s) - acceptance, 1e-6, 20.0)
    log_ratio_NL = spread * normal_NL - spread**2 / 2 - math.log(1 - never)
    log_ratio_NL[is_missed_NL] = -np.inf
    ceilings_NL = np.exp(np.minimum.accumulate(np.minimum(log_ratio_NL.cumsum(1), 0.0), 1))
    return float(1 + (1 - (1 - ceilings_NL) ** num_drafts).sum(1).mean())


@dataclass(frozen=True)
class ModelPair:
    """Two models on a device."""

    target: DecoderShape
    draft: DecoderShape
    device: Device
    acceptance: float
    missed: float = 0.6

    def step_s(self, num_drafts: int, length: int, requests: int, context: int) -> float:
        """Return the time of a step of these requests, each after a text of `context` tokens."""
        texts = requests * context
        rows = requests * (1 + num_drafts * length)
        is_recorded = rows <= MOST_ROWS
        idle_per_request_s = _IDLE_PER_DRAFTING_S if num_drafts else _IDLE_PER_ROW_S
        around_s = _IDLE_S + idle_per_request_s * requests + _HOST_READ_S
        if is_recorded:
            num_launches = RECORDED_LAUNCHES
        elif num_drafts:
            num_launches = LEVEL_LAUNCHES * length + VERDICT_LAUNCHES
            around_s += _HOST_READ_S  # equal nodes are merged
        else:
            num_launches = PLAIN_LAUNCHES
        levels_s = 0.0
        for level in range(length):
            level_rows = requests * (num_drafts if level else 2)
            levels_s += self.draft.pass_s(self.device, level_rows, texts)
        target_s = self.target.pass_s(self.device, rows, texts)
        return levels_s + target_s + around_s + num_launches * _LAUNCH_S

    def speedup(self, num_drafts: int, length: int, requests: int, context: int) -> float:
        """Return the speedup over plain decoding."""
        plain_s = self.step_s(0, 0, requests, context)
        tokens = tokens_per_step(num_drafts, length, self.acceptance, self.missed)
        return tokens * plain_s / self.step_s(num_drafts, length, requests, context)

    def roofline(self, requests: int, context: int) -> float:
        """Return the share of the device's bandwidth that plain decoding reaches."""
        needed = self.target.weights * _BYTES + requests * context * self.target.token_bytes
        return needed / self.device.bytes_per_s / self.step_s(0, 0, requests, context)

    def most_requests(self, length: int, num_nodes: int = 21) -> int:
        """Return the number of requests with texts of `length` tokens that fit on the device
        together with the weights.
        """
        weights = sum(m.weights + m.hidden * m.vocabulary for m in (self.target, self.draft)) * _BYTES
        # Recorded passes share logits of 256 MiB per model; a step's probabilities and sums take 16
        # bytes per token and node.
        room = self.device.memory_bytes - weights - 2 * (256 << 20)
        request_bytes = length * (self.target.token_bytes + self.draft.token_bytes) / _POOL_SHARE
        return max(0, math.floor(room / (request_bytes + 16 * num_nodes * self.target.vocabulary)))


def foretell(pair: ModelPair, requests: Sequence[int], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for every load: plain decoding, the speedup of every shape, and the best
    shape.
    """
    rows = []
    for count in requests:
        for context in contexts:
            gains = {f"{k}x{n}": pair.speedup(k, n, count, context) for k, n in _SHAPES}
            best = max(gains, key=gains.__getitem__)
            rows.append(
                {
                    "requests": count,
                    "context": context,
                    "plain_s": pair.step_s(0, 0, count, context),
                    "roofline": pair.roofline(count, context),
                    "speedup": gains,
                    "best": best if gains[best] > 1 else "off",
                }
            )
    return rows


def beside_measured(pair: ModelPair, file: Path) -> dict[str, dict[str, float]]:
    """Return step times of a session's first part next to the estimates, and their ratio."""
    try:
        found = json.loads(file.read_text(encoding="utf8"))["sections"]["engine"]["found"]["step_s"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}: no step times of a session on a device (gpu-part-1.json)") from error
    result = {}
    for name, measured_s in found.items():
        arm, _, context = name.partition(" after ")
        num_drafts, length = (0, 0) if arm == "off" else map(int, arm.partition(":")[2].split("x"))
        foretold_s = pair.step_s(num_drafts, length, 1, int(context))
        result[name] = {"measured_s": measured_s, "foretold_s": foretold_s, "ratio": measured_s / foretold_s}
    return result


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per number of requests and length of text, and the other
    estimates.
    """
    shapes = list(result["rows"][0]["speedup"])
    head = ["requests", "context", "plain, ms", "of the bandwidth", *shapes, "run"]
    rows = []
    for row in result["rows"]:
        cells = [str(row["requests"]), str(row["context"]), f"{1e3 * row['plain_s']:.1f}", f"{row['roofline']:.0%}"]
        cells += [f"{row['speedup'][shape]:.2f}x" for shape in shapes]
        rows.append([*cells, row["best"]])
    lines = [table(head, rows), f"requests that the device holds, by tokens of a text: {result['holds']}"]
    lines.append("These are estimates of a model, not measurements.")
    for name, one in result.get("measured", {}).items():
        lines.append(f"{name}: {1e3 * one['measured_s']:.2f} ms, {one['ratio']:.2f} of the model's")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="8b", help=f"{', '.join(SIZES)}, or a checkpoint's folder (default 8b)")
    parser.add_argument("--draft", default="0.6b", help="the same of the draft model (default 0.6b)")
    parser.add_argument("--device", default="h200", choices=DEVICES, help="default h200")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="tokens, of a named size (default 151936)")
    parser.add_argument("--acceptance", type=float, default=0.75, help="of a single draft, 0 to 1 (default 0.75)")
    parser.add_argument(
        "--missed",
        type=float,
        default=0.6,
        help="how much of what a single draft loses is tokens that the draft model all but excludes: several drafts "
        "do not help there (default 0.6, as of the embedded pair)",
    )
    parser.add_argument("--requests", type=integers, default=[1, 4, 16, 64], help="at once (default 1,4,16,64)")
    parser.add_argument("--contexts", type=integers, default=[300, 1000], help="tokens of a text (default 300,1000)")
    parser.add_argument("--measured", type=Path, help="gpu-part-1.json of a session: how far the model was off")


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Return the estimates."""
    if not 0 < options.acceptance < 1:
        raise ConfigError(f"--acceptance {options.acceptance}: must be between 0 and 1")
    if not 0 <= options.missed < 1:
        raise ConfigError(f"--missed {options.missed}: must be 0 or more, and below 1")
    target, draft = (model_of(name, options.vocabulary) for name in (options.target, options.draft))
    pair = ModelPair(target, draft, DEVICES[options.device], options.acceptance, options.missed)
    rows = foretell(pair, options.requests, options.contexts)
    holds = {str(length): pair.most_requests(length) for length in (1000, 4000, 32_000)}
    result = {"what": "a model's figures, not measured", "device": options.device, "rows": rows, "holds": holds}
    if options.measured:
        result["measured"] = beside_measured(pair, options.measured)
    return result

"""State for the live page: totals since the start and the running requests, without their text."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import asdict
from itertools import islice
from typing import Any

from engine.api import Outcome, StepResults, StepStats, Timing
from server.serving.statistics import GenerationState

_MOST_SHOWN = 32


class Live:
    """Totals that only grow, so that a page can compute rates, and the running generations."""

    def __init__(self) -> None:
        self._running: dict[Hashable, Callable[[], GenerationState]] = {}
        self._stats: StepStats | None = None
        self._num_tokens = 0
        self._num_passes = 0
        self._num_steps = 0
        self._num_emitted = 0
        self._num_resting = 0
        self.timing = Timing()

    def step(self, step: StepResults) -> None:
        """Take the state of the engine after a step."""
        self._stats = step.stats

    def take(self, outcome: Outcome, stats: StepStats) -> None:
        """Count the part of a step that an answer has taken, as `SpeculationCount` does."""
        num_tokens = len(outcome.token_ids)
        self._num_tokens += num_tokens
        self._num_passes += bool(num_tokens)
        self._num_resting += bool(num_tokens) and outcome.rests
        if outcome.draft_length:
            self._num_steps += 1
            self._num_emitted += num_tokens
        self.timing.add(stats, outcome)

    def begin(self, key: Hashable, read_state: Callable[[], GenerationState]) -> None:
        """Show a generation from now on."""
        self._running[key] = read_state

    def end(self, key: Hashable) -> None:
        """Show a generation no longer."""
        self._running.pop(key, None)

    def state(self, num_blocks: int, num_held: int | None = None) -> dict[str, Any]:
        """Return the state that a page polls.

        num_blocks: of the K/V cache, 0 while the model loads. num_held: requests that wait for the
        engine to wake; None while it is awake.
        """
        num_running = num_waiting = num_blocks_used = 0
        if num_held is not None:
            num_waiting = num_held
        elif self._stats is not None:
            num_running = self._stats.num_running
            num_waiting = self._stats.num_waiting
            num_blocks_used = self._stats.num_blocks_used
        shown = islice(self._running.values(), _MOST_SHOWN)
        return {
            "time_s": time.monotonic(),
            "num_running": num_running,
            "num_waiting": num_waiting,
            "kv_cache_usage": num_blocks_used / num_blocks if num_blocks else 0.0,
            "totals": {
                "tokens": self._num_tokens,
                "passes": self._num_passes,
                "spec_steps": self._num_steps,
                "spec_tokens": self._num_emitted,
                "resting": self._num_resting,
            },
            "timing": asdict(self.timing),
            "requests": [_shown(read_state()) for read_state in shown],
            "num_requests": len(self._running),
        }


def _shown(state: GenerationState) -> dict[str, Any]:
    counted = state.speculation
    clock = state.clock
    return {
        "num_prompt_tokens": state.num_prompt_tokens,
        "num_choices": len(state.reasons),
        "num_tokens": state.num_answer_tokens,
        "age_s": time.perf_counter() - clock.started,
        "ttft_s": clock.ttft_s,
        "rule": counted.rule,
        "tokens_per_pass": counted.tokens_per_pass,
        "acceptance_length": counted.acceptance_length,
        "speedup": counted.speedup,
    }

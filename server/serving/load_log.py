"""A log line about load and speculation every few seconds while answers are generated.

Not for: single requests (`observer.py`), or metrics (`metrics.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.api import Timing, log_fields
from server.serving.live import Live

log = logging.getLogger("polydraft")

INTERVAL_S = 10.0
"""Time between two lines, as in vLLM."""


class LoadLog:
    """Rates between two reads of the live totals."""

    def __init__(self, live: Live, num_blocks: Callable[[], int]) -> None:
        """num_blocks: blocks of the K/V cache; 0 while the model loads."""
        self._live = live
        self._num_blocks = num_blocks
        self._before = live.state(0)

    def read(self) -> dict[str, Any] | None:
        """Return facts since the last call, or None if no answer received a token.

        tokens_per_second: of all answers; tokens_per_pass: of all target passes; tokens_per_step:
        of speculative steps alone, which is the acceptance length, None if nothing was drafted;
        resting: share of passes without drafts because plain decoding is as fast; speedup: see
        `Timing`, None if nothing was timed.
        """
        before = self._before
        now = self._live.state(self._num_blocks())
        self._before = now
        grown = {name: total - before["totals"][name] for name, total in now["totals"].items()}
        if not grown["tokens"]:
            return None
        duration_s = now["time_s"] - before["time_s"]
        tokens_per_step = None
        if grown["spec_steps"]:
            tokens_per_step = grown["spec_tokens"] / grown["spec_steps"]
        timing = Timing(**now["timing"]) - Timing(**before["timing"])
        return {
            "running": now["num_running"],
            "waiting": now["num_waiting"],
            "tokens_per_second": grown["tokens"] / duration_s,
            "tokens_per_pass": grown["tokens"] / grown["passes"],
            "tokens_per_step": tokens_per_step,
            "resting": grown["resting"] / grown["passes"],
            "speedup": timing.speedup,
            "kv_cache_usage": now["kv_cache_usage"],
        }

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Log a line after every interval with tokens, until cancelled or an error is logged."""
        try:
            while True:
                await asyncio.sleep(interval_s)
                if (facts := self.read()) is not None:
                    log.info("load", extra=log_fields(**facts))
        except Exception:  # nothing else waits for this task
            log.exception("load is no longer logged")

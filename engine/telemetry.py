"""What each step took, and what plain decoding would have taken: everything that is measured of a running engine.

The engine says when a step begins and ends and which part of it runs; nothing here changes what a step does. The model
of step times learns from every step; answers and dashboards get the figures of a step.
"""

from __future__ import annotations

import torch

from engine.metrics import Overhead, StepStats, Stopwatch
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_time import StepTimes, Work


class CudaClock:
    """Marks are events of the current stream."""

    def mark(self) -> torch.cuda.Event:
        """The moment at which the stream has done all it was given so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Time between two marks; None where the stream has not come to the second one yet."""
        return float(begin.elapsed_time(end)) / 1e3 if end.query() else None  # type: ignore[no-untyped-call]

    def wait(self, mark: torch.cuda.Event) -> None:
        """Until the stream has come to a mark."""
        mark.synchronize()


class Telemetry:
    """Measures the steps of one engine."""

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self.stopwatch = Stopwatch(CudaClock() if device.type == "cuda" else None)
        self.phase = self.stopwatch.phase
        self.times: StepTimes | None = None
        """How long steps take; None where none were measured."""
        self.num_steps = 0
        self._scheduler = scheduler
        self._overhead = Overhead()
        self._controlled_s = 0.0

    def begin_step(self) -> None:
        """A step begins now."""
        self.stopwatch.start()

    def end_step(self, num_read: int) -> StepStats:
        """The step that began last has ended; num_read: requests whose grammars are being read."""
        wall_s, phases_s = self.stopwatch.stop(waits=not self._scheduler.last_plan.sampling_rows)
        self.num_steps += 1
        # Planning and messages cost plain decoding the same; the controller does not run then.
        around_s = self._overhead.add(self.stopwatch, self._scheduler.has_work, self._controlling_s())
        plain_s, prompt_s = self._learn(phases_s["draft"], self.stopwatch.parts_s - phases_s["draft"], around_s.usual)
        return self.stats(num_read, wall_s + around_s.before, plain_s, prompt_s, phases_s)

    def pause(self) -> None:
        """The next step does not follow the last one at once: it does not pay for the time between them."""
        self._overhead.pause()

    def stats(
        self,
        num_read: int,
        wall_s: float = 0.0,
        plain_s: float | None = None,
        prompt_s: float = 0.0,
        phases_s: dict[str, float] | None = None,
    ) -> StepStats:
        """The state now, with the times of the step that led to it; without times where no step was made."""
        scheduler = self._scheduler
        return StepStats(
            wall_s=wall_s,
            plain_s=plain_s,
            prompt_s=prompt_s,
            phases_s=phases_s or {},
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + num_read,
            num_blocks_used=scheduler.blocks.num_used,
            num_preemptions=scheduler.num_preemptions,
            num_cache_queries=scheduler.num_cache_queries,
            num_cache_hits=scheduler.num_cache_hits,
            num_steps=self.num_steps,
        )

    def _controlling_s(self) -> float:
        """How long the controller has run since the last call."""
        controller = self._scheduler.controller
        before_s, self._controlled_s = self._controlled_s, controller.spent_s if controller is not None else 0.0
        return max(0.0, self._controlled_s - before_s)

    def _learn(self, draft_s: float, rest_s: float, around_s: float) -> tuple[float | None, float]:
        """Duration of a plain step over the rows of the last plan that emit, and of what that plan's prompts took;
        (None, 0) where no times were measured or nothing was emitted.

        draft_s, rest_s: what the parts of the step took; around_s: usual time between the parts of two steps.
        """
        times, plan = self.times, self._scheduler.last_plan
        if times is None or not plan.sampling_rows:
            return None, 0.0
        work = Work.of(plan)
        plain_s = times.rest_s(work.plain) + around_s
        # By chance below 0: over many steps it is the sum that counts.
        prompt_s = rest_s - times.rest_s(work.without_prompts) if work.prompt else 0.0
        times.host_s = around_s
        times.observe(work, draft_s, rest_s, self.stopwatch.started)
        return plain_s, prompt_s

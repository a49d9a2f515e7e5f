"""What each step took, and what plain decoding would have taken: everything that is measured of a running engine.

The engine says when a step begins and ends and which part of it runs; nothing here changes what a step does. The
controller hears how long steps took, answers and dashboards get the figures of a step.
"""

from __future__ import annotations

from engine.metrics import Overhead, StepStats, Stopwatch
from engine.pace import Pace, Step
from engine.scheduling.controller import added
from engine.scheduling.scheduler import Scheduler


class Telemetry:
    """Measures the steps of one engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.stopwatch = Stopwatch()
        self.phase = self.stopwatch.phase
        self.pace: Pace | None = None
        """How long plain decoding takes; None where it was not measured."""
        self.num_steps = 0
        self._scheduler = scheduler
        self._overhead = Overhead()
        self._controlled_s = 0.0

    def begin_step(self) -> None:
        """A step begins now."""
        self.stopwatch.start()

    def end_step(self, num_read: int) -> StepStats:
        """The step that began last has ended; num_read: requests whose grammars are being read."""
        wall_s, phases_s = self.stopwatch.stop()
        self.num_steps += 1
        # Planning and messages cost plain decoding the same; the controller does not run then.
        around_s = self._overhead.add(self.stopwatch, self._scheduler.has_work, self._controlling_s())
        self._tell_controller(wall_s)
        plain_s, prompt_s = self._compare(around_s.usual, self.stopwatch.parts_s - phases_s["draft"])
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

    def _tell_controller(self, wall_s: float) -> None:
        """Tell the controller how long a step took that only decoded: no prompts, copied tokens, catching up."""
        controller, plan = self._scheduler.controller, self._scheduler.last_plan
        if (
            controller is None
            or not plan.rows
            or plan.has_prefill
            or plan.is_behind
            or any(row.copies for row in plan.rows)
        ):
            return
        drafting = [row.widths for row in plan.rows if row.branching]
        num_text = sum(row.end for row in plan.rows)
        controller.note_time(len(plan.rows), len(drafting), added(drafting), wall_s, num_text)

    def _compare(self, around_s: float, seconds: float) -> tuple[float | None, float]:
        """Duration of a plain step over the rows of the last plan that emit, and of what that plan's prompts took;
        (None, 0) where that is not known.

        around_s: usual time between the parts of two steps; seconds: of the last step's parts, without drafting.
        """
        plan = self._scheduler.last_plan
        rows = plan.sampling_rows
        if self.pace is None or not rows:
            return None, 0.0
        beside = self.pace.add(
            Step(
                started=self.stopwatch.started,
                seconds=seconds,
                num_rows=len(rows),
                context=sum(row.end for row in rows) / len(rows),
                num_nodes=sum(row.num_nodes for row in rows),
                has_prompts=plan.has_prefill,
                is_behind=plan.is_behind,
            )
        )
        return (beside.plain_s + around_s, beside.prompt_s) if beside is not None else (None, 0.0)

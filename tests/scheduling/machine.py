"""A simulated machine: a formula gives the duration of its steps, and its clock is their sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from engine.control.controller import Controller
from engine.control.step_time import Prices, StepTimes
from engine.control.step_work import PLAIN, Shape, StepWork
from engine.fanout import Fanout, chains, level_widths
from engine.request import Request, Speculation
from engine.scheduling.outcome import Timing
from tests.server.step_results import outcome, stats


@dataclass
class Machine:
    """Seconds of a step's parts; a plain step of one request takes a hundredth of a second."""

    base_s: float = 0.009
    row_s: float = 0.001
    node_s: float = 0.001
    pass_s: float = 0.0005
    draw_s: float = 0.0
    read_s: float = 0.0
    prompt_s: float = 0.0003
    launch_s: float = 0.0
    """Host time of the passes of a drafting step that also reads prompts."""
    times: float = 1.0
    """Factor of all durations."""
    drafting_times: float = 1.0
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's duration."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self._random = np.random.default_rng(5)

    def parts_s(self, work: StepWork) -> tuple[float, float]:
        """(seconds of drafting, of the rest)."""
        factor = self.times * (self.drafting_times if work.nodes else 1.0)
        if self.noise:
            factor *= float(self._random.lognormal(0.0, self.noise))
        draft_s = self.read_s * work.read
        if work.drafts:
            num_drawn = work.rows * (1 + sum(level_widths(work.drafts)[:-1])) - len(work.drafts)
            draft_s += self.pass_s * len(work.drafts) + self.draw_s * num_drawn
        rest_s = self.base_s + self.row_s * work.rows + self.node_s * work.nodes + self.prompt_s * work.prompt
        if work.drafts and work.prompt:
            rest_s += self.launch_s
        return factor * draft_s, factor * rest_s

    def step_s(self, work: StepWork) -> float:
        """Seconds of a whole step."""
        return sum(self.parts_s(work))

    def prices(self) -> Prices:
        """Return the prices that an engine measures at its start."""
        return Prices(self.base_s + self.row_s, self.row_s, self.pass_s, self.draw_s, self.prompt_s, self.read_s)


H100 = Machine(base_s=0.0075, row_s=8e-5, node_s=8e-5, pass_s=0.0016, prompt_s=3e-5, launch_s=0.02)
"""Steps as in docs/results/gpu/part-1-h100.json.

7.6 ms plain, 15.9 with one chain of five, 17.1 with four chains, 28 with a prompt.
"""


@dataclass
class Server:
    """Requests on a machine, and the controller that chooses what they draft."""

    machine: Machine
    acceptance: float = 0.75
    """Probability that a chain's token is accepted; of several chains one more seldom misses."""
    num_requests: int = 1
    num_prompt: int = 0
    """Tokens of each prompt; 0: requests never end."""
    num_answer: int = 48
    fixed: Shape | None = None
    """Shape of all steps; None: the controller chooses."""
    num_tokens: int = 0
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.controller = Controller(StepTimes(self.machine.prices()), 16)
        self._random = np.random.default_rng(7)
        self._lengths = np.random.default_rng(11)
        self._left: list[float] = []

    def run(self, num_steps: int) -> list[Fanout]:
        """Return what is drafted in this many steps."""
        return [self.step().drafts for _ in range(num_steps)]

    def step(self) -> StepWork:
        """One step."""
        num_new = max(0, self.num_requests - len(self._left))
        self._left += [self.num_answer * self._lengths.uniform(0.5, 1.5) for _ in range(num_new)]
        prompt = num_new * self.num_prompt
        shape = self._shape(prompt > 0)
        fanout = chains(*shape)
        nodes = self.num_requests * sum(level_widths(fanout))
        reads = shape != PLAIN or (self.fixed is None and self.controller.reads)
        work = StepWork(rows=self.num_requests, nodes=nodes, prompt=prompt, read=prompt if reads else 0, drafts=fanout)
        draft_s, rest_s = self.machine.parts_s(work)
        self.machine.now += draft_s + rest_s
        plain = self.controller.times.observe(work, draft_s + rest_s, draft_s, self.machine.now)
        timed = stats(draft_s + rest_s, plain.plain_s, draft_s, plain.prompt_s)
        for number in range(self.num_requests):
            count = self._emit(shape)
            self.timing.add(timed, outcome(count, count - 1))
            if self.num_prompt:
                self._left[number] -= count
        left = [left for left in self._left[: self.num_requests] if left > 0]
        for _ in range(len(self._left) - len(left) if self.fixed is None else 0):
            self.controller.acceptance.note_answer(self.num_prompt, self.num_answer)
        self._left = left
        return work

    def _shape(self, with_prompts: bool) -> Shape:
        if self.fixed is not None:
            return self.fixed
        self.controller.choose([ASKING] * self.num_requests, (), with_prompts)
        fanout = self.controller.fanout(ASKING)
        return (fanout[0], len(fanout)) if fanout else PLAIN

    def _emit(self, shape: Shape) -> int:
        """Each drafted token is accepted by chance, given those before it."""
        num_drafts, length = shape
        chance = 1 - (1 - self.acceptance) ** (num_drafts**0.25) if num_drafts else 0.0
        rejected = np.flatnonzero(self._random.random(length) >= chance)
        count = int(rejected[0]) if len(rejected) else length
        if length and self.fixed is None:
            self.controller.observe(num_drafts, length, count)
        self.num_tokens += count + 1
        return count + 1

    def rate(self, num_steps: int) -> float:
        """Return tokens per second over this many steps."""
        began, before = self.machine.now, self.num_tokens
        self.run(num_steps)
        return (self.num_tokens - before) / (self.machine.now - began)

    def rate_of_answers(self, num_tokens: int) -> float:
        """Return tokens per second while about this many are emitted."""
        began, before = self.machine.now, self.num_tokens
        while self.num_tokens < before + num_tokens:
            self.step()
        return (self.num_tokens - before) / (self.machine.now - began)


def asking(num_drafts: int = 4, draft_length: int = 5) -> SimpleNamespace:
    """Return a request that leaves its shape to the controller."""
    speculation = Speculation(num_drafts=num_drafts, draft_length=draft_length, adaptive=True)
    return SimpleNamespace(request=Request(request_id="", prompt_token_ids=(1,), speculation=speculation))


ASKING = asking()

"""A simulated machine: a formula gives the duration of its steps, and its clock is their sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from engine.control.controller import Controller
from engine.control.step_time import Point, StepTimes
from engine.control.step_work import PLAIN, Shape, StepWork
from engine.request import Limits, Request, Speculation
from engine.scheduling.sequence import Sequence


@dataclass
class Machine:
    """Seconds of a step's parts; a plain step of one request takes a hundredth of a second."""

    row_s: float = 0.001
    node_s: float = 0.001
    pass_s: float = 0.0005
    read_s: float = 0.0
    prompt_s: float = 0.0003
    text_s: float = 0.0
    free_tokens: int = 0
    """If set, only tokens beyond this number take time in the target's pass: `node_s` each, of any
    type.
    """
    times: float = 1.0
    """Factor of all durations."""
    drafting_times: float = 1.0
    shape_times: Mapping[Shape, float] = field(default_factory=dict)
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's duration."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self._random = np.random.default_rng(5)

    def parts_s(self, work: StepWork) -> tuple[float, float]:
        """(seconds of drafting, of the rest)."""
        factor = self.times * self.shape_times.get(work.shape, 1.0) * (self.drafting_times if work.nodes else 1.0)
        if self.noise:
            factor *= float(self._random.lognormal(0.0, self.noise))
        draft_s = self.pass_s * len(work.passes) + self.read_s * work.read
        rest_s = 0.009 + self.text_s * work.text + self.prompt_s * work.prompt
        if self.free_tokens:
            rest_s += self.node_s * max(0, work.rows + work.nodes + work.prompt - self.free_tokens)
        else:
            rest_s += self.row_s * work.rows + self.node_s * work.nodes
        return factor * draft_s, factor * rest_s

    def step_s(self, work: StepWork) -> float:
        """Seconds of a whole step."""
        return sum(self.parts_s(work))

    def points(self, most_rows: int = 64) -> list[Point]:
        """Return the measurements of its calibration."""
        works = [StepWork(rows=2**n, text=2**n * text) for n in range(7) for text in (1, 200) if 2**n <= most_rows]
        works += [chains(rows, shape) for rows in (1, 4, 16) for shape in ((1, 1), (1, 3), (1, 5), (4, 3), (4, 5))]
        works += [replace(chains(1, (1, 3)), read=64), StepWork(rows=1, text=1, prompt=64)]
        return [(work, *self.parts_s(work)) for work in works if work.rows <= most_rows]


def chains(rows: int, shape: Shape, text: int = 1) -> StepWork:
    """A step in which all requests draft the same shape."""
    num_drafts, length = shape
    passes = (rows, *(rows * num_drafts,) * (length - 1))
    nodes = rows * num_drafts * length
    return StepWork(rows=rows, text=rows * text, nodes=nodes, num_drafting=rows, passes=passes, shape=shape)


def sequence(number: int, num_drafts: int = 4, draft_length: int = 5, max_tokens: int = 10**6) -> Sequence:
    speculation = Speculation(num_drafts=num_drafts, draft_length=draft_length, adaptive=True)
    request = Request(
        request_id=str(number), prompt_token_ids=(1,), limits=Limits(max_tokens=max_tokens), speculation=speculation
    )
    return Sequence(number, request, 0.0)


class Server:
    """Requests on a machine, and the controller that chooses what they draft."""

    def __init__(self, machine: Machine, accepted: Mapping[int, float], controller: Controller | None = None) -> None:
        """accepted: by request, how often a drafted token is accepted, given those before it."""
        self.machine = machine
        self.controller = controller or Controller(StepTimes(machine.points()), 16)
        self.sequences = [sequence(number) for number in accepted]
        self.accepted = accepted
        self.num_tokens = 0
        self._random = np.random.default_rng(7)

    def run(self, num_steps: int) -> list[Shape]:
        """Return the shapes of this many steps; plain if no request drafts."""
        return [self.step().shape for _ in range(num_steps)]

    def step(self) -> StepWork:
        """One step."""
        self.controller.choose(self.sequences)
        fanouts = {request.sequence_id: self.controller.fanout(request) for request in self.sequences}
        drafting = [fanout for fanout in fanouts.values() if fanout]
        work = StepWork(rows=len(self.sequences), text=sum(len(request.tokens) for request in self.sequences))
        if drafting:
            shape = drafting[0][0], len(drafting[0])
            work = replace(chains(len(drafting), shape), rows=work.rows, text=work.text)
        draft_s, rest_s = self.machine.parts_s(work)
        self.controller.times.observe(work, draft_s, rest_s, self.machine.now)
        self.machine.now += draft_s + rest_s
        for request in self.sequences:
            self._emit(request, fanouts[request.sequence_id])
        return work

    def _emit(self, request: Sequence, fanout: tuple[int, ...]) -> None:
        """Each drafted token is accepted by chance, given those before it."""
        rejected = np.flatnonzero(self._random.random(len(fanout)) >= self.accepted[request.sequence_id])
        count = int(rejected[0]) if len(rejected) else len(fanout)
        if fanout:
            self.controller.observe(request, fanout[0], len(fanout), count)
        self.num_tokens += count + 1

    def rate(self, num_steps: int) -> float:
        """Return tokens per second over this many steps."""
        began, before = self.machine.now, self.num_tokens
        self.run(num_steps)
        return (self.num_tokens - before) / (self.machine.now - began)


def rate_of(shape: Shape, machine: Machine, accepted: Mapping[int, float]) -> float:
    """Tokens a second that requests with these acceptances have in the mean where all draft one
    shape.
    """
    work = chains(len(accepted), shape) if shape != PLAIN else StepWork(rows=len(accepted), text=len(accepted))
    num_tokens = sum(one**depth for one in accepted.values() for depth in range(shape[1] + 1))
    return num_tokens / machine.step_s(work)

"""A grammar that allows nothing any more: the step that drew a token after it ends the request, which is not sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.errors import DEAD_END, SERVER_FAULTS, RequestError
from engine.request import GRAMMAR, Limits, Request, Sampling, Speculation
from engine.sampling.following import Following
from tests.engine import tiny

VOCABULARY = 32


class OneToken:
    """A grammar that allows token 7 for the first tokens of an answer, and then nothing, not even an end."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.failure: RequestError | None = None
        self.num_emitted = 0

    def start(self, grammar: str) -> OneToken:
        return OneToken(self.most)

    def is_ready(self) -> bool:
        return True

    def seconds_read(self) -> float:
        return 0.0

    def check_answer(self, emitted: Sequence[int]) -> None:
        self.num_emitted += len(emitted)
        if self.num_emitted > self.most:
            self.failure = RequestError("nothing is allowed", GRAMMAR, DEAD_END)

    def masks(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> Callable[[], list[np.ndarray]]:
        def mask(depth: int) -> np.ndarray:
            allowed = np.zeros(VOCABULARY, dtype=bool)
            allowed[7] = depth < self.most
            return allowed

        return lambda: [mask(len(answer) + len(path)) for path in paths]

    def end(self) -> None:
        pass


@pytest.mark.parametrize("most", [0, 1, 3, 6])
@pytest.mark.parametrize("drafts", [False, True])
def test_no_token_after_a_dead_end_is_sent(most: int, drafts: bool) -> None:
    target = replace(tiny.llama(1, VOCABULARY), eos_token_ids=frozenset({VOCABULARY - 1}))
    draft = replace(tiny.perturbed(target, 2, 0.05), eos_token_ids=target.eos_token_ids) if drafts else None
    engine = tiny.build(target, draft)
    engine.following = Following(OneToken(most), 4)  # type: ignore[arg-type]
    speculation = Speculation(num_drafts=2, draft_length=2) if drafts else Speculation()
    engine.submit(
        Request(
            request_id="a",
            prompt_token_ids=(3, 4, 5),
            sampling=Sampling(grammar="any", seed=1),
            limits=Limits(max_tokens=20),
            speculation=speculation,
        )
    )
    sent: list[int] = []
    failed: list[tuple[str, RequestError]] = []
    engine.queue_followed()
    for _ in range(30):
        if not engine.scheduler.has_work:
            break
        result = engine.run_step()
        sent += [token for outcome in result.outcomes for token in outcome.token_ids]
        failed += result.failed
    assert [(name, error.code) for name, error in failed] == [("a", DEAD_END)]
    assert failed[0][1].code in SERVER_FAULTS
    assert set(sent) <= {7}
    assert len(sent) <= most
    if not drafts:
        assert len(sent) == most
    engine.scheduler.check_invariants()

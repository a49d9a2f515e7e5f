"""The message of a call's requests returns what was sent, and what is shared."""

from __future__ import annotations

import msgspec

from engine.api import Limits, Request, Sampling, Speculation, Submit, decode_to_engine, encode
from engine.fixed_edits import SharedEdits
from tests.engine import tiny

SAMPLING = Sampling(
    temperature=0.7,
    logit_bias=((3, 1.5), (4, -100.0)),
    allowed_token_ids=tuple(range(90)),
    bad_words=((5,), (6, 7)),
    seed=11,
)


def calls_requests() -> list[Request]:
    """Two prompts with three choices each, as a server makes them."""
    first = Request(
        request_id="0",
        prompt_token_ids=(),
        sampling=SAMPLING,
        limits=Limits(max_tokens=7, min_tokens=2, stop_token_ids=(1, 2)),
        speculation=Speculation(num_drafts=2, draft_length=3),
        num_logprobs=1,
        priority=3,
        prediction=(8, 9),
        cache_salt="salt",
        reports_drafts=True,
    )
    return [
        msgspec.structs.replace(
            first,
            request_id=str(3 * number + choice),
            prompt_token_ids=prompt,
            sampling=msgspec.structs.replace(SAMPLING, seed=100 * number + choice),
            limits=msgspec.structs.replace(first.limits, max_tokens=7 + number),
            num_prompt_logprobs=None if choice else 2,
        )
        for number, prompt in enumerate([(1, 2, 3), (4, 5)])
        for choice in range(3)
    ]


def test_submit_message_round_trips() -> None:
    requests = calls_requests()
    message = decode_to_engine(encode(Submit.of(requests)))
    assert isinstance(message, Submit)
    assert message.requests() == requests


def test_shared_values_are_sent_once() -> None:
    """Every further choice adds little, and all requests hold the same lists."""
    requests = calls_requests()
    one, six = len(encode(Submit.of(requests[:1]))), len(encode(Submit.of(requests)))
    assert six - one < 300 < one
    message = decode_to_engine(encode(Submit.of(requests)))
    assert isinstance(message, Submit)
    edits = SharedEdits()
    made = [edits.of(request.sampling, (1, 2)) for request in message.requests()]
    assert all(one is made[0] for one in made)
    other = msgspec.structs.replace(SAMPLING, bad_words=((5,), (6, 8)))
    mine, others = edits.of(SAMPLING, ()), edits.of(other, ())
    assert mine.barred_after((6,), ()) == [7]
    assert others.barred_after((6,), ()) == [8]


def test_an_engine_makes_the_edits_of_a_call_once() -> None:
    engine = tiny.build(tiny.llama(1, 100), None)
    engine.submit(*(msgspec.structs.replace(one, speculation=Speculation(), prediction=()) for one in calls_requests()))
    rows = engine.scheduler.plan().rows
    made = {id(row.text.fixed) for row in rows if row.text is not None}
    assert len(rows) == 6
    assert len(made) == 1

"""Edits of logits at their edges; their law is tested on the running engine (tests/engine/test_output_law.py)."""

from __future__ import annotations

import torch

from engine.plan import Text
from engine.request import Sampling
from engine.sampling.edits import Place, edit
from engine.sampling.law import LawParameters, law


def test_extreme_values_leave_a_law() -> None:
    """Huge logits, the smallest penalty, full bias, everything banned: never not a number."""
    logits = torch.randn(3, 50) * 1e37
    sampling = Sampling(repetition_penalty=0.01, logit_bias=((3, 100.0), (4, -100.0)), frequency_penalty=-2)
    nothing = Sampling(allowed_token_ids=(7,), bad_words=((7,),))
    text = Text((3, 4, 5, 3), 2, min_tokens=9, ends=(6, -1, 2**62))
    edited = edit(logits, [Place(sampling, text), Place(nothing, text, (1, 2)), None])
    rows = law(edited, LawParameters.of([sampling, nothing, Sampling()], logits.device))
    assert torch.isfinite(rows).all()
    torch.testing.assert_close(rows.sum(1), torch.ones(3))
    assert rows[0, 6] == 0
    assert torch.equal(edited[2], logits[2])

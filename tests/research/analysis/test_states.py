"""`polydraft analyze states` measures trees in both forms, and tokens."""

from __future__ import annotations

import json

import pytest

from research.analysis import states
from research.analysis.__main__ import main
from research.analysis.passes import new_model, runner_of, tree_of
from tests.models import families


def test_second_form_stores_a_state_of_each_node_and_has_the_same_logits() -> None:
    model = new_model(families.config("qwen3_5_text"), "tiny")
    runner = runner_of(model, 48, sizes=states._SIZES)
    *_, (_, stored) = runner.storage.states.calls
    logits = {}
    for form, num_stored in ((states.INPUTS, 1), (states.STATES, 1 + 12)):
        stored.fill_(1.0)
        logits[form] = states.forward(runner, 20, tree_of(4, 3), form)
        assert int((stored != 1.0).flatten(1).any(1).sum()) == num_stored
    assert logits[states.INPUTS].equal(logits[states.STATES])


@pytest.mark.slow
def test_every_tree_is_measured_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["states", "--contexts", "100,300", "--repeats", "2", "--threads", "1"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    # 3 layers with a convolution of 8192 channels, 16 heads of k, and 32 heads of v and two numbers
    inputs, state = 8192 + 16 * 128 + 32 * 130, 3 * 8192 + 32 * 128 * 128
    assert result["node_bytes"] == {states.INPUTS: 3 * 4 * inputs, states.STATES: 3 * 4 * state}
    assert [tree["nodes"] for tree in result["trees"]] == [12, 64]
    timed = [*result["tokens"].values(), *(seconds for tree in result["trees"] for seconds in tree["seconds"].values())]
    assert {len(seconds) for seconds in timed} == {2}
    assert states.markdown(result) in printed.err

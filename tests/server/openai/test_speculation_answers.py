"""Speculation statistics of answers, and speculation fields of requests."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.server.completions import CALL, OFF, answer_of, check_counts, refusal_of
from tests.server.daemon_process import MODEL
from tests.server.event_stream import open_stream
from tests.server.good_bodies import CHAT, COMPLETIONS


def test_a_whole_answer_counts_its_speculation(http: httpx.Client) -> None:
    """`metrics` has times and a consistent `speculative_decoding`."""
    metrics = answer_of(http)["metrics"]
    counted = metrics["speculative_decoding"]
    check_counts(counted, 40)
    # A seed keeps one short chain.
    assert (counted["num_spec_tokens"], counted["rule"]) == (4, "bv_race")
    assert counted["num_accepted_draft_tokens"] > 0, "this pair of models never agrees; the test proves little"
    assert counted["drafters"]["model"]["num_drafts"] == counted["num_spec_steps"]
    times = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
    assert all(metrics[name] >= 0 for name in times)
    assert metrics["time_to_first_token_ms"] <= metrics["generation_time_ms"]


def test_an_answer_cut_by_a_stop_string_counts_no_more_than_it_has(http: httpx.Client) -> None:
    """Tokens behind the stop string are in no count."""
    text = answer_of(http)["choices"][0]["text"]
    answer = answer_of(http, stop=text[50:60])
    check_counts(answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens"])


def test_an_uncalibrated_daemon_reports_no_speedup(http: httpx.Client) -> None:
    """Without a measurement of plain decoding, `speedup` is null and its header is left out."""
    response = http.post(COMPLETIONS, json=CALL)
    counted = response.json()["metrics"]["speculative_decoding"]
    assert counted["speedup"] is None
    assert "x-polydraft-speedup" not in response.headers
    length = float(response.headers["x-polydraft-acceptance-length"])
    assert length == counted["mean_acceptance_length"]


@pytest.mark.usefixtures("measured_seat")
def test_a_calibrated_daemon_reports_the_speedup(one_seat_http: httpx.Client) -> None:
    """In the body and as a header; streams have it in the body."""
    response = one_seat_http.post(COMPLETIONS, json=CALL)
    speedup = response.json()["metrics"]["speculative_decoding"]["speedup"]
    assert speedup > 0
    assert float(response.headers["x-polydraft-speedup"]) == speedup
    with open_stream(one_seat_http, COMPLETIONS, **CALL, stream_options={"include_usage": True}) as stream:
        assert stream.read()[-1]["metrics"]["speculative_decoding"]["speedup"] > 0


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, CALL | {"n": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 20}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 20, "metrics": True}),
    ],
)
def test_figures_are_rounded_to_what_they_mean(
    http: httpx.Client, path: str, body: dict[str, Any], stream: bool
) -> None:
    """At most three decimals, on every route, whole and streamed."""
    wanted = {"stream": True} | ({"stream_options": {"include_usage": True}} if "completions" in path else {})
    answer = http.post(path, json={"model": MODEL, **body, **(wanted if stream else {})})
    assert answer.status_code == 200, answer.text
    _, *metrics = answer.text.split('"metrics":')
    assert any('"generation_time_ms":' in text for text in metrics)
    assert not re.findall(r"\d\.\d{4,}", "".join(metrics))


def test_the_counts_of_several_choices_are_summed(http: httpx.Client) -> None:
    """`n=3` is counted over all choices, and for each of them."""
    answer = answer_of(http, n=3)
    counted, each = answer["metrics"]["speculative_decoding"], answer["metrics"]["choices"]
    for one in each:
        check_counts(one, 40)
    for name in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"):
        assert sum(one[name] for one in each) == counted[name]
    assert "choices" not in answer_of(http)["metrics"]
    with open_stream(http, COMPLETIONS, **CALL, n=3, stream_options={"include_usage": True}) as stream:
        streamed = stream.read()[-1]["metrics"]
    assert [one["acceptance_histogram"] for one in streamed["choices"]] == [one["acceptance_histogram"] for one in each]
    assert sum(counted["acceptance_histogram"]) == counted["num_spec_steps"]
    accepted = counted["num_accepted_draft_tokens"]
    assert accepted + counted["num_spec_steps"] >= 3 * 40 - 3
    assert counted["num_spec_steps"] > answer_of(http)["metrics"]["speculative_decoding"]["num_spec_steps"]


def test_a_stream_reports_on_its_usage_chunk_only(http: httpx.Client) -> None:
    """The usage chunk carries the same counts as the whole answer; no other chunk carries any."""
    with open_stream(http, COMPLETIONS, **CALL, stream_options={"include_usage": True}) as stream:
        *before, last = stream.read()
    assert not any("metrics" in chunk for chunk in before)
    counted = last["metrics"]["speculative_decoding"]
    check_counts(counted, 40)
    whole = answer_of(http)["metrics"]["speculative_decoding"]
    assert counted["acceptance_histogram"] == whole["acceptance_histogram"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_without_usage_reports_on_its_last_chunk(http: httpx.Client, path: str, n: int) -> None:
    """With the finish reason of the choice that ends last; what `metrics: false` leaves out."""
    call = {**CALL, "n": n}
    if path == CHAT:
        call["messages"] = [{"role": "user", "content": call.pop("prompt")}]
    with open_stream(http, path, **call) as stream:
        *before, last = stream.read()
    assert not any("metrics" in chunk for chunk in before)
    assert last["choices"][0]["finish_reason"] == "length"
    counted = last["metrics"]["speculative_decoding"]
    whole = http.post(path, json=call).json()["metrics"]["speculative_decoding"]
    assert counted["acceptance_histogram"] == whole["acceptance_histogram"]
    assert len(last["metrics"].get("choices", [1])) == n
    with open_stream(http, path, **call, metrics=False) as stream:
        assert not any("metrics" in chunk for chunk in stream.read())


def test_a_request_can_decline_metrics(http: httpx.Client) -> None:
    """With `metrics: false` neither a whole answer nor a stream carries them."""
    assert "metrics" not in answer_of(http, metrics=False)
    call = {**CALL, "metrics": False, "stream_options": {"include_usage": True}}
    with open_stream(http, COMPLETIONS, **call) as stream:
        assert not any("metrics" in chunk for chunk in stream.read())


def test_speculation_can_be_turned_off(http: httpx.Client) -> None:
    """With `enabled: false` (or rule `off`) nothing is drafted and nothing is reported."""
    for speculation in (OFF, {"rule": "off"}):
        response = http.post(COMPLETIONS, json={**CALL, "speculation": speculation})
        assert response.json()["metrics"]["speculative_decoding"] is None
        assert "x-polydraft-acceptance-length" not in response.headers


@pytest.mark.parametrize(
    "speculation",
    [
        {"num_drafts": 2, "draft_length": 3},
        {"num_drafts": 16, "draft_length": 16},
        {"num_drafts": 1, "draft_length": 1},
        {"rule": "block", "draft_length": 4},
        {"rule": "token", "num_drafts": 1},
        {"rule": "bv_race", "num_drafts": 3, "drafters": ["model"]},
    ],
)
def test_a_request_chooses_its_own_shape_and_rule(http: httpx.Client, speculation: dict[str, Any]) -> None:
    """Number of drafts, their length and the rule are as asked for."""
    counted = answer_of(http, speculation=speculation)["metrics"]["speculative_decoding"]
    check_counts(counted, 40)
    assert counted["num_spec_tokens"] == speculation.get("draft_length", 5)
    assert counted["rule"] == speculation.get("rule", "bv_race")
    one_chain = speculation.get("rule") in ("block", "token")
    num_drafts = speculation.get("num_drafts", 1 if one_chain else 4)
    assert counted["drafters"]["model"]["num_drafts"] == num_drafts * counted["num_spec_steps"]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        ({"num_drafts": 17}, "speculation.num_drafts"),
        ({"draft_length": 17}, "speculation.draft_length"),
        ({"num_drafts": 0}, "speculation.num_drafts"),
        ({"draft_length": 0}, "speculation.draft_length"),
        ({"rule": "block", "num_drafts": 4}, "speculation.num_drafts"),
        ({"rule": "nonsense"}, "speculation.rule"),
        ({"drafters": ["oracle"]}, "speculation.drafters"),
        ({"drafters": []}, "speculation.drafters"),
        ({"drafters": ["prompt_lookup"], "num_drafts": 2}, "speculation.num_drafts"),
        ({"num_drafts": 2.5}, "speculation.num_drafts"),
        ({"over_acceptance_residual": "target"}, "speculation.over_acceptance_residual"),
        ([], "speculation"),
    ],
)
def test_impossible_requests_are_refused_by_name(
    http: httpx.Client, speculation: Any, param: str, temperature: float
) -> None:
    """A value above a cap, an unknown rule, too many chains: never a clamp.

    What is refused does not depend on the temperature.
    """
    error = refusal_of(http, speculation=speculation, temperature=temperature)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def served_rules(http: httpx.Client) -> list[str]:
    """The rules that a refusal offers instead."""
    message: str = refusal_of(http, speculation={"rule": "nonsense"})["message"]
    return message.partition("one of ")[2].split(", ")


def test_greedy_answers_are_the_same_with_and_without_speculation(http: httpx.Client) -> None:
    """At temperature 0 text and usage are those of plain decoding, whatever drafts and verifies."""
    call = {"model": MODEL, "messages": [{"role": "user", "content": "A long story, please."}], "temperature": 0}
    wishes: list[dict[str, Any]] = [{"rule": rule} for rule in served_rules(http)]
    assert {"bv_race", "block", "token"} <= {wish["rule"] for wish in wishes}
    wishes.append({"rule": "bv_race", "num_drafts": 4, "draft_length": 9})
    plain, *others = [
        http.post(CHAT, json={**call, "max_tokens": 40, "speculation": wish}).json() for wish in (OFF, *wishes)
    ]
    for body in others:
        assert body["choices"] == plain["choices"]
        assert body["usage"] == plain["usage"]
        assert body["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


# How few tokens a distribution may leave: a rule must cope with fewer of them than there are
# drafts.
NARROW = ({}, {"top_k": 1}, {"top_k": 2}, {"top_p": 0}, {"temperature": 1e-300}, {"temperature": 0})
METHODS = ("iid", "without_replacement", "greedy", "most_likely")


def check_served_or_refused(http: httpx.Client, rule: str, method: str | None, num_drafts: int | None) -> None:
    """Assert that a combination is served or refused, under wide and narrow laws."""
    speculation = {"rule": rule, "draft_method": method, "num_drafts": num_drafts, "draft_length": 3}
    for sampling in NARROW:
        response = http.post(COMPLETIONS, json={**CALL, **sampling, "max_tokens": 5, "speculation": speculation})
        if response.status_code == 400:
            assert response.json()["error"]["param"].startswith("speculation."), response.text
        else:
            assert response.status_code == 200, (speculation, sampling, response.text)
            assert response.json()["usage"]["completion_tokens"] == 5


@pytest.mark.sole("every rule over HTTP")
def test_every_rule_serves_or_refuses_every_draft_method(http: httpx.Client) -> None:
    """No combination of rule, draft method and number of drafts breaks the daemon."""
    for rule in served_rules(http):
        check_served_or_refused(http, rule, None, None)
        for method in METHODS:
            check_served_or_refused(http, rule, method, 4)


def test_a_method_that_draws_two_chains_is_refused_for_four(http: httpx.Client) -> None:
    """The draft method of SpecHub draws exactly two chains, whichever rule verifies them."""
    for rule in served_rules(http):
        check_served_or_refused(http, rule, "spechub", None)
        check_served_or_refused(http, rule, "spechub", 4)

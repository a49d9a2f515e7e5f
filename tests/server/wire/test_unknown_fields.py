"""Names that no field has: refused if they would change an answer, else ignored and reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from engine.api import RequestError
from server.anthropic.messages import CountTokensRequest, MessagesRequest
from server.app import BODIES as ALL_BODIES
from server.openai.responses import ResponsesRequest
from server.wire.current_call import this_call
from server.wire.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.wire.foreign_fields import FOREIGN
from server.wire.unsupported_fields import UnknownFields
from tests.server.daemon_process import Daemon
from tests.server.good_bodies import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, error_of, post

ANSWERING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
IGNORED = "x-polydraft-ignored-fields"
# Names that clients and other servers use for what does not change an answer.
HARMLESS = """
    chat_id conversation_id conversationId session_id sessionId request_id rid id_slot slot_id keep_alive cache_prompt
    n_cache_reuse n_keep num_ctx num_gpu num_thread use_mmap timings_per_token return_progress sse_ping_interval title
    features files variables background_tasks tool_ids filter_ids user_id prompt_id message_id parent_message_id trace
    trace_id provider route betas anthropic_version inference_geo cache_control extra_headers kv_transfer_params
    bootstrap_room mm_processor_kwargs guided_decoding_backend return_hidden_states custom_labels extra_key mirostat_tau
    mirostat_eta dry_base dry_allowed_length xtc_threshold dynatemp_exponent speculative.n_max stream_interval
    speed models model_id prompts tool trace_ids temp
""".split()
OTHER_VALUE = {"an odd": ["value"]}


def bodies_with(name: str, value: Any) -> Iterator[BaseModel]:
    """Every body that has no such field, with it."""
    for path, fields in BODIES.items():
        kind = KINDS[path]
        if name not in kind.model_fields:
            yield kind.model_validate({**fields, name: value})


KINDS: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
    f"{MESSAGES}/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@pytest.fixture
def unknown_fields() -> UnknownFields:
    return UnknownFields(False, ALL_BODIES, FOREIGN)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_unknown_names_are_ignored_and_reported(daemon: Daemon, http: httpx.Client, path: str) -> None:
    """In the answer's header, and once in the log; never their values."""
    sent = {"of_next_month": "something secret", "x\nERROR y": 1, "z" * 5000: 2}
    for _ in range(2):
        answer = post(http, path, sent)
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED] == f"of_next_month, x\\nERROR y, {'z' * 64}"
    assert IGNORED not in post(http, path, {"a_key_of_next_month": None}).headers
    lines = [line for line in daemon.log.splitlines() if "of_next_month" in line]
    assert len(lines) == 1, lines
    assert "WARNING request field of_next_month was ignored" in lines[0]
    assert "something secret" not in daemon.log


def test_an_ignored_field_leaves_the_answer_alone(http: httpx.Client) -> None:
    asked = {"seed": 4, "temperature": 1, "max_tokens": 12}
    plain, more = (post(http, CHAT, asked | extra).json() for extra in ({}, dict.fromkeys(HARMLESS, 1)))
    assert plain["choices"] == more["choices"]


def test_the_header_and_the_number_of_unknown_names_are_bounded(http: httpx.Client) -> None:
    """Each of them costs a look at the names that are known."""
    answer = post(http, CHAT, {f"{number:02}{'x' * 100}": 1 for number in range(64)})
    assert len(answer.headers[IGNORED]) < 600
    error = error_of(post(http, CHAT, {f"{number}{'x' * 100}": 1 for number in range(65)}), 400)
    assert len(error["message"]) < 700


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_a_field_of_another_server_is_refused_by_name(unknown_fields: UnknownFields, name: str) -> None:
    """On every endpoint, unless its value asks for nothing."""
    for body in bodies_with(name, OTHER_VALUE):
        with pytest.raises(RequestError, match=f"^{name} is not supported") as caught:
            unknown_fields.check(body)
        assert caught.value.param == name
    for value in FOREIGN[name].values:
        for body in bodies_with(name, value):
            unknown_fields.check(body)
    assert not this_call().ignored


@pytest.mark.parametrize("path", ANSWERING)
def test_fields_that_would_change_an_answer_are_refused_over_http(http: httpx.Client, path: str) -> None:
    for fields in ({"mirostat": 2}, {"options": {"top_k": 3}}, {"typical_p": 0.5}, {"grammar": "root ::= x"}):
        answer = post(http, path, fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"{next(iter(fields))} is not supported")


def test_a_field_of_another_endpoint_is_refused_by_name(unknown_fields: UnknownFields) -> None:
    """If it would change an answer there."""
    names = {name for kind in KINDS.values() for name in kind.model_fields}
    asked = {name for name in names for body in bodies_with(name, OTHER_VALUE) if refuses(unknown_fields, body, name)}
    accepted = names - asked - set.intersection(*[set(kind.model_fields) for kind in KINDS.values()])
    assert {"logit_bias", "tools", "min_p", "suffix", "thinking", "response_format", "cache_salt"} <= asked
    assert {"user", "metadata", "store", "reasoning_effort", "verbosity", "service_tier"} <= accepted
    assert not accepted & {"temperature", "top_k", "stop", "n", "seed", "previous_response_id", "mcp_servers"}


def refuses(unknown_fields: UnknownFields, body: BaseModel, name: str) -> bool:
    """Whether a body is refused, which must be by the name."""
    try:
        unknown_fields.check(body)
    except RequestError as error:
        return error.param == name
    return False


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("topP", "top_p"),
        ("maxTokens", "max_tokens"),
        ("top-k", "top_k"),
        ("logitBias", "logit_bias"),
        ("repetition_penalties", "repetition_penalty"),
        ("chat_template_kwarg", "chat_template_kwargs"),
        ("mirostats", "mirostat"),
    ],
)
def test_a_misspelt_field_is_refused(http: httpx.Client, name: str, meant: str) -> None:
    """It would change the answer that is asked for without a word."""
    error = error_of(post(http, CHAT, {name: 1}), 400)
    assert error["message"] == f"Unrecognized request argument supplied: {name} (did you mean {meant}?)"
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", name, "unknown_parameter")


def test_harmless_names_are_not_taken_for_misspelt_ones(unknown_fields: UnknownFields) -> None:
    for name in HARMLESS:
        for body in bodies_with(name, 1):
            unknown_fields.check(body)


@pytest.mark.parametrize("path", ANSWERING)
def test_hints_are_accepted_everywhere(http: httpx.Client, path: str) -> None:
    """Fields that this model's template does not support are reported as ignored."""
    hints = {"store": True, "verbosity": "low", "service_tier": "flex", "metadata": {"a": "b"}}
    answer = post(http, path, {**hints, "reasoning_effort": "high"})
    assert answer.status_code == 200, answer.text
    assert "effort" in answer.headers.get(IGNORED, "") or path == COMPLETIONS


def test_the_penalty_of_llama_cpp_is_the_repetition_penalty(http: httpx.Client) -> None:
    asked = {"prompt": [5, 6, 5, 6, 7] * 8, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    plain, one, other = (
        post(http, COMPLETIONS, asked | more).json()["choices"][0]["text"]
        for more in ({}, {"repetition_penalty": 1.8}, {"repeat_penalty": 1.8})
    )
    assert one == other != plain
    differing = {"repeat_penalty": 1.1, "repetition_penalty": 1.2}
    assert error_of(post(http, COMPLETIONS, differing), 400)["param"] == "repeat_penalty"
    assert post(http, COMPLETIONS, dict.fromkeys(differing, 1.1)).status_code == 200


def test_best_of_is_accepted_if_all_of_them_are_sent(http: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        assert post(http, path, {"n": 2, "best_of": 2}).status_code == 200
        for fields in ({"n": 2, "best_of": 3}, {"best_of": 2}, {"n": 2, "best_of": 1}):
            assert error_of(post(http, path, fields), 400)["param"] == "best_of"


def test_the_schema_says_which_names_are_closed(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is True
    assert schemas["SpeculationFields"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["Message"]
    fields = schemas["CompletionRequest"]["properties"]
    assert (fields["echo"]["type"], fields["moderation"]["enum"]) == ("boolean", [None])
    assert fields["chat_template_kwargs"]["enum"] == [{}, None]


def test_logged_unknown_names_are_bounded(caplog: pytest.LogCaptureFixture, unknown_fields: UnknownFields) -> None:
    """However many names clients invent, they do not fill the log."""
    for number in range(1000):
        for _ in range(2):
            body = CompletionRequest.model_validate({"model": "m", "prompt": "x", f"field_{number}": 1})
            unknown_fields.check(body)
    assert 200 < len(caplog.records) < 300

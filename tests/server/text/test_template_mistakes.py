"""Templates that fail by mistake (the operator's), or on purpose (the client's)."""

from __future__ import annotations

import logging
from typing import Any

import jinja2
import pytest

from engine.api import TEMPLATE_FAILED
from server.text.rendering import log_failure
from tests.server.text.conversations import SHORT, USER, called, refused, says


def jinja(text: str) -> Any:
    """A template that may raise on purpose."""

    def raise_exception(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    found = jinja2.Environment().from_string(text, {"raise_exception": raise_exception})
    return lambda messages, tools, documents: found.render(messages=messages, tools=tools)


@pytest.fixture(autouse=True)
def _without_limits_of_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log every warning, also after tests that set up a server's log."""
    monkeypatch.setattr(logging.getLogger("polydraft.rendering"), "filters", [])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{% if messages | length > 1 %}\n{{ a.b.c }}{% endif %}\n{{ a.b.c }}", 2),
        ("\n\n{{ a.b.c }}", 3),
        ("{% macro show() %}\n{{ a.b.c }}{% endmacro %}\n{{ show() }}", 2),
        ("{% macro one() %}\n{{ a.b.c }}{% endmacro %}\n{% macro two() %}{{ one() }}{% endmacro %}{{ two() }}", 2),
    ],
)
def test_a_mistake_in_a_template_is_the_operators(text: str, line: int, caplog: pytest.LogCaptureFixture) -> None:
    """The type and the place in the first form are said, the words of the conversation are not."""
    error = refused(jinja(text), USER, says("user", "secret"))
    fault = f"UndefinedError on line {line}"
    assert str(error) == f"the chat template of this model fails ({fault}); the operator has to correct it"
    assert (error.param, error.code) == ("messages", TEMPLATE_FAILED)
    assert isinstance(error.__cause__, jinja2.UndefinedError)
    # The server reports it if no conversation of this type can be rendered.
    assert not caplog.records
    log_failure(error.__cause__, [USER, says("user", "secret"), called(SHORT)], [{"type": "function"}])
    told = (
        f"the chat template fails ({fault}) for messages of user, assistant with calls, with tools, and such chats are "
        "refused; correct it, or choose another by --chat-template"
    )
    assert caplog.record_tuples == [("polydraft.rendering", logging.WARNING, told)]


def test_a_template_that_cannot_be_read_is_the_operators() -> None:
    def render(*_: Any) -> str:
        raise jinja2.TemplateSyntaxError("secret", 7)

    assert "(TemplateSyntaxError on line 7)" in str(refused(render, USER))


def test_a_template_refuses_on_purpose() -> None:
    """Also if it would fail by mistake in another form."""
    for text in (
        "{{ raise_exception('no') }}",
        "{% if messages | length > 1 %}{{ a.b.c }}{% endif %}{{ raise_exception('no') }}",
    ):
        error = refused(jinja(text), USER, USER)
        assert (str(error), error.code) == ("the chat template refuses these messages: no", None)

"""A chat template's end of turn is compared with the end tokens."""

from __future__ import annotations

import pytest

from engine.api import ConfigError
from server.text.tokenizer import Tokenizer
from server.text.turn_end import check_template, turn_remark
from tests.server.tiny_models import EOS, TOKENIZER

STRICT = (
    "{% if messages | map(attribute='role') | list != ['user', 'assistant'] %}{{ raise_exception('roles') }}{% endif %}"
    "{% if not messages[0].content %}{{ raise_exception('nothing was asked') }}{% endif %}"
)
"""Templates in the style of real models."""
CHAT = STRICT + "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}END{% endfor %}"


def of(template: str | None) -> Tokenizer:
    tokenizer = Tokenizer(str(TOKENIZER), template)
    tokenizer.close()
    return tokenizer


def test_a_turn_that_ends_with_another_token_is_named() -> None:
    end = of(None).token_text(EOS)
    tokenizer = of(CHAT.replace("END", end + "\n"))
    assert turn_remark(tokenizer, [EOS]) is None
    remark = turn_remark(tokenizer, [])
    assert remark is not None
    assert f"{end!r} ({EOS})" in remark
    for other in (CHAT.replace("END", f"\n{end}"), CHAT.replace("END", f" {{{{ m['content'] }}}}{end}")):
        assert turn_remark(of(other), []) == remark


@pytest.mark.parametrize(
    "template",
    [
        CHAT.replace("END", ""),
        CHAT.replace("END", "\n"),
        "BEGIN{{ messages[0].content }}",
        "{{ raise_exception('no') }}",
        CHAT.replace("END", "") + "{% if add_generation_prompt %}BEGIN{% endif %}",
    ],
    ids=["nothing", "text", "no answer", "refusal", "next turn"],
)
def test_template_without_a_known_end_gets_no_remark(template: str) -> None:
    tokenizer = of(template.replace("BEGIN", of(None).token_text(EOS)))
    check_template(tokenizer)
    assert turn_remark(tokenizer, []) is None


def test_a_template_with_a_wrong_syntax_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"chat template cannot be read \(line 1: .*; see --chat-template"):
        check_template(of("{% for m in messages %}"))

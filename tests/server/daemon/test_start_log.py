"""Log lines about speculation after the start: the settings, or advice if nothing drafts."""

from __future__ import annotations

import pytest

from server.settings.settings import Serve
from server.start_lines import drafting, reachable
from tests.server.daemon_process import Daemon
from tests.server.step_results import facts

HELP = "off, as nothing drafts; --draft-model MODEL or --spec-drafters prompt_lookup makes answers faster"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model": "t"}, HELP),
        ({"model": "t", "spec_drafters": "prompt_lookup"}, "bv_race, prompt lookup"),
        ({"model": "t", "spec_drafters": "model,prompt_lookup"}, "bv_race, prompt lookup"),
        ({"model": "t", "spec_rule": "off"}, "off (--spec-rule off)"),
        ({"model": "t", "draft_model": "d"}, "bv_race, up to 4 drafts of 5 tokens"),
        ({"model": "t", "draft_model": "d", "spec_rule": "off"}, "off (--spec-rule off)"),
        ({"model": "t", "draft_model": "d", "spec_shape": "fixed:2,3"}, "bv_race, 2 drafts of 3 tokens"),
        # It checks one chain, whatever --num-drafts is.
        ({"model": "t", "draft_model": "d", "spec_rule": "block"}, "block, up to 1 draft of 5 tokens"),
        ({"model": "t", "draft_model": "d", "draft_tree": "3,1,1"}, "bv_race, a tree of 3,1,1"),
        (
            {"model": "t", "draft_model": "d", "spec_drafters": "model,prompt_lookup"},
            "bv_race, up to 4 drafts of 5 tokens and prompt lookup",
        ),
    ],
)
def test_start_log_names_the_drafter(settings: dict[str, str], text: str) -> None:
    wanted = Serve(**settings)  # type: ignore[arg-type]
    known = facts("model" if "draft_model" in settings else "")
    assert drafting(known, wanted.engine_config().speculation) == text


def test_a_daemon_names_its_page_and_its_api(daemon: Daemon) -> None:
    assert f"page: {daemon.url}/; API: {daemon.url}/v1, described at {daemon.url}/docs" in daemon.log


def test_a_log_that_is_no_terminal_has_no_loading_bars(daemon: Daemon) -> None:
    assert "engine: loading target" in daemon.log
    assert "Loading weights" not in daemon.log


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_an_address_of_all_interfaces_is_one_that_can_be_opened(host: str) -> None:
    assert reachable(f"https://{host}:8000") == "https://localhost:8000"
    assert reachable("http://10.0.0.1:8000") == "http://10.0.0.1:8000"


def test_a_daemon_logs_its_speculation_and_context(daemon: Daemon) -> None:
    assert "speculation: bv_race, up to 4 drafts of 5 tokens; context 2048 tokens" in daemon.log

"""A daemon for tools, shared by the tests of several APIs' routes."""

from __future__ import annotations

import pytest

from tests.grid import grid
from tests.server.call_spellings import TEMPLATES
from tests.server.daemon_process import Daemon, Daemons


@pytest.fixture(scope="module", params=grid(["hermes", "llama3"], ["hermes"]))
def tool_daemon(request: pytest.FixtureRequest, daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon whose chat template shows tools."""
    return daemons.get(*pair_arguments, "--no-calibrate", "--chat-template", str(TEMPLATES / f"{request.param}.jinja"))

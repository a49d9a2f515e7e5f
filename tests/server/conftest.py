"""Daemons shared by the tests of the server: one with many seats, one with a single seat."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.grid import slow_fixture
from tests.server.call_spellings import TEMPLATES
from tests.server.daemon_process import MODEL, Daemon, Daemons
from tests.server.infill_models import write_filling_model
from tests.server.tiny_models import TinyModels, write_pair

KEYS = ("first-secret-key", "second-secret-key")
PREFIX = "/behind-a-proxy"
FILLING_CONTEXT = 512


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """The tiny pair."""
    return write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """Start daemons, and end them after the last test; none may print a traceback."""
    pool = Daemons(tmp_path_factory.mktemp("daemons"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def pair_arguments(models: TinyModels) -> list[str]:
    """The tiny pair as command line arguments."""
    draft = str(models.draft)
    return [str(models.target), "--draft-model", draft, "--served-model-name", MODEL, "--num-threads", "1"]


@pytest.fixture
def rendering_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Yield all records of rendering, also after a daemon set up its log."""
    monkeypatch.setattr(logging.getLogger("polydraft"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("polydraft.rendering"), "filters", [])
    return caplog


@pytest.fixture
def daemon(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon with 64 seats."""
    return daemons.get(*pair_arguments, "--no-calibrate")


@pytest.fixture
def http(daemon: Daemon) -> Iterator[httpx.Client]:
    """A plain client of `daemon`, which must still serve when the test is over."""
    with daemon.client() as client:
        yield client
        assert client.get("/ready").status_code == 200, daemon.log


@pytest.fixture
def openai_client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    """The official client of `daemon`, without retries."""
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tool_daemon(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon whose chat template shows tools, and has no switch for thinking."""
    return daemons.get(*pair_arguments, "--no-calibrate", "--chat-template", str(TEMPLATES / "hermes.jinja"))


@pytest.fixture(scope="session")
@slow_fixture
def filling_daemon(daemons: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """A daemon whose model fills gaps with known answers, and drafts from the prompt."""
    folder = write_filling_model(tmp_path_factory.mktemp("filling") / "model")
    sizes = ["--max-model-len", str(FILLING_CONTEXT), "--num-threads", "1", "--no-calibrate"]
    return daemons.get(str(folder), "--served-model-name", MODEL, "--spec-drafters", "prompt_lookup", *sizes)


@pytest.fixture
def filling(filling_daemon: Daemon) -> Iterator[httpx.Client]:
    """A plain client of `filling_daemon`."""
    with filling_daemon.client() as client:
        yield client


@pytest.fixture
def one_seat(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A calibrated daemon with one seat, one place, two keys and a path prefix."""
    keys = [word for key in KEYS for word in ("--api-key", key)]
    limits = ["--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--sse-keep-alive-interval", "0.02"]
    more = ["--root-path", PREFIX, "--enable-log-requests"]
    return daemons.get(*pair_arguments, *keys, *limits, *more, key=KEYS[0])


@pytest.fixture
def measured_seat(one_seat: Daemon) -> Daemon:
    """`one_seat` after a plain answer: for a minute, its answers report a speedup."""
    call = {"model": MODEL, "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "speculation": {"enabled": False}}
    with one_seat.client(KEYS[0]) as client:
        assert client.post("/v1/completions", json=call).status_code == 200
    return one_seat


@pytest.fixture
def one_seat_http(one_seat: Daemon) -> Iterator[httpx.Client]:
    """A client of `one_seat` that has its key."""
    with one_seat.client(KEYS[0]) as client:
        yield client

"""A daemon with a folder for batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.conftest import KEYS
from tests.server.daemon_process import Daemon, Daemons


@pytest.fixture(scope="session")
def batch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the daemon makes."""
    return tmp_path_factory.mktemp("batches") / "deep" / "folder"


@pytest.fixture
def start_batch_daemon(daemons: Daemons, pair_arguments: list[str], batch_folder: Path) -> Callable[[], Daemon]:
    """Return a daemon with four seats, two keys, bodies of 64 KiB and files of 1 MiB.

    It starts again if it has ended.
    """
    limits = ["--max-num-seqs", "4", "--max-request-bytes", "65536", "--batch-max-file-bytes", "1048576"]
    keys = [word for key in KEYS for word in ("--api-key", key)]
    more = ["--no-calibrate", "--batch-folder", str(batch_folder), "--enable-log-requests"]
    return lambda: daemons.get(*pair_arguments, *limits, *keys, *more, key=KEYS[0])


@pytest.fixture
def batch_daemon(start_batch_daemon: Callable[[], Daemon]) -> Daemon:
    """The running daemon."""
    return start_batch_daemon()


@pytest.fixture
def batch_http(batch_daemon: Daemon) -> Iterator[httpx.Client]:
    """A plain client that has the first key."""
    with batch_daemon.client(KEYS[0]) as client:
        yield client


@pytest.fixture
def client(batch_daemon: Daemon) -> Iterator[openai.OpenAI]:
    """The official client with the first key, without retries."""
    with openai.OpenAI(base_url=f"{batch_daemon.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client

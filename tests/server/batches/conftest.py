"""A daemon with a folder for batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.daemon_process import Daemon, Daemons


@pytest.fixture(scope="session")
def batch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the daemon makes."""
    return tmp_path_factory.mktemp("batches") / "deep" / "folder"


@pytest.fixture
def batch_daemon(daemons: Daemons, pair_arguments: list[str], batch_folder: Path) -> Daemon:
    """A daemon with four seats that stores batches, with lines of 64 KiB and files of 1 MiB."""
    limits = ["--max-num-seqs", "4", "--max-request-bytes", "65536", "--batch-max-file-bytes", "1048576"]
    more = ["--batch-folder", str(batch_folder), "--enable-log-requests"]
    return daemons.get(*pair_arguments, "--no-calibrate", *limits, *more)


@pytest.fixture
def client(batch_daemon: Daemon) -> Iterator[openai.OpenAI]:
    """The official client of `batch_daemon`, without retries."""
    with openai.OpenAI(base_url=f"{batch_daemon.url}/v1", api_key="unused", max_retries=0) as client:
        yield client

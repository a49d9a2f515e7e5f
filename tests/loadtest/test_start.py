"""Starts of two versions alternate, each with separate caches that its later starts find."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadtest import client, start
from tests.wrong import instead


def test_versions_alternate_and_keep_their_caches(tmp_path: Path) -> None:
    started: list[tuple[str, str, str]] = []

    @contextmanager
    def daemon(_: object, arguments: Sequence[str], prefix: Sequence[str]) -> Iterator[str]:
        code, kernels = (word.partition("=")[2] for word in prefix[-2:])
        assert Path(arguments[-1]).parent.is_dir()
        started.append((code, kernels, arguments[-1]))
        yield "http://daemon"

    numbers = {"polydraft_engine_process_resident_memory_bytes": 3 << 20, "process_resident_memory_bytes": 2 << 20}
    with instead(start, "running_daemon", daemon), instead(client, "metric", lambda *of: numbers[of[-1]]):
        output = tmp_path / "start.json"
        assert start.main(["--starts", "2", "--other", str(tmp_path), "--output", str(output)]) == 0
    (own, _, _), (other, _, _) = started[:2]
    assert started[2:] == started[:2]
    assert [Path(own, "loadtest").is_dir(), other] == [True, str(tmp_path.resolve())]
    assert len({cache for _, *caches in started for cache in caches}) == 2
    arms = json.loads(output.read_text())["arms"]
    assert [(one["engine_mib"], one["server_mib"]) for one in arms["this"] + arms["other"]] == [(3, 2)] * 4

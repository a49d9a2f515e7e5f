"""schemathesis against our own /openapi.json: whatever it sends, no answer is a server error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.grid import slow_fixture
from tests.server.daemon_process import Daemon, Daemons


@pytest.fixture(scope="module")
@slow_fixture
def brief_daemon(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon with a short context, so that no generated call has a long answer."""
    return daemons.get(*pair_arguments, "--no-calibrate", "--max-model-len", "64")


def test_no_generated_call_is_a_server_error(brief_daemon: Daemon, tmp_path: Path) -> None:
    """Thousands of calls, in and out of the schema, with a fixed seed."""
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{brief_daemon.url}/openapi.json",
            "--url",
            brief_daemon.url,
            "--checks",
            "not_a_server_error",
            "--max-examples",
            "8",
            "--seed",
            "1",
            "--request-timeout",
            "60",
            "--no-color",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
    with brief_daemon.client() as client:
        assert client.get("/ready").status_code == 200


def test_the_description_has_the_media_types_that_are_sent(daemon: Daemon) -> None:
    with daemon.client() as client:
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            if "get" in methods and "{" not in path:
                sent = client.get(path).headers["content-type"].partition(";")[0]
                assert list(methods["get"]["responses"]["200"]["content"]) == [sent], path


def test_the_description_has_the_errors_that_are_sent(daemon: Daemon) -> None:
    """400 in OpenAI's shape where FastAPI by itself would say 422."""
    with daemon.client() as client:
        described = client.get("/openapi.json").json()
        refused = client.post("/v1/responses", json={"model": 5})
        missing = client.get("/v1/models/nowhere")
    assert (refused.status_code, missing.status_code) == (400, 404)
    schemas, paths = described["components"]["schemas"], described["paths"]
    assert set(refused.json()["error"]) == set(schemas["Error"]["properties"]["error"]["required"])
    statuses = {path: set(found["responses"]) for path, methods in paths.items() for found in methods.values()}
    assert not any("422" in found for found in statuses.values())
    posts = [path for path, methods in paths.items() if "post" in methods]
    assert [statuses[path] for path in posts] == [{"200", *"400 401 404 413 415 429 500 503".split()}] * 14
    message = paths["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
    assert message.endswith("/MessagesError")
    assert statuses["/v1/models/{name}"] == {"200", "401", "404", "503"}
    assert statuses["/v1/models"] == statuses["/v1/models/{name}"] - {"404"}
    assert (statuses["/health"], statuses["/version"]) == ({"200", "503"}, {"200"})
    assert statuses["/tokenizer_info"] == {"200", "401"}
    assert not {"HTTPValidationError", "ValidationError"} & set(schemas)

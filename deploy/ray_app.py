"""Polydraft on Ray Serve: several daemons at one address.

With prefix affinity, autoscaling and a graceful drain.

serve run deploy.ray_app:build arguments="MODEL --draft-model DRAFT" max_replicas=4

`Front` receives HTTP requests and `PrefixRouter` chooses a replica. Each `Replica` runs one
`polydraft serve` and forwards requests to it over a unix socket, so that it behaves like a daemon.
For KubeRay there is `deploy/kubernetes/rayservice.yaml`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import ray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from deploy.ray_call import ReplicaCall, prefix_of, repeatable
from deploy.ray_metrics import CONTENT_TYPE, merged

log = logging.getLogger("ray.serve")

_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate te trailer transfer-encoding upgrade host content-length".split()
)
# Response header with the name of the replica.
_REPLICA = "x-polydraft-replica"
_TRIES = 3
# A daemon reports its state at once; whole answers have no time limit.
_PROBE_S = 5.0
# A busy replica is left out of the metrics page, so that the page is ready before Prometheus'
# timeout (10 s).
_SCRAPE_S = 1.0
# With this command the daemon drains when the replica, which holds its standard input, has ended in
# any way.
SUPERVISED = [
    *("sh", "-c"),
    'exec 3<&0; "$@" </dev/null & child=$!; (cat <&3 >/dev/null; kill -TERM $child) & watch=$!; '
    "wait $child; status=$?; kill $watch; exit $status",
    "sh",
]


class Replica:
    """A daemon and the connection to it."""

    def __init__(self, arguments: list[str], start_timeout_s: float) -> None:
        """Start a daemon and wait until it serves; arguments: of `polydraft serve`."""
        self._folder = tempfile.mkdtemp(prefix="polydraft-replica-")
        socket = str(Path(self._folder) / "http")
        command = [*SUPERVISED, sys.executable, "-P", "-m", "server.cli", "serve", *arguments, "--uds", socket]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        # Ray bounds a replica's open requests; requests for its state come on top.
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=None)
        self._wait_ready(socket, start_timeout_s)

    def _wait_ready(self, socket: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://replica") as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise RuntimeError(f"polydraft serve ended with {self._process.returncode}; see the replica's log")
                try:
                    if Path(socket).exists() and client.get("/ready", timeout=_PROBE_S).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
        raise RuntimeError(f"polydraft serve is not ready after {timeout_s:.0f} s")

    async def check_health(self) -> None:
        """Raise if the daemon has ended or its engine completes no more steps.

        Ray then starts another replica.
        """
        (await self._client.get("/health", timeout=_PROBE_S)).raise_for_status()

    async def answer(self, call: ReplicaCall) -> AsyncIterator[tuple[int, list[tuple[str, str]]] | bytes]:
        """Yield status and headers, then the body in pieces.

        If the caller leaves, the daemon aborts the request.
        """
        request = self._client.build_request(call.method, call.target, headers=call.headers, content=call.body)
        response = await self._client.send(request, stream=True)
        try:
            name = serve.get_replica_context().replica_id.unique_id
            yield response.status_code, [*_forwarded(response.headers.multi_items()), (_REPLICA, name)]
            async for chunk in response.aiter_raw():
                yield chunk
        finally:
            await response.aclose()

    async def __del__(self) -> None:
        """Let the daemon finish its requests; Ray waits for this during its graceful shutdown."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        while self._process.poll() is None:
            await asyncio.sleep(0.1)
        shutil.rmtree(self._folder, ignore_errors=True)


class Front:
    """Forwards HTTP requests to replicas.

    If a replica dies before its answer begins, another one gets the request.
    """

    def __init__(self, replicas: DeploymentHandle[Replica], max_request_bytes: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._max_request_bytes = max_request_bytes

    async def __call__(self, request: Request) -> Response:
        """Serve one request."""
        query = f"?{request.url.query}" if request.url.query else ""
        target = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1") + query
        if request.scope["path"] == "/metrics":
            return await self._metrics()
        is_post = request.method == "POST"
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_request_bytes:
                message = f"the body is larger than {self._max_request_bytes} bytes"
                return _refusal(ReplicaCall("", target, [], b""), 413, "invalid_request_error", "too_large", message)
        call = ReplicaCall(
            request.method,
            target,
            repeatable(_forwarded(list(request.headers.items())), body),
            body,
            prefix_of(body) if is_post else "",
        )
        for left in reversed(range(_TRIES)):
            answer = self._replicas.answer.remote(call)
            try:
                return await self._respond(call, answer)
            except BackPressureError:
                return _refusal(call, 429, "rate_limit_error", "queue_full", "all replicas are busy; try again soon")
            except (RayActorError, RayTaskError) as error:
                answer.cancel()
                log.warning("a replica failed; %d tries left (%s)", left, type(error).__name__)
        return _refusal(call, 503, "service_unavailable", "engine_unavailable", "the replica ended; try again")

    async def _metrics(self) -> Response:
        """Return the metrics of all replicas.

        If there are none, none is asked, because Ray would start one.
        """
        pages: dict[str, str] = {}

        # In sequence: the router identifies a waiting call by its HTTP request, so two calls would
        # hide each other.
        for name in await asyncio.to_thread(replica_names):
            call = ReplicaCall("GET", "/metrics", [], b"", replica=name)
            answer = self._replicas.answer.remote(call)
            try:
                async with asyncio.timeout(_SCRAPE_S):
                    response = await self._respond(call, answer)
            except (BackPressureError, RayActorError, RayTaskError, TimeoutError) as error:
                answer.cancel()
                log.warning("the metrics of a replica are missing (%s)", type(error).__name__)
                continue
            if response.status_code == 200:
                pages[response.headers[_REPLICA]] = bytes(response.body).decode()
        return Response(merged(pages), media_type=CONTENT_TYPE)

    async def _respond(self, call: ReplicaCall, answer: Any) -> Response:
        """Return the response of a replica, a stream in pieces and any other one when complete."""
        status, headers = await anext(answer)
        kind = dict(headers).get("content-type", "")
        if kind.startswith(_STREAMS):
            first = await anext(answer, b"")
            return StreamingResponse(rest_of(call, first, answer), status, dict(headers))
        return Response(b"".join([chunk async for chunk in answer]), status, dict(headers))


def replica_names() -> list[str]:
    """Return the ids of this application's replicas, also of starting ones.

    Ray's actor names end with them.
    """
    ours = f"::{serve.get_replica_context().app_name}#Replica#"
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"].rpartition("#")[2] for one in actors if ours in one["name"]]


async def rest_of(call: ReplicaCall, first: bytes, answer: Any) -> AsyncIterator[bytes]:
    """Yield the events of a stream; a broken stream ends with an error event."""
    num_events = 0
    try:
        yield first
        num_events += _events_in(first)
        async for chunk in answer:
            yield chunk
            num_events += _events_in(chunk)
    except (RayActorError, RayTaskError) as error:
        log.warning("a replica failed in the middle of a stream (%s)", type(error).__name__)
        yield _last_event(call, num_events)
    finally:
        answer.cancel()


_STREAMS = ("text/event-stream", "application/x-ndjson")
"""Types of answers that are passed on in pieces."""
_OLLAMA = "/api/"
_ENDED = "the replica ended in the middle of the answer; send the request again"


def _events_in(chunk: bytes) -> int:
    return chunk.count(b"\nevent: ") + chunk.startswith(b"event: ")


def _last_event(call: ReplicaCall, num_events: int) -> bytes:
    """Return the error event of a broken stream, in the format of its endpoint.

    num_events: events before it.
    """
    if call.target.startswith(_OLLAMA):
        return json.dumps({"error": _ENDED}).encode() + b"\n"
    if "/v1/messages" in call.target:
        data = {"type": "error", "error": {"type": "api_error", "message": _ENDED}}
        return f"event: error\ndata: {json.dumps(data)}\n\n".encode()
    error = {"message": _ENDED, "type": "service_unavailable", "param": None, "code": "engine_unavailable"}
    if "/v1/responses" in call.target:
        return (
            f"event: error\ndata: {json.dumps({'type': 'error', 'sequence_number': num_events, **error})}\n\n".encode()
        )
    return f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode()


def _refusal(call: ReplicaCall, status: int, kind: str, code: str, message: str) -> Response:
    body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    if "/v1/messages" in call.target:
        error_type = {413: "request_too_large", 429: "rate_limit_error"}.get(status, "overloaded_error")
        body = {"type": "error", "error": {"type": error_type, "message": message}}
    if call.target.startswith(_OLLAMA):
        body = {"error": message}
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return Response(json.dumps(body), status, headers, "application/json")


def _forwarded(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers without those of a connection."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _HOP_BY_HOP]


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


class Options(BaseModel):
    """Options of `build`, from the command line or from `serveConfigV2`.

    On the command line they are `serve run ... name=value`.
    """

    model_config = ConfigDict(extra="forbid")

    arguments: Annotated[list[str], BeforeValidator(_words)] = []
    """Arguments of `polydraft serve` in every replica, as a list or as in a shell; without any, the
    embedded pair is served.
    """
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float = Field(16, gt=0)
    """Target number of open requests per replica."""
    upscale_delay_s: float = Field(30, ge=0)
    """Time with too many open requests after which a replica is added."""
    downscale_delay_s: float = Field(600, ge=0)
    """Time with too few open requests after which a replica is removed."""
    max_ongoing_requests: int = Field(64, ge=1)
    """Maximum number of open requests per replica, including the daemon's queue beyond
    `--max-num-seqs`.
    """
    max_queued_requests: int = Field(1024, ge=-1)
    """Maximum number of requests that wait for a replica; further ones get 429."""
    num_cpus: float = Field(2, ge=0)
    num_gpus: float = Field(0, ge=0)
    """Resources that a replica reserves."""
    most_ahead: int = Field(8, ge=0)
    """Number of requests by which a prefix's replica may exceed the idlest one before others take
    over.
    """
    drain_timeout_s: float = Field(60, ge=0)
    start_timeout_s: float = Field(600, gt=0)
    max_request_bytes: int = Field(4 << 20, ge=1)
    """Maximum size of a forwarded body; the daemon's `--max-request-bytes` also applies."""


def daemon_arguments(wanted: Options) -> list[str]:
    """Return the arguments of `polydraft serve` in a replica; the last of repeated flags counts."""
    # Otherwise every daemon would use the cores that Ray has assigned to others.
    threads = str(max(1, int(wanted.num_cpus) - 1))
    return ["--shutdown-timeout", str(wanted.drain_timeout_s), "--num-threads", threads, *wanted.arguments]


def build(options: dict[str, Any]) -> serve.Application:
    """Build the application (`import_path: deploy.ray_app:build`); options: fields of `Options`."""
    wanted = Options.model_validate(options)
    router: dict[str, Any] = {
        "request_router_class": "deploy.ray_router.PrefixRouter",
        "request_router_kwargs": {"most_ahead": wanted.most_ahead},
    }
    replicas = serve.deployment(
        name="Replica",
        max_ongoing_requests=wanted.max_ongoing_requests,
        max_queued_requests=wanted.max_queued_requests,
        graceful_shutdown_timeout_s=wanted.drain_timeout_s + 5,
        ray_actor_options={"num_cpus": wanted.num_cpus, "num_gpus": wanted.num_gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=wanted.min_replicas,
            max_replicas=wanted.max_replicas,
            target_ongoing_requests=wanted.target_ongoing_requests,
            upscale_delay_s=wanted.upscale_delay_s,
            downscale_delay_s=wanted.downscale_delay_s,
        ),
        request_router_config=RequestRouterConfig(**router),
    )(Replica).bind(daemon_arguments(wanted), wanted.start_timeout_s)
    # Accepts the sum of the replicas' requests and the queue.
    front = serve.deployment(name="Front", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})(Front)
    return front.bind(replicas, wanted.max_request_bytes)

"""The daemon: binds, loads the models in the background, serves, drains, and exits.

Exit codes: 0 after a drain, 1 after a failure of the engine or of loading, 2 for a bad
configuration, 3 if the address cannot be bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import uvicorn
import uvloop

from engine.api import ConfigError, EngineConfig, EngineFacts, StepResults
from server.app import BODIES, build_app
from server.batches.batches import Batches, open_batches
from server.http.connections import Connection, Seldom, Waiting
from server.openai.generation_defaults import generation_defaults
from server.serving.engine_client import EngineClient
from server.serving.idle_sleep import IdleSleep
from server.serving.load_log import LoadLog
from server.serving.metrics import ServerMetrics
from server.serving.observer import Observer
from server.serving.tracing import Tracing
from server.settings.settings import Serve
from server.start_lines import start_lines
from server.state import Server
from server.text.dialogue import dialogue_of
from server.text.infill import infill_of
from server.text.shipped_templates import SHIPPED
from server.text.tokenizer import GenerationDefaults, Tokenizer
from server.text.turn_end import check_template, turn_remark
from server.wire.foreign_fields import FOREIGN
from server.wire.unsupported_fields import UnknownFields

log = logging.getLogger("polydraft")

# Longer than clients and proxies hold an idle connection (httpx, and so the openai client: 5 s;
# load balancers often 60 s; Go 90 s). A server that closes it first may cut off a request that is
# in transit.
_IDLE_CONNECTION_S = 120
_RESERVED_FILES = 48
"""Files opened after the start besides connections.

Uploads, a new engine after a sleep, connections accepted in one round of the loop.
"""
_FEW_CONNECTIONS = 64
_LAST_EVENTS_S = 1.2
"""Time that open streams have to send their last event."""
_ACCEPTED_AT_ONCE = 8
"""Connections accepted in a turn of the event loop. libuv accepts one per listening descriptor."""
_SHUTTING_DOWN = "the server is shutting down"
EXIT_OK = 0
EXIT_FAILURE = 1


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers; the daemon decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def engine_client(settings: Serve, config: EngineConfig) -> EngineClient:
    """Return a client with the limits of the settings, which has no process yet."""
    return EngineClient(
        config,
        settings.max_num_seqs + settings.max_num_queued_reqs,
        settings.stall_timeout,
        settings.request_timeout,
        settings.max_num_queued_tokens,
    )


def run(settings: Serve, config: EngineConfig, listener: socket.socket, process: subprocess.Popen[bytes]) -> int:
    """Serve until a signal stops the daemon; return the exit code.

    process: a new one for the engine. Raises ConfigError for an unusable
    tokenizer or chat template.
    """
    client = engine_client(settings, config)
    # The engine takes longest to load, so it starts before the tokenizer is read.
    client.connect(process)
    try:
        server = build_server(settings, client)
        daemon = _Daemon(server, listener)
    except BaseException:
        client.kill()
        raise
    # Objects created so far live as long as the daemon. Scanning them for garbage would delay every
    # stream.
    gc.freeze()
    gc.enable()
    try:
        return uvloop.run(daemon.serve())
    finally:
        server.tokenizer.close()


def build_server(settings: Serve, client: EngineClient) -> Server:
    """Build the state that routes share; raise ConfigError for a tokenizer or template."""
    model = client.config.model
    tokenizer_source, revision = model.tokenizer_source
    tokenizer = Tokenizer(
        tokenizer_source,
        _chat_template(settings),
        revision,
        has_plain_messages=settings.special_tokens_in_messages == "text",
    )
    check_template(tokenizer)
    defaults = GenerationDefaults()
    if settings.generation_config != "neutral":
        defaults = generation_defaults(model.target, model.revision)
    name = settings.served_name()
    metrics = ServerMetrics(name, settings.metrics_compat == "vllm")
    dialogue = dialogue_of(tokenizer, settings.tool_call_parser, settings.reasoning_parser)
    tracing = None
    if settings.otlp_traces_endpoint:
        tracing = Tracing(settings.otlp_traces_endpoint, name)
    return Server(
        settings=settings,
        client=client,
        tokenizer=tokenizer,
        defaults=defaults,
        observer=Observer(metrics, settings.enable_log_requests, tracing),
        model_name=name,
        dialogue=dialogue,
        thoughts=dialogue.thoughts,
        infill=infill_of(tokenizer, settings.fim_tokens),
        unknown_fields=UnknownFields(settings.strict_fields, BODIES, FOREIGN),
    )


def _chat_template(settings: Serve) -> str | None:
    """Return the text of `--chat-template`; raise ConfigError if it cannot be read."""
    source = SHIPPED.get(settings.chat_template or "", settings.chat_template)
    if not source:
        return None
    try:
        return Path(source).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {settings.chat_template}: cannot be read ({error})") from error


class _Daemon:
    """One run of the daemon."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener
        self._batches = open_batches(server)
        self._waiting = Waiting(server.settings.max_connections, server.settings.receive_timeout)
        self._uvicorn = _Uvicorn(_uvicorn_config(server, self._waiting, self._batches))
        self._stop_wanted = asyncio.Event()
        self._abort_wanted = asyncio.Event()

    async def serve(self) -> int:
        """Listen, load, serve and stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        client = self._server.client
        self._server.metrics.watch_engine(lambda: client.engine_pid)
        client.on_ready = self._on_ready
        client.on_step = self._on_step
        await client.start()
        copies = [self._listener.dup() for _ in range(_ACCEPTED_AT_ONCE - 1)]
        self._waiting.most = most_connections(self._waiting.most)
        if self._batches is not None:
            self._batches.start()
        listening = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener, *copies]))
        stopping = asyncio.create_task(self._stop_wanted.wait())
        dying = asyncio.create_task(client.ended.wait())
        reporting = None
        if self._server.settings.enable_log_stats:
            load = LoadLog(self._server.observer.live, self._num_blocks)
            reporting = asyncio.create_task(load.run())
        sleeping = asyncio.create_task(self._sleep_when_idle())
        await asyncio.wait({stopping, dying, listening, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        sleeping.cancel()
        for task in (listening, sleeping):
            if task.done():
                task.result()
        self._waiting.is_draining = True
        for connection in self._connections():
            connection.begin_drain()
        if self._batches is not None:
            await self._batches.stop()
        if stopping.done() and client.is_alive:
            await self._drain()
        code = self._exit_code()
        if reporting is not None:
            reporting.cancel()
        await self._close(listening)
        return code

    def _connections(self) -> list[Connection]:
        return [cast(Connection, connection) for connection in self._uvicorn.server_state.connections]

    async def _sleep_when_idle(self) -> None:
        """Let the engine sleep as configured, until it has failed or this task is cancelled."""
        client = self._server.client
        idle_s = self._server.settings.sleep_idle_seconds
        if idle_s:
            await IdleSleep(client, self._server.metrics, idle_s).run()
        await client.ended.wait()

    def _on_signal(self) -> None:
        if self._stop_wanted.is_set():
            self._abort_wanted.set()
        self._stop_wanted.set()

    def _on_ready(self, facts: EngineFacts) -> None:
        self._server.metrics.ready(facts)
        if self._server.client.facts is not None:  # it has slept
            return
        for line in start_lines(facts, self._server, self._address()):
            log.info(line)
        for warning in self._server.dialogue.warnings:
            log.warning(warning)
        if remark := turn_remark(self._server.tokenizer, facts.eos_token_ids):
            log.info(remark)

    def _on_step(self, step: StepResults) -> None:
        self._server.metrics.step(step)
        self._server.observer.live.step(step)

    def _num_blocks(self) -> int:
        """Return the number of blocks of the K/V cache; 0 while the model loads."""
        facts = self._server.client.facts
        return facts.num_blocks if facts else 0

    def _address(self) -> str:
        settings = self._server.settings
        if settings.uds:
            return f"unix:{settings.uds}"
        scheme = "https" if settings.ssl_certfile else "http"
        host = settings.host
        if ":" in host:
            host = f"[{host}]"
        port = self._listener.getsockname()[1]
        return f"{scheme}://{host}:{port}"

    async def _drain(self) -> None:
        client = self._server.client
        client.is_draining = True
        timeout_s = self._server.settings.shutdown_timeout
        if not client.is_awake:
            # Nothing is drained: the model would have to be loaded for the requests that wait.
            client.end_all(_SHUTTING_DOWN)
        log.info("draining %d requests, at most %.0f s", client.num_open, timeout_s)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        # Slow clients may still be reading answers that the engine has finished.
        answering = self._uvicorn.server_state.tasks
        while (client.num_open or answering) and client.is_alive and not self._abort_wanted.is_set():
            if asyncio.get_running_loop().time() > deadline_s:
                open_requests = max(client.num_open, len(answering))
                log.warning("the drain timed out with %d requests open; they are aborted", open_requests)
                break
            await asyncio.sleep(0.02)
        client.end_all(_SHUTTING_DOWN)

    def _exit_code(self) -> int:
        client = self._server.client
        if client.is_alive:
            return EXIT_OK
        if client.failure is not None:
            log.error("%s", client.failure.message)
            return client.failure.exit_code
        log.error("the engine process ended unexpectedly (exit status %s)", client.exit_status)
        return EXIT_FAILURE

    async def _close(self, listening: asyncio.Task[None]) -> None:
        if answering := set(self._uvicorn.server_state.tasks):
            await asyncio.wait(answering, timeout=_LAST_EVENTS_S)
        for connection in self._connections():
            connection.abandon()
        self._uvicorn.should_exit = True
        await asyncio.wait({listening}, timeout=5)
        await self._server.client.close()
        self._server.observer.close()
        if self._batches is not None:
            self._batches.close()


def _uvicorn_config(server: Server, waiting: Waiting, batches: Batches | None = None) -> uvicorn.Config:
    """Return uvicorn's settings; raise ConfigError for an unusable TLS key or certificate."""
    settings = server.settings
    if settings.ssl_keyfile and not settings.ssl_certfile:
        raise ConfigError("--ssl-keyfile: a key without its --ssl-certfile")
    for name in ("uvicorn.error", "polydraft.connections", "polydraft.rendering", "polydraft.batches"):
        logging.getLogger(name).addFilter(Seldom())
    config = uvicorn.Config(
        build_app(server, batches),
        # uvicorn calls it like the class.
        http=cast(type[asyncio.Protocol], functools.partial(Connection, waiting)),
        ws="none",
        log_config=None,
        # Forwarded headers count only from the configured proxies. Otherwise any client could forge
        # its address.
        proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
        log_level=max(logging.WARNING, logging.getLevelName(settings.log_level.upper())),
        access_log=False,
        lifespan="off",
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        timeout_keep_alive=_IDLE_CONNECTION_S,
        timeout_graceful_shutdown=1,
    )
    try:
        config.load()
    except OSError as error:  # also every ssl.SSLError
        raise ConfigError(f"--ssl-certfile {settings.ssl_certfile}: cannot be used ({error})") from error
    return config


def most_connections(wanted: int) -> int:
    """Return the number of connections that may be open.

    The wanted number, or all that the limit of open files allows for 0.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    num_left = soft - num_open
    allowed = max(1, num_left - _RESERVED_FILES, num_left // 2)
    if allowed < (wanted or _FEW_CONNECTIONS):
        text = "only %d connections can be served: %d of %d files are open; raise the limit of open files (ulimit -n)"
        log.warning(text, allowed, num_open, soft)
    return min(wanted or allowed, allowed)

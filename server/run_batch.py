"""`polydraft run-batch`: answers a file's lines without a daemon, and resumes.

Until all lines are answered, a file next to the output has the name of the run and the shape of
its drafts. They decide the answer of a line, so a line that is attempted again has the same one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import uvloop
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from engine.api import ConfigError, EngineConfig, EngineStopped
from server.batches.endpoint import NOT_NOW, LineEndpoint, shape_of_lines
from server.batches.lines import InputLine, read_lines, request_of
from server.batches.objects import ENDPOINTS, LineResponse, OutputLine
from server.daemon import EXIT_FAILURE, EXIT_OK, build_server, engine_client
from server.settings.flags import BatchCommand
from server.state import Server
from server.wire.ids import new_id

log = logging.getLogger("polydraft")

_CLIENT = "run-batch"
_RETRY_S = 0.05
_REPAIR_S = 10.0
"""Time after which an answer is written again that the disk had no room for."""
_WAITING = 8
"""Lines that wait for a seat, so that no seat is empty between two lines."""


def run_batch(command: BatchCommand, config: EngineConfig, process: subprocess.Popen[bytes]) -> int:
    """Answer the lines; return 0 once all are in the output, 1 after a failure or signal.

    process: a new one for the engine. Raises ConfigError for files that cannot be used.
    """
    lines = _lines_of(command.input_file)
    num_done, lines = _lines_left(command, lines)
    if not lines:
        _run_file(command).unlink(missing_ok=True)
        print(f"polydraft run-batch: all {num_done} lines are in {command.output_file} already", file=sys.stderr)
        return EXIT_OK
    shape = shape_of_lines(config.speculation, min(command.settings.max_num_seqs, len(lines)))
    identity = _run_identity(command, shape)
    client = engine_client(command.settings, config)
    client.connect(process)
    try:
        server = build_server(command.settings, client)
    except BaseException:
        client.kill()
        raise
    run = _Run(command, server, lines, num_done, identity)
    try:
        code = uvloop.run(run.run())
    finally:
        server.tokenizer.close()
    if code == EXIT_OK:
        _run_file(command).unlink(missing_ok=True)
    return code


def _run_file(command: BatchCommand) -> Path:
    return command.output_file.with_name(f"{command.output_file.name}.run")


class _Identity(msgspec.Struct, frozen=True):
    """Content of the run's file."""

    name: str
    shape: tuple[int, int]


def _run_identity(command: BatchCommand, shape: tuple[int, int]) -> _Identity:
    """Return the identity of the output's run; raise ConfigError if it cannot be stored.

    A new one has the given shape, and is stored before any line begins.
    """
    path = _run_file(command)
    try:
        if command.overwrites:
            path.unlink(missing_ok=True)
        with path.open("a+") as file:
            file.seek(0)
            if text := file.read():
                return msgspec.json.decode(text, type=_Identity)
            identity = _Identity(new_id(), shape)
            file.write(msgspec.json.encode(identity).decode())
            file.flush()
            os.fsync(file.fileno())
        return identity
    except OSError as error:
        raise ConfigError(f"{path}: the name of the run cannot be stored or read ({error})") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: is not of this version ({error}); delete it, or --overwrite") from error


def _lines_of(path: Path) -> list[InputLine]:
    """Return the lines of the input; raises ConfigError if there are none."""
    try:
        with path.open("rb") as file:
            if not file.seekable():
                raise ConfigError(f"{path}: a pipe, and each line is read again when it is answered; name a file")
            lines = list(read_lines(file, ENDPOINTS))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if not lines:
        raise ConfigError(f"{path}: has no lines")
    return lines


def _lines_left(command: BatchCommand, lines: Sequence[InputLine]) -> tuple[int, list[InputLine]]:
    """Return the number of lines that the output has already, and the other lines.

    Removes the last line of the output if it is not whole. Raises ConfigError for an
    output of other lines.
    """
    path = command.output_file
    if path.exists() and path.samefile(command.input_file):
        raise ConfigError(f"-o {path}: is the input; choose another file")
    try:
        with path.open("ab+") as output:
            if command.overwrites:
                output.truncate(0)
            output.seek(0)
            done = set(_ids_of(output))
    except OSError as error:
        reason = error.strerror or "a pipe; name a file"
        raise ConfigError(f"-o {path}: cannot be written ({reason})") from error
    if done - {line.line_id for line in lines}:
        raise ConfigError(
            f"-o {path}: has answers to other lines than {command.input_file}; choose another file, or --overwrite"
        )
    left = [line for line in lines if line.line_id not in done]
    return len(lines) - len(left), left


def _ids_of(output: BinaryIO) -> Iterator[str | None]:
    """Yield the ids of answers in a file, None for other lines; cut off a partial line."""
    end = 0
    for text in output:
        if not text.endswith(b"\n"):
            output.truncate(end)
            return
        end += len(text)
        try:
            yield msgspec.json.decode(text, type=_Id).id
        except msgspec.DecodeError:
            yield None


class _Id(msgspec.Struct):
    """Field that all answers have."""

    id: str


class _Run:
    """One run of the command."""

    def __init__(
        self, command: BatchCommand, server: Server, lines: Sequence[InputLine], num_done: int, identity: _Identity
    ) -> None:
        """lines: without an answer yet. num_done: lines that have one."""
        self._command = command
        self._server = server
        self._client = server.client
        self._endpoint = LineEndpoint(server)
        self._lines = lines
        self._num_done = num_done
        self._total = num_done + len(lines)
        self._num_errors = 0
        self._identity = identity
        self._is_writing = asyncio.Lock()

    async def run(self) -> int:
        """Load, answer the lines, and stop the engine."""
        client = self._client
        client.on_ready = self._server.metrics.ready
        client.on_step = self._server.metrics.step
        await client.start()
        work = asyncio.create_task(self._answer_all())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        dying = asyncio.create_task(client.ended.wait())
        await asyncio.wait({work, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        work.cancel()
        await asyncio.wait({work})
        code = self._exit_code(work)
        await client.close()
        self._server.observer.close()
        return code

    def _exit_code(self, work: asyncio.Task[None]) -> int:
        """Say how the run has ended; return the exit code."""
        path = self._command.output_file
        client = self._client
        if not work.cancelled() and work.exception() is None:
            text = f"{self._num_done} lines are in {path}"
            if self._num_errors:
                text += f", {self._num_errors} of this run with an error"
            print(f"polydraft run-batch: {text}", file=sys.stderr)
            return EXIT_OK
        if client.failure is not None:
            log.error("%s", client.failure.message)
        elif not client.is_alive:
            log.error("the engine process ended unexpectedly (exit status %s)", client.exit_status)
        elif not work.cancelled():
            log.error("the lines cannot be answered", exc_info=work.exception())
        left = f"{self._num_done} of {self._total} lines are in {path}; the same command answers the other lines"
        print(f"polydraft run-batch: {left}", file=sys.stderr)
        return client.failure.exit_code if client.failure is not None else EXIT_FAILURE

    async def _answer_all(self) -> None:
        while not self._client.is_ready:
            await asyncio.sleep(_RETRY_S)
        places = asyncio.Semaphore(self._server.settings.max_num_seqs + _WAITING)
        with (
            self._command.input_file.open("rb") as source,
            self._command.output_file.open("ab", buffering=0) as output,
            tqdm(total=self._total, initial=self._num_done, unit="line", mininterval=1, file=sys.stderr) as bar,
            logging_redirect_tqdm([log]),
        ):
            async with asyncio.TaskGroup() as group:
                for line in self._lines:
                    await places.acquire()
                    source.seek(line.start)
                    task = group.create_task(self._answer(line, source.read(line.size), output, bar))
                    task.add_done_callback(lambda _: places.release())

    async def _answer(self, line: InputLine, text: bytes, output: FileIO, bar: tqdm[Any]) -> None:
        response = None
        if line.error is None:
            response = await self._response(text, line.line_id)
        answer = OutputLine(line.line_id, line.custom_id, response, line.error)
        await self._write(msgspec.json.encode(answer) + b"\n", output)
        self._num_done += 1
        self._num_errors += response is None or response.status_code >= 400
        bar.update()

    async def _write(self, text: bytes, output: FileIO) -> None:
        """Write an answer whole, once the disk has room for it."""
        async with self._is_writing:
            while text:
                try:
                    text = text[output.write(text) :]
                except OSError as error:
                    path = self._command.output_file
                    log.warning("%s cannot be written (%s); lines wait until it can", path, error.strerror)
                    await asyncio.sleep(_REPAIR_S)

    async def _response(self, text: bytes, line_id: str) -> LineResponse:
        """Return the response of the endpoint, also if the engine is busy at first."""
        request = request_of(text)
        name = f"{self._identity.name}:{line_id}"
        while True:
            # The call of a line replaces the one of its task.
            attempt = self._endpoint.answer(request, _CLIENT, name, self._identity.shape)
            response = await asyncio.create_task(attempt)
            if response.status_code not in NOT_NOW:
                return response
            if not self._client.is_alive:
                raise EngineStopped("the engine has stopped")
            await asyncio.sleep(_RETRY_S)

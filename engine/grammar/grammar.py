"""Grammars: which tokens may follow an answer and a path of drafted tokens below it.

A grammar is a string that llguidance reads (from a JSON schema, a regular expression or Lark). A
separate process follows each grammar (`grammar_process.py`), with limits of time and memory. If a
grammar exceeds them or crashes its process, only its request ends with an error. All grammars of a
step compute at the same time. Not for: building grammars from requests
(`server/text/structured.py`).
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from engine.config import GrammarConfig
from engine.errors import DEAD_END, GRAMMAR_UNAVAILABLE, NOTHING_LEFT, RequestError
from engine.grammar.grammar_process import (
    KILL,
    START,
    Ask,
    Begun,
    Ended,
    FromChild,
    GaveUp,
    GrammarReady,
    Masks,
    Start,
    encode,
    from_child,
)
from engine.grammar.grammar_tokens import Vocabulary
from engine.request import GRAMMAR

Bools = npt.NDArray[np.bool_]
Paths = Sequence[Sequence[int]]

_AT_DEAD_END = (
    "the grammar was accepted, but after the answer so far it allows no token of this model's vocabulary",
    DEAD_END,
)
_AGAINST_MASKS = (
    "after the answer so far the grammar allows only tokens that bad_words and allowed_token_ids exclude; allow more",
    NOTHING_LEFT,
)
_LONGEST_MESSAGE = 1 << 20
_LEAST_WAIT_S = 0.001


class GrammarClient:
    """Position of a request's answer in its grammar."""

    def __init__(
        self,
        connection: Connection,
        grammar: str,
        vocab_size: int,
        limits: GrammarConfig,
        kill: Callable[[int], None],
    ) -> None:
        """connection: to the process that follows the grammar; kill: ends a process, by number."""
        self.failure: RequestError | None = None
        """Reason why the answer cannot continue."""
        self._connection = connection
        self._vocab_size = vocab_size
        self._limits = limits
        self._kill = kill
        self.process_id = 0
        """Process that follows the grammar; 0 until it has begun."""
        self._num_sent = -1
        """Tokens of the answer that the process knows; -1 before the first question."""
        self._masks: dict[tuple[int, ...], bytes] = {}
        """Masks of the current answer by path, as bits."""
        self._is_ready = False
        self._begin_clock()
        self._send(Start(grammar))

    def check_answer(self, emitted: Sequence[int]) -> None:
        """Set `failure` if a step has emitted a token where all masks together allowed none.

        emitted: the step's tokens after the answer for which masks were requested.
        """
        if self.failure is not None:
            return
        for depth, token in enumerate(emitted):
            mask = self._masks.get(tuple(emitted[:depth]))
            if mask is not None and not mask[token >> 3] >> (token & 7) & 1:
                reason, code = _AGAINST_MASKS if any(mask) else _AT_DEAD_END
                self.failure = RequestError(reason, GRAMMAR, code)
                return

    def is_ready(self) -> bool:
        """Whether masks can be requested. Raise RequestError if the grammar cannot be followed."""
        while not self._is_ready and self.failure is None and self._connection.poll():
            self._receive()
        if not self._is_ready and self.failure is None:
            self._check_time(self._limits.start_timeout_s)
        if self.failure is not None:
            raise self.failure
        return self._is_ready

    def seconds_read(self) -> float:
        """Return the CPU time that reading the grammar has taken; 0 before its process runs."""
        return self._computed_s() if self.process_id else 0.0

    def masks(self, answer: Sequence[int], paths: Paths) -> Callable[[], list[Bools | None]]:
        """Ask which tokens may follow each path: [V], None if a path has ended before.

        answer: the tokens so far; it only grows. The returned function waits, so ask all grammars
        first. If the grammar fails, all masks are None and `failure` is set.
        """
        has_grown = len(answer) != self._num_sent
        if has_grown:
            self._masks.clear()
        # A step may ask several times about an answer; after thoughts the answer may be empty.
        if has_grown or not answer:
            self._begin_clock()
        new_tokens = list(answer[max(0, self._num_sent) :])
        self._num_sent = len(answer)
        if self.failure is None:
            self._send(Ask(new_tokens, [list(path) for path in paths]))
        return lambda: self._wait_for_masks(paths)

    def _wait_for_masks(self, paths: Paths) -> list[Bools | None]:
        limit_s = self._limits.mask_timeout_s
        while self.failure is None:
            if not self._connection.poll(max(_LEAST_WAIT_S, limit_s - self._computed_s())):
                self._check_time(limit_s)
                continue
            message = self._receive()
            if isinstance(message, Masks):
                self._check_time(limit_s)
                for path, mask in zip(paths, message.masks, strict=True):
                    if mask is not None:
                        self._masks[tuple(path)] = mask
                return [self._unpacked(mask) for mask in message.masks]
        return [None] * len(paths)

    def _unpacked(self, mask: bytes | None) -> Bools | None:
        if mask is None:
            return None
        bits = np.frombuffer(mask, dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)

    def _send(self, message: Start | Ask) -> None:
        # The end of its process is detected when its answer is read.
        with contextlib.suppress(OSError):
            self._connection.send_bytes(encode(message))

    def _receive(self) -> FromChild | None:
        try:
            message = from_child.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            reason = "the process that follows it has ended, or cannot start; try again"
            self._fail(reason, GRAMMAR_UNAVAILABLE)
            return None
        if isinstance(message, Begun):
            self.process_id = message.process_id
            self._begin_clock()
        elif isinstance(message, GrammarReady):
            self._is_ready = True
        elif isinstance(message, GaveUp):
            self._fail(message.reason, message.code)
        elif isinstance(message, Ended):
            self._fail_for_end(message.exit_code)
        return message

    def _fail_for_end(self, exit_code: int) -> None:
        ended = "its process has ended: "
        if exit_code == -signal.SIGKILL:
            # The engine kills only processes that it no longer asks.
            reason = "the system killed it, probably because memory ran out; try again"
            self._fail(ended + reason, GRAMMAR_UNAVAILABLE)
        elif exit_code == -signal.SIGXCPU:
            self._fail_for_time(self._limits.start_timeout_s)
        else:
            self._fail(ended + "it needs more memory than allowed, or crashes; make it simpler")

    def _begin_clock(self) -> None:
        self._asked_s = time.monotonic()
        self._asked_cpu_s = self._cpu_s()

    def _computed_s(self) -> float:
        return self._cpu_s() - self._asked_cpu_s

    def _check_time(self, limit_s: float) -> None:
        """Fail if the process has computed longer than this since the last question."""
        waited_s = time.monotonic() - self._asked_s
        if not self.process_id:
            if waited_s >= self._limits.patience_s:
                reason = "the process that follows grammars does not answer; try again"
                self._fail(reason, GRAMMAR_UNAVAILABLE)
        elif self._computed_s() >= limit_s:
            self._fail_for_time(limit_s)
        elif waited_s >= limit_s + self._limits.patience_s:
            self._fail("the machine is too busy to follow it; try again", GRAMMAR_UNAVAILABLE)

    def _fail_for_time(self, limit_s: float) -> None:
        taken = f"it takes more than {1000 * limit_s:.0f} ms to compute what may follow"
        self._fail(f"{taken}; make it simpler")

    def _cpu_s(self) -> float:
        """Return the process's CPU time (clock_getcpuclockid(3)); 0 while its number is unknown."""
        if not self.process_id:
            return 0.0
        try:
            return time.clock_gettime((~self.process_id << 3) | 2)
        except OSError:
            return 0.0  # it has ended, as its connection will report

    def _fail(self, reason: str, code: str | None = None) -> None:
        """Set the failure if there is none. code: None if the grammar is the cause."""
        if self.failure is None:
            reason = f"the grammar cannot be used: {reason}"
            self.failure = RequestError(reason, GRAMMAR, code)

    def end(self) -> None:
        """Stop following the grammar and end the process, even while it computes."""
        if self.process_id:
            self._kill(self.process_id)
        self._connection.close()


class GrammarPool:
    """Starts grammars over one model's vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """vocabulary: read when the first grammar is started."""
        self._vocabulary = vocabulary
        self.process: subprocess.Popen[bytes] | None = None
        """Forks a process for each grammar; None until the first one."""
        self._control: socket.socket | None = None

    def start(self, grammar: str) -> GrammarClient:
        """Start following a grammar.

        `is_ready` reports when masks can be requested, or a failure.
        """
        control = self._running()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [START], [theirs.fileno()])
        # The child reads the grammar after the fork; the engine does not wait for it.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST_MESSAGE)
        size = self._vocabulary.vocab_size
        limits = self._vocabulary.limits
        return GrammarClient(Connection(ours.detach()), grammar, size, limits, self._kill)

    def _kill(self, process_id: int) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(KILL + process_id.to_bytes(8, "little"))

    def close(self) -> None:
        if self._control is not None and self.process is not None:
            self._control.close()
            self.process.wait()
        self._control = self.process = None

    def _running(self) -> socket.socket:
        """Return the socket of `process`, which is started if it does not run."""
        if self._control is not None and self.process is not None and self.process.poll() is None:
            return self._control
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-P", "-m", "engine.grammar.grammar_process", str(number)]
            self.process = subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)
        ours.send(encode(self._vocabulary))
        self._control = ours
        return ours

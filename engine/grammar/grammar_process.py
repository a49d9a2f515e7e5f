"""Follows grammars, one child for each: `python -m engine.grammar.grammar_process FD`.

Grammars come from untrusted clients, and the native library that follows them (llguidance) may
hang, exhaust memory or crash. So this process reads the model's vocabulary once and forks a child
for every grammar; a fork is cheap because memory is shared until it is written. The child has a
memory limit, follows one answer, and can be killed at any time. This process does not import torch
and has one thread, because a fork copies only the calling thread.

The engine sends a `Vocabulary` first; then, for every grammar, one byte with the child's end of a
pair of sockets. It ends a child through this process, its parent, so that it never kills a process
number that has been reused. The socket preserves message boundaries (SOCK_SEQPACKET). This process
keeps each child's own end open and reports there how the child has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.errors import NO_VOCABULARY
from engine.grammar.grammar_tokens import Vocabulary, read_vocabulary

if TYPE_CHECKING:  # the engine imports this module for its messages; only the process needs the library
    from llguidance import LLMatcher, LLTokenizer

START, KILL = b"s", b"k"
_LONGEST_MESSAGE = 1 << 16
_NICENESS = 10
_PR_SET_PDEATHSIG = 1
# Beginning of llguidance's message if no token may follow.
_DEAD_END = "NoExtensionBias"


class Start(msgspec.Struct, frozen=True, tag=True):
    """To a child: the grammar to follow."""

    grammar: str


class Ask(msgspec.Struct, frozen=True, tag=True):
    """To a child: request for masks after paths below the answer; the empty path is the answer."""

    answer: list[int]
    """Tokens since the last question."""
    paths: list[list[int]]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """From a child, at its start: its process number."""

    process_id: int


class GrammarReady(msgspec.Struct, frozen=True, tag=True):
    """From a child: the grammar can be followed."""


class Masks(msgspec.Struct, frozen=True, tag=True):
    """From a child: one bit per token for each path; None below a path that has ended before.

    No bit is set after a path that the grammar allows but cannot continue.
    """

    masks: list[bytes | None]


class GaveUp(msgspec.Struct, frozen=True, tag=True):
    """From a child: the grammar cannot be followed; code None blames the grammar."""

    reason: str
    code: str | None = None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """From the process: a child has ended, with an exit code or minus a signal's number."""

    exit_code: int


FromChild = Begun | GrammarReady | Masks | GaveUp | Ended
to_child: msgspec.msgpack.Decoder[Start | Ask] = msgspec.msgpack.Decoder(Start | Ask)
from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)
encode = msgspec.msgpack.Encoder().encode


class GrammarMatcher:
    """Position of an answer in its grammar.

    Each drafted path gets a copy (1 us). llguidance 1.9 does not always restore its state when it
    rolls back: some next masks differ.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._ends = frozenset(tokenizer.eos_tokens)
        only_ends = bytearray(-(-tokenizer.vocab_size // 8))
        for token in self._ends:
            only_ends[token // 8] |= _bit(token)
        self._has_begun = False
        self._only_ends = bytes(only_ends)
        self._all_but_ends = bytes(~byte & 0xFF for byte in only_ends)
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()

    @property
    def fault(self) -> str:
        """Return why the grammar cannot be followed; "" if it can, or if masks show a dead end."""
        if _is_dead_end(self._matcher):
            return "" if self._has_begun else "it allows no answer at all"
        if self._matcher.is_error():
            return _brief(self._matcher.get_error())
        return ""

    def masks(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        """Extend the answer by these tokens, and return a mask after each path below it."""
        self._has_begun = True
        self._matcher.consume_tokens(list(answer))
        return [self._mask(path) for path in paths]

    def _mask(self, path: Sequence[int]) -> bytes | None:
        if not self._ends.isdisjoint(path):
            return None
        matcher = self._matcher.deep_copy() if path else self._matcher
        if path and not matcher.consume_tokens(list(path)):
            return self._beyond(path)
        mask = bytes(matcher.compute_bitmask())
        if _is_dead_end(matcher):
            return bytes(len(mask))
        if path and matcher.is_error():
            # A limit of the library: an answer that reaches it fails when its tokens arrive, and
            # must not end before.
            return self._all_but_ends
        if matcher.is_accepting() or matcher.is_error():
            return mask
        return self._without_ends(mask)

    def _without_ends(self, mask: bytes) -> bytes:
        """Return a mask without ends, which a grammar may name as a part of its text."""
        if not any(mask[token // 8] & _bit(token) for token in self._ends):
            return mask
        cleared = bytearray(mask)
        for token in self._ends:
            cleared[token // 8] &= ~_bit(token)
        return bytes(cleared)

    def _beyond(self, path: Sequence[int]) -> bytes:
        """Return the mask below a path that cannot be followed.

        Without such a path only ends are allowed, because an empty mask would be a dead end. If a
        limit of the library ends the path, all but ends are allowed.
        """
        matcher = self._matcher.deep_copy()
        for token in path:
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                break
            if not mask[token // 8] & _bit(token):
                return self._only_ends
            if not matcher.consume_tokens([token]):
                break
        return self._all_but_ends


def _bit(token: int) -> int:
    return 1 << token % 8


def _is_dead_end(matcher: LLMatcher) -> bool:
    return matcher.is_error() and matcher.get_error().startswith(_DEAD_END)


def _brief(text: str) -> str:
    """Return an error's first line, with the cause below the library's picture of the place."""
    first, *lines = (text.strip() or "unknown error").splitlines()
    causes = [line.removeprefix("error:") for line in lines if line.startswith("error: ")]
    cause = causes[0] if causes else ""
    return first[:400] + cause[:400]


def follow(connection: Connection, tokenizer: LLTokenizer) -> None:
    """Follow one grammar until the engine closes the connection."""
    matcher: GrammarMatcher | None = None
    while True:
        try:
            message = to_child.decode(connection.recv_bytes())
        except EOFError:
            return
        masks: list[bytes | None] = []
        if isinstance(message, Start):
            matcher = GrammarMatcher(tokenizer, message.grammar)
            _limit_time(None)
        else:
            assert matcher is not None, "a question before the grammar"
            masks = matcher.masks(message.answer, message.paths)
        if matcher.fault:
            connection.send_bytes(encode(GaveUp(matcher.fault)))
        elif isinstance(message, Start):
            connection.send_bytes(encode(GrammarReady()))
        else:
            connection.send_bytes(encode(Masks(masks)))


def _go_first() -> None:
    """Let the system end this process first if memory runs out, and with its parent."""
    with contextlib.suppress(OSError, AttributeError):
        Path("/proc/self/oom_score_adj").write_text("1000")
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(more_bytes: int) -> None:
    """Limit this process to its present memory plus `more_bytes`."""
    with open("/proc/self/statm") as file:
        taken_bytes = int(file.read().split()[0]) * resource.getpagesize()
    most_bytes = taken_bytes + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float | None) -> None:
    """Limit the CPU time of this process, counted from its start; None removes the limit."""
    soft = resource.RLIM_INFINITY if seconds is None else math.ceil(seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _run_child(
    number: int,
    control: socket.socket,
    tokenizer: LLTokenizer | str,
    vocabulary: Vocabulary,
) -> None:
    """Run a child from its start to its end; never returns.

    number: file descriptor of its socket; tokenizer: the reason if it could not be read.
    """
    status = 1
    try:
        control.close()
        connection = Connection(number)
        connection.send_bytes(encode(Begun(os.getpid())))
        if isinstance(tokenizer, str):
            connection.send_bytes(encode(GaveUp(tokenizer, NO_VOCABULARY)))
        else:
            # Steps have priority over grammars that are being read; a step that waits for masks
            # leaves its core free.
            os.nice(_NICENESS)
            _go_first()
            _limit_memory(vocabulary.limits.memory_bytes)
            _limit_time(vocabulary.limits.start_timeout_s)
            # The library's panic messages may quote the client's grammar.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            follow(connection, tokenizer)
        status = 0
    finally:
        os._exit(status)


def serve(control: socket.socket) -> None:
    """Fork a child for every grammar until the engine ends, then end the remaining ones."""
    vocabulary = msgspec.msgpack.decode(control.recv(_LONGEST_MESSAGE), type=Vocabulary)
    tokenizer: LLTokenizer | str
    try:
        tokenizer = read_vocabulary(vocabulary)
    except BaseException as error:  # llguidance raises exceptions of many types, including panics
        needed = "structured output needs the model's tokenizer.json"
        tokenizer = f"{needed}; it cannot be read: {_brief(str(error))}"
    children: dict[int, int] = {}
    """Descriptor of each child's own socket, by process id."""
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            woken.recv(_LONGEST_MESSAGE)
            _report_ended(children)
        if control not in ready:
            continue
        data, received = socket.recv_fds(control, 9, 1)[:2]
        if not data:
            break
        if data[:1] == KILL:
            process_id = int.from_bytes(data[1:], "little")
            if process_id in children:
                os.kill(process_id, signal.SIGKILL)
            continue
        try:
            process_id = os.fork()
        except OSError:  # no room for another child: the engine finds its socket closed
            os.close(received[0])
            continue
        if not process_id:
            for number in children.values():
                os.close(number)
            _run_child(received[0], control, tokenizer, vocabulary)
        children[process_id] = received[0]
    for process_id in children:
        os.kill(process_id, signal.SIGKILL)


def _report_ended(children: dict[int, int]) -> None:
    """Report ended children to the engine, and forget them."""
    while children:
        process_id, status = os.waitpid(-1, os.WNOHANG)
        if not process_id:
            return
        number = children.pop(process_id)
        os.set_blocking(number, False)  # its buffer may be full
        with contextlib.suppress(OSError), Connection(number) as connection:
            connection.send_bytes(encode(Ended(os.waitstatus_to_exitcode(status))))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control)


if __name__ == "__main__":
    main()

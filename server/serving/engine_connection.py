"""A new engine process and the two sockets to it, from its launch to its end.

Not for: requests, or what the messages mean (`engine_client.py`).
"""

from __future__ import annotations

import subprocess

import zmq
import zmq.asyncio

from engine.api import EngineConfig, FromEngine, ToEngine, decode_from_engine, encode, launch
from server.serving.socket_folder import INBOX, OUTBOX, SocketFolder


class EngineConnection:
    """An engine process that has received its configuration, and the sockets to it."""

    def __init__(self, process: subprocess.Popen[bytes], config: EngineConfig, is_offline: bool = False) -> None:
        """Bind the sockets, and configure a new process; `open` or `kill` must follow.

        is_offline: whether it must take models from the hub's cache. Raises ConfigError if there is
        no place for the sockets.
        """
        self.process = process
        self._folder = SocketFolder()
        inbox = f"ipc://{self._folder.name}/{INBOX}"
        outbox = f"ipc://{self._folder.name}/{OUTBOX}"
        self._context = zmq.Context()
        self._bound_inbox = self._bind(zmq.PUSH, inbox)
        self._bound_outbox = self._bind(zmq.PULL, outbox)
        self._open_sockets: list[zmq.asyncio.Socket] = []
        try:
            launch(process, config, inbox, outbox, is_offline)
        except BaseException:  # also a signal that ends this process
            self.close()
            raise

    def _bind(self, socket_type: int, address: str) -> zmq.Socket[bytes]:
        """Return a socket with an unlimited queue, bound to an address."""
        socket = self._context.socket(socket_type)
        socket.set_hwm(0)
        socket.bind(address)
        return socket

    def open(self) -> None:
        """Allow to send and to receive, from within the event loop."""
        # Asynchronous wrappers of sockets that were bound before the event loop existed.
        self._to_engine = zmq.asyncio.Socket.from_socket(self._bound_inbox)
        self._from_engine = zmq.asyncio.Socket.from_socket(self._bound_outbox)
        self._open_sockets = [self._to_engine, self._from_engine]

    def send(self, message: ToEngine) -> None:
        """Send a message, at once."""
        # The socket's queue is unlimited.
        self._to_engine.send(encode(message))

    async def receive(self, wait_s: float) -> FromEngine | None:
        """Return the next message; None if none has arrived in `wait_s` seconds."""
        if not await self._from_engine.poll(wait_s * 1000):
            return None
        message: FromEngine = decode_from_engine(await self._from_engine.recv())
        return message

    @property
    def process_has_ended(self) -> bool:
        """Whether the process has exited."""
        return self.process.poll() is not None

    def leave_nothing(self) -> None:
        """Remove the sockets' folder once both are connected: a killed process leaves none."""
        if self._bound_inbox.poll(0, zmq.POLLOUT):
            self._folder.cleanup()

    def kill(self) -> None:
        """Kill the process before anything is read from it."""
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Release the sockets and their folder, not the process; idempotent."""
        for socket in self._open_sockets:
            socket.close(linger=0)  # the event loop no longer watches its descriptor
        self._context.destroy(linger=0)
        self._folder.cleanup()

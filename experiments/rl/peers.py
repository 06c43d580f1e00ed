"""Processes that notice each other's end: every one is connected to the first, which tells all others.

The kernel closes the connections of a process that is killed, wherever it was: in a collective, a compilation or a
reward function. A host that is gone stops answering the kernel's probes. JAX's own heartbeats notice both much later.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import IO, Final

DONE: Final = "done"
LOST: Final = "lost "
PROBES: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host from which nothing has come for 10 s is probed every 5 s, and is gone when 4 probes have no answer: 30 s."""
CONNECT_SECONDS: Final = 30
LONGEST_LINE: Final = 1000
"""So many characters are read of an introduction."""


class Door:
    """Where the first process lets the others in."""

    def __init__(self) -> None:
        self.server, self.password = socket.create_server(("", 0)), secrets.token_hex(16)

    @property
    def port(self) -> int:
        """The port that the others connect to."""
        return self.server.getsockname()[1]

    def admit(self, count: int) -> dict[str, socket.socket]:
        """The connections of so many processes that know the password, by their names.

        Raises:
            OSError: if they have not come in time.
        """
        admitted: dict[str, socket.socket] = {}
        self.server.settimeout(CONNECT_SECONDS)
        while len(admitted) < count:
            connection, _ = self.server.accept()
            connection.settimeout(CONNECT_SECONDS)
            password, name = _introduction(connection)
            if secrets.compare_digest(password, self.password):
                admitted[name] = connection
            else:
                connection.close()
        self.server.close()
        return admitted


def _introduction(connection: socket.socket) -> tuple[str, str]:
    """Password and name that a process says when it enters; nothing of whatever else has connected."""
    with contextlib.suppress(OSError, UnicodeDecodeError), connection.makefile() as file:
        password, _, name = file.readline(LONGEST_LINE).rstrip("\n").partition(" ")
        if password.isascii():
            return password, name
    return "", ""


def enter(host: str, port: int, password: str, name: str) -> socket.socket:
    """The connection of another process to the first one.

    Raises:
        OSError: if it cannot be reached.
    """
    connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    connection.sendall(f"{password} {name}\n".encode())
    return connection


class Peers:
    """The connections of one process, each read by a thread of its own.

    Args:
        connections: those of all others for the first process, that of the first for the others; by names.
        end: called once with what happened when a process is lost, on one of the threads; ends this process.
    """

    def __init__(self, connections: dict[str, socket.socket], end: Callable[[str], None]):
        self._connections, self._end = connections, end
        self._over = threading.Lock()
        for name, connection in connections.items():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in PROBES.items():
                if hasattr(socket, option):  # which is Linux; others probe when they like
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            threading.Thread(target=self._watch, args=(name, connection.makefile()), daemon=True).start()

    def tell(self, what: str) -> bool:
        """Tell all others that this process ends, and why, unless another one has been lost already; whether it did."""
        first = self._over.acquire(blocking=False)
        if first:
            self._send(LOST + what)
        return first

    def close(self) -> None:
        """Take leave of the others: they may end from here on."""
        if self._over.acquire(blocking=False):
            self._send(DONE)

    def _watch(self, name: str, file: IO[str]) -> None:
        what = f"{name} died"
        with contextlib.suppress(OSError):
            for line in file:
                if line.rstrip("\n") == DONE:
                    return
                what = line.rstrip("\n").removeprefix(LOST)
                break
        if self._over.acquire(blocking=False):
            self._send(LOST + what)
            self._end(what)

    def _send(self, line: str) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())

"""Connections between processes, by which every process notices quickly that another one has ended.

Every process is connected to the first one, which passes the news on. When a process is killed, the kernel closes its
connections, no matter whether it was in a collective, a compilation or a reward function. A host that is gone stops
answering the kernel's probes. JAX's own heartbeats would notice both much later.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import IO, Final

DONE: Final = "done"
"""The message of a process that has finished."""
LOST: Final = "lost "
"""The start of the message that a process was lost, before what happened."""
PROBES: Final = 4
"""The unanswered probes of the kernel after which a host is gone. They take two thirds of the patience."""
CONNECT_SECONDS: Final = 30
"""The time limit for a connection to be made."""
LONGEST_LINE: Final = 1000
"""The maximum number of characters that are read of an introduction."""


class Listener:
    """The server of the first process, to which the others connect with a password."""

    def __init__(self) -> None:
        self._server, self.password = socket.create_server(("", 0)), secrets.token_hex(16)

    @property
    def port(self) -> int:
        """The port that the others connect to."""
        return self._server.getsockname()[1]

    def accept(self, count: int) -> dict[str, socket.socket]:
        """Wait until ``count`` processes have connected with the password.

        Returns:
            Their connections by the names of the processes.

        Raises:
            OSError: if a process does not connect in time.
        """
        connections: dict[str, socket.socket] = {}
        self._server.settimeout(CONNECT_SECONDS)
        while len(connections) < count:
            connection, _ = self._server.accept()
            connection.settimeout(CONNECT_SECONDS)
            password, name = _read_introduction(connection)
            if secrets.compare_digest(password, self.password):
                connections[name] = connection
            else:
                connection.close()
        self._server.close()
        return connections


def _read_introduction(connection: socket.socket) -> tuple[str, str]:
    """Read the password and the name that a new connection sends. Both are empty if it sends something else."""
    with contextlib.suppress(OSError, UnicodeDecodeError), connection.makefile() as file:
        password, _, name = file.readline(LONGEST_LINE).rstrip("\n").partition(" ")
        if password.isascii():
            return password, name
    return "", ""


def connect(host: str, port: int, password: str, name: str) -> socket.socket:
    """Connect to the first process, and send password and name.

    Args:
        host: the host of the first process.
        port: the port of its listener.
        password: the password of its listener.
        name: the name of this process.

    Returns:
        The connection.

    Raises:
        OSError: if the first process cannot be reached.
    """
    connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    connection.sendall(f"{password} {name}\n".encode())
    return connection


class Peers:
    """The connections of one process, with one thread for each that reads from it.

    Args:
        connections: the connections by the names of the processes: on the first process to all others, on the others to
            the first.
        end: the function that ends this process. When a process is lost, one of the threads calls it once, with a
            sentence that says what happened.
        patience: the seconds without an answer after which a host is gone.
    """

    def __init__(self, connections: dict[str, socket.socket], end: Callable[[str], None], patience: int):
        self._connections, self._end = connections, end
        self._over = threading.Lock()
        for name, connection in connections.items():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            interval = max(round(patience / 6), 1)
            probes = {"TCP_KEEPIDLE": 2 * interval, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": PROBES}
            for option, value in probes.items():
                # Only Linux has these options. Other systems probe at their own intervals.
                if hasattr(socket, option):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            threading.Thread(target=self._watch, args=(name, connection.makefile()), daemon=True).start()

    def tell(self, reason: str) -> bool:
        """Tell all others that this process ends, and why, unless another process has been lost already.

        Returns:
            Whether the others were told.
        """
        first = self._over.acquire(blocking=False)
        if first:
            self._send(LOST + reason)
        return first

    def close(self) -> None:
        """Tell the others that this process has finished. From now on it ignores their ends."""
        if self._over.acquire(blocking=False):
            self._send(DONE)

    def _watch(self, name: str, file: IO[str]) -> None:
        """Read from one connection until its process has finished or is lost."""
        reason = f"{name} died"
        with contextlib.suppress(OSError):
            for line in file:
                if line.rstrip("\n") == DONE:
                    return
                reason = line.rstrip("\n").removeprefix(LOST)
                break
        if self._over.acquire(blocking=False):
            self._send(LOST + reason)
            self._end(reason)

    def _send(self, line: str) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())

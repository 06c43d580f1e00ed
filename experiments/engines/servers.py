"""The servers of an engine: requests with limits, answers, and servers that die and come back.

A server gets at most so many requests at a time as the settings say, the one with the fewest first. A server that does
not answer is *down*: its requests go to the others, and it is asked every second whether it is back. It then gets the
newest weights before it gets requests again.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import httpx2

from experiments.engines.settings import EngineRequests

PAUSE_SECONDS: Final = 1.0
"""The time between two questions whether a server is back."""
QUICK_SECONDS: Final = 10.0
"""The time within which a server must accept a connection, and answer whether it is healthy."""


class EngineError(ValueError):
    """The engine cannot go on. The message is one line with the address and the numbers."""


class ServerDown(Exception):
    """A server that does not answer, or answers that it cannot."""


class Server:
    """One server.

    Args:
        address: its address, ``http://host:port``.
        client: the HTTP client.
        settings: the limits of requests.
    """

    def __init__(self, address: str, client: httpx2.AsyncClient, settings: EngineRequests):
        self.address, self._client, self._settings = address.rstrip("/"), client, settings
        self.requests = 0
        """The number of requests that it has now."""
        self.up = True
        self._takes_keys: bool | None = None
        self.version: int | None = None
        """The version of its weights, as far as this process knows."""

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request, and return the answer.

        Raises:
            ServerDown: if there is no answer within the limit, or one that says that the server cannot.
            EngineError: if the server rejects the request, which another attempt would not change.
        """
        timeout = httpx2.Timeout(self._settings.seconds, connect=QUICK_SECONDS)
        try:
            response = await self._client.post(f"{self.address}{path}", json=dict(body), timeout=timeout)
        except (httpx2.HTTPError, OSError) as error:
            raise ServerDown(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
            raise EngineError(f"{self.address}{path}: {response.status_code} {_one_line(response.text)}")
        if response.status_code != 200:
            raise ServerDown(f"{response.status_code} {_one_line(response.text)}")
        try:
            return response.json()
        except ValueError:
            raise ServerDown(f"an answer that is not JSON: {_one_line(response.text)}") from None

    async def seed(self, key: int) -> int:
        """Return the seed for a random key of 64 bits: the key for servers of this project, 31 bits of it for others.

        Raises:
            ServerDown: if the server does not answer.
        """
        if self._takes_keys is None:
            info = await self._get("/get_model_info")
            self._takes_keys = isinstance(info, Mapping) and bool(info.get("takes_keys"))
        return key if self._takes_keys else key & 0x7FFFFFFF

    async def is_healthy(self) -> bool:
        """Ask whether the server answers."""
        try:
            await self._get("/health")
        except ServerDown:
            return False
        return True

    async def _get(self, path: str) -> Any:
        """Return the answer as JSON, or None if it is something else."""
        try:
            response = await self._client.get(f"{self.address}{path}", timeout=QUICK_SECONDS)
        except (httpx2.HTTPError, OSError) as error:
            raise ServerDown(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if response.status_code != 200:
            raise ServerDown(f"{path}: {response.status_code} {_one_line(response.text)}")
        try:
            return response.json()
        except ValueError:
            return None

    async def load(self, folder: str, version: int) -> None:
        """Let the server load a folder of weights.

        Raises:
            ServerDown: if it does not answer.
            EngineError: if it cannot load them.
        """
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
        answer = await self.post("/update_weights_from_disk", body)
        if not (isinstance(answer, Mapping) and answer.get("success")):
            message = answer.get("message", answer) if isinstance(answer, Mapping) else answer
            raise EngineError(f"{self.address}: it does not load {folder}: {_one_line(str(message))}")
        self.version = version


class Servers:
    """The servers of an engine, inside an event loop.

    Args:
        all_servers: the servers.
        settings: the limits of requests.
        folder: the folder of the newest weights. None if the servers have them.
        version: the version of the newest weights.
    """

    def __init__(self, all_servers: list[Server], settings: EngineRequests, folder: str | None, version: int):
        self._all, self._settings, self._folder, self._version = all_servers, settings, folder, version
        self._changed = anyio.Event()
        self._reasons: dict[str, str] = {}

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Server]:
        """Wait for a server with room for a request, and count the request for it.

        Raises:
            EngineError: if no server has been up for longer than the settings allow.
        """
        server = await self._wait_for_room()
        server.requests += 1
        try:
            yield server
        finally:
            server.requests -= 1
            self._notify()

    def mark_down(self, server: Server, reason: str) -> None:
        """Give a server no more requests, until `revive` finds that it answers and has sent it the newest weights."""
        server.up = False
        self._reasons[server.address] = reason
        self._notify()

    async def revive(self) -> None:
        """Ask the servers that are down whether they are back, for as long as the task runs."""
        while True:
            for server in self._all:
                if not server.up and await server.is_healthy():
                    await self._load(server)
            await anyio.sleep(PAUSE_SECONDS)

    async def load_all(self) -> None:
        """Let all servers load the newest weights, at the same time; those that are down do it when they are back.

        Raises:
            EngineError: if a server cannot load them, or none is up for longer than the settings allow.
        """
        async with anyio.create_task_group() as group:
            for server in self._all:
                group.start_soon(self._load, server)
        if not any(server.up for server in self._all):
            async with anyio.create_task_group() as group:
                group.start_soon(self.revive)
                async with self.borrow():
                    group.cancel_scope.cancel()

    async def _load(self, server: Server) -> None:
        try:
            if self._folder is not None:
                await server.load(self._folder, self._version)
        except ServerDown as error:
            self.mark_down(server, str(error))
        else:
            server.up = True
            self._notify()

    async def _wait_for_room(self) -> Server:
        while True:
            changed = self._changed
            up = [server for server in self._all if server.up]
            free = [server for server in up if server.requests < self._settings.at_once]
            if free:
                return min(free, key=lambda server: server.requests)
            with anyio.move_on_after(None if up else self._settings.patience) as waited:
                await changed.wait()
            if waited.cancelled_caught:
                down = "; ".join(f"{address}: {reason}" for address, reason in self._reasons.items())
                raise EngineError(f"no server has answered for {self._settings.patience:g} s: {down}")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]

"""The servers of an engine: requests with limits, answers, and servers that end and come back.

A server gets at most as many requests at a time as the settings allow; the server with the fewest gets the next one. It
gets requests only while it answers and has the newest weights. A server that does not answer is *down*: its requests go
to the others, and it is asked every second whether it is back. It then gets the newest weights before it gets requests
again.

New weights may come while requests run. Servers are then asked to interrupt them and answer with the tokens so far. No
other request is sent until all of them are answered and the servers have the weights. So the weights that sampled an
answer are those of the time when its request was sent.
"""

import functools
import math
import time
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import anyio
import httpx2

from experiments.engines.dialect import Dialect, ServerDown
from experiments.engines.protocol import EngineError
from experiments.engines.settings import EngineRequests
from experiments.engines.sglang import Sglang
from experiments.engines.vllm import Vllm
from relibra_jax.models import ModelConfig
from relibra_jax.support.json_text import parse_json

PAUSE_SECONDS: Final = 1.0
"""The time between two checks of whether a server is back, or has room."""
QUICK_SECONDS: Final = 10.0
"""The time within which a server must accept a connection, and answer whether it is healthy."""


class Weights(NamedTuple):
    """Weights that servers are to have."""

    number: int
    """The number of updates that made them."""
    folder: str | None
    """The folder that they load from. None if they were started with them."""
    version: str | None
    """The name that they answer with. None if they were started with them."""


class Server:
    """One server.

    Args:
        address: its address, ``http://host:port``.
        settings: the limits of requests.
        client: the HTTP client.
    """

    def __init__(self, address: str, settings: EngineRequests, client: httpx2.AsyncClient):
        self.address, self._settings, self._client = address.rstrip("/"), settings, client
        self.turn = anyio.Lock()
        """Held while it is asked what it has, or loads weights."""
        self.requests = 0
        """The number of requests that it has now."""
        self.down: str | None = None
        """Why it gets no requests. None while it answers."""
        self.version: str | None = None
        """The version of the weights that it has confirmed."""
        self.dialect: Dialect | None = None
        """Its interface. None until it is recognised."""
        self._running = set[anyio.CancelScope]()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request, again while the server says that it is busy, and return the answer.

        Raises:
            ServerDown: if there is no answer within the limit, or one that says that the server cannot.
            EngineError: if the server rejects the request, which another attempt would not change.
        """
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            try:
                return await self._post(path, body)
            finally:
                self._running.discard(scope)
        raise ServerDown(f"{path}: {self.down}")

    def give_up(self) -> None:
        """End the requests that run, which raise `ServerDown`: the server does not answer any more."""
        for scope in self._running:
            scope.cancel()

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        end = time.monotonic() + self._settings.seconds
        while True:
            response = await self._send("POST", path, max(end - time.monotonic(), 0.001), json=dict(body))
            if response.status_code not in (408, 429) or time.monotonic() > end:
                break
            await anyio.sleep(PAUSE_SECONDS)
        if 400 <= response.status_code < 500:
            raise EngineError(f"{self.address}{path}: {response.status_code} {_one_line(response.text)}")
        if response.status_code == 200 and not response.text:
            return None
        return self._json(path, response)

    async def ask(self, path: str, *, optional: bool = False) -> Any:
        """Return what the server tells about itself, or None if it is no JSON.

        Args:
            path: the path to ask.
            optional: whether to return None for a server without that path, instead of counting it as down.

        Raises:
            ServerDown: if it does not answer at once.
        """
        response = await self._send("GET", path, QUICK_SECONDS)
        if not response.text or (optional and response.status_code == 404):
            return None
        return self._json(path, response)

    async def recognise(self) -> None:
        """Find out which interface the server has.

        Raises:
            ServerDown: if it does not answer, or has no interface that is known.
        """
        if isinstance(await self.ask("/get_model_info", optional=True), Mapping):
            self.dialect = Sglang(self)
        elif isinstance(await self.ask("/version", optional=True), Mapping):
            self.dialect = Vllm(self)
        else:
            raise ServerDown("neither /get_model_info (SGLang) nor /version (vLLM) tells about it")

    async def load(self, folder: str, version: str) -> None:
        """Let the server load a folder of weights, unless it says that it has them.

        Raises:
            ServerDown: if it does not answer.
            EngineError: if it cannot load them.
        """
        assert self.dialect is not None, "recognise comes first"
        await self.dialect.load(folder, version)
        self.version = version

    async def describe(self, config: ModelConfig) -> None:
        """Ask the server what it is and which weights it has.

        Raises:
            ServerDown: if it does not answer, or says that it has other weights than it has confirmed.
            EngineError: if it says that it has another model, or that it cannot do what a run needs.
        """
        assert self.dialect is not None, "recognise comes first"
        actual = await self.dialect.describe(config)
        if self.version is not None and actual not in (None, self.version):
            raise ServerDown(f"it has weights of version {actual}, not {self.version}")

    async def _send(self, method: str, path: str, seconds: float, **content: Any) -> httpx2.Response:
        timeout = httpx2.Timeout(seconds, connect=min(seconds, QUICK_SECONDS))
        try:
            return await self._client.request(method, f"{self.address}{path}", timeout=timeout, **content)
        except (httpx2.HTTPError, OSError) as error:
            raise ServerDown(f"{type(error).__name__}: {error}".rstrip(": ")) from None

    def _json(self, path: str, response: httpx2.Response) -> Any:
        if response.status_code != 200:
            raise ServerDown(f"{path}: {response.status_code} {_one_line(response.text)}")
        try:
            return parse_json(response.text)
        except ValueError:
            raise ServerDown(f"{path}: an answer that is not JSON: {_one_line(response.text)}") from None


class Servers:
    """The servers of an engine, inside its event loop.

    Args:
        servers: the servers.
        settings: the limits of requests.
        config: the sizes of the model.
    """

    def __init__(self, servers: list[Server], settings: EngineRequests, config: ModelConfig):
        self._servers, self._settings, self._config = servers, settings, config
        self.weights: Weights | None = None
        """The newest weights. None before the first."""
        self.interrupts = 0
        """The number of times that requests were held, and interrupted."""
        self._held = False
        self._changed = anyio.Event()
        self._none_since = time.monotonic()
        """When the last server went down, if all are, or the last call began."""

    async def prepare(self) -> None:
        """Ask all servers what they have, and let those load the newest weights that do not have them.

        Servers that are down do so when they are back (`revive`).

        Raises:
            EngineError: if a server cannot load the weights, or has another model.
        """
        self._none_since = time.monotonic()
        async with anyio.create_task_group() as group:
            for server in self._servers:
                group.start_soon(self._ready, server)

    async def hold(self) -> None:
        """Send no other requests until `go_on`. Those that run may be interrupted."""
        self._held = True
        self.interrupts += 1

    async def interrupt(self) -> None:
        """Let servers interrupt the requests until all are answered: some may still have been on their way.

        Raises:
            EngineError: if a server cannot be interrupted.
        """
        while any(server.requests for server in self._servers):
            async with anyio.create_task_group() as group:
                for server in self._servers:
                    if server.requests:
                        group.start_soon(self._interrupt_one, server)
            with anyio.move_on_after(PAUSE_SECONDS):
                while any(server.requests for server in self._servers):
                    await self._changed.wait()

    async def load(self, weights: Weights) -> None:
        """Let the servers load weights, and wait until one has them.

        Raises:
            EngineError: if a server cannot load the weights, or no server answers.
        """
        self.weights = weights
        await self.prepare()
        await self._wait_for_one()

    async def go_on(self) -> None:
        """Send requests again."""
        self._held = False
        self._notify()

    @asynccontextmanager
    async def borrow(
        self, avoid: Set[str] = frozenset(), favourite: str | None = None
    ) -> AsyncIterator[Server]:
        """Wait for a server with room for a request, and count the request for it.

        Args:
            avoid: the addresses of servers to take only if no other is up.
            favourite: the address of the server to take if it has room. None for the one with the fewest requests.

        Raises:
            EngineError: if no server has been up for longer than the settings allow.
        """
        server = await self._wait_for_room(avoid, favourite)
        server.requests += 1
        try:
            yield server
        finally:
            server.requests -= 1
            self._notify()

    def mark_down(self, server: Server, reason: str) -> None:
        """Give a server no more requests, until `revive` finds that it answers and has the newest weights."""
        if self._up:
            self._none_since = time.monotonic()
        server.down = reason
        self._notify()

    async def wait_while_held(self) -> None:
        """Wait until `go_on`, if requests are held: servers may get weights that this process does not know yet."""
        while self._held:
            await self._changed.wait()

    async def revive(self, *, while_held: bool = False) -> None:
        """Ask the servers that are down whether they are back, for as long as the task runs."""
        while True:
            if not while_held:
                await self.wait_while_held()
            async with anyio.create_task_group() as group:
                for server in self._servers:
                    if server.down is not None:
                        group.start_soon(self._ready, server)
            await anyio.sleep(PAUSE_SECONDS)

    async def _wait_for_one(self) -> None:
        """Wait until a server is up, as `borrow` does."""
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(self.revive, while_held=True))
            while not self._up:
                await self._wait_for_change()
            group.cancel_scope.cancel()

    @property
    def _up(self) -> list[Server]:
        return [server for server in self._servers if server.down is None]

    async def _interrupt_one(self, server: Server) -> None:
        assert server.dialect is not None, "servers are recognised before they get requests"
        try:
            await server.dialect.interrupt()
        except ServerDown as error:
            self.mark_down(server, str(error))
            server.give_up()

    async def _ready(self, server: Server) -> None:
        """Bring a server up, or note why it is down."""
        async with server.turn:
            try:
                if server.down is not None:
                    await server.ask("/health")
                if server.down is not None or server.dialect is None:
                    await server.recognise()
                wanted = self.weights
                if wanted is not None and wanted.folder is not None and wanted.version is not None:
                    await self._load_one(server, wanted.folder, wanted.version)
                await server.describe(self._config)
            except ServerDown as error:
                self.mark_down(server, str(error))
            else:
                server.down = None
                self._notify()

    async def _load_one(self, server: Server, folder: str, version: str) -> None:
        if server.down is not None or server.version != version:
            await server.load(folder, version)

    async def _wait_for_room(self, avoid: Set[str], favourite: str | None) -> Server:
        while True:
            up = self._up
            wanted = [server for server in up if server.address not in avoid] or up
            free = [server for server in wanted if server.requests < self._settings.at_once]
            if free and not self._held:
                return min(free, key=lambda server: (server.address != favourite, server.requests))
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        """Wait until a server is up or has room, or the rest of the time without any server has passed."""
        changed, up = self._changed, self._up
        left = math.inf if up else self._none_since + self._settings.patience - time.monotonic()
        if left <= 0:
            down = "; ".join(f"{server.address}: {server.down}" for server in self._servers)
            raise EngineError(f"no server has answered for {self._settings.patience:g} s: {down}")
        with anyio.move_on_after(left):
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]

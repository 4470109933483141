"""A policy worker over HTTP that answers at once, slowly, wrongly or not at all, as a test wants it.

It speaks the part of the worker's interface that the router uses, counts what a correct router never does (a request
before weights were loaded, a swap with a request in flight), and can be killed and restarted on the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any

import orjson
import uvicorn
from starlette.types import Receive, Scope, Send

from dartrl.interfaces import Clock

Body = dict[str, Any]


class FakeWorker:
    """One worker on a loopback port."""

    def __init__(self, clock: Clock, *, name: str = "fake-0", seconds: float = 0.0, load_seconds: float = 0.0) -> None:
        """seconds, load_seconds: time that a reply and a load take on the clock."""
        self.name = name
        self.seconds = seconds
        self.load_seconds = load_seconds
        self.reply: Callable[[Body], Body] = _echo
        self.version: int | None = None
        self.refuses: set[int] = set()
        self.next_statuses: list[int] = []
        self.requests: list[Body] = []
        self.loads: list[Body] = []
        self.violations: list[str] = []
        self.num_in_flight = 0
        self._clock = clock
        self._life = 0
        self._port = 0
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL, the same over all lives."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Come to life, without weights."""
        self._life += 1
        self.version = None
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        self._server = _Server(uvicorn.Config(self, lifespan="off", log_level="critical", access_log=False))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await self._clock.sleep(0.002)

    async def kill(self) -> None:
        """Die at once: every connection breaks, nothing is answered."""
        assert self._server is not None and self._serving is not None, "not started"
        for connection in list(self._server.server_state.connections):
            transport: Any = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        for task in list(self._server.server_state.tasks):
            task.cancel()
        self._server.force_exit = True
        self._server.should_exit = True
        await self._serving
        self._server = self._serving = None
        self.num_in_flight = 0

    async def stop(self) -> None:
        """End, if it still lives."""
        if self._server is not None:
            await self.kill()

    # ------------------------------------------------------------------ ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        match scope["path"]:
            case "/v1/chat/completions":
                status, answer = await self._complete(orjson.loads(body))
            case "/control/load":
                status, answer = await self._load(orjson.loads(body))
            case "/control/status":
                status, answer = 200, {"worker": self.name, "instance": f"life-{self._life}", "weights_version": self.version}
            case path:
                status, answer = 404, {"error": {"message": f"no {path}"}}
        data = orjson.dumps(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _complete(self, body: Body) -> tuple[int, Body]:
        self.requests.append(body)
        if self.version is None:
            self.violations.append("request before weights were loaded")
        if self.next_statuses:
            status = self.next_statuses.pop(0)
            return status, {"error": {"message": f"status {status} on cue"}}
        version = self.version
        self.num_in_flight += 1
        try:
            await self._clock.sleep(self.seconds)
        finally:
            self.num_in_flight -= 1
        if self.version != version:
            self.violations.append("weights changed under a request")
        answer = self.reply(body)
        return 200, answer | {"dartrl": answer.get("dartrl", {}) | {"weights_version": version, "worker": self.name}}

    async def _load(self, body: Body) -> tuple[int, Body]:
        self.loads.append(body)
        if self.num_in_flight:
            self.violations.append("load with a request in flight")
        await self._clock.sleep(self.load_seconds)
        if body["version"] in self.refuses:
            return 409, {"error": {"message": f"version {body['version']} has a wrong checksum"}}
        self.version = body["version"]
        return 200, {"weights_version": self.version}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _read(receive: Receive) -> bytes:
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body", False):
            return data


def _echo(body: Body) -> Body:
    return {"object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}]}

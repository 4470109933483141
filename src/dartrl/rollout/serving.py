"""HTTP serving shared by the rollout service: a socket that is bound first, a token check, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import socket
from collections.abc import Generator
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from dartrl.errors import ConfigError

KEEP_ALIVE_SECONDS = 75
"""Idle connections stay open this long."""
SHUTDOWN_SECONDS = 2
"""Requests still running when a server ends get this long."""


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ConfigError that names the option and the remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        why = "another process listens on it" if error.errno == errno.EADDRINUSE else str(error.strerror)
        remedy = f"choose another with --set {option}=PORT, or 0 to let the system choose"
        raise ConfigError(f"{option} is {port} on {host}: {why}; {remedy}") from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """A server that leaves signals to the role."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(app: ASGIApp, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve until `stop` is set (by the role), then let running requests end for a moment."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=[listener]), name="http")
        stopped = group.create_task(stop.wait(), name="http-stop")
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        stopped.cancel()


class TokenGuard:
    """Lets only requests with the bearer token through to an app; everybody if there is no token."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._expected is not None:
            given = header(scope, b"authorization") or b""
            if not hmac.compare_digest(given, self._expected):
                await send_error(send, 401, "a valid token is needed: Authorization: Bearer $DARTRL_TOKEN")
                return
        await self._app(scope, receive, send)


def header(scope: Scope, name: bytes) -> bytes | None:
    """Value of a request header by its lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


async def send_body(send: Send, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """Answer with a JSON body that is ready."""
    fixed = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, status: int, message: str) -> None:
    """Answer with an error in OpenAI's form; 429 and 503 ask to come again in a second."""
    headers = ((b"retry-after", b"1"),) if status in (429, 503) else ()
    await send_body(send, status, error_body(status, message), headers)


def error_body(status: int, message: str) -> bytes:
    """JSON of an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 429 else "server_error"
    body: dict[str, Any] = {"error": {"message": message, "type": kind, "code": status}}
    return orjson.dumps(body)

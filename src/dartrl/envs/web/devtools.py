"""Client of one browser's DevTools pipe: NUL-separated JSON, every wait bounded, a dead browser noticed at once.

Woken by: the read pipe (replies, events, end of file). A reply that belongs to a cancelled or timed-out command is dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from dartrl.errors import EnvironmentCrashed, EnvironmentFault, EnvironmentTimeout
from dartrl.interfaces import Clock

EventHandler = Callable[[str, Mapping[str, Any]], None]
"""Called with an event's method and parameters; must not block."""

Reply = dict[str, Any]
"""Result object of one command."""


class DevTools(asyncio.Protocol):
    """One connection. Commands of one session are executed in the order in which they are sent."""

    def __init__(self, clock: Clock, *, timeout_seconds: float, what: str = "browser") -> None:
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._what = what
        self._last_id = 0
        self._pending: dict[int, tuple[asyncio.Future[Reply], str | None]] = {}
        self._handlers: dict[str, EventHandler] = {}
        self._chunks: list[bytes] = []
        self._reader: asyncio.ReadTransport | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._lost: str | None = None

    async def connect(self, read_fd: int, write_fd: int) -> None:
        """Take over both ends of the pipe; they are closed with the connection."""
        loop = asyncio.get_running_loop()
        self._writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(write_fd, "wb", 0))
        self._reader, _ = await loop.connect_read_pipe(lambda: self, os.fdopen(read_fd, "rb", 0))

    @property
    def is_open(self) -> bool:
        """False as soon as the browser has closed its end."""
        return self._lost is None and self._writer is not None

    def listen(self, session: str, handler: EventHandler) -> None:
        """Send the events of a session to `handler`."""
        self._handlers[session] = handler

    def send(self, method: str, params: Mapping[str, Any] | None = None, session: str | None = None) -> asyncio.Future[Reply]:
        """Send one command; the future ends with its result, an EnvironmentFault, or EnvironmentCrashed."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_mark_as_seen)  # a command may be sent and forgotten
        if self._writer is None or self._lost is not None:
            future.set_exception(EnvironmentCrashed(f"{self._what} is gone ({self._lost or 'not started'}); {method} was not sent"))
            return future
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        self._pending[self._last_id] = (future, session)
        self._writer.write(orjson.dumps(message) + b"\0")
        return future

    async def command(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        session: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Reply:
        """Result of one command. Raises EnvironmentTimeout, EnvironmentCrashed or EnvironmentFault."""
        replies = await self.collect([self.send(method, params, session)], method, timeout_seconds=timeout_seconds)
        return replies[0]

    async def collect(
        self, futures: Sequence[asyncio.Future[Reply]], what: str, *, timeout_seconds: float | None = None
    ) -> Sequence[Reply]:
        """Results of commands already sent, under one deadline; `what` names them in errors."""
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            async with self._clock.timeout(limit):
                return await asyncio.gather(*futures)
        except TimeoutError as error:
            raise EnvironmentTimeout(f"{self._what} did not answer {what} within {limit:g} s") from error

    def fail_session(self, session: str, reason: str) -> None:
        """End all waits of a session whose page is gone."""
        self._handlers.pop(session, None)
        self._fail(lambda owner: owner == session, reason)

    def close(self) -> None:
        """Close both ends; every wait ends with EnvironmentCrashed."""
        self._lose("connection closed")
        if self._reader is not None:
            self._reader.close()

    # -- asyncio.Protocol, called by the event loop

    def data_received(self, data: bytes) -> None:
        if b"\0" not in data:
            self._chunks.append(data)
            return
        first, *others = data.split(b"\0")
        messages = [b"".join((*self._chunks, first)), *others]
        self._chunks = [messages.pop()]
        for message in messages:
            self._receive(orjson.loads(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"pipe closed{f': {exc}' if exc else ''}")

    def _receive(self, message: Mapping[str, Any]) -> None:
        if "id" not in message:
            handler = self._handlers.get(message.get("sessionId", ""))
            if handler is not None:
                handler(message["method"], message.get("params", {}))
            return
        future, _ = self._pending.pop(message["id"], (None, None))
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(EnvironmentFault(f"{self._what} refused a command: {message['error']['message']}", "guest_api"))
        else:
            future.set_result(message["result"])

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        self._handlers.clear()
        self._fail(lambda owner: True, f"{self._what} is gone ({reason})")
        if self._writer is not None:
            self._writer.abort()

    def _fail(self, concerns: Callable[[str | None], bool], reason: str) -> None:
        for number, (future, owner) in list(self._pending.items()):
            if concerns(owner):
                del self._pending[number]
                if not future.done():
                    future.set_exception(EnvironmentCrashed(reason))


def _mark_as_seen(future: asyncio.Future[Reply]) -> None:
    if not future.cancelled():
        future.exception()

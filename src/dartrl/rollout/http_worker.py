"""A policy worker over HTTP: the router's side of `server.py`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import orjson

from dartrl.errors import PolicyFault, PolicyUnavailable, WeightsRejected
from dartrl.interfaces import Clock
from dartrl.records import WeightsVersion
from dartrl.rollout.fleet import WorkerStatus
from dartrl.rollout.http_peer import HttpPeer, Reply, error_message

STATUS_SECONDS = 10.0
"""A worker that does not tell its state within this time is lost; long, because a busy machine answers late."""
LOAD_SECONDS = 600.0
"""Deadline of loading weights; a large model on a cold disk takes minutes."""


class HttpWorker:
    """WorkerPort of one base URL."""

    def __init__(self, url: str, *, clock: Clock, probe_tolerance: float, token: str | None = None) -> None:
        """url: such as http://127.0.0.1:7001. probe_tolerance: largest difference in nats that a load may show."""
        self.url = url.rstrip("/")
        self._probe_tolerance = probe_tolerance
        self._peer = HttpPeer(self.url, clock=clock, token=token)

    @property
    def name(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc

    async def complete(self, body: bytes, *, timeout_seconds: float) -> Reply:
        """The worker's answer to a chat completion, untouched. Raises PolicyOverloaded, PolicyUnavailable or PolicyFault."""
        return await self._peer.request("POST", "/v1/chat/completions", body, timeout_seconds=timeout_seconds)

    async def status(self) -> WorkerStatus:
        """What the worker says about itself. Raises PolicyUnavailable if it does not say it properly in time."""
        try:
            reply = await self._peer.request("GET", "/control/status", timeout_seconds=STATUS_SECONDS)
            body: Any = reply.json()
        except PolicyUnavailable:
            raise
        except PolicyFault as fault:
            raise PolicyUnavailable(str(fault)) from fault
        match body:
            case {"instance": str(instance), "weights_version": int() | None as version}:
                return WorkerStatus(instance, version, loads_while_serving=body.get("loads_while_serving") is True)
            case _:
                raise PolicyUnavailable(
                    f"{self.url}/control/status answers {reply.status} {reply.body[:120]!r}; is it a dartrl worker?"
                )

    async def load(self, weights: WeightsVersion) -> None:
        """Return once the worker samples from these weights.

        Raises WeightsRejected if it refuses them and keeps the old ones, PolicyFault or PolicyUnavailable if it fails.
        """
        body = {
            "version": weights.version,
            "path": weights.path,
            "checksum": weights.checksum,
            "probe_tolerance": self._probe_tolerance,
        }
        reply = await self._peer.request("POST", "/control/load", orjson.dumps(body), timeout_seconds=LOAD_SECONDS)
        if reply.status in (409, 422):
            raise WeightsRejected(f"worker {self.name} refuses version {weights.version}: {error_message(reply)}")
        if reply.status != 200:
            raise PolicyFault(f"worker {self.name} answers {reply.status} to a load: {error_message(reply)}")

    async def close(self) -> None:
        """Release the connections."""
        await self._peer.close()

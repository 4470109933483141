"""The router process: one address in front of all policy workers, on three ports.

    inference  POST /v1/chat/completions, GET /v1/models, GET /health
    control    GET /workers, POST /workers {"url"}, POST /drain {"worker"}, POST /resume {"worker"}
    metrics    GET /metrics (Prometheus), GET /health

Bodies pass through as bytes: the router neither reads requests nor replies. Which worker gets a request, the queue and the
retries are in `fleet.py`, changes of weights in `weight_sync.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dartrl.config import RunConfig
from dartrl.errors import ConfigError, PolicyFault, PolicyOverloaded, PolicyUnavailable
from dartrl.interfaces import Clock, Ledger
from dartrl.metrics import Meter
from dartrl.rollout.client import AFFINITY_HEADER
from dartrl.rollout.fleet import Fleet, Worker, WorkerState
from dartrl.rollout.http_worker import HttpWorker
from dartrl.rollout.prometheus import FleetCollector
from dartrl.rollout.serving import TokenGuard, bind, error_body, header, send_body, send_error, serve
from dartrl.rollout.weight_sync import WeightSync

log = logging.getLogger(__name__)

BATCHES_IN_FLIGHT = 2
"""Batches that a worker may hold: one that it computes and one that waits, so that it never starves."""
LARGEST_BODY_BYTES = 256 * 2**20
"""Larger requests are refused."""

_AFFINITY = AFFINITY_HEADER.encode()


class RouterService:
    """Router, weight sync and their three servers."""

    def __init__(
        self,
        config: RunConfig,
        *,
        ledger: Ledger,
        clock: Clock,
        meter: Meter,
        workers: Sequence[str],
        token: str | None = None,
    ) -> None:
        """workers: base URLs. token: wanted from every caller if set. Raises ConfigError off loopback without a token."""
        rollout = config.rollout
        if token is None and rollout.host not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError(f"rollout.host is {rollout.host}; off loopback a token is required: set DARTRL_TOKEN")
        self.fleet: Fleet[HttpWorker] = Fleet(
            clock=clock, meter=meter, capacity=BATCHES_IN_FLIGHT * rollout.max_batch, max_waiting=rollout.max_waiting
        )
        self.sync = WeightSync(
            self.fleet,
            ledger=ledger,
            clock=clock,
            meter=meter,
            poll_seconds=rollout.sync_seconds,
            drain_timeout_seconds=rollout.drain_timeout_seconds,
        )
        self._config = config
        self._clock = clock
        self._meter = meter
        self._token = token
        for url in workers:
            self.add_worker(url)

    def add_worker(self, url: str) -> Worker[HttpWorker]:
        """A worker at that address joins the fleet; it serves once it has the fleet's weights."""
        return self.fleet.add(
            HttpWorker(url, clock=self._clock, probe_tolerance=self._config.rollout.probe_tolerance, token=self._token)
        )

    async def run(self, stop: asyncio.Event, *, started: asyncio.Future[dict[str, int]] | None = None) -> None:
        """Serve until `stop` is set (by the role). Raises ConfigError if a port is taken.

        started: receives the ports in use (inference, control, metrics).
        """
        rollout = self._config.rollout
        with contextlib.ExitStack() as bound:
            listeners: dict[str, socket.socket] = {}
            for service, option in (("inference", "port"), ("control", "control_port"), ("metrics", "metrics_port")):
                listener = bind(rollout.host, getattr(rollout, option), f"rollout.{option}")
                listeners[service] = bound.enter_context(contextlib.closing(listener))
            ports = {service: listener.getsockname()[1] for service, listener in listeners.items()}
            log.info("router ready host=%s ports=%s workers=%s", rollout.host, ports, list(self.fleet.workers))
            try:
                async with asyncio.TaskGroup() as group:
                    syncing = group.create_task(self.sync.run(stop), name="weight-sync")
                    for service, listener in listeners.items():
                        group.create_task(serve(TokenGuard(self._app(service), self._token), listener, stop), name=service)
                    if started is not None:
                        started.set_result(ports)
                    await stop.wait()
                    syncing.cancel()
            finally:
                for worker in self.fleet.workers.values():
                    await worker.port.close()
        log.info("router ended")

    def _app(self, service: str) -> ASGIApp:
        if service == "inference":
            return InferenceApp(self.fleet, timeout_seconds=self._config.rollout.request_timeout_seconds, meter=self._meter)
        return self._control_app() if service == "control" else self._metrics_app()

    # ------------------------------------------------------------------ control

    def _control_app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/workers", self._list_workers, methods=["GET"]),
                Route("/workers", self._register, methods=["POST"]),
                Route("/drain", self._drain, methods=["POST"]),
                Route("/resume", self._resume, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ]
        )

    async def _list_workers(self, _: Request) -> Response:
        target = self.sync.target
        body = {
            "weights_version": target.version if target else None,
            "waiting": self.fleet.num_waiting,
            "workers": [describe_worker(worker) for worker in self.fleet.workers.values()],
        }
        return JSONResponse(body)

    async def _register(self, request: Request) -> Response:
        url = await _field(request, "url")
        if url is None or not url.startswith(("http://", "https://")):
            return _error(400, 'the body must be {"url": "http://HOST:PORT"}')
        return JSONResponse(describe_worker(self.add_worker(url)), status_code=201)

    async def _drain(self, request: Request) -> Response:
        """Take a worker out of service until it is resumed; answers when its last request has ended."""
        worker = self.fleet.workers.get(await _field(request, "worker") or "")
        if worker is None:
            return self._unknown_worker()
        self.fleet.hold(worker)
        is_idle = await self.fleet.drain(worker, self._config.rollout.drain_timeout_seconds)
        return JSONResponse(describe_worker(worker) | {"drained": is_idle}, status_code=200 if is_idle else 504)

    async def _resume(self, request: Request) -> Response:
        worker = self.fleet.workers.get(await _field(request, "worker") or "")
        if worker is None:
            return self._unknown_worker()
        self.fleet.resume(worker)
        return JSONResponse(describe_worker(worker))

    def _unknown_worker(self) -> Response:
        return _error(404, f'the body must name a worker: {{"worker": NAME}} with NAME one of {", ".join(self.fleet.workers)}')

    # ------------------------------------------------------------------ metrics and health

    def _metrics_app(self) -> Starlette:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(FleetCollector(self.fleet, self._meter))

        async def metrics(_: Request) -> Response:
            return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

        return Starlette(routes=[Route("/metrics", metrics), Route("/health", self._health)])

    async def _health(self, _: Request) -> Response:
        return Response(health_body(self.fleet), health_status(self.fleet), media_type="application/json")


class InferenceApp:
    """The data path, as a bare ASGI app."""

    def __init__(self, fleet: Fleet[HttpWorker], *, timeout_seconds: float, meter: Meter) -> None:
        """timeout_seconds: deadline of one reply, queueing included."""
        self._fleet = fleet
        self._timeout_seconds = timeout_seconds
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["method"], scope["path"]:
            case "POST", "/v1/chat/completions":
                await self._complete(scope, receive, send)
            case "GET", "/v1/models":
                await send_body(send, 200, models_body(self._fleet))
            case "GET", "/health":
                await send_body(send, health_status(self._fleet), health_body(self._fleet))
            case method, path:
                await send_error(send, 404, f"{method} {path} does not exist; this port serves /v1/chat/completions and /v1/models")

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        if body is None:
            return
        if len(body) > LARGEST_BODY_BYTES:
            await send_error(send, 413, f"the request has more than {LARGEST_BODY_BYTES} bytes; send fewer or smaller images")
            return
        affinity = (header(scope, _AFFINITY) or b"").decode("latin-1")
        try:
            reply = await self._fleet.submit(
                lambda worker: worker.complete(body, timeout_seconds=self._timeout_seconds),
                affinity=affinity,
                timeout_seconds=self._timeout_seconds,
            )
        except PolicyOverloaded as error:
            await send_error(send, 429, str(error))
        except PolicyUnavailable as error:
            await send_error(send, 503, str(error))
        except PolicyFault as error:
            await send_error(send, 500, str(error))
        else:
            await send_body(send, reply.status, reply.body)


def describe_worker(worker: Worker[HttpWorker]) -> dict[str, Any]:
    """One worker in JSON."""
    return {
        "name": worker.name,
        "url": worker.port.url,
        "state": str(worker.state),
        "held": worker.is_held,
        "weights_version": worker.version,
        "in_flight": worker.num_in_flight,
        "replies": worker.num_replies,
    }


def models_body(fleet: Fleet[HttpWorker]) -> bytes:
    """The model list in OpenAI's form, with the weights version of each serving worker."""
    serving = {worker.name: worker.version for worker in fleet.workers.values() if worker.state is WorkerState.SERVING}
    model = {"id": "policy", "object": "model", "created": 0, "owned_by": "dartrl", "dartrl": {"weights_versions": serving}}
    return orjson.dumps({"object": "list", "data": [model]})


def health_status(fleet: Fleet[HttpWorker]) -> int:
    """200 while at least one worker serves, else 503."""
    return 200 if any(worker.state is WorkerState.SERVING for worker in fleet.workers.values()) else 503


def health_body(fleet: Fleet[HttpWorker]) -> bytes:
    """States of all workers."""
    states = {worker.name: str(worker.state) for worker in fleet.workers.values()}
    return orjson.dumps({"status": "ok" if health_status(fleet) == 200 else "no worker serves", "workers": states})


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body (at most a little more than allowed), or None if the caller went away."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size <= LARGEST_BODY_BYTES + len(chunk):
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _field(request: Request, name: str) -> str | None:
    """A text field of a JSON body; None if there is none."""
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError:
        return None
    value = body.get(name) if isinstance(body, dict) else None
    return value if isinstance(value, str) else None


def _error(status: int, message: str) -> Response:
    return Response(error_body(status, message), status, media_type="application/json")

"""HTTP face of one policy worker: chat completions, and control over its weights.

POST /v1/chat/completions   one reply; 400 bad request, 429 queue full, 503 no weights or too late, each with the reason
GET  /v1/models, /health    what is served; 503 from /health until weights are loaded
POST /control/load          {version, path, checksum, probe_tolerance}: change weights between replies; 409 while another load is
                            under way, 422 if manifest, fingerprint or probes disagree, and the old weights stay in service
GET  /control/status        name, instance (differs after a restart), version, queue lengths
"""

from __future__ import annotations

import itertools
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dartrl.errors import ConfigError, DartrlError, PolicyOverloaded, PolicyUnavailable, WeightsRejected
from dartrl.records import WeightsVersion
from dartrl.rollout.embedded_engine import EmbeddedEngine
from dartrl.rollout.serving import TokenGuard, error_body
from dartrl.rollout.wire import DEFAULT_MODEL, generation_to_json, request_from_json

LARGEST_BODY_BYTES = 64 << 20
"""Larger requests are refused."""
_STATUS_OF = ((ConfigError, 400), (PolicyOverloaded, 429), (PolicyUnavailable, 503), (WeightsRejected, 422))


class _LoadBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=0)
    path: str = Field(min_length=1)
    checksum: str = Field(min_length=1)
    probe_tolerance: float = Field(gt=0, allow_inf_nan=False)


def create_worker_app(engine: EmbeddedEngine, *, token: str | None = None) -> Starlette:
    """The app of a worker whose engine runs; token: wanted from every caller if set."""
    worker = _Worker(engine)
    routes = [
        Route("/v1/chat/completions", worker.complete, methods=["POST"]),
        Route("/v1/models", worker.models),
        Route("/health", worker.health),
        Route("/control/load", worker.load, methods=["POST"]),
        Route("/control/status", worker.status),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TokenGuard, token=token)] if token else [])


class _Worker:
    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    async def complete(self, request: Request) -> Response:
        try:
            body = await _read_json(request)
            engine = self._engine
            wanted = request_from_json(body, default_id=f"{engine.instance}-{next(self._numbers)}")
            generation = await engine.generate(wanted)
        except DartrlError as error:
            return _error(error)
        model = body.get("model")
        created = int(engine.now())
        return _json(generation_to_json(generation, model=model if isinstance(model, str) else DEFAULT_MODEL, created=created))

    async def models(self, request: Request) -> Response:
        version = self._engine.status()["weights_version"]
        model = {"id": DEFAULT_MODEL, "object": "model", "created": 0, "owned_by": "dartrl", "dartrl": {"weights_version": version}}
        return _json({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        is_ready = bool(self._engine.status()["ready"])
        return _json({"status": "ok" if is_ready else "no weights"}, 200 if is_ready else 503)

    async def status(self, request: Request) -> Response:
        return _json(self._engine.status())

    async def load(self, request: Request) -> Response:
        try:
            parsed = _LoadBody.model_validate(await _read_json(request))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in problem["loc"]) or "body"
            return _error(ConfigError(f"load field {where}: {problem['msg']}"))
        except DartrlError as error:
            return _error(error)
        loading = self._engine.status()["loading"]
        if loading is not None:
            return Response(error_body(409, f"version {loading} is being loaded; wait for it"), 409, media_type="application/json")
        weights = WeightsVersion(parsed.version, parsed.path, parsed.checksum, training_step=0, parent=None)
        try:
            difference = await self._engine.load(weights, probe_tolerance=parsed.probe_tolerance)
        except DartrlError as error:
            return _error(error)
        return _json({"weights_version": parsed.version, "probe_difference": difference})


async def _read_json(request: Request) -> dict[str, Any]:
    chunks: list[bytes] = []
    size_bytes = 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes > LARGEST_BODY_BYTES:
            raise ConfigError(f"the request has more than {LARGEST_BODY_BYTES} bytes; send fewer or smaller images")
        chunks.append(chunk)
    try:
        body: Any = orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"the request body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError("the request body is no JSON object")
    return body


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _error(error: DartrlError) -> Response:
    status = next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 500)
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(error_body(status, str(error)), status, headers, media_type="application/json")

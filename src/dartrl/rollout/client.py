"""The policy as the runners see it: one router behind an address."""

from __future__ import annotations

import orjson

from dartrl.errors import PolicyFault
from dartrl.interfaces import Clock, GenerateRequest
from dartrl.rollout.http_peer import HttpPeer, error_message
from dartrl.rollout.wire import generation_from_json, request_to_json
from dartrl.types import Generation

AFFINITY_HEADER = "x-dartrl-affinity"
"""Carries the trajectory id, so that the router need not read the body."""


class HttpPolicyClient:
    """PolicyClient over OpenAI chat completions."""

    def __init__(self, base_url: str, *, timeout_seconds: float, clock: Clock, token: str | None = None) -> None:
        """timeout_seconds: deadline of one reply. token: bearer token, if the service wants one."""
        self._peer = HttpPeer(base_url, clock=clock, token=token)
        self._timeout_seconds = timeout_seconds
        self._clock = clock

    async def generate(self, request: GenerateRequest) -> Generation:
        """One reply.

        Raises PolicyOverloaded (429), PolicyUnavailable (502 to 504, no connection, no answer in time) or PolicyFault (any
        other refusal, or a reply that is incomplete).
        """
        started = self._clock.now()
        reply = await self._peer.request(
            "POST",
            "/v1/chat/completions",
            orjson.dumps(request_to_json(request)),
            timeout_seconds=self._timeout_seconds,
            headers={AFFINITY_HEADER: request.affinity} if request.affinity else None,
        )
        if reply.status != 200:
            raise PolicyFault(f"request {request.id} was refused with status {reply.status}: {error_message(reply)}")
        return generation_from_json(reply.json(), request=request, seconds=self._clock.now() - started)

    async def close(self) -> None:
        """Release the connections."""
        await self._peer.close()

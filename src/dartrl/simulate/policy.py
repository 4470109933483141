"""Simulated policy workers behind the real fleet: replies take time, get better with the version, and workers crash."""

from __future__ import annotations

import math
import random

import numpy as np

from dartrl.errors import PolicyOverloaded, PolicyUnavailable
from dartrl.interfaces import Clock, GenerateRequest, ImageRef
from dartrl.records import WeightsVersion
from dartrl.rollout.fleet import Fleet, WorkerStatus
from dartrl.simulate.plan import SimulationPlan
from dartrl.simulate.world import RIGHT, WRONG
from dartrl.types import Generation

VERSIONS_TO_LEARN = 40.0
"""Versions after which the share of wrong steps has fallen to 1 / e."""

_PROMPT = np.arange(64, dtype=np.int32)
_TOKENS = {RIGHT: np.array([3, 1], np.int32), WRONG: np.array([4, 1], np.int32), "?": np.array([5, 1], np.int32)}


class SimulatedWorker:
    """WorkerPort of one engine."""

    def __init__(self, plan: SimulationPlan, clock: Clock, number: int) -> None:
        self.name = f"engine-{number}"
        self._plan = plan
        self._clock = clock
        self._random = random.Random(f"{plan.seed}/{self.name}")
        self._life = 1
        self._is_alive = True
        self._version: int | None = None
        self._num_in_flight = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """One reply. Raises PolicyUnavailable if the worker is dead or dies meanwhile, PolicyOverloaded if it is full."""
        life, version = self._alive(), self._version
        if version is None:
            raise PolicyUnavailable(f"{self.name} has no weights yet")
        if self._num_in_flight >= 2 * self._plan.batch:
            raise PolicyOverloaded(f"{self.name} is full")
        started = self._clock.now()
        self._num_in_flight += 1
        try:
            load = self._num_in_flight / self._plan.batch
            await self._clock.sleep(self._plan.reply.draw(self._random) * (1.0 + load))
        finally:
            self._num_in_flight -= 1
        if self._alive() != life:
            raise PolicyUnavailable(f"{self.name} was restarted")
        assert self._version == version, "weights changed under a request"
        return self._reply(request, version, self._clock.now() - started)

    async def status(self) -> WorkerStatus:
        """Life and version."""
        return WorkerStatus(f"{self.name}/{self._alive()}", self._version)

    async def load(self, weights: WeightsVersion) -> None:
        """Change the weights."""
        life = self._alive()
        await self._clock.sleep(self._plan.load.draw(self._random))
        if self._alive() != life:
            raise PolicyUnavailable(f"{self.name} was restarted")
        self._version = weights.version

    def crash(self) -> None:
        """Die with everything in hand."""
        self._is_alive = False
        self._version = None

    def restart(self) -> None:
        """Come back without weights."""
        self._is_alive = True
        self._life += 1

    def _alive(self) -> int:
        if not self._is_alive:
            raise PolicyUnavailable(f"{self.name} is dead")
        return self._life

    def _reply(self, request: GenerateRequest, version: int, seconds: float) -> Generation:
        instruction, image = request.messages[0].parts
        assert isinstance(instruction, str) and isinstance(image, ImageRef)
        generator = random.Random(f"{request.seed}/{version}")
        text = "?"
        if generator.random() >= self._plan.unreadable_share:
            wrong = float(instruction.split()[1]) * math.exp(-version / VERSIONS_TO_LEARN)
            text = WRONG if generator.random() < wrong else RIGHT
        logprob, entropy = -generator.random(), generator.random()
        return Generation(
            text=text,
            prompt_ids=_PROMPT,
            response_ids=_TOKENS[text],
            behaviour_logprobs=np.array([logprob, 0.0], np.float32),
            entropies=np.array([entropy, 0.0], np.float32),
            finish_reason="stop",
            image_hashes=(image.hash,),
            image_grids=((1, 2, 2),),
            fingerprint="simulated",
            temperature=request.temperature,
            banned_ids=(),
            compute_dtype="float32",
            weights_version=version,
            worker=self.name,
            request_id=request.id,
            seconds=seconds,
        )


class FleetClient:
    """PolicyClient that reaches the fleet without sockets."""

    def __init__(self, fleet: Fleet[SimulatedWorker], *, timeout_seconds: float) -> None:
        self._fleet = fleet
        self._timeout_seconds = timeout_seconds

    async def generate(self, request: GenerateRequest) -> Generation:
        """One reply, as the router would give it."""
        return await self._fleet.submit(
            lambda worker: worker.generate(request), affinity=request.affinity, timeout_seconds=self._timeout_seconds
        )

    async def close(self) -> None:
        """Nothing is held."""

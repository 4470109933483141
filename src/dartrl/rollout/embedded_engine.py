"""A policy worker inside this process: dynamic batching over the policy layer, and weights that change between replies.

Torch runs in one blocking call at a time; while it runs, that call owns the rows under way, takes newcomers from the queue
between any two tokens, and hands complete replies to the event loop. `run` is woken by `generate`, `load` and its stop event.
New weights are read and probed beside those that serve; the swap itself is an assignment, made when the replies under way are
complete, so no reply spans two versions. Requests that arrive meanwhile wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dartrl.config import RunConfig
from dartrl.errors import ConfigError, PolicyFault, PolicyOverloaded, PolicyUnavailable, WeightsRejected
from dartrl.interfaces import Clock, GenerateRequest
from dartrl.metrics import Meter
from dartrl.policy.decoding import Decoder, Reply, begin_reply
from dartrl.policy.inputs import encode_prompt
from dartrl.policy.manifest import verify_manifest
from dartrl.policy.model import ComputeType, Policy, load_policy, require_same_kind
from dartrl.policy.probes import check_probes
from dartrl.records import WeightsVersion
from dartrl.types import Generation

logger = logging.getLogger(__name__)

JOIN_RATIO = 2
"""Waiting requests per row under way at which newcomers join."""
LINGER_SECONDS = 0.005
"""Longest pause before a batch, about a tenth of the time a batch takes."""


@dataclass(slots=True, eq=False)
class _Job:
    request: GenerateRequest
    answer: asyncio.Future[Generation]
    arrived_at: float


@dataclass(slots=True, eq=False)
class _Swap:
    version: int
    policy: Policy
    decoder: Decoder
    probe_difference: float
    done: asyncio.Future[None]


class EmbeddedEngine:
    """Answers requests from one policy; `run` must be running."""

    def __init__(self, config: RunConfig, *, name: str, clock: Clock, meter: Meter | None = None) -> None:
        self.name = name
        self.instance = f"{os.getpid()}-{clock.now():.6f}"
        self._clock = clock
        self._dtype: ComputeType = config.policy.dtype
        self._max_batch = config.rollout.max_batch
        self._max_waiting = config.rollout.max_waiting
        self._timeout_seconds = config.rollout.request_timeout_seconds
        self.meter = meter or Meter(clock.now)
        self._policy: Policy | None = None
        self._decoder: Decoder | None = None
        self._version: int | None = None
        self._waiting: deque[_Job] = deque()
        self._active: dict[int, _Job] = {}
        self._last_rows = 0
        self._in_flight: dict[str, asyncio.Future[Generation]] = {}
        self._loading: int | None = None
        self._swap: _Swap | None = None
        self._wake = asyncio.Event()
        self._is_running = False

    # ----------------------------------------------------------------------- requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """One reply; a request whose id is already under way shares its reply.

        Raises ConfigError for a bad request, PolicyOverloaded if the queue is full, PolicyUnavailable without weights or after
        the request timeout.
        """
        if self._version is None or not self._is_running:
            raise PolicyUnavailable(f"worker {self.name} has no weights yet; load a version through /control/load")
        started = self._clock.now()
        answer = self._in_flight.get(request.id)
        if answer is None:
            if len(self._waiting) >= self._max_waiting:
                raise PolicyOverloaded(
                    f"worker {self.name} has {len(self._waiting)} requests waiting (rollout.max_waiting); retry later"
                )
            answer = asyncio.get_running_loop().create_future()
            self._in_flight[request.id] = answer
            answer.add_done_callback(lambda done: self._forget(request.id, done))
            self._waiting.append(_Job(request, answer, started))
            self._wake.set()
        try:
            async with self._clock.timeout(self._timeout_seconds):
                generation = await asyncio.shield(answer)
        except TimeoutError as error:
            late = PolicyUnavailable(
                f"worker {self.name} did not answer request {request.id} within {self._timeout_seconds:.0f} s "
                f"(rollout.request_timeout_seconds)"
            )
            _resolve(answer, late)
            raise late from error
        self.meter.observe("engine/reply_seconds", self._clock.now() - started)
        return generation

    async def load(self, weights: WeightsVersion, *, probe_tolerance: float) -> float:
        """Serve this version from now on; returns the largest probe difference in nats.

        Requests are answered meanwhile. Raises WeightsRejected, with the old weights in service, if manifest, fingerprint or
        probes disagree or if another load is under way.
        """
        if self._loading is not None:
            raise WeightsRejected(f"worker {self.name} is already loading version {self._loading}; wait for it")
        if not self._is_running:
            raise WeightsRejected(f"worker {self.name} is not running")
        self._loading = weights.version
        try:
            with self.meter.busy("engine/load_seconds"):
                swap = await self._clock.run_blocking(
                    self._stage, weights, probe_tolerance, asyncio.get_running_loop().create_future()
                )
            if not self._is_running:
                raise WeightsRejected(f"worker {self.name} is shutting down")
            self._swap = swap
            self._wake.set()
            with self.meter.busy("engine/swap_seconds"):
                await asyncio.shield(swap.done)
        except WeightsRejected as error:
            logger.warning("weights rejected worker=%s version=%d error=%s", self.name, weights.version, error)
            raise
        finally:
            self._loading = None
        return swap.probe_difference

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock.now()

    def status(self) -> dict[str, Any]:
        """JSON-ready state: name, version, queue lengths, what is served."""
        return {
            "worker": self.name,
            "instance": self.instance,
            "weights_version": self._version,
            "ready": self._version is not None and self._is_running,
            "loading": self._loading,
            "loads_while_serving": True,
            "active": len(self._active),
            "waiting": len(self._waiting),
            "max_batch": self._max_batch,
            "compute_dtype": self._dtype,
            "fingerprint": self._policy.fingerprint if self._policy else None,
        }

    # ----------------------------------------------------------------------- the loop

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; replies under way then fail with PolicyUnavailable."""
        torch.set_num_threads(1)  # more of them spin while they wait, and take the cores from browser and trainer
        self._is_running = True
        if self._decoder is not None:
            self._decoder.abandon()
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: self._halt())
        try:
            while self._is_running:
                await self._turn()
        finally:
            stopping.cancel()
            self._halt()
            self._fail_all(PolicyUnavailable(f"worker {self.name} is shutting down"))

    def _halt(self) -> None:
        self._is_running = False
        self._wake.set()

    async def _turn(self) -> None:
        self._wake.clear()
        if self._swap is not None:
            self._install(self._swap)
        elif not self._waiting:
            await self._wake.wait()
        else:
            await self._linger()
            with self.meter.busy("engine/busy_seconds"):
                await self._work()

    async def _linger(self) -> None:
        """Give the callers of the last batch a moment to come back together: one batch of eight is cheaper than eight of one."""
        expected, self._last_rows = self._last_rows, 0
        try:
            async with self._clock.timeout(LINGER_SECONDS):
                while len(self._waiting) < min(expected, self._max_batch) and self._swap is None:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return

    async def _work(self) -> None:
        try:
            await self._clock.run_blocking(self._decode_until_idle, asyncio.get_running_loop())
        except (RuntimeError, MemoryError) as error:
            logger.error("decoding failed worker=%s rows=%d error=%r", self.name, len(self._active), error)
            self._require_decoder().abandon()
            self._fail_active(PolicyFault(f"worker {self.name} failed while decoding: {error}"))

    def _fail_active(self, fault: PolicyFault) -> None:
        for job in self._active.values():
            _resolve(job.answer, fault)
        self._active.clear()

    def _fail_all(self, fault: PolicyFault) -> None:
        self._fail_active(fault)
        while self._waiting:
            _resolve(self._waiting.popleft().answer, fault)
        if self._swap is not None:
            _resolve(self._swap.done, WeightsRejected(f"worker {self.name} is shutting down"))
            self._swap = None

    def _forget(self, request_id: str, answer: asyncio.Future[Generation]) -> None:
        self._in_flight.pop(request_id, None)
        answer.exception()  # counts as retrieved, also if every caller has gone

    def _require_decoder(self) -> Decoder:
        if self._decoder is None:
            raise PolicyUnavailable(f"worker {self.name} has no weights yet")
        return self._decoder

    # ----------------------------------------------------------------------- blocking work, off the event loop

    def _decode_until_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve rows, admitting who waits, until none is left; replies go to the event loop as soon as they are complete.

        Reading a prompt has a fixed cost, so newcomers join when they are at least twice as many as the rows under way.
        """
        decoder = self._require_decoder()
        while self._is_running:
            if self._swap is None and len(self._waiting) >= JOIN_RATIO * len(decoder):
                self._admit(decoder, loop)
            if not len(decoder):
                return
            decoder.step()
            self._deliver(decoder, loop)

    def _admit(self, decoder: Decoder, loop: asyncio.AbstractEventLoop) -> None:
        replies: list[Reply] = []
        while self._waiting and len(decoder) + len(replies) < self._max_batch:
            job = self._waiting.popleft()
            if job.answer.done():
                continue
            result = self._begin(job.request)
            if isinstance(result, ConfigError):
                loop.call_soon_threadsafe(_resolve, job.answer, result)
            else:
                self._active[id(result)] = job
                replies.append(result)
        if replies:
            decoder.admit(replies)
            self._last_rows = len(decoder)
            self._deliver(decoder, loop)

    def _deliver(self, decoder: Decoder, loop: asyncio.AbstractEventLoop) -> None:
        for reply in decoder.collect():
            job = self._active.pop(id(reply))
            loop.call_soon_threadsafe(_resolve, job.answer, self._generation(job.request, reply))

    def _begin(self, request: GenerateRequest) -> Reply | ConfigError:
        policy = self._policy
        if policy is None:
            return ConfigError(f"worker {self.name} has no weights yet")
        try:
            prompt = encode_prompt(policy, request.messages, request.images)
        except ConfigError as error:
            return error
        return begin_reply(policy, prompt, temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed)

    def _generation(self, request: GenerateRequest, reply: Reply) -> Generation:
        policy, version = self._policy, self._version
        if policy is None or version is None:
            raise PolicyUnavailable(f"worker {self.name} has no weights yet")
        ids = reply.ids[:-1] if reply.finish_reason == "stop" else reply.ids
        return Generation(
            text=str(policy.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)),
            prompt_ids=reply.prompt.ids_S,
            response_ids=np.asarray(reply.ids, dtype=np.int32),
            behaviour_logprobs=np.asarray(reply.logprobs, dtype=np.float32),
            entropies=np.asarray(reply.entropies, dtype=np.float32),
            finish_reason=reply.finish_reason or "length",
            image_hashes=tuple(image.hash for image in reply.prompt.images),
            image_grids=tuple(image.grid for image in reply.prompt.images),
            fingerprint=policy.fingerprint,
            temperature=request.temperature,
            banned_ids=policy.banned_ids,
            compute_dtype=policy.dtype,
            weights_version=version,
            worker=self.name,
            request_id=request.id,
        )

    # ----------------------------------------------------------------------- weights

    def _install(self, swap: _Swap) -> None:
        """Policy, decoder and version change together, between two replies."""
        self._policy, self._decoder, self._version = swap.policy, swap.decoder, swap.version
        self._swap = None
        logger.info("weights loaded worker=%s version=%d probe_difference=%.2e", self.name, swap.version, swap.probe_difference)
        _resolve(swap.done, None)

    def _stage(self, weights: WeightsVersion, tolerance: float, done: asyncio.Future[None]) -> _Swap:
        """The checked policy, ready to serve; blocking work, off the event loop. Raises WeightsRejected."""
        folder = Path(weights.path)
        verify_manifest(folder, weights.checksum)
        try:
            policy = load_policy(folder, dtype=self._dtype)
        except ConfigError as error:
            raise WeightsRejected(str(error)) from error
        if self._policy is not None:
            require_same_kind(policy, self._policy, folder)
        difference = check_probes(policy, folder, tolerance=tolerance)
        decoder = Decoder(policy, max_rows=self._max_batch)
        return _Swap(weights.version, policy, decoder, difference, done)


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)

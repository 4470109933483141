"""A policy worker inside this process: dynamic batching over the policy layer, and weights that change between replies.

The event loop owns all state; torch runs in one blocking call at a time. Requests join the batch between any two tokens, as soon
as a row is free. `run` is woken by `generate`, `load` and its stop event. A swap waits until the replies under way are
complete, so no reply spans two versions; requests that arrive meanwhile wait in the queue.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Sequence
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
from dartrl.policy.model import ComputeType, Policy, copy_weights, load_policy, load_weights_into
from dartrl.policy.probes import check_probes
from dartrl.records import WeightsVersion
from dartrl.types import Generation

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    request: GenerateRequest
    answer: asyncio.Future[Generation]
    arrived_at: float


@dataclass(slots=True, eq=False)
class _Swap:
    weights: WeightsVersion
    probe_tolerance: float
    done: asyncio.Future[float]


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
        self._active: dict[int, tuple[_Job, Reply]] = {}
        self._in_flight: dict[str, asyncio.Future[Generation]] = {}
        self._swap: _Swap | None = None
        self._wake = asyncio.Event()
        self._has_arrivals = False
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
            self._has_arrivals = True
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

        Waits for replies under way. Raises WeightsRejected, with the old weights in service, if manifest, fingerprint or probes
        disagree or if another load is under way.
        """
        if self._swap is not None:
            raise WeightsRejected(f"worker {self.name} is already loading version {self._swap.weights.version}; wait for it")
        if not self._is_running:
            raise WeightsRejected(f"worker {self.name} is not running")
        swap = _Swap(weights, probe_tolerance, asyncio.get_running_loop().create_future())
        self._swap = swap
        self._has_arrivals = True
        self._wake.set()
        return await asyncio.shield(swap.done)

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
            "loading": self._swap.weights.version if self._swap else None,
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
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: self._wake.set())
        try:
            while not stop.is_set():
                await self._turn()
        finally:
            self._is_running = False
            stopping.cancel()
            self._fail_all(PolicyUnavailable(f"worker {self.name} is shutting down"))

    async def _turn(self) -> None:
        self._wake.clear()
        self._has_arrivals = False
        if self._swap is not None and not self._active:
            await self._change_weights(self._swap)
            return
        jobs = [] if self._swap is not None else self._take_waiting()
        if not jobs and not self._active:
            await self._wake.wait()
            return
        with self.meter.busy("engine/busy_seconds"):
            await self._advance(jobs)

    def _take_waiting(self) -> list[_Job]:
        jobs: list[_Job] = []
        while self._waiting and len(jobs) + len(self._active) < self._max_batch:
            job = self._waiting.popleft()
            if not job.answer.done():
                jobs.append(job)
        return jobs

    async def _advance(self, jobs: Sequence[_Job]) -> None:
        try:
            admitted, finished = await self._clock.run_blocking(self._compute, jobs)
        except (RuntimeError, MemoryError) as error:
            logger.error("decoding failed worker=%s rows=%d error=%r", self.name, len(self._active) + len(jobs), error)
            self._require_decoder().abandon()
            self._fail_active(jobs, PolicyFault(f"worker {self.name} failed while decoding: {error}"))
            return
        for job, result in admitted:
            if isinstance(result, ConfigError):
                _resolve(job.answer, result)
            else:
                self._active[id(result)] = (job, result)
        if jobs:
            self.meter.observe("engine/batch_rows", len(self._active))
        for reply in finished:
            job, _ = self._active.pop(id(reply))
            _resolve(job.answer, self._generation(job.request, reply))

    def _fail_active(self, jobs: Sequence[_Job], fault: PolicyFault) -> None:
        for job in [*jobs, *(job for job, _ in self._active.values())]:
            _resolve(job.answer, fault)
        self._active.clear()

    def _fail_all(self, fault: PolicyFault) -> None:
        self._fail_active(list(self._waiting), fault)
        self._waiting.clear()
        if self._swap is not None:
            _resolve(self._swap.done, WeightsRejected(f"worker {self.name} is shutting down"))
            self._swap = None
        if self._decoder is not None:
            self._decoder.abandon()

    def _forget(self, request_id: str, answer: asyncio.Future[Generation]) -> None:
        self._in_flight.pop(request_id, None)
        answer.exception()  # counts as retrieved, also if every caller has gone

    def _require_decoder(self) -> Decoder:
        if self._decoder is None:
            raise PolicyUnavailable(f"worker {self.name} has no weights yet")
        return self._decoder

    # ----------------------------------------------------------------------- blocking work, off the event loop

    def _compute(self, jobs: Sequence[_Job]) -> tuple[list[tuple[_Job, Reply | ConfigError]], list[Reply]]:
        """Admit new requests, then decode until a reply is complete or somebody is waiting for a free row or a swap."""
        decoder = self._require_decoder()
        admitted = [(job, self._begin(job.request)) for job in jobs]
        fresh = [result for _, result in admitted if isinstance(result, Reply)]
        if fresh:
            decoder.admit(fresh)
        finished = decoder.collect()
        while len(decoder) and not finished:
            decoder.step()
            finished = decoder.collect()
            if self._has_arrivals and len(decoder) < self._max_batch:
                break
        return admitted, finished

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

    async def _change_weights(self, swap: _Swap) -> None:
        try:
            with self.meter.busy("engine/swap_seconds"):
                difference = await self._clock.run_blocking(self._install, swap.weights, swap.probe_tolerance)
        except WeightsRejected as error:
            logger.warning("weights rejected worker=%s version=%d error=%s", self.name, swap.weights.version, error)
            self._swap = None
            _resolve(swap.done, error)
            return
        self._version = swap.weights.version
        self._swap = None
        logger.info("weights loaded worker=%s version=%d probe_difference=%.2e", self.name, self._version, difference)
        _resolve(swap.done, difference)

    def _install(self, weights: WeightsVersion, tolerance: float) -> float:
        """Largest probe difference after the weights are in place; on failure the old ones are put back."""
        folder = Path(weights.path)
        verify_manifest(folder, weights.checksum)
        if self._policy is None:
            try:
                policy = load_policy(folder, dtype=self._dtype)
            except ConfigError as error:
                raise WeightsRejected(str(error)) from error
            difference = check_probes(policy, folder, tolerance=tolerance)
            self._policy, self._decoder = policy, Decoder(policy, max_rows=self._max_batch)
            return difference
        policy = self._policy
        previous = {name: value.clone() for name, value in policy.model.state_dict().items()}
        load_weights_into(policy, folder)
        self._require_decoder().forget_images()
        try:
            return check_probes(policy, folder, tolerance=tolerance)
        except WeightsRejected:
            copy_weights(previous, policy.model)
            raise


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)

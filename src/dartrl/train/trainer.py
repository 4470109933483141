"""The trainer: takes the run's trainer lease, then claims groups, trains, publishes, acknowledges, checkpoints, for ever.

    standby -> (lease) -> resume -> claim -> train -> publish -> acknowledge -> ... checkpoint every few steps

Who wakes whom: nobody calls the trainer. It polls the ledger for the phase and for ready groups, and ends with `stop`. Torch
runs in a thread by `clock.run_blocking`; a task beside it renews the lease meanwhile. If the lease is lost, everything in
memory is dropped and the trainer is a standby again: whoever holds the lease has rolled back what was not checkpointed.
It trains in phase TRAINING; in any other phase, and when it stops, it makes what was applied durable. The phases themselves,
and with them training.max_minutes, belong to the conductor.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from dartrl.config import RunConfig
from dartrl.errors import LeaseLost
from dartrl.interfaces import BlobStore, Clock, Ledger, StepSelector
from dartrl.metrics import Meter
from dartrl.records import Checkpoint, Claim, Event, Lease, Phase, ResumePoint, TrainingStep, WeightsVersion
from dartrl.train.starvation import StarvationWatch
from dartrl.train.workshop import Workshop

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Pause between two looks for enough groups, or for the next phase."""
STANDBY_SECONDS = 1.0
"""Pause between two tries for the trainer lease."""
DISK_RETRY_SECONDS = 5.0
"""Pause after the disk refused weights or a checkpoint."""
BUSY = "busy_seconds"


@dataclass(slots=True)
class _Position:
    """Where this trainer stands, in memory."""

    step: int
    """Last acknowledged training step."""
    published: WeightsVersion
    """Newest version of this lineage."""
    published_step: int
    """Step whose weights that version holds."""
    durable_step: int
    """Step of the newest checkpoint."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """One trainer of a run; several may be started, and all but one wait."""

    ledger: Ledger
    """Where groups come from and steps go to."""
    blobs: BlobStore
    """Screenshots of the claimed steps."""
    config: RunConfig
    """The run's configuration."""
    run_dir: Path
    """Receives weights/ and checkpoints/."""
    clock: Clock
    """Time and threads."""
    meter: Meter
    """Receives `busy_seconds` and the readings `train/*`."""
    holder: str
    """Name under which the lease is taken."""
    select_steps: StepSelector
    """Mean entropies of a group's steps -> which train; see curation."""

    def __post_init__(self) -> None:
        self._workshop = Workshop(self.config, self.run_dir, blobs=self.blobs, select_steps=self.select_steps)
        self._watch = StarvationWatch(groups_per_step=self.config.training.groups_per_step)

    async def run(self, stop: asyncio.Event) -> None:
        """Train until `stop` is set; on a lost lease, wait for it again."""
        while not stop.is_set():
            lease = await self._acquire(stop)
            if lease is None:
                return
            try:
                await self._hold(lease, stop)
            except* LeaseLost as lost:
                log.warning("trainer lease lost holder=%s reason=%s", self.holder, lost.exceptions[0])

    # -- lease

    async def _acquire(self, stop: asyncio.Event) -> Lease | None:
        is_waiting = False
        while not stop.is_set():
            lease = await self.clock.run_blocking(self.ledger.acquire_trainer, self.holder)
            if lease is not None:
                log.info("trainer lease taken holder=%s token=%d", lease.holder, lease.token)
                return lease
            if not is_waiting:
                log.info("standby holder=%s: another trainer has the lease", self.holder)
                is_waiting = True
            await self._pause(stop, STANDBY_SECONDS)
        return None

    async def _hold(self, lease: Lease, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(self._renew_for_ever(lease), name="trainer-heartbeat")
            try:
                await self._train(lease, stop)
            finally:
                heartbeat.cancel()

    async def _renew_for_ever(self, lease: Lease) -> None:
        while True:
            await self.clock.sleep(self.config.data.lease_seconds / 3)
            if not await self.clock.run_blocking(self.ledger.renew, [lease]):
                raise LeaseLost(f"{lease.subject} was taken from {lease.holder}")

    # -- the loop

    async def _train(self, lease: Lease, stop: asyncio.Event) -> None:
        position = await self._resume(lease, stop)
        if position is None:
            return
        self._watch.reset(self.clock.now())
        while not stop.is_set():
            claim = await self._next_claim(lease, position)
            if claim is not None:
                await self._step(lease, position, claim, stop)
                self._watch.reset(self.clock.now())
            else:
                await self._pause(stop, POLL_SECONDS)
        await self._make_durable(lease, position, stop)

    async def _next_claim(self, lease: Lease, position: _Position) -> Claim | None:
        training = self.config.training
        phase = (await self.clock.run_blocking(self.ledger.run)).phase
        if phase is not Phase.TRAINING or position.step >= training.max_training_steps:
            await self._make_durable(lease, position, stop=None)
            self._watch.reset(self.clock.now())
            return None
        claim = await self.clock.run_blocking(self.ledger.claim_groups, lease, training.groups_per_step)
        if claim is None and self._watch.is_due(self.clock.now()):
            await self._warn_of_starvation()
        return claim

    async def _step(self, lease: Lease, position: _Position, claim: Claim, stop: asyncio.Event) -> None:
        started = self.clock.now()
        index = position.step + 1
        with self.meter.busy(BUSY):
            metrics, rejected = await self.clock.run_blocking(
                self._workshop.train, claim, index, position.published.version, position.published_step == position.step
            )
            trained = self.clock.now()
            weights = None
            if metrics["updates"] > 0 and self._is_publication_due(index):
                weights = await self._publish(lease, index, position.published.version, stop)
        metrics |= {"train_seconds": trained - started, "publish_seconds": self.clock.now() - trained}
        step = TrainingStep(index, claim.id, metrics, rejected)
        await self.clock.run_blocking(self.ledger.acknowledge_step, lease, claim, step, weights)
        position.step = index
        if weights is not None:
            position.published, position.published_step = weights, index
        self._report(step, weights)
        if index - position.durable_step >= self.config.training.checkpoint_every:
            await self._make_durable(lease, position, stop)

    def _is_publication_due(self, index: int) -> bool:
        training = self.config.training
        return index % training.publish_every == 0 or index % training.checkpoint_every == 0

    def _report(self, step: TrainingStep, weights: WeightsVersion | None) -> None:
        metrics = step.metrics
        self.meter.add("train/steps")
        self.meter.add("train/rows", metrics["rows"])
        self.meter.add("train/members_rejected", len(step.rejected))
        self.meter.observe("train/step_seconds", metrics["train_seconds"])
        log.info(
            "trained step=%d version=%s rows=%d success=%.3f loss=%.4f ess=%.3f seconds=%.2f rejected=%d",
            step.index,
            weights.version if weights else "-",
            metrics["rows"],
            metrics.get("success", 0.0),
            metrics.get("loss", 0.0),
            metrics.get("effective_sample_size", 1.0),
            metrics["train_seconds"],
            len(step.rejected),
        )

    # -- resuming

    async def _resume(self, lease: Lease, stop: asyncio.Event) -> _Position | None:
        resume: ResumePoint = await self.clock.run_blocking(self.ledger.begin_training, lease)
        restored = await self.clock.run_blocking(self._workshop.restore, resume.checkpoint)
        current = await self.clock.run_blocking(self.ledger.current_weights)
        step = resume.next_step - 1
        log.info("resumed step=%d rolled_back=%d checkpoint=%s", step, resume.rolled_back, restored or "-")
        is_served = (
            current is not None
            and resume.rolled_back == 0
            and current.training_step == step
            and (resume.checkpoint is None or (restored == step and current.version == resume.checkpoint.weights_version))
        )
        if current is None or not is_served:
            current = await self._publish(lease, step, current.version if current else None, stop)
            if current is None:
                return None
            await self.clock.run_blocking(self.ledger.publish_weights, lease, current)
        ready = Event("trainer_ready", self.holder, {"step": step, "checkpoint_step": restored, "version": current.version})
        await self.clock.run_blocking(self.ledger.record_event, ready)
        return _Position(step=step, published=current, published_step=step, durable_step=step)

    # -- weights and checkpoints

    async def _publish(self, lease: Lease, step: int, parent: int | None, stop: asyncio.Event | None) -> WeightsVersion | None:
        """The present weights under a new number, not yet named in the ledger; None if `stop` came while the disk refused."""
        version = await self.clock.run_blocking(self.ledger.next_weights_version, lease)
        while True:
            try:
                path, checksum = await self.clock.run_blocking(self._workshop.publish, version)
                break
            except OSError as error:
                await self._alarm("weights_not_written", f"weights v{version} cannot be written: {error}; free disk space")
            if stop is None or stop.is_set():
                return None
            await self._pause(stop, DISK_RETRY_SECONDS)
        return WeightsVersion(version, str(path), checksum, step, parent, self.clock.now())

    async def _make_durable(self, lease: Lease, position: _Position, stop: asyncio.Event | None) -> None:
        """Publish what is unpublished and checkpoint, so that everything applied becomes trained; a no-op if that is so."""
        if position.step == position.durable_step:
            return
        with self.meter.busy(BUSY):
            if position.published_step != position.step:
                weights = await self._publish(lease, position.step, position.published.version, stop)
                if weights is None:
                    return
                await self.clock.run_blocking(self.ledger.publish_weights, lease, weights)
                position.published, position.published_step = weights, position.step
            try:
                checkpoint: Checkpoint = await self.clock.run_blocking(
                    self._workshop.save_checkpoint, position.step, position.published.version
                )
            except OSError as error:
                await self._alarm("checkpoint_not_written", f"step {position.step} has no checkpoint: {error}; free disk space")
                return
            await self.clock.run_blocking(self.ledger.record_checkpoint, lease, checkpoint)
        position.durable_step = position.step
        log.info("checkpoint written name=%s version=%d", checkpoint.name, checkpoint.weights_version)
        syncs = await self.clock.run_blocking(self.ledger.events, ("sync",))
        served = {str(sync.data["worker"]): int(sync.data["version"]) for sync in syncs if "version" in sync.data}
        await self.clock.run_blocking(self._workshop.clean, served.values(), position.published.version)

    # -- small things

    async def _warn_of_starvation(self) -> None:
        counts = await self.clock.run_blocking(self.ledger.counts)
        recent = await self.clock.run_blocking(self.ledger.events, ("breaker", "alarm"), self._watch.since)
        await self._alarm("starved", self._watch.explain(self.clock.now(), counts, recent))

    async def _alarm(self, reason: str, message: str) -> None:
        log.warning("%s %s", reason, message)
        event = Event("alarm", "trainer", {"reason": reason, "message": message, "holder": self.holder})
        await self.clock.run_blocking(self.ledger.record_event, event)

    async def _pause(self, stop: asyncio.Event, seconds: float) -> None:
        """Return after that time, or at once when `stop` is set."""
        try:
            async with self.clock.timeout(seconds):
                await stop.wait()
        except TimeoutError:
            return

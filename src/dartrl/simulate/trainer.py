"""A trainer without a model: it claims, takes its time, acknowledges with a new version, writes checkpoints, and crashes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dartrl.interfaces import Clock, Ledger
from dartrl.metrics import Meter
from dartrl.records import Checkpoint, Claim, Lease, TrainingStep, WeightsVersion
from dartrl.simulate.plan import SimulationPlan

POLL_SECONDS = 1.0
"""Pause between two looks for a claim or for the trainer's lease."""


class SimulatedTrainer:
    """One life of the trainer; a later life resumes from the ledger."""

    def __init__(self, plan: SimulationPlan, *, ledger: Ledger, clock: Clock, meter: Meter, holder: str) -> None:
        self._plan = plan
        self._ledger = ledger
        self._clock = clock
        self._meter = meter
        self._holder = holder
        self._random = random.Random(f"{plan.seed}/{holder}")

    async def run(self) -> None:
        """Train for ever. Raises LeaseLost if another trainer took over."""
        lease = await self._acquire()
        resume = self._ledger.begin_training(lease)
        step = resume.next_step
        parent = resume.checkpoint.weights_version if resume.checkpoint else None
        weights = self._make_weights(lease, step - 1, parent)
        self._ledger.publish_weights(lease, weights)
        while True:
            claim = self._ledger.claim_groups(lease, self._plan.groups_per_step)
            if claim is None:
                await self._clock.sleep(POLL_SECONDS)
                lease = self._renew(lease)
                continue
            lease = await self._train(lease)
            weights = self._make_weights(lease, step, weights.version)
            self._ledger.acknowledge_step(lease, claim, TrainingStep(step, claim.id, self._metrics(claim, weights)), weights)
            if step % self._plan.checkpoint_every == 0:
                name = f"step-{step:06d}-{self._holder}"
                self._ledger.record_checkpoint(lease, Checkpoint(name, f"checkpoints/{name}", step, weights.version, name))
            step += 1

    async def _acquire(self) -> Lease:
        while True:
            lease = self._ledger.acquire_trainer(self._holder)
            if lease is not None:
                return lease
            await self._clock.sleep(POLL_SECONDS)

    async def _train(self, lease: Lease) -> Lease:
        """The time of a training step, with heartbeats."""
        left = self._plan.training_step.draw(self._random)
        with self._meter.busy("busy_seconds"):
            while left > 0:
                part = min(left, 5.0)
                await self._clock.sleep(part)
                left -= part
                lease = self._renew(lease)
        return lease

    def _renew(self, lease: Lease) -> Lease:
        renewed: Sequence[Lease] = self._ledger.renew([lease])
        return renewed[0] if renewed else lease

    def _make_weights(self, lease: Lease, step: int, parent: int | None) -> WeightsVersion:
        version = self._ledger.next_weights_version(lease)
        return WeightsVersion(version, f"weights/v{version:06d}", f"sum-{version}", step, parent)

    def _metrics(self, claim: Claim, weights: WeightsVersion) -> dict[str, float]:
        members = [member for group in claim.groups for member in group.members]
        versions = [member.trajectory.oldest_version or 0 for member in members if member.role == "fresh"]
        return {
            "members": float(len(members)),
            "steps": float(sum(len(member.trajectory.steps) for member in members)),
            "staleness_max": float(weights.version - 1 - min(versions, default=weights.version - 1)),
            "success": sum(bool(member.trajectory.outcome.success) for member in members) / max(1, len(members)),
        }

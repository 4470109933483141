"""A runner process: N environment slots, each playing one episode after another.

A slot that is free asks the ledger at once; slots of one runner ask in turn, so that only one of them polls while there is
nothing to do. One task renews all leases. An attempt whose lease is lost is dropped without a record, because somebody else
may own its slot by now. `stop` (set by the role) ends the attempts as `aborted:shutdown`, which are recorded.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from dartrl.config import RunConfig
from dartrl.errors import EnvironmentFault, LeaseLost
from dartrl.interfaces import BlobStore, Clock, Dialect, EnvironmentPool, Ledger, PolicyClient, Reward
from dartrl.metrics import Meter
from dartrl.records import Assignment, Lease, Wait
from dartrl.rollout.episode import EpisodeTools, run_episode, unplayed_trajectory
from dartrl.types import End, Outcome, Trajectory

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""How long attempts may take to end and be recorded once `stop` is set."""
LONGEST_WAIT_SECONDS = 5.0
"""A slot looks for work at least this often."""
FAULT_PAUSE_SECONDS = 0.5
"""Pause of a slot after its environment broke; doubles with each fault in a row, up to LONGEST_WAIT_SECONDS."""

_SPOILED = frozenset({End.ENV_ERROR, End.ABORTED})


@dataclass(kw_only=True, eq=False)
class Runner:
    """Plays episodes in all slots of a pool until told to stop."""

    ledger: Ledger
    """Gives assignments and takes trajectories."""
    pool: EnvironmentPool
    """Environments of the slots; started and closed by the runner."""
    client: PolicyClient
    """Answers prompts; closed by the runner."""
    dialect: Dialect
    """Writes prompts and reads replies."""
    blobs: BlobStore
    """Receives the screenshots."""
    config: RunConfig
    """Limits and deadlines."""
    clock: Clock
    """Time and blocking work."""
    meter: Meter
    """Receives `busy_seconds` (time in episodes, averaged over the slots) and the readings `envs/*`, `rollout/*`."""
    name: str
    """Holder of this runner's leases; differs between two lives of a runner."""
    reward: Reward | None = None
    """Replaces the environments' verdicts if set."""

    def __post_init__(self) -> None:
        self._tools = EpisodeTools(
            client=self.client,
            dialect=self.dialect,
            blobs=self.blobs,
            clock=self.clock,
            meter=self.meter,
            agent=self.config.agent,
            reply_timeout_seconds=self.config.rollout.request_timeout_seconds,
            reward=self.reward,
        )
        self._leases: dict[str, Lease] = {}
        self._attempts: dict[str, asyncio.Task[Trajectory]] = {}
        self._asking = asyncio.Lock()

    async def run(self, stop: asyncio.Event) -> None:
        """Play until `stop` is set; then everything ends within STOP_SECONDS and the closing of the pool.

        Raises EnvironmentFault if the pool cannot start, and whatever the ledger raises.
        """
        try:
            await self.pool.start()
            log.info("runner started name=%s slots=%d", self.name, self.pool.size)
            async with asyncio.TaskGroup() as group:
                slots = [group.create_task(self._run_slot(slot, stop), name=f"slot-{slot}") for slot in range(self.pool.size)]
                group.create_task(self._renew_leases(stop), name="leases")
                group.create_task(self._end_attempts(stop, slots), name="stop")
        finally:
            await self.pool.close()
            await self.client.close()
            log.info("runner ended name=%s", self.name)

    # ------------------------------------------------------------------ slots

    async def _run_slot(self, slot: int, stop: asyncio.Event) -> None:
        faults_in_a_row = 0
        while not stop.is_set():
            with self.meter.busy("envs/idle_seconds"):
                assignment = await self._next_assignment(slot, stop)
            if assignment is None:
                return
            trajectory = await self._attempt(slot, assignment, stop)
            await self._record(assignment, trajectory)
            faults_in_a_row = faults_in_a_row + 1 if trajectory.outcome.end is End.ENV_ERROR else 0
            if trajectory.outcome.end in _SPOILED and not stop.is_set():
                await self.pool.discard(slot)
            if faults_in_a_row:
                pause = FAULT_PAUSE_SECONDS * 2 ** (faults_in_a_row - 1)
                await self._pause(min(pause, LONGEST_WAIT_SECONDS), stop)

    async def _next_assignment(self, slot: int, stop: asyncio.Event) -> Assignment | None:
        """The next episode of a slot, or None once `stop` is set. Slots wait here for their turn to ask."""
        async with self._asking:
            while not stop.is_set():
                answer = await self.clock.run_blocking(self.ledger.next_assignment, f"{self.name}/{slot}")
                if isinstance(answer, Assignment):
                    self._leases[answer.trajectory_id] = answer.lease
                    return answer
                self._note_wait(answer)
                await self._pause(min(max(answer.seconds, 0.01), LONGEST_WAIT_SECONDS), stop)
        return None

    async def _attempt(self, slot: int, assignment: Assignment, stop: asyncio.Event) -> Trajectory:
        """The attempt as a task of its own, so that it can be ended alone; one that ignores this is not waited for."""
        started_at = self.clock.now()
        attempt = asyncio.create_task(self._play(slot, assignment), name=assignment.trajectory_id)
        self._attempts[assignment.trajectory_id] = attempt
        try:
            if stop.is_set():
                attempt.cancel()
            await asyncio.wait({attempt})
            if attempt.cancelled():
                return unplayed_trajectory(assignment, Outcome(End.ABORTED, "shutdown"), started_at)
            return attempt.result()
        finally:
            attempt.cancel()
            del self._attempts[assignment.trajectory_id]
            seconds = self.clock.now() - started_at
            self.meter.add("envs/episode_seconds", seconds)
            self.meter.add("busy_seconds", seconds / self.pool.size)

    async def _play(self, slot: int, assignment: Assignment) -> Trajectory:
        try:
            with self.meter.busy("envs/acquire_seconds"):
                environment = await self.pool.acquire(slot, assignment.task)
        except EnvironmentFault as fault:
            outcome = Outcome(End.ENV_ERROR, fault.kind, detail=str(fault)[:300])
            return unplayed_trajectory(assignment, outcome, self.clock.now())
        except Exception as error:  # noqa: BLE001 - slot replacement: a plug-in's bug costs one attempt, not the runner
            log.exception("no environment slot=%d task=%s", slot, assignment.task.id)
            outcome = Outcome(End.ENV_ERROR, "crash", detail=f"{type(error).__name__}: {error}"[:300])
            return unplayed_trajectory(assignment, outcome, self.clock.now())
        return await run_episode(assignment, environment, self._tools)

    async def _record(self, assignment: Assignment, trajectory: Trajectory) -> None:
        """Write the attempt down, unless its lease is lost."""
        lease = self._leases.pop(trajectory.id, None)
        if lease is None:
            self.meter.add("envs/episodes_dropped")
            return
        try:
            await self.clock.run_blocking(self.ledger.record_trajectory, lease, trajectory)
        except LeaseLost as error:
            self.meter.add("envs/episodes_dropped")
            log.warning("episode dropped trajectory=%s reason=%s", trajectory.id, error)
            return
        outcome = trajectory.outcome
        self.meter.add("envs/episodes")
        self.meter.add("envs/actions", sum(len(step.actions) for step in trajectory.steps))
        self.meter.add("envs/steps", len(trajectory.steps))
        self.meter.add(f"envs/episodes_{outcome.end}")
        if not outcome.is_scored and outcome.end is not End.ABORTED:
            log.warning(
                "episode failed trajectory=%s task=%s end=%s reason=%s detail=%s",
                trajectory.id,
                assignment.task.id,
                outcome.end,
                outcome.reason,
                outcome.detail,
            )

    def _note_wait(self, wait: Wait) -> None:
        self.meter.add(f"envs/waits_{wait.reason}")
        log.debug("no assignment reason=%s seconds=%.2f", wait.reason, wait.seconds)

    # ------------------------------------------------------------------ leases and stopping

    async def _renew_leases(self, stop: asyncio.Event) -> None:
        """Keep the leases of all attempts; cancel those that are lost."""
        while not stop.is_set():
            await self._pause(self.config.data.lease_seconds / 3, stop)
            held = list(self._leases.items())
            if not held:
                continue
            renewed = await self.clock.run_blocking(self.ledger.renew, [lease for _, lease in held])
            by_subject = {lease.subject: lease for lease in renewed}
            for trajectory_id, lease in held:
                if trajectory_id not in self._leases:
                    continue
                if lease.subject in by_subject:
                    self._leases[trajectory_id] = by_subject[lease.subject]
                else:
                    self._lose(trajectory_id)

    def _lose(self, trajectory_id: str) -> None:
        del self._leases[trajectory_id]
        log.warning("lease lost trajectory=%s; its work is dropped", trajectory_id)
        attempt = self._attempts.get(trajectory_id)
        if attempt is not None:
            attempt.cancel()

    async def _end_attempts(self, stop: asyncio.Event, slots: list[asyncio.Task[None]]) -> None:
        """Once `stop` is set (by the role), end the attempts, then what still hangs."""
        await stop.wait()
        for attempt in list(self._attempts.values()):
            attempt.cancel()
        try:
            async with self.clock.timeout(STOP_SECONDS):
                await asyncio.wait(slots)
        except TimeoutError:
            log.error("runner slots hang name=%s; they are cancelled without a record", self.name)
            for slot in slots:
                slot.cancel()

    async def _pause(self, seconds: float, stop: asyncio.Event) -> None:
        """Sleep, but not beyond `stop`."""
        try:
            async with self.clock.timeout(seconds):
                await stop.wait()
        except TimeoutError:
            return

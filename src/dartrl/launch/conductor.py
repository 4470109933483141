"""Leads a run through its stages: evaluation before, training, draining, evaluation after.

The conductor only writes phases, evaluations and `stage` events into the ledger and waits for what the other roles make
of them; it talks to nobody. So a run goes on from the ledger alone: stages with a `finished` event are skipped, and the
training clock continues where its last reading was. Every wait polls the ledger and ends with `stop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum

from dartrl.config import RunConfig
from dartrl.dashboard.readings import training_seconds
from dartrl.errors import RoleFailed
from dartrl.interfaces import Clock, Ledger
from dartrl.launch.system_clock import wait_for_event
from dartrl.records import Evaluation, Event, Phase

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Pause between two looks at the ledger."""
CLOCK_SECONDS = 5.0
"""Training time between two readings of the training clock: at most this much is trained twice after a crash."""
START_SECONDS = 300.0
"""How long the roles may take until the first weights are published."""
DRAIN_SECONDS = 120.0
"""How long running episodes and the last training step may take."""
SYNC_SECONDS = 120.0
"""How long the policy workers may take to load the last weights."""


class Stage(StrEnum):
    """Parts of a run, in order."""

    BEFORE = "evaluation_before"
    TRAINING = "training"
    DRAINING = "draining"
    AFTER = "evaluation_after"


class Conductor:
    """Moves one run from its present stage to the end."""

    def __init__(self, ledger: Ledger, config: RunConfig, clock: Clock, *, stop: asyncio.Event) -> None:
        self._ledger = ledger
        self._config = config
        self._clock = clock
        self._stop = stop
        self._started_at = clock.now()

    async def run(self) -> bool:
        """Go through all stages that are not finished; True if the run reached its end, False if `stop` came first.

        Raises RoleFailed if the roles make no progress in time.
        """
        actions: Mapping[Stage, Callable[[], Awaitable[None]]] = {
            Stage.BEFORE: self._evaluate_before,
            Stage.TRAINING: self._train,
            Stage.DRAINING: self._drain,
            Stage.AFTER: self._evaluate_after,
        }
        await self._wait_for_weights()
        finished = finished_stages(await self._events("stage"))
        for stage in Stage:
            if stage in finished:
                continue
            await self._record(stage, state="started")
            await actions[stage]()
            if self._stop.is_set():
                return False
            await self._record(stage, state="finished")
        await self._set_phase(Phase.FINISHED)
        return True

    # -- stages

    async def _evaluate_before(self) -> None:
        if self._config.evaluation.before:
            await self._evaluate("before")

    async def _evaluate_after(self) -> None:
        if self._config.evaluation.after:
            await self._wait_for_sync()
            await self._evaluate("after")

    async def _evaluate(self, when: str) -> None:
        await self._set_phase(Phase.EVALUATING)
        evaluations = planned_evaluations(self._config, when)
        for evaluation in evaluations:
            await self._clock.run_blocking(self._ledger.open_evaluation, evaluation)
        pending = [evaluation.id for evaluation in evaluations]
        while pending and not self._stop.is_set():
            result = await self._clock.run_blocking(self._ledger.evaluation_result, pending[0])
            if result.finished >= result.total:
                pending.pop(0)
            else:
                await wait_for_event(self._stop, POLL_SECONDS)

    async def _train(self) -> None:
        limit = self._config.training.max_minutes * 60.0
        spent = training_seconds(await self._events("stage"))
        if spent >= limit:
            return
        await self._wait_for_trainer()
        await self._set_phase(Phase.TRAINING)
        last = self._clock.now()
        recorded = spent
        while not self._stop.is_set() and spent < limit and not await self._all_steps_done():
            await wait_for_event(self._stop, POLL_SECONDS)
            now = self._clock.now()
            spent, last = spent + (now - last), now
            if spent - recorded >= CLOCK_SECONDS:
                await self._record(Stage.TRAINING, state="clock", seconds=spent)
                recorded = spent
        await self._record(Stage.TRAINING, state="clock", seconds=spent)

    async def _all_steps_done(self) -> bool:
        counts = await self._clock.run_blocking(self._ledger.counts)
        done = counts.get("training_steps_applied", 0) + counts.get("training_steps_durable", 0)
        return done >= self._config.training.max_training_steps

    async def _drain(self) -> None:
        await self._set_phase(Phase.DRAINING)

        async def is_quiet() -> bool:
            counts = await self._clock.run_blocking(self._ledger.counts)
            return not any(counts.get(name, 0) for name in ("leases", "members_claimed", "members_applied"))

        if not await self._wait_until(is_quiet, DRAIN_SECONDS):
            log.warning("draining ended early seconds=%.0f: episodes or memberships are still open", DRAIN_SECONDS)

    # -- waits

    async def _wait_for_weights(self) -> None:
        async def are_published() -> bool:
            return await self._clock.run_blocking(self._ledger.current_weights) is not None

        if not await self._wait_until(are_published, START_SECONDS):
            raise RoleFailed(f"no weights were published within {START_SECONDS:.0f} s; see logs/trainer-0.log in the run's folder")

    async def _wait_for_trainer(self) -> None:
        """The training clock runs only once a trainer of this session has its checkpoint or the initial policy in memory."""

        async def is_ready() -> bool:
            return any(event.at >= self._started_at for event in await self._events("trainer_ready"))

        if not await self._wait_until(is_ready, START_SECONDS):
            raise RoleFailed(f"no trainer was ready within {START_SECONDS:.0f} s; see logs/trainer-0.log in the run's folder")

    async def _wait_for_sync(self) -> None:
        async def is_synced() -> bool:
            weights = await self._clock.run_blocking(self._ledger.current_weights)
            loaded = loaded_versions(await self._events("join", "sync"))
            workers = self._config.rollout.workers
            return weights is not None and sum(version == weights.version for version in loaded.values()) >= workers

        if not await self._wait_until(is_synced, SYNC_SECONDS):
            log.warning("evaluation starts although a worker has not loaded the last weights seconds=%.0f", SYNC_SECONDS)

    async def _wait_until(self, condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        """True once the condition holds or `stop` is set; False after `seconds`."""
        deadline = self._clock.now() + seconds
        while not await condition():
            if self._stop.is_set():
                return True
            if self._clock.now() >= deadline:
                return False
            await wait_for_event(self._stop, POLL_SECONDS)
        return True

    # -- ledger

    async def _events(self, *kinds: str) -> list[Event]:
        return list(await self._clock.run_blocking(self._ledger.events, kinds))

    async def _record(self, stage: Stage, **data: float | str) -> None:
        log.info("stage %s %s", stage, data)
        await self._clock.run_blocking(self._ledger.record_event, Event("stage", stage, dict(data)))

    async def _set_phase(self, phase: Phase) -> None:
        if not self._stop.is_set():
            await self._clock.run_blocking(self._ledger.set_phase, phase)


def planned_evaluations(config: RunConfig, when: str) -> list[Evaluation]:
    """The evaluations `<when>-sampled` and, if asked for, `<when>-greedy`."""
    count = config.evaluation.episodes_per_task
    sampled = Evaluation(f"{when}-sampled", config.rollout.temperature, count)
    return [sampled, Evaluation(f"{when}-greedy", 0.0, count)] if config.evaluation.greedy else [sampled]


def finished_stages(events: list[Event]) -> set[str]:
    """Stages with a `finished` event."""
    return {event.subject for event in events if event.data.get("state") == "finished"}


def loaded_versions(events: list[Event]) -> dict[str, int]:
    """Worker -> version of its last `join` or `sync` event."""
    return {str(event.data["worker"]): int(event.data["version"]) for event in events if "version" in event.data}

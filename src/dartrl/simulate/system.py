"""The whole system in virtual time: real runners, episode loop, fleet, weight sync, data manager and curation; simulated
environments, engines and trainer. Equal plans give equal event logs.

Processes crash and come back as under a supervisor: a crash is the cancelling of everything that the process ran, without
a record, and its next life finds its work in the ledger.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import orjson

from dartrl.config import RunConfig, parse_config
from dartrl.data.audit import AuditReport, audit
from dartrl.data.blobs import MemoryBlobStore
from dartrl.data.manager import DataManager, open_ledger, run_manager
from dartrl.errors import LeaseLost
from dartrl.metrics import Meter
from dartrl.records import Event, Phase, Run, TrainingStep
from dartrl.rollout.fleet import Fleet
from dartrl.rollout.runner import Runner
from dartrl.rollout.weight_sync import WeightSync
from dartrl.simulate.plan import SimulationPlan
from dartrl.simulate.policy import FleetClient, SimulatedWorker
from dartrl.simulate.trainer import SimulatedTrainer
from dartrl.simulate.virtual_time import VirtualClock, run_virtual
from dartrl.simulate.world import SimulatedDialect, SimulatedPool, make_tasks

log = logging.getLogger(__name__)

REPLY_TIMEOUT_SECONDS = 300.0
"""Deadline of a simulated reply."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulation left in the ledger."""

    counts: Mapping[str, int]
    """Counters of the ledger at the end."""
    readings: Mapping[str, float]
    """Sums of all meters: `runner/...`, `router/...`, `trainer/...`."""
    steps: tuple[TrainingStep, ...]
    """Training steps of the final lineage."""
    events: tuple[Event, ...]
    """The whole event log."""
    audit: AuditReport
    """Whether everything is accounted for."""
    event_hash: str
    """SHA-256 of the event log; equal for equal plans."""


def simulate(plan: SimulationPlan, **changes: Mapping[str, object]) -> SimulationResult:
    """The result of running the plan to its end in virtual time.

    changes: sections of the configuration to replace, such as curation={"sampling": "batch"}.
    """
    return run_virtual(_System(plan, changes).run())


class _System:
    def __init__(self, plan: SimulationPlan, changes: Mapping[str, Mapping[str, object]]) -> None:
        self._plan = plan
        self._config = _make_config(plan, changes)
        self._clock = VirtualClock()
        self._blobs = MemoryBlobStore()
        self._ledger: DataManager = open_ledger(
            "memory:", blobs=self._blobs, config=self._config, run_id="simulation", now=self._clock.now
        )
        self._meters = {role: Meter(self._clock.now) for role in ("runner", "router", "trainer")}
        self._fleet: Fleet[SimulatedWorker] = Fleet(
            clock=self._clock, meter=self._meters["router"], capacity=2 * plan.batch, max_waiting=plan.runners * plan.slots
        )
        self._random = random.Random(f"{plan.seed}/crashes")
        self._stop = asyncio.Event()

    async def run(self) -> SimulationResult:
        self._ledger.open_run(Run("simulation", self._plan.seed, self._config.model_dump(mode="json")), make_tasks(self._plan))
        self._ledger.set_phase(Phase.TRAINING)
        async with asyncio.TaskGroup() as group:
            roles = self._start_roles(group)
            await self._clock.sleep(self._plan.seconds)
            self._ledger.set_phase(Phase.DRAINING)
            self._stop.set()
            for role in roles:
                role.cancel()
        self._ledger.set_phase(Phase.FINISHED)
        return self._result()

    def _start_roles(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start everything; returns the tasks that must be cancelled at the end."""
        plan = self._plan
        sync = WeightSync(
            self._fleet,
            ledger=self._ledger,
            clock=self._clock,
            meter=self._meters["router"],
            poll_seconds=self._config.rollout.sync_seconds,
            drain_timeout_seconds=self._config.rollout.drain_timeout_seconds,
        )
        workers = [SimulatedWorker(plan, self._clock, number) for number in range(plan.workers)]
        for worker in workers:
            self._fleet.add(worker)
        endless = [group.create_task(sync.run(self._stop), name="weight-sync")]
        endless += [group.create_task(self._crash_worker(worker), name=worker.name) for worker in workers]
        endless.append(group.create_task(self._keep_alive("trainer", self._live_trainer, plan.trainer_life_seconds)))
        endless.append(group.create_task(self._keep_alive("manager", self._live_manager, plan.manager_life_seconds)))
        for number in range(plan.runners):
            group.create_task(self._keep_alive(f"runner-{number}", self._live_runner, plan.runner_life_seconds))
        return endless

    # ------------------------------------------------------------------ lives of processes

    async def _live_runner(self, name: str) -> None:
        runner = Runner(
            ledger=self._ledger,
            pool=SimulatedPool(self._plan, self._clock, name),
            client=FleetClient(self._fleet, timeout_seconds=REPLY_TIMEOUT_SECONDS),
            dialect=SimulatedDialect(),
            blobs=self._blobs,
            config=self._config,
            clock=self._clock,
            meter=self._meters["runner"],
            name=name,
        )
        await runner.run(self._stop)

    async def _live_trainer(self, name: str) -> None:
        trainer = SimulatedTrainer(self._plan, ledger=self._ledger, clock=self._clock, meter=self._meters["trainer"], holder=name)
        await trainer.run()

    async def _live_manager(self, name: str) -> None:
        await run_manager(self._ledger, clock=self._clock, holder=name, stop=self._stop)

    async def _keep_alive(self, name: str, live: Callable[[str], Awaitable[None]], life_seconds: float) -> None:
        """One life after another until the end, as a supervisor does it."""
        life = 0
        while not self._stop.is_set():
            life += 1
            try:
                async with self._clock.timeout(self._draw_life(life_seconds)):
                    await live(f"{name}@{life}")
            except (TimeoutError, LeaseLost) as error:
                self._ledger.record_event(Event("restart", name, {"life": life, "reason": type(error).__name__}))
                await self._pause(self._plan.restart.draw(self._random))

    async def _crash_worker(self, worker: SimulatedWorker) -> None:
        while True:
            await self._clock.sleep(self._draw_life(self._plan.worker_life_seconds))
            worker.crash()
            await self._clock.sleep(self._plan.restart.draw(self._random))
            worker.restart()

    def _draw_life(self, mean_seconds: float) -> float:
        life = self._random.expovariate(1.0)
        return min(life * mean_seconds, 10.0 * self._plan.seconds)

    async def _pause(self, seconds: float) -> None:
        try:
            async with self._clock.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    def _result(self) -> SimulationResult:
        events = tuple(self._ledger.events())
        lines = [orjson.dumps([event.at, event.kind, event.subject, event.data]) for event in events]
        readings = {f"{role}/{name}": value for role, meter in self._meters.items() for name, value in meter.readings().items()}
        return SimulationResult(
            counts=dict(self._ledger.counts()),
            readings=readings,
            steps=tuple(self._ledger.training_steps()),
            events=events,
            audit=audit(self._ledger),
            event_hash=hashlib.sha256(b"\n".join(lines)).hexdigest(),
        )


def _make_config(plan: SimulationPlan, changes: Mapping[str, Mapping[str, object]]) -> RunConfig:
    """Options that suit a desktop cluster; the rest keeps its defaults."""
    sections: dict[str, dict[str, object]] = {
        "tasks": {"families": [f"family-{number:02d}" for number in range(plan.families)], "train_instances": plan.instances},
        "environment": {"runners": plan.runners, "slots": plan.slots},
        "agent": {"max_steps": 30, "episode_timeout_seconds": 1800.0},
        "rollout": {"request_timeout_seconds": REPLY_TIMEOUT_SECONDS, "sync_seconds": 2.0, "drain_timeout_seconds": 120.0},
        "data": {"lease_seconds": 120.0, "group_deadline_seconds": 2400.0, "breaker_window": max(50, 2 * plan.slots)},
        "training": {"groups_per_step": plan.groups_per_step},
    }
    for section, options in changes.items():
        sections.setdefault(section, {}).update(options)
    return parse_config({"seed": plan.seed, **sections}, source="simulation")

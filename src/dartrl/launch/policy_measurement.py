"""Success of a policy folder in the real environment, in this process: no ledger, no router, no training.

For choosing a pre-trained policy. Results that are reported come from `dartrl eval`, which records every episode.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dartrl.config import RunConfig
from dartrl.data.blobs import MemoryBlobStore
from dartrl.errors import EnvironmentFault
from dartrl.interfaces import Clock, EnvironmentPool, GenerateRequest
from dartrl.launch.plugins import create_dialect, create_pool, create_task_set
from dartrl.metrics import Meter
from dartrl.policy.model import load_policy
from dartrl.records import Assignment, Lease, WeightsVersion
from dartrl.rollout.embedded_engine import EmbeddedEngine
from dartrl.rollout.episode import EpisodeTools, run_episode
from dartrl.train.publish import publish
from dartrl.types import Generation, Task

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Times an episode is played before its faults end the measurement."""


async def measure_policy(
    config: RunConfig, clock: Clock, *, policy: Path, families: Sequence[str], episodes: int, temperature: float
) -> dict[str, float]:
    """Family -> share of the episodes solved in full, on the first training instances.

    An episode that the infrastructure broke is played again. Raises ConfigError for an unknown family, WeightsRejected or
    EnvironmentFault if policy or browser do not start, or if an episode breaks `ATTEMPTS` times.
    """
    tasks = create_task_set(config.tasks.set).tasks(families, "train", episodes)
    pool = create_pool(config, clock)
    engine = EmbeddedEngine(config, name="measurement", clock=clock)
    stop = asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="dartrl-measure-") as folder:
        path, checksum = publish(load_policy(policy, dtype=config.policy.dtype), Path(folder), 1)
        serving = asyncio.create_task(engine.run(stop))
        try:
            await pool.start()
            await clock.sleep(0)  # the engine accepts weights once it runs
            await engine.load(WeightsVersion(1, str(path), checksum, 0, None), probe_tolerance=config.rollout.probe_tolerance)
            return await _play(config, clock, engine, pool, tasks, temperature)
        finally:
            stop.set()
            await serving
            await pool.close()


class _DirectClient:
    """The engine as a PolicyClient, without HTTP between."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._engine.generate(request)

    async def close(self) -> None:
        return


async def _play(
    config: RunConfig, clock: Clock, engine: EmbeddedEngine, pool: EnvironmentPool, tasks: Sequence[Task], temperature: float
) -> dict[str, float]:
    tools = EpisodeTools(
        client=_DirectClient(engine),
        dialect=create_dialect(config.agent),
        blobs=MemoryBlobStore(),
        clock=clock,
        meter=Meter(clock.now),
        agent=config.agent,
        reply_timeout_seconds=config.rollout.request_timeout_seconds,
    )
    solved: dict[str, list[bool]] = {}
    waiting = iter(enumerate(tasks))

    async def play(slot: int, task: Task, sampling_seed: int) -> bool:
        detail = ""
        for attempt in range(ATTEMPTS):
            assignment = _assignment(task, config, clock, temperature=temperature, sampling_seed=sampling_seed)
            outcome = (await run_episode(assignment, await pool.acquire(slot, task), tools)).outcome
            if outcome.is_scored:
                return outcome.success is True
            detail = outcome.detail
            logger.warning("episode broke task=%s attempt=%d reason=%s %s", task.id, attempt, outcome.reason, detail)
            await pool.discard(slot)
        raise EnvironmentFault(f"episode {task.id} broke {ATTEMPTS} times, last: {detail}")

    async def work(slot: int) -> None:
        for index, task in waiting:
            solved.setdefault(task.family, []).append(await play(slot, task, index))

    async with asyncio.TaskGroup() as group:
        for slot in range(pool.size):
            group.create_task(work(slot))
    return {family: round(sum(values) / len(values), 3) for family, values in sorted(solved.items())}


def _assignment(task: Task, config: RunConfig, clock: Clock, *, temperature: float, sampling_seed: int) -> Assignment:
    return Assignment(
        trajectory_id=f"{task.id}/{temperature:g}",
        group_id=task.id,
        slot=0,
        attempt=0,
        task=task,
        max_steps=config.agent.max_steps,
        temperature=temperature,
        sampling_seed=sampling_seed,
        purpose="evaluation",
        lease=Lease(f"trajectory:{task.id}", "measurement", 1, clock.now() + config.agent.episode_timeout_seconds),
    )

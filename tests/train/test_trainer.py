"""The whole trainer against the real data manager in memory and a small random policy."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dartrl.config import RunConfig, parse_config
from dartrl.data.blobs import MemoryBlobStore
from dartrl.data.manager import DataManager, open_ledger
from dartrl.metrics import Meter
from dartrl.policy.manifest import verify_manifest
from dartrl.policy.model import Policy, load_policy, load_weights_into, save_policy
from dartrl.policy.probes import check_probes
from dartrl.records import Assignment, Event, Phase, Run
from dartrl.testing.clock import ManualClock
from dartrl.train.trainer import Trainer
from dartrl.types import Task

GROUP = 4


@dataclass
class Bench:
    """A run with everything but runners and workers, which `fill` and `sync` stand for."""

    root: Path
    config: RunConfig
    blobs: MemoryBlobStore
    clock: ManualClock
    ledger: DataManager
    sampler: Policy
    make_recorder: Callable[..., Any]
    version: int = 0
    episodes: int = 0
    trainers: list[asyncio.Task[None]] = field(default_factory=list)

    def trainer(self, holder: str = "trainer-0") -> Trainer:
        return Trainer(
            ledger=self.ledger,
            blobs=self.blobs,
            config=self.config,
            run_dir=self.root,
            clock=self.clock,
            meter=Meter(self.clock.now),
            holder=holder,
            select_steps=lambda entropies: [True] * len(entropies),
        )

    @contextlib.asynccontextmanager
    async def running(self, holder: str = "trainer-0") -> AsyncIterator[asyncio.Event]:
        """A trainer that runs inside the block and is stopped cleanly after it."""
        stop = asyncio.Event()
        task = asyncio.create_task(self.trainer(holder).run(stop))
        try:
            yield stop
        finally:
            stop.set()
            while not task.done():
                await self.clock.advance(0.5)
            await task

    async def until_step(self, step: int) -> None:
        while len(self.ledger.training_steps()) < step:
            self.sync()
            self.fill()
            await self.clock.advance(0.2)

    def sync(self) -> None:
        """What the router does: bring the sampling policy to the published version."""
        weights = self.ledger.current_weights()
        if weights is not None and weights.version != self.version:
            verify_manifest(Path(weights.path), weights.checksum)
            load_weights_into(self.sampler, Path(weights.path))
            check_probes(self.sampler, Path(weights.path), tolerance=1e-4)
            self.version = weights.version
            self.ledger.record_event(Event("sync", "engine-0", {"worker": "engine-0", "version": weights.version}))

    def fill(self) -> None:
        """What runners do: finish every assignment that is handed out."""
        recorder = self.make_recorder(self.sampler, self.blobs)
        while isinstance(assignment := self.ledger.next_assignment("runner-0"), Assignment):
            score = float((assignment.slot + assignment.task.seed) % 2)
            trajectory = recorder.trajectory(
                assignment.trajectory_id,
                assignment.task,
                score,
                num_steps=1 + assignment.slot % 2,
                seed=assignment.sampling_seed % 10_000,
                version=self.version,
            )
            self.ledger.record_trajectory(assignment.lease, trajectory)
            self.episodes += 1


@pytest.fixture
def make_bench(tmp_path: Path, make_policy, make_recorder):
    def make(name: str = "run", **training: Any) -> Bench:
        base = tmp_path / "initial"
        if not base.exists():
            save_policy(make_policy(), base)
        options = {"groups_per_step": 2, "checkpoint_every": 2, "minibatch_rows": 8, "microbatch_rows": 4, "learning_rate": 1e-3}
        config = parse_config(
            {
                "policy": {"path": str(base)},
                "training": {**options, **training},
                "curation": {"max_rollouts": GROUP, "max_staleness": 2},
                "data": {"lease_seconds": 6.0},
            }
        )
        clock, blobs = ManualClock(), MemoryBlobStore()
        ledger = open_ledger("memory:", blobs=blobs, config=config, run_id=name, now=clock.now)
        tasks = [Task(id=f"click/{seed}", family="click", seed=seed, instruction="click") for seed in range(40)]
        ledger.open_run(Run(name, 0, {}), tasks)
        ledger.set_phase(Phase.TRAINING)
        return Bench(tmp_path / name, config, blobs, clock, ledger, make_policy(), make_recorder)

    return make


async def test_it_publishes_the_initial_weights_before_anything_else(make_bench, make_policy):
    bench = make_bench()
    async with bench.running():
        await bench.clock.advance(1.0)
        weights = bench.ledger.current_weights()
        assert weights is not None
        assert (weights.version, weights.training_step, weights.parent) == (1, 0, None)
        verify_manifest(Path(weights.path), weights.checksum)
        assert check_probes(make_policy(), Path(weights.path), tolerance=1e-6) <= 1e-6


async def test_it_trains_publishes_and_checkpoints_and_leaves_nothing_applied(make_bench, make_policy):
    bench = make_bench()
    async with bench.running():
        await bench.until_step(5)
    steps = bench.ledger.training_steps()
    assert [step.index for step in steps] == list(range(1, len(steps) + 1))
    counts = bench.ledger.counts()
    assert counts.get("members_applied", 0) == 0
    assert counts["members_trained"] == len(steps) * 2 * GROUP
    weights = bench.ledger.current_weights()
    assert weights is not None and weights.training_step == len(steps)
    trained = load_policy(Path(weights.path)).model.state_dict()
    initial = make_policy().model.state_dict()
    assert any(not torch.equal(trained[name], initial[name]) for name in initial)


async def test_each_step_reports_how_far_off_policy_it_was(make_bench):
    bench = make_bench()
    async with bench.running():
        await bench.until_step(3)
    for step in bench.ledger.training_steps():
        metrics = step.metrics
        assert metrics["episodes"] == 2 * GROUP
        assert metrics["success"] == 0.5
        assert 0 < metrics["effective_sample_size"] <= 1
        assert 0 <= metrics["staleness_max"] <= bench.config.curation.max_staleness
        assert metrics["rows_left_out"] == 0
        if "logprob_gap_max_at_lag_0" in metrics:
            assert metrics["logprob_gap_max_at_lag_0"] < 1e-4
    first = bench.ledger.training_steps()[0].metrics
    assert first["logprob_gap_max_at_lag_0"] < 1e-4
    assert first["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)


async def test_learning_rate_zero_is_a_control_run(make_bench, make_policy):
    bench = make_bench(learning_rate=0.0)
    async with bench.running():
        await bench.until_step(3)
    weights = bench.ledger.current_weights()
    assert weights is not None and weights.version >= 4
    served = load_policy(Path(weights.path)).model.state_dict()
    for name, value in make_policy().model.state_dict().items():
        assert torch.equal(served[name], value), name

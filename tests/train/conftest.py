"""A small random policy and recorded episodes of it, made from nothing and equal in every run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dartrl.config import RunConfig, parse_config
from dartrl.data.blobs import MemoryBlobStore
from dartrl.data.manager import DataManager, open_ledger
from dartrl.interfaces import ImageRef, Message
from dartrl.metrics import Meter
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import collate, encode_prompt, reply_row
from dartrl.policy.manifest import verify_manifest
from dartrl.policy.model import Policy, PolicyShape, build_policy, build_tokenizer, load_weights_into, save_policy
from dartrl.policy.probes import check_probes
from dartrl.records import Assignment, Claim, ClaimedGroup, Event, Member, Phase, Run
from dartrl.testing.clock import ManualClock
from dartrl.testing.images import flat_png
from dartrl.train.trainer import Trainer
from dartrl.types import End, Generation, Outcome, Step, Task, Trajectory

torch.set_num_threads(1)

SHAPE = PolicyShape(
    text_width=32,
    text_layers=2,
    text_heads=2,
    text_kv_heads=1,
    text_mlp=48,
    vision_width=24,
    vision_layers=1,
    vision_heads=2,
    vision_mlp=32,
)
CORPUS = ["click the left half of the screen", "click 12 20", "type hello", "finish"]


def small_policy(seed: int = 0, dtype: str = "float32") -> Policy:
    tokenizer = build_tokenizer(CORPUS, vocab_size=320)
    return build_policy(tokenizer, SHAPE, seed=seed, dtype=dtype)  # type: ignore[arg-type]


@dataclass
class Recorder:
    """Makes episodes as if the policy had been sampled by an engine that serves `version`."""

    policy: Policy
    blobs: MemoryBlobStore
    temperature: float = 1.0
    noise: float = 0.0

    def generation(self, text: str, shade: int, *, seed: int, version: int = 1) -> Generation:
        random = np.random.default_rng(seed)
        png = flat_png(56, 28, shade=shade)
        image = ImageRef(self.blobs.put(png), 56, 28)
        prompt = encode_prompt(self.policy, [Message("user", (image, text))], {image.hash: png})
        allowed = [i for i in range(300) if i not in self.policy.banned_ids and i not in self.policy.end_ids]
        ids = [*random.choice(allowed, random.integers(1, 6)), min(self.policy.end_ids)]
        with torch.no_grad():
            logprobs, entropies, _ = token_logprobs(
                self.policy, collate([reply_row(prompt, np.array(ids, np.int32))]), temperature=self.temperature
            )
        noisy = np.minimum(logprobs[0].numpy() + self.noise * random.normal(size=len(ids)), 0.0)
        return Generation(
            text="?",
            prompt_ids=prompt.ids_S,
            response_ids=np.array(ids, np.int32),
            behaviour_logprobs=noisy.astype(np.float32),
            entropies=entropies[0].numpy().astype(np.float32),
            finish_reason="stop",
            image_hashes=(image.hash,),
            image_grids=tuple(picture.grid for picture in prompt.images),
            fingerprint=self.policy.fingerprint,
            temperature=self.temperature,
            banned_ids=self.policy.banned_ids,
            compute_dtype="float32",
            weights_version=version,
            worker="engine-0",
            request_id=f"request-{seed}",
        )

    def trajectory(self, name: str, task: Task, score: float, *, num_steps: int = 2, seed: int = 0, version: int = 1) -> Trajectory:
        steps = tuple(
            Step(
                index=index,
                screenshot=None,
                screen=(56, 28),
                observation_text="",
                generation=self.generation(
                    "click " * (index + 1), task.seed * 16 + index, seed=seed * 100 + index, version=version
                ),
                actions=(),
                parse_error=None,
                environment_seconds=0.0,
                started_at=0.0,
            )
            for index in range(num_steps)
        )
        outcome = Outcome(End.TERMINATED, "environment", score=score, success=score == 1.0, raw=score)
        return Trajectory(name, task, "click", steps, outcome, 0.0, 1.0)

    def claim(self, name: str, scores: Sequence[Sequence[float]], *, seed: int = 0, version: int = 1) -> Claim:
        """One group per row of scores."""
        groups: list[ClaimedGroup] = []
        for g, row in enumerate(scores):
            task = Task(id=f"click/{g}", family="click", seed=g)
            members = tuple(
                Member(
                    f"{name}-{g}-{slot}",
                    self.trajectory(
                        f"{name}-t{g}-{slot}",
                        task,
                        score,
                        num_steps=1 + (g + slot) % 3,
                        seed=seed * 1000 + g * 50 + slot,
                        version=version,
                    ),
                    "fresh",
                )
                for slot, score in enumerate(row)
            )
            groups.append(ClaimedGroup(f"{name}-g{g}", task, members))
        return Claim(name, tuple(groups))


@dataclass
class Bench:
    """A run with everything but runners and workers, which `fill` and `sync` stand for."""

    root: Path
    config: RunConfig
    blobs: MemoryBlobStore
    clock: ManualClock
    ledger: DataManager
    sampler: Policy
    version: int = 0
    episodes: int = 0
    damage: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Slot -> changes to the first recorded reply of every episode in it."""

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
        recorder = Recorder(self.sampler, self.blobs)
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
            if changes := self.damage.get(assignment.slot):
                first = replace(trajectory.steps[0], generation=replace(trajectory.steps[0].generation, **changes))
                trajectory = replace(trajectory, steps=(first, *trajectory.steps[1:]))
            self.ledger.record_trajectory(assignment.lease, trajectory)
            self.episodes += 1


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    """small_policy(seed, dtype): random weights, equal for equal seeds."""
    return small_policy


@pytest.fixture
def make_recorder() -> type[Recorder]:
    """Recorder(policy, blobs, temperature, noise)."""
    return Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(small_policy(), MemoryBlobStore())


@pytest.fixture
def select_all() -> Callable[[Sequence[float]], list[bool]]:
    """Selector that trains on every step."""
    return lambda entropies: [True] * len(entropies)


@pytest.fixture
def make_bench(tmp_path: Path) -> Callable[..., Bench]:
    """make_bench(name, **training options): a run in phase TRAINING with groups of 4, two groups a step."""

    def make(name: str = "run", **training: Any) -> Bench:
        base = tmp_path / "initial"
        if not base.exists():
            save_policy(small_policy(), base)
        options = {"groups_per_step": 2, "checkpoint_every": 2, "minibatch_rows": 8, "microbatch_rows": 4, "learning_rate": 1e-3}
        config = parse_config(
            {
                "policy": {"path": str(base)},
                "training": {**options, **training},
                "curation": {"max_rollouts": 4, "max_staleness": 2},
                "data": {"lease_seconds": 6.0},
            }
        )
        clock, blobs = ManualClock(), MemoryBlobStore()
        ledger = open_ledger("memory:", blobs=blobs, config=config, run_id=name, now=clock.now)
        tasks = [Task(id=f"click/{seed}", family="click", seed=seed, instruction="click") for seed in range(40)]
        ledger.open_run(Run(name, 0, {}), tasks)
        ledger.set_phase(Phase.TRAINING)
        return Bench(tmp_path / name, config, blobs, clock, ledger, small_policy())

    return make

"""A ledger on a bench: a clock to turn, and short ways to play every role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dartrl.config import RunConfig, parse_config
from dartrl.interfaces import BlobStore, Ledger
from dartrl.records import Assignment, Checkpoint, Claim, Phase, Run, TrainingStep, Wait, WeightsVersion
from dartrl.testing.trajectories import make_trajectory
from dartrl.types import End, Task

MakeLedger = Callable[[RunConfig, str, BlobStore, Callable[[], float]], Ledger]


@dataclass
class LedgerBench:
    """A ledger with a clock to turn and short ways to play all roles."""

    make: MakeLedger
    """Gives a fresh ledger."""
    blobs: BlobStore
    """Where screenshots go."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options on top of the small ones below."""
    time: float = 1000.0
    """Ledger time in seconds."""
    ledger: Any = None
    """The ledger that `open` opened last."""

    def open(self, *, phase: Phase = Phase.TRAINING, **options: Mapping[str, Any]) -> Ledger:
        """A run with two families of three instances, two held out each, weights version 1, in a phase."""
        sections: dict[str, dict[str, Any]] = {
            "environment": {"slots": 4},
            "data": {"lease_seconds": 10, "group_deadline_seconds": 100, "max_attempts": 2, "breaker_window": 5},
            "curation": {"max_rollouts": 3, "max_staleness": 1},
            "training": {"groups_per_step": 2, "keep_checkpoints": 2},
            "agent": {"max_steps": 6},
        }
        for section, values in {**self.options, **options}.items():
            sections[section] = {**sections.get(section, {}), **values}
        ledger = self.make(parse_config(sections), "run-a", self.blobs, lambda: self.time)
        ledger.open_run(Run("run-a", 7, {"name": "a"}), make_tasks())
        self.ledger = ledger
        lease = ledger.acquire_trainer("trainer-0")
        assert lease is not None
        self.trainer = lease
        ledger.begin_training(lease)
        version = ledger.next_weights_version(lease)
        ledger.publish_weights(lease, WeightsVersion(version, "weights/v1", "c1", 0, None))
        ledger.set_phase(phase)
        return ledger

    def close(self) -> None:
        """Let go of the ledger, if it can be closed."""
        if hasattr(self.ledger, "close"):
            self.ledger.close()

    def assign(self, holder: str = "runner-0") -> Assignment:
        """The next assignment, which must be there."""
        given = self.ledger.next_assignment(holder)
        assert isinstance(given, Assignment), given
        return given

    def record(self, assignment: Assignment, score: float = 0.0, *, end: End = End.TERMINATED, **more: Any) -> None:
        """Record an attempt."""
        trajectory = make_trajectory(assignment, self.blobs, score=score, end=end, started_at=self.time, **more)
        self.ledger.record_trajectory(assignment.lease, trajectory)

    def play_group(self, scores: Sequence[float], **more: Any) -> str:
        """Run one group to its end with these scores; returns its id."""
        group = ""
        for score in scores:
            assignment = self.assign()
            group = assignment.group_id
            self.record(assignment, score, **more)
        return group

    def claim(self, count: int = 2) -> Claim:
        """The next claim, which must be there."""
        claim = self.ledger.claim_groups(self.trainer, count)
        assert claim is not None
        return claim

    def step(self, claim: Claim, index: int, *, publish: bool = True, rejected: dict[str, str] | None = None) -> None:
        """Acknowledge a step, with new weights."""
        weights = None
        if publish:
            current = self.ledger.current_weights()
            version = self.ledger.next_weights_version(self.trainer)
            weights = WeightsVersion(version, f"weights/v{version}", f"c{version}", index, current.version if current else None)
        self.ledger.acknowledge_step(self.trainer, claim, TrainingStep(index, claim.id, {"loss": 0.5}, rejected or {}), weights)

    def train_step(self, index: int) -> Claim:
        """Two groups of mixed scores, claimed and acknowledged."""
        version = self.version()
        for _ in range(2):
            self.play_group([0.0, 1.0, 0.0], version=version)
        claim = self.claim()
        self.step(claim, index)
        return claim

    def version(self) -> int:
        """The published version."""
        weights = self.ledger.current_weights()
        return weights.version if weights else 0

    def checkpoint(self, step: int) -> None:
        """Record a checkpoint after a step."""
        self.ledger.record_checkpoint(
            self.trainer, Checkpoint(f"s{step}", f"checkpoints/s{step}", step, self.version(), f"k{step}")
        )

    def tick(self) -> Mapping[str, int]:
        """One round of time-driven work."""
        lease = self.ledger.acquire_manager("manager-0")
        assert lease is not None
        return self.ledger.tick(lease)


def make_tasks() -> list[Task]:
    """Two families, three training and two held-out instances each."""
    train = [Task(f"{family}/{seed}", family, seed, spec={"size": seed}) for family in ("left", "right") for seed in range(3)]
    held_out = [Task(f"{family}/{seed}", family, seed, "evaluation") for family in ("left", "right") for seed in (100, 101)]
    return train + held_out


def refused(kind: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """The message with which the call raises `kind`."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} did not raise {kind.__name__}")


def reason_to_wait(ledger: Ledger) -> str:
    """Why the ledger has no assignment; it must have none."""
    given = ledger.next_assignment("runner-0")
    assert isinstance(given, Wait), given
    assert given.seconds > 0
    return given.reason

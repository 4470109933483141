"""What is simulated: how many of what, how long things take, how often they fail."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """Log-normal time of an operation."""

    median: float
    """Seconds."""
    sigma: float = 0.3
    """Standard deviation of the logarithm; 0 is constant."""

    def draw(self, generator: random.Random) -> float:
        """One time in seconds."""
        return self.median * math.exp(self.sigma * generator.gauss(0.0, 1.0)) if self.sigma else self.median


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """A cluster and its weaknesses; the defaults are a desktop cluster as in DART's experiments."""

    seed: int = 0
    """Root of everything random."""
    seconds: float = 3600.0
    """Virtual time of training."""
    runners: int = 10
    """Runner processes."""
    slots: int = 100
    """Environments per runner."""
    workers: int = 4
    """Policy workers."""
    families: int = 12
    """Task families; their episodes need between 6 and 28 right steps."""
    instances: int = 40
    """Training instances per family."""
    reset: Latency = Latency(20.0)
    """Environment reset."""
    step: Latency = Latency(12.0)
    """Action with its settled screen."""
    evaluate: Latency = Latency(3.0)
    """Scoring."""
    reply: Latency = Latency(8.0)
    """Reply of an idle worker; a full one takes twice as long."""
    batch: int = 256
    """Replies that a worker makes together."""
    load: Latency = Latency(4.0)
    """Loading weights into a worker."""
    training_step: Latency = Latency(60.0)
    """One training step of the trainer."""
    groups_per_step: int = 32
    """Groups claimed for a training step."""
    checkpoint_every: int = 2
    """Training steps between two checkpoints."""
    environment_fault_share: float = 0.001
    """Share of environment operations that crash."""
    evaluator_fault_share: float = 0.002
    """Share of evaluations that cannot be computed."""
    unreadable_share: float = 0.01
    """Share of replies that cannot be parsed."""
    worker_life_seconds: float = 1500.0
    """Mean time between two crashes of a policy worker; infinite for none."""
    runner_life_seconds: float = 2400.0
    """Mean time between two crashes of a runner."""
    trainer_life_seconds: float = 1200.0
    """Mean time between two crashes of the trainer."""
    manager_life_seconds: float = 900.0
    """Mean time between two crashes of the manager process."""
    restart: Latency = Latency(20.0)
    """Time a crashed process is away."""


CALM = float("inf")
"""Life of a process that never crashes."""

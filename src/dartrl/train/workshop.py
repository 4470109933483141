"""The blocking work of the trainer on policy and files, in one object that its thread calls.

Owns the learner and the folders weights/ and checkpoints/ of one run; knows neither the ledger nor the time.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from dartrl.config import RunConfig
from dartrl.interfaces import BlobStore, StepSelector
from dartrl.policy.model import Policy, load_policy
from dartrl.records import Checkpoint, Claim
from dartrl.train.batch import assemble
from dartrl.train.checkpoint import Progress, newest_usable, remove_old, save_checkpoint
from dartrl.train.learner import Learner
from dartrl.train.publish import publish, remove_superseded


class Workshop:
    """Policy, optimizer and files of one run."""

    def __init__(self, config: RunConfig, run_dir: Path, *, blobs: BlobStore, select_steps: StepSelector) -> None:
        self._config = config
        self._blobs = blobs
        self._select_steps = select_steps
        self._weights_dir = run_dir / "weights"
        self._checkpoints_dir = run_dir / "checkpoints"
        self._learner: Learner | None = None

    @property
    def learner(self) -> Learner:
        """The learner, after `restore`."""
        assert self._learner is not None, "restore comes first"
        return self._learner

    def restore(self, checkpoint: Checkpoint | None) -> int | None:
        """Load the checkpoint, an older one if it is damaged, or the initial policy if it is None.

        Returns the training step of the checkpoint that was loaded. Raises CheckpointBroken or ConfigError.
        """
        config = self._config
        reference = self._load_initial() if config.training.kl_weight else None
        if checkpoint is None:
            self._learner = Learner(self._load_initial(), reference=reference, config=config)
            return None
        loaded = newest_usable(self._checkpoints_dir, checkpoint.name, checkpoint.checksum, dtype=config.policy.dtype)
        self._learner = Learner(loaded.policy, reference=reference, config=config)
        self._learner.load_optimizer_state(loaded.optimizer)
        torch.set_rng_state(loaded.random_state)
        return loaded.progress.training_step

    def train(self, claim: Claim, step: int, version: int, is_published: bool) -> tuple[dict[str, float], dict[str, str]]:
        """(metrics, membership id -> reason of rejection) of training on the claim."""
        learner = self.learner
        batch = assemble(claim, blobs=self._blobs, tools=learner, objective=learner.objective, select_steps=self._select_steps)
        metrics = learner.train(batch, step=step, version=version, is_published=is_published)
        return metrics, batch.rejected

    def publish(self, version: int) -> tuple[Path, str]:
        """(folder, checksum) of the present weights as that version. Raises OSError if the disk refuses."""
        self._weights_dir.mkdir(parents=True, exist_ok=True)
        return publish(self.learner.policy, self._weights_dir, version)

    def save_checkpoint(self, step: int, version: int) -> Checkpoint:
        """A durable checkpoint after that step. Raises OSError if the disk refuses."""
        folder, checksum = save_checkpoint(
            self._checkpoints_dir,
            policy=self.learner.policy,
            optimizer=self.learner.optimizer_state(),
            progress=Progress(training_step=step, weights_version=version),
        )
        return Checkpoint(folder.name, str(folder), step, version, checksum)

    def clean(self, served: Collection[int], current: int) -> None:
        """Remove checkpoints and weights that nobody needs any more.

        served: newest version that each policy worker loaded. current: the version just published.
        """
        remove_old(self._checkpoints_dir, keep=self._config.training.keep_checkpoints)
        remove_superseded(self._weights_dir, served=served, keep={1, current})

    def _load_initial(self) -> Policy:
        return load_policy(self._config.policy.path, dtype=self._config.policy.dtype)

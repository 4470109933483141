"""Resumable points of training: model, optimizer, random state and progress in one folder.

    checkpoints/step-000040/  policy/  optimizer.safetensors  progress.json  manifest.json

Files are durable and vouched for by the manifest before the folder gets its name, and the folder has its name before the
ledger has its row. Loading verifies the manifest; a folder that is damaged is refused, and `newest_usable` goes back to an
older one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dartrl.errors import CheckpointBroken, ConfigError, WeightsRejected
from dartrl.policy.manifest import sync_folder, verify_manifest, write_manifest
from dartrl.policy.model import Policy, load_policy, save_policy

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{6,})")
_OPTIMIZER = "optimizer.safetensors"
_PROGRESS = "progress.json"
_RANDOM = "torch/random"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stood."""

    training_step: int
    """Last step contained."""
    weights_version: int
    """Version published with it."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A checkpoint in memory."""

    policy: Policy
    """With the checkpoint's weights."""
    optimizer: dict[str, torch.Tensor]
    """State for `Learner.load_optimizer_state`."""
    random_state: torch.Tensor
    """State of torch's generator."""
    progress: Progress
    """Where it stood."""


def checkpoint_name(training_step: int) -> str:
    """Folder name of the checkpoint after that step."""
    return f"step-{training_step:06d}"


def save_checkpoint(
    checkpoints_dir: Path, *, policy: Policy, optimizer: dict[str, torch.Tensor], progress: Progress
) -> tuple[Path, str]:
    """(folder, checksum) of a complete, durable checkpoint. Raises OSError, with no trace left, if the disk refuses."""
    folder = checkpoints_dir / checkpoint_name(progress.training_step)
    unfinished = checkpoints_dir / f".{folder.name}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        save_policy(policy, unfinished / "policy")
        _save_tensors({**optimizer, _RANDOM: torch.get_rng_state()}, unfinished / _OPTIMIZER)
        (unfinished / _PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")
        checksum = write_manifest(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
        sync_folder(checkpoints_dir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder, checksum


def load_checkpoint(folder: Path, checksum: str | None, *, dtype: str) -> Loaded:
    """The checkpoint in this folder. checksum: the ledger's, or None to trust the folder's own manifest.

    Raises CheckpointBroken that names the damaged file.
    """
    try:
        verify_manifest(folder, checksum)
        progress = Progress(**json.loads((folder / _PROGRESS).read_text(encoding="utf-8")))
        tensors = load_file(folder / _OPTIMIZER)
        policy = load_policy(folder / "policy", dtype=dtype)  # pyright: ignore[reportArgumentType]
    except (WeightsRejected, ConfigError, SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointBroken(f"checkpoint {folder} cannot be used: {error}") from error
    random_state = tensors.pop(_RANDOM)
    return Loaded(policy, tensors, random_state, progress)


def newest_usable(checkpoints_dir: Path, name: str, checksum: str, *, dtype: str) -> Loaded:
    """The named checkpoint, or the newest older one that is intact.

    Raises CheckpointBroken if there is none. Going back loses the weights' share of the steps in between, never their
    records; that is logged as an error.
    """
    wanted = _step_of(name)
    try:
        return load_checkpoint(checkpoints_dir / name, checksum, dtype=dtype)
    except CheckpointBroken as error:
        log.error("checkpoint damaged name=%s reason=%s", name, error)
        first_error = error
    for step in sorted(_steps(checkpoints_dir), reverse=True):
        if step >= wanted:
            continue
        try:
            loaded = load_checkpoint(checkpoints_dir / checkpoint_name(step), None, dtype=dtype)
        except CheckpointBroken as error:
            log.error("checkpoint damaged name=%s reason=%s", checkpoint_name(step), error)
            continue
        log.error("resuming from an older checkpoint name=%s lost_steps=%d", checkpoint_name(step), wanted - step)
        return loaded
    raise CheckpointBroken(
        f"{first_error}; no older checkpoint in {checkpoints_dir} is intact. Restore the folder from a backup, or start a new "
        f"run with policy.path set to a folder in {checkpoints_dir.parent / 'weights'}"
    ) from first_error


def remove_old(checkpoints_dir: Path, *, keep: int) -> list[int]:
    """Remove all but the newest `keep` checkpoints; returns the steps removed."""
    doomed = sorted(_steps(checkpoints_dir))[:-keep]
    for step in doomed:
        shutil.rmtree(checkpoints_dir / checkpoint_name(step), ignore_errors=True)
    return doomed


def _steps(checkpoints_dir: Path) -> list[int]:
    if not checkpoints_dir.is_dir():
        return []
    return [int(match[1]) for path in checkpoints_dir.iterdir() if (match := _NAME.fullmatch(path.name))]


def _step_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointBroken(f"checkpoint name {name!r} is not of the form step-000040; was it written by another version?")
    return int(match[1])


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)

"""Weights that workers may load: one folder per version, complete and vouched for before the ledger names it.

    weights/v000012/  model.safetensors, config, tokenizer, image settings, probes.json, manifest.json

The folder is written under another name and renamed when everything in it is durable, so a crash leaves either all of it or
nothing. Folders that no worker can still ask for are removed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from dartrl.policy.manifest import sync_folder, write_manifest
from dartrl.policy.model import Policy, save_policy
from dartrl.policy.probes import write_probes

KEEP_NEWEST = 4
"""Published folders kept in any case."""
KEEP_UNKNOWN = 16
"""Published folders kept while no worker has reported what it serves."""
_NAME = re.compile(r"v(\d{6,})")


def publish(policy: Policy, weights_dir: Path, version: int) -> tuple[Path, str]:
    """(folder, checksum) of the policy written as `version`, with probes.

    Raises OSError, with no trace left, if the disk refuses.
    """
    folder = weights_dir / f"v{version:06d}"
    unfinished = weights_dir / f".v{version:06d}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        save_policy(policy, unfinished)
        write_probes(policy, unfinished)
        checksum = write_manifest(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
        sync_folder(weights_dir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder, checksum


def remove_superseded(weights_dir: Path, *, served: Collection[int], keep: Collection[int]) -> list[int]:
    """Remove version folders that nobody needs any more; returns their versions.

    served: newest version that each worker reported; a worker never goes back behind it, except to it. keep: versions kept
    whatever else. The newest KEEP_NEWEST stay, and everything from the oldest served version on.
    """
    versions = sorted(int(match[1]) for path in weights_dir.iterdir() if (match := _NAME.fullmatch(path.name)))
    kept_newest = KEEP_NEWEST if served else KEEP_UNKNOWN
    newest = set(versions[-kept_newest:])
    needed_from = min(served) if served else 0
    doomed = [v for v in versions if v not in newest and v not in keep and (not served or v < needed_from)]
    for version in doomed:
        shutil.rmtree(weights_dir / f"v{version:06d}", ignore_errors=True)
    return doomed

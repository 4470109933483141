"""Checksums of a folder of published files, so that half-written or altered weights are refused.

`manifest.json` lists every other file of the folder with its size and SHA-256; the folder's checksum is the SHA-256 of the
manifest's bytes, so one short string in the ledger vouches for everything. Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from dartrl.errors import WeightsRejected

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 1 << 20


def write_manifest(folder: Path) -> str:
    """The folder's checksum, after `manifest.json` describes all its files and everything is on disk."""
    files = {name: _describe(folder / name, durable=True) for name in _file_names(folder)}
    data = json.dumps({"format": _FORMAT, "files": files}, indent=1, sort_keys=True).encode()
    unfinished = folder / f".{MANIFEST_NAME}.part"
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / MANIFEST_NAME)
    sync_folder(folder)
    return hashlib.sha256(data).hexdigest()


def verify_manifest(folder: Path, checksum: str | None) -> None:
    """Return if every file is as the manifest says, and the manifest as `checksum` says (None: any manifest).

    Raises WeightsRejected that names the file.
    """
    path = folder / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WeightsRejected(f"{path} cannot be read ({error.strerror}); publish the weights again") from error
    actual = hashlib.sha256(data).hexdigest()
    if checksum is not None and actual != checksum:
        raise WeightsRejected(f"{path} has checksum {actual}, expected {checksum}; the folder was replaced or altered")
    listed = _listed_files(data, path)
    present = set(_file_names(folder))
    for name in sorted(listed.keys() | present):
        if name not in present:
            raise WeightsRejected(f"{folder / name} is missing but listed in {MANIFEST_NAME}; publish the weights again")
        if name not in listed:
            raise WeightsRejected(f"{folder / name} is not listed in {MANIFEST_NAME}; remove it or publish the weights again")
        found = _describe(folder / name, durable=False)
        if found != listed[name]:
            raise WeightsRejected(
                f"{folder / name} has {found['size_bytes']} bytes and SHA-256 {found['sha256'][:12]}..., "
                f"but {MANIFEST_NAME} says {listed[name]}; publish the weights again"
            )


def sync_folder(folder: Path) -> None:
    """Make the folder's directory entries durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_names(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name not in (MANIFEST_NAME, f".{MANIFEST_NAME}.part"))


def _describe(path: Path, *, durable: bool) -> dict[str, Any]:
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
        if durable:
            os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "size_bytes": size_bytes}


def _listed_files(data: bytes, path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(data)
        if manifest["format"] == _FORMAT:
            return dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsRejected(f"{path} is not a manifest of format {_FORMAT}: {error!r}") from error
    raise WeightsRejected(f"{path} has manifest format {manifest['format']!r}; this version reads {_FORMAT}")

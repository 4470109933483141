"""Blobs by content hash: screenshots and the arrays of trajectories. Durable before any row names them.

A blob is written once, under its SHA-256, and verified on every read. A hit on an existing blob refreshes its age,
so that garbage collection with a grace period cannot take what somebody is about to reference.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from dartrl.errors import BlobCorrupt


def content_hash(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


class MemoryBlobStore:
    """Blobs of one process, for tests and simulation."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        """SHA-256 of the data in hex, after it is stored."""
        name = content_hash(data)
        self._blobs[name] = data
        return name

    def get(self, hash: str) -> bytes:
        """The bytes. Raises BlobCorrupt if missing or changed."""
        data = self._blobs.get(hash)
        if data is None:
            raise BlobCorrupt(f"blob {hash} is missing from the memory store")
        return _verified(hash, data, "the memory store")

    def __contains__(self, hash: str) -> bool:
        """True if a blob of that hash exists (not verified)."""
        return hash in self._blobs


class FileBlobStore:
    """Blobs as files `root/ab/cdef...`; many processes may share one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> str:
        """SHA-256 of the data in hex, after it is on disk. Raises OSError if the disk is full or read-only."""
        name = content_hash(data)
        path = self._path(name)
        try:
            stored = path.stat().st_size == len(data)
        except FileNotFoundError:
            stored = False
        if stored:
            os.utime(path)
        else:
            path.parent.mkdir(exist_ok=True)
            _write_atomically(path, data)
        return name

    def get(self, hash: str) -> bytes:
        """The bytes. Raises BlobCorrupt if missing or changed."""
        path = self._path(hash)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise BlobCorrupt(f"blob {hash} is missing from {self._root}") from error
        return _verified(hash, data, str(path))

    def __contains__(self, hash: str) -> bool:
        """True if a blob of that hash exists (not verified)."""
        return self._path(hash).is_file()

    def _path(self, hash: str) -> Path:
        if len(hash) != 64 or not set(hash) <= set("0123456789abcdef"):
            raise BlobCorrupt(f"{hash!r} is not a SHA-256 in hex, so no blob can have that name")
        return self._root / hash[:2] / hash[2:]


def _verified(hash: str, data: bytes, place: str) -> bytes:
    found = content_hash(data)
    if found != hash:
        raise BlobCorrupt(f"blob {hash} in {place} has {len(data)} bytes with hash {found}; the file was changed or cut short")
    return data


def _write_atomically(path: Path, data: bytes) -> None:
    """File and folder entry are on disk when this returns; a reader sees all of it or nothing."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

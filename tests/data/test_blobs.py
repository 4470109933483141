"""Blobs: content-addressed, atomic, verified."""

import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.data.blobs import FileBlobStore, MemoryBlobStore
from dartrl.errors import BlobCorrupt


@pytest.fixture(params=["memory", "files"])
def blobs(request, tmp_path):
    return MemoryBlobStore() if request.param == "memory" else FileBlobStore(tmp_path / "blobs")


def blob_path(root, name):
    return root / "blobs" / name[:2] / name[2:]


@given(data=st.binary(max_size=200))
def test_the_name_is_the_hash(data):
    store = MemoryBlobStore()
    assert store.put(data) == hashlib.sha256(data).hexdigest()


def test_what_is_put_comes_back(blobs):
    names = [blobs.put(data) for data in (b"", b"one", b"two" * 1000, b"one")]
    assert names[1] == names[3] and len(set(names)) == 3
    assert [blobs.get(name) for name in names] == [b"", b"one", b"two" * 1000, b"one"]
    assert all(name in blobs for name in names)


def test_a_missing_blob_is_named(blobs):
    name = hashlib.sha256(b"never stored").hexdigest()
    assert name not in blobs
    with pytest.raises(BlobCorrupt, match=name):
        blobs.get(name)


def test_a_changed_or_cut_file_is_noticed(tmp_path):
    store = FileBlobStore(tmp_path / "blobs")
    name = store.put(b"screenshot")
    for bad in (b"screenshoT", b"scr", b""):
        blob_path(tmp_path, name).write_bytes(bad)
        with pytest.raises(BlobCorrupt, match="changed or cut short"):
            store.get(name)


def test_a_cut_file_is_written_anew(tmp_path):
    store = FileBlobStore(tmp_path / "blobs")
    name = store.put(b"screenshot")
    blob_path(tmp_path, name).write_bytes(b"scr")
    assert store.put(b"screenshot") == name
    assert store.get(name) == b"screenshot"


def test_a_hit_refreshes_the_age(tmp_path):
    store = FileBlobStore(tmp_path / "blobs")
    name = store.put(b"screenshot")
    os.utime(blob_path(tmp_path, name), (1000, 1000))
    store.put(b"screenshot")
    assert blob_path(tmp_path, name).stat().st_mtime > 1000


def test_no_partial_file_stays_when_writing_fails(tmp_path):
    store = FileBlobStore(tmp_path / "blobs")
    name = hashlib.sha256(b"data").hexdigest()
    blob_path(tmp_path, name).mkdir(parents=True)
    with pytest.raises(OSError):
        store.put(b"data")
    assert [path.name for path in (tmp_path / "blobs" / name[:2]).iterdir()] == [name[2:]]


@pytest.mark.parametrize("name", ["../../etc/passwd", "abc", "G" * 64, ""])
def test_only_hashes_are_names(tmp_path, name):
    with pytest.raises(BlobCorrupt, match="not a SHA-256"):
        FileBlobStore(tmp_path / "blobs").get(name)

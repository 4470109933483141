import json
from pathlib import Path

import pytest

from dartrl.errors import WeightsRejected
from dartrl.policy.manifest import MANIFEST_NAME, verify_manifest, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "adapter" / "config.json").write_text("{}")
    return tmp_path


def test_unaltered_folder_verifies_with_and_without_checksum(folder: Path):
    checksum = write_manifest(folder)
    verify_manifest(folder, checksum)
    verify_manifest(folder, None)


def test_checksum_depends_on_contents_only(folder: Path):
    first = write_manifest(folder)
    assert write_manifest(folder) == first
    (folder / "model.safetensors").write_bytes(b"other")
    assert write_manifest(folder) != first


def test_every_file_is_listed_with_its_size(folder: Path):
    write_manifest(folder)
    files = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    assert {name: entry["size_bytes"] for name, entry in files.items()} == {"model.safetensors": 25600, "adapter/config.json": 2}


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "add", "replace manifest", "remove manifest", "garbage manifest"])
def test_damage_is_refused_and_named(folder: Path, damage: str):
    checksum = write_manifest(folder)
    model = folder / "model.safetensors"
    data = bytearray(model.read_bytes())
    if damage == "truncate":
        model.write_bytes(data[:-1])
    elif damage == "flip":
        data[1000] ^= 1
        model.write_bytes(data)
    elif damage == "remove":
        model.unlink()
    elif damage == "add":
        (folder / "extra.bin").write_bytes(b"x")
    elif damage == "replace manifest":
        model.write_bytes(b"other")
        write_manifest(folder)
    elif damage == "remove manifest":
        (folder / MANIFEST_NAME).unlink()
    else:
        (folder / MANIFEST_NAME).write_text("[]")
        checksum = None
    with pytest.raises(WeightsRejected, match=r"model\.safetensors|extra\.bin|manifest\.json"):
        verify_manifest(folder, checksum)

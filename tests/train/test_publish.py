"""Which published folders may go."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dartrl.train.publish import KEEP_NEWEST, KEEP_UNKNOWN, remove_superseded


def make_folders(root: Path, versions) -> None:
    for version in versions:
        (root / f"v{version:06d}").mkdir(parents=True)


def present(root: Path) -> set[int]:
    return {int(path.name[1:]) for path in root.iterdir()}


@given(st.sets(st.integers(1, 60), min_size=1), st.lists(st.integers(1, 60), max_size=4), st.sets(st.integers(1, 60), max_size=3))
def test_nothing_that_a_worker_may_ask_for_is_removed(tmp_path_factory, versions, served, keep):
    root = tmp_path_factory.mktemp("weights")
    make_folders(root, versions)
    removed = remove_superseded(root, served=served, keep=keep)
    left = present(root)
    assert left | set(removed) == versions
    assert not left & set(removed)
    assert set(sorted(versions)[-KEEP_NEWEST:]) <= left
    assert keep & versions <= left
    if served:
        assert {v for v in versions if v >= min(served)} <= left
        assert all(v in keep or v >= min(served) or v in sorted(versions)[-KEEP_NEWEST:] for v in left)
    else:
        assert set(sorted(versions)[-KEEP_UNKNOWN:]) <= left


def test_other_files_are_left_alone(tmp_path: Path):
    make_folders(tmp_path, range(1, 30))
    (tmp_path / ".v000031.partial").mkdir()
    (tmp_path / "notes").mkdir()
    remove_superseded(tmp_path, served=[29], keep={1})
    assert {path.name for path in tmp_path.iterdir()} == {
        ".v000031.partial",
        "notes",
        "v000001",
        "v000026",
        "v000027",
        "v000028",
        "v000029",
    }

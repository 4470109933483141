"""Ledgers on each store; SQLite files are copies of one migrated file, since migrating takes longer than most tests."""

import shutil

import pytest

from dartrl.config import RunConfig
from dartrl.data.blobs import MemoryBlobStore
from dartrl.data.manager import open_ledger
from dartrl.testing.ledger_bench import LedgerBench


def maker(url):
    """Opens ledgers at a URL."""
    return lambda config, run_id, blobs, now: open_ledger(url, blobs=blobs, config=config, run_id=run_id, now=now)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("migrated") / "ledger.sqlite"
    open_ledger(f"sqlite:///{path}", blobs=MemoryBlobStore(), config=RunConfig(), run_id="none", now=lambda: 0.0).close()
    return path


@pytest.fixture
def sqlite_url(migrated_file, tmp_path):
    shutil.copy(migrated_file, tmp_path / "ledger.sqlite")
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


@pytest.fixture(params=["memory", "sqlite"])
def bench(request):
    """A bench over each store in turn."""
    if request.param == "memory":
        yield LedgerBench(maker("memory:"), MemoryBlobStore())
        return
    bench = LedgerBench(maker(request.getfixturevalue("sqlite_url")), MemoryBlobStore())
    yield bench
    bench.close()

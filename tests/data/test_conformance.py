"""One suite over every store."""

from collections.abc import Callable

import pytest

from dartrl.config import RunConfig
from dartrl.data.blobs import FileBlobStore, MemoryBlobStore
from dartrl.data.manager import open_ledger
from dartrl.interfaces import BlobStore, Ledger
from dartrl.testing.store_conformance import LEDGER_CHECKS, LedgerBench


def _maker(url: str):
    def make(config: RunConfig, run_id: str, blobs: BlobStore, now: Callable[[], float]) -> Ledger:
        return open_ledger(url, blobs=blobs, config=config, run_id=run_id, now=now)

    return make


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
def test_memory_ledger_keeps_its_promise(check):
    check(LedgerBench(_maker("memory:"), MemoryBlobStore()))


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
def test_sqlite_ledger_keeps_its_promise(check, tmp_path):
    check(LedgerBench(_maker(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), FileBlobStore(tmp_path / "blobs")))

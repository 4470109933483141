"""One suite over every store."""

from collections.abc import Callable

import pytest

from dartrl.config import RunConfig
from dartrl.data.blobs import MemoryBlobStore
from dartrl.data.manager import open_ledger
from dartrl.interfaces import BlobStore, Ledger
from dartrl.testing.store_conformance import LEDGER_CHECKS, LedgerBench


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
def test_memory_ledger_keeps_its_promise(check):
    def make(config: RunConfig, run_id: str, blobs: BlobStore, now: Callable[[], float]) -> Ledger:
        return open_ledger("memory:", blobs=blobs, config=config, run_id=run_id, now=now)

    check(LedgerBench(make, MemoryBlobStore()))

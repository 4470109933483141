"""What the data manager adds to its rules: repeated transactions, damaged blobs at a claim, the manager's loop."""

import asyncio
from contextlib import contextmanager

import pytest

from dartrl.config import parse_config
from dartrl.data.audit import audit
from dartrl.data.blobs import FileBlobStore, MemoryBlobStore
from dartrl.data.manager import MAX_ATTEMPTS, DataManager, open_ledger, run_manager
from dartrl.data.memory_store import MemoryStore
from dartrl.data.store import TransactionLost
from dartrl.testing.clock import ManualClock
from dartrl.testing.ledger_bench import LedgerBench


class DeadlockingStore(MemoryStore):
    """Takes back the next `losses` transactions just before they would be final."""

    def __init__(self, now):
        super().__init__(now)
        self.losses = 0

    @contextmanager
    def transaction(self, *, durable=False):
        with super().transaction(durable=durable) as transaction:
            yield transaction
            if self.losses:
                self.losses -= 1
                raise TransactionLost("deadlock found when trying to get lock")


def deadlocking(config, run_id, blobs, now):
    return DataManager(DeadlockingStore(now), blobs=blobs, config=config, run_id=run_id)


def in_memory(config, run_id, blobs, now):
    return open_ledger("memory:", blobs=blobs, config=config, run_id=run_id, now=now)


def test_a_transaction_that_the_database_takes_back_is_repeated():
    bench = LedgerBench(deadlocking, MemoryBlobStore())
    ledger = bench.open()
    for score in (0.0, 1.0, 0.0):
        ledger.store.losses = 3
        assignment = bench.assign()
        ledger.store.losses = MAX_ATTEMPTS - 1
        bench.record(assignment, score)
    ledger.store.losses = 2
    bench.step(bench.claim(1), 1)
    counts = ledger.counts()
    assert (counts["trajectories"], counts["members_applied"], counts["leases"]) == (3, 3, 0)
    assert audit(ledger).ok


def test_repeating_has_an_end():
    bench = LedgerBench(deadlocking, MemoryBlobStore())
    ledger = bench.open()
    ledger.store.losses = MAX_ATTEMPTS
    with pytest.raises(TransactionLost, match="deadlock"):
        ledger.next_assignment("runner")
    assert ledger.counts()["trajectories"] == 0


def test_a_group_with_a_damaged_blob_is_left_out_of_the_claim(tmp_path):
    bench = LedgerBench(in_memory, FileBlobStore(tmp_path))
    ledger = bench.open()
    first = bench.play_group([0.0, 1.0, 0.0])
    second = bench.play_group([0.0, 1.0, 0.0])
    with ledger.store.reading() as transaction:
        name = transaction.first("rollout_run", {"group_id": first})["arrays"]
    path = tmp_path / name[:2] / name[2:]
    stored = path.read_bytes()
    path.write_bytes(stored[:-1])
    claim = bench.claim(2)
    assert [group.group_id for group in claim.groups] == [second]
    assert ledger.events(["group_rejected"])[-1].data == {"reason": "blob_corrupt"}
    bench.step(claim, 1)
    path.write_bytes(stored)
    assert audit(ledger).ok, audit(ledger).problems


async def test_one_of_two_managers_works_and_the_other_takes_over():
    clock = ManualClock()
    config = parse_config({"data": {"lease_seconds": 10}})
    ledger = in_memory(config, "run-a", MemoryBlobStore(), clock.now)
    bench = LedgerBench(lambda *_: ledger, MemoryBlobStore())
    bench.open()
    bench.assign()
    stops = [asyncio.Event(), asyncio.Event()]
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(run_manager(ledger, clock=clock, holder="m1", stop=stops[0]))
        await clock.advance(2)
        tasks.create_task(run_manager(ledger, clock=clock, holder="m2", stop=stops[1]))
        await clock.advance(3)
        assert ledger.acquire_manager("m3") is None
        first.cancel()
        await clock.advance(12)
        assert ledger.events(["takeover"])[-1].data["to"] == "m2"
        assert ledger.counts()["trajectories_aborted"] == 1, "the episode nobody renewed was taken away"
        for stop in stops:
            stop.set()
        await clock.advance(2)

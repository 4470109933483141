"""The audit finds what was planted, and names it."""

import contextlib

import pytest

from dartrl.data.audit import audit
from dartrl.data.blobs import FileBlobStore, MemoryBlobStore
from dartrl.data.manager import open_ledger
from dartrl.records import Evaluation
from dartrl.testing.ledger_bench import LedgerBench


def make(config, run_id, blobs, now):
    return open_ledger("memory:", blobs=blobs, config=config, run_id=run_id, now=now)


@pytest.fixture(scope="module")
def bench():
    """A run with six steps (five durable), two replays, an evaluation, a running episode."""
    bench = LedgerBench(make, MemoryBlobStore())
    ledger = bench.open(curation={"max_rollouts": 3, "max_staleness": 9})
    for step in range(1, 5):
        bench.train_step(step)
        if step in (1, 2, 3):
            bench.checkpoint(step)
    while ledger.counts()["groups_ready"] < 2:
        bench.play_group([0.0, 0.0, 0.0], version=bench.version())
    bench.step(bench.claim(), 5)
    bench.checkpoint(5)
    ledger.open_evaluation(Evaluation("e", 0.0, 1))
    for _ in range(2):
        bench.record(bench.assign(), 1.0, version=bench.version())
    bench.train_step(6)
    bench.play_group([1.0, 1.0, 1.0], version=bench.version())
    bench.assign()
    return bench


def audit_after(bench, spoil):
    """The audit of the run as it is after the change, which is then taken back."""
    with contextlib.suppress(_TakenBack), bench.ledger.store.transaction() as transaction:
        spoil(transaction)
        report = audit(bench.ledger)
        raise _TakenBack
    return report


class _TakenBack(Exception):
    """Ends a transaction without effect."""


def test_a_clean_run_adds_up(bench):
    report = audit(bench.ledger)
    assert report.ok, report.problems
    assert report.lines[-1] == "audit clean"
    fresh = next(line for line in report.lines if line.startswith("fresh members"))
    total, trained, rejected, pending = (int(word) for word in fresh.split() if word.isdigit())
    assert total == trained + rejected + pending and trained > 0 and rejected > 0 and pending > 0
    assert any(line.startswith("replay members") and not line.startswith("replay members 0") for line in report.lines)


PLANTED = [
    ("group_member", {"state": "trained"}, {"state": "lost"}, "unknown state 'lost'"),
    ("group_member", {"state": "trained"}, {"reason": "because"}, "is trained with reason"),
    ("group_member", {"state": "rejected"}, {"reason": ""}, "is rejected with reason ''"),
    ("group_member", {"state": "trained"}, {"state": "ready", "training_step": None}, "is ready, but its group is trained"),
    ("group_member", {"state": "trained"}, {"training_step": 77}, "in step 77, which did not claim it"),
    ("group_member", {"state": "trained"}, {"claim_id": "c"}, "which did not claim it"),
    ("group_member", {"state": "trained"}, {"score": 0.25}, "disagrees with its trajectory"),
    ("group_member", {"state": "applied"}, {"state": "trained"}, "is trained, but its group is applied"),
    ("group_member", {"role": "replay"}, {"role": "fresh"}, "has 2 fresh memberships, not 1"),
    ("group_member", {"role": "replay"}, {"success": False, "score": 0.0}, "is not a success"),
    ("group_member", {"role": "fresh"}, {"trajectory_id": "nobody"}, "belongs to no group or trajectory"),
    ("rollout_run", {"state": "terminated"}, {"reward": None}, "is terminated with score None"),
    ("rollout_run", {"state": "terminated"}, {"reward": 1.5}, "outside [0, 1]"),
    ("rollout_run", {"state": "terminated"}, {"state": "env_error"}, "is env_error with score"),
    ("rollout_run", {"state": "terminated"}, {"num_chunks": 9}, "says 9 steps, but has steps [0, 1]"),
    ("rollout_run", {"state": "terminated"}, {"used": 5}, "says used 5 times"),
    ("rollout_run", {"state": "terminated"}, {"oldest_version": 77}, "says versions 77 to"),
    ("rollout_run", {"state": "running"}, {"state": "terminated"}, "is held, but it does not run"),
    ("rollout_run", {"purpose": "evaluation"}, {"purpose": "train"}, "has 0 fresh memberships, not 1"),
    ("step", {"step_index": 1}, {"step_index": 2}, "but has steps [0, 2]"),
    ("step", {"step_index": 1}, {"weights_version": 77}, "was sampled by unpublished versions [77]"),
    ("step", {"step_index": 1}, {"screenshot": "0" * 64}, "screenshot of step 1"),
    ("group_slot", {"state": "filled"}, {"state": "open"}, "of its slots are not"),
    ("group_slot", {"state": "filled"}, {"trajectory_id": "nobody"}, "which does not exist"),
    ("group_slot", {"state": "filled"}, {"group_id": "nowhere"}, "slots of nowhere have no group"),
    ("rollout_group", {"state": "trained"}, {"num_slots": 4}, "says 4 slots, but has 3"),
    ("rollout_group", {"state": "rejected"}, {"reason": ""}, "is rejected without a reason"),
    ("rollout_group", {"state": "trained"}, {"state": "applied"}, "but its group is applied"),
    ("rollout_group", {"state": "trained"}, {"task_id": "left/100"}, "in split evaluation"),
    ("lease", {"kind": "trajectory", "state": "held"}, {"state": "released"}, "runs without a lease"),
    ("training_step", {"step_index": 1}, {"step_index": 9}, "are not one chain"),
    ("training_step", {"step_index": 1}, {"state": "applied"}, "follows one that is not durable"),
    ("training_step", {"step_index": 1}, {"state": "rolled_back"}, "are not one chain"),
    ("training_step", {"step_index": 2}, {"weights_version": 1}, "names weights version 1, which is of another step"),
    ("weights_version", {"version": 2}, {"version": 99}, "are not the numbers"),
    ("weights_version", {"version": 3}, {"parent": 3}, "which is not an earlier published version"),
    ("weights_version", {"version": 2}, {"state": "rolled_back"}, "which is not an earlier published version"),
    ("weights_version", {"version": 2}, {"training_step": 50}, "but an earlier one is of step 50"),
    ("checkpoint", {"status": "COMPLETED"}, {"training_step": 99}, "the newest checkpoint holds step 99"),
    ("checkpoint", {"status": "DEPRECATED"}, {"deleted_at": None}, "without a time of deletion"),
    ("pool_entry", {"replays": 1}, {"replays": 9}, "the pool counts 9 replays"),
]


@pytest.mark.parametrize(
    ("table", "where", "changes", "message"), PLANTED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_planted_corruption_is_found(bench, table, where, changes, message):
    def spoil(transaction):
        row = transaction.first(table, where)
        assert row is not None, "nothing to corrupt"
        transaction.update(table, {"id": row["id"]}, changes)

    report = audit_after(bench, spoil)
    assert not report.ok
    assert any(message in problem for problem in report.problems), report.problems
    assert "found" in report.lines[-1]


def test_a_stale_claim_is_found(bench):
    def spoil(transaction):
        event = transaction.first("event", {"kind": "claim"})
        data = {**event["data"], "groups": [{**event["data"]["groups"][0], "staleness": 10}]}
        transaction.update("event", {"id": event["id"]}, {"data": data})

    assert any("at staleness 10; at most 9" in problem for problem in audit_after(bench, spoil).problems)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_blob_is_found(tmp_path, damage):
    bench = LedgerBench(make, FileBlobStore(tmp_path / "blobs"))
    bench.open()
    bench.play_group([0.0, 1.0, 0.0])
    with bench.ledger.store.reading() as transaction:
        name = transaction.first("rollout_run", {"state": "terminated"})["arrays"]
    path = tmp_path / "blobs" / name[:2] / name[2:]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    assert any(problem.startswith("arrays of") and name in problem for problem in audit(bench.ledger).problems)

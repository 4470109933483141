"""SQL: one schema everywhere, published columns kept, many writers at once, clear errors."""

import multiprocessing
import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from dartrl.config import parse_config
from dartrl.data import migrations, schema
from dartrl.data.audit import audit
from dartrl.data.blobs import FileBlobStore, MemoryBlobStore
from dartrl.data.manager import open_ledger
from dartrl.data.sql_store import open_sql_store
from dartrl.data.sql_tables import METADATA
from dartrl.data.store import Above, AtMost, Increment
from dartrl.errors import ConfigError, LedgerConflict
from dartrl.records import Assignment, Phase, Run, Wait, WeightsVersion
from dartrl.testing.ledger_bench import LedgerBench, make_tasks
from dartrl.testing.trajectories import make_trajectory

CONFIG = parse_config(
    {
        "environment": {"slots": 4},
        "curation": {"max_rollouts": 3, "max_staleness": 6},
        "training": {"groups_per_step": 2},
    }
)

# --------------------------------------------------------------------------- schema


def test_the_migrated_database_has_exactly_our_tables(sqlite_url):
    with sa.create_engine(sqlite_url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_the_head_revision_is_the_newest_file():
    folder = Path(migrations.__file__).parent
    assert ScriptDirectory(str(folder)).get_current_head() == migrations.HEAD


def test_published_columns_keep_names_and_keys(sqlite_url):
    inspector = sa.inspect(sa.create_engine(sqlite_url))
    columns = {table: [column["name"] for column in inspector.get_columns(table)] for table in ("rollout_run", "checkpoint")}
    assert columns["rollout_run"][:12] == (
        "id run_id trajectory_id task_id trace_id split_dir reward num_chunks used model_version instruction create_at".split()
    )
    assert (
        columns["checkpoint"][:15]
        == (
            "id name version run_id status path source operator remark config_yaml "
            "created_at updated_at deleted_at started_at finished_at"
        ).split()
    )
    assert ["trajectory_id", "run_id"] in [key["column_names"] for key in inspector.get_unique_constraints("rollout_run")]
    indexed = {tuple(index["column_names"]) for index in inspector.get_indexes("checkpoint")}
    assert {("status",), ("created_at",), ("updated_at",)} <= indexed
    assert ("task_id",) in {tuple(index["column_names"]) for index in inspector.get_indexes("rollout_run")}


def test_a_published_query_and_insert_run_unchanged(sqlite_url, tmp_path):
    bench = LedgerBench(lambda *given: open_on(sqlite_url, *given), MemoryBlobStore())
    bench.open()
    bench.train_step(1)
    bench.checkpoint(1)
    bench.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as connection:
        connection.execute(
            "INSERT INTO rollout_run (run_id, trajectory_id, task_id, trace_id, reward) VALUES ('r', 't', 'k', 'x', 1.0)"
        )
        rows = connection.execute(
            "SELECT r.reward, r.used, r.num_chunks FROM rollout_run r WHERE r.run_id = 'run-a' AND r.used = 1 AND r.reward <> -1 "
            "AND r.model_version IN (SELECT 'weights/' || 'v1') ORDER BY r.create_at, r.id"
        ).fetchall()
        assert rows == [(0.0, 1, 2), (1.0, 1, 2), (0.0, 1, 2)] * 2
        assert connection.execute("SELECT version, status, path FROM checkpoint").fetchall() == [
            ("v2", "COMPLETED", "checkpoints/s1")
        ]


# --------------------------------------------------------------------------- rows


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_both_stores_answer_alike(kind, sqlite_url):
    """The row interface itself, where the two could drift apart."""
    store = open_ledger(
        "memory:" if kind == "memory" else sqlite_url, blobs=MemoryBlobStore(), config=CONFIG, run_id="r", now=lambda: 5.0
    ).store
    with store.transaction() as t:
        t.insert(
            "weights_version",
            [{"run_id": "r", "version": v, "state": s, "parent": p} for v, s, p in [(1, "a", None), (3, "b", 1), (2, "a", 1)]],
        )
        assert t.now == 5.0
    with pytest.raises(LedgerConflict), store.transaction() as t:
        t.update("weights_version", {"version": 1}, {"state": "z"})
        t.insert("weights_version", [{"run_id": "r", "version": 3, "state": "c"}])
    with pytest.raises(KeyError), store.transaction() as t:
        t.insert("weights_version", [{"run_id": "r", "state": "c", "nonsense": 1}])
    with store.reading() as t:
        versions = [row["version"] for row in t.select("weights_version", {}, order="version", descending=True)]
        assert versions == [3, 2, 1]
        assert [row["version"] for row in t.select("weights_version", {"state": "a"}, descending=True, limit=1)] == [2]
        assert [row["version"] for row in t.select("weights_version", {"version": AtMost(2)})] == [1, 2]
        assert [row["version"] for row in t.select("weights_version", {"version": Above(1), "state": ("a", "b")})] == [3, 2]
        assert [row["version"] for row in t.select("weights_version", {"parent": None})] == [1]
        assert t.select("weights_version", {"version": ()}) == []
        assert t.tally("weights_version", {"run_id": "r"}, ("state",)) == {("a",): 2, ("b",): 1}
        assert t.first("weights_version", {"run_id": "nobody"}) is None
    with store.transaction() as t:
        assert t.update("weights_version", {"state": "a"}, {"training_step": Increment(4), "path": "p"}) == 2
        assert {(row["version"], row["training_step"], row["path"]) for row in t.select("weights_version", {})} == {
            (1, 4, "p"),
            (2, 4, "p"),
            (3, 0, ""),
        }
    store.close()


def test_every_table_has_a_complete_row():
    with pytest.raises(KeyError, match="needs a value for"):
        schema.complete_row("run", {"run_id": "r"})


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not a SQLAlchemy URL"),
        ("oracle9i://x/y", "not a SQLAlchemy URL"),
        ("sqlite://", "cannot share"),
        ("sqlite:////nowhere/at/all/ledger.sqlite", "cannot be opened"),
        ("", "data.database is empty"),
    ],
)
def test_a_wrong_url_is_explained(url, message):
    with pytest.raises(ConfigError, match=message):
        open_ledger(url, blobs=MemoryBlobStore(), config=CONFIG, run_id="r", now=lambda: 0.0)


def test_a_file_that_is_no_database_is_explained(tmp_path):
    (tmp_path / "x.sqlite").write_bytes(b"this is not a database" * 100)
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_sql_store(f"sqlite:///{tmp_path / 'x.sqlite'}", lambda: 0.0)


# --------------------------------------------------------------------------- many at once


def open_on(url, config, run_id, blobs, now):
    return open_ledger(url, blobs=blobs, config=config, run_id=run_id, now=now)


def prepared(url, folder):
    ledger = open_on(url, CONFIG, "run-a", FileBlobStore(folder / "blobs"), lambda: 1000.0)
    ledger.open_run(Run("run-a", 0, {}), make_tasks())
    lease = ledger.acquire_trainer("trainer")
    ledger.publish_weights(lease, WeightsVersion(ledger.next_weights_version(lease), "w", "c", 0, None))
    ledger.set_phase(Phase.TRAINING)
    return ledger, lease


def run_episodes(ledger, holder, blobs, count, seen):
    for number in range(count):
        assignment = ledger.next_assignment(holder)
        if isinstance(assignment, Wait):
            continue
        seen.append(assignment.trajectory_id)
        ledger.record_trajectory(assignment.lease, make_trajectory(assignment, blobs, score=float((assignment.slot + number) % 2)))


def test_threads_of_one_process_never_share_an_episode_or_a_claim(sqlite_url, tmp_path):
    ledger, lease = prepared(sqlite_url, tmp_path)
    blobs = MemoryBlobStore()
    ledger.scope.blobs = blobs
    seen: list[str] = []
    claimed: list[str] = []

    def claim():
        for _ in range(6):
            claim = ledger.claim_groups(lease, 1)
            claimed.extend(group.group_id for group in (claim.groups if claim else ()))

    threads = [threading.Thread(target=run_episodes, args=(ledger, f"r{number}", blobs, 8, seen)) for number in range(4)]
    threads += [threading.Thread(target=claim) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claim()
    assert len(seen) == len(set(seen)) >= 24
    assert len(claimed) == len(set(claimed)) >= 1
    assert audit(ledger).ok, audit(ledger).problems


def _other_process(url, folder, holder):
    blobs = FileBlobStore(folder / "blobs")
    ledger = open_on(url, CONFIG, "run-a", blobs, lambda: 1000.0)
    run_episodes(ledger, holder, blobs, 6, [])
    ledger.close()


@pytest.mark.slow
def test_processes_that_start_together_migrate_once_and_share_the_work(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    spawn = multiprocessing.get_context("spawn")
    openers = [spawn.Process(target=open_sql_store, args=(url, float)) for _ in range(3)]
    for process in openers:
        process.start()
    for process in openers:
        process.join()
    assert [process.exitcode for process in openers] == [0, 0, 0]
    ledger, _ = prepared(url, tmp_path)
    workers = [spawn.Process(target=_other_process, args=(url, tmp_path, f"r{number}")) for number in range(3)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    assert [process.exitcode for process in workers] == [0, 0, 0]
    assert ledger.counts()["trajectories"] == 18
    assert audit(ledger).ok, audit(ledger).problems
    assert isinstance(ledger.next_assignment("last"), Assignment | Wait)

"""The trainer when things break: crashes, lost leases, bad rows, a full disk, no groups, other phases."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from dartrl.data.audit import audit
from dartrl.records import Phase


async def crash(bench, task: asyncio.Task[None]) -> None:
    """End a trainer as SIGKILL would: no farewell, nothing made durable."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await bench.clock.advance(0.1)


async def test_a_standby_takes_over_from_the_last_checkpoint_and_nothing_is_lost(make_bench):
    bench = make_bench()
    first = asyncio.create_task(bench.trainer("trainer-a").run(asyncio.Event()))
    await bench.until_step(1)
    async with bench.running("trainer-b"):
        await bench.until_step(3)
        assert all(event.data["holder"] == "trainer-a" for event in bench.ledger.events(("takeover",)))
        await crash(bench, first)
        crashed_at = len(bench.ledger.training_steps())
        newest = bench.ledger.current_weights()
        assert newest is not None
        await bench.clock.advance(bench.config.data.lease_seconds + 3)
        resumes = bench.ledger.events(("resume",))
        assert resumes[-1].data["training_step"] == crashed_at // 2 * 2
        weights = bench.ledger.current_weights()
        assert weights is not None and weights.version >= newest.version
        await bench.until_step(crashed_at + 1)
    steps = bench.ledger.training_steps()
    assert [step.index for step in steps] == list(range(1, len(steps) + 1))
    report = audit(bench.ledger)
    assert report.ok, report.problems
    assert bench.ledger.counts().get("members_applied", 0) == 0


@pytest.mark.slow
async def test_a_trainer_that_loses_its_lease_drops_its_work_and_waits_again(make_bench):
    bench = make_bench()
    async with bench.running("trainer-a"):
        await bench.until_step(1)
        stolen = bench.ledger.acquire_trainer("trainer-a")  # as if it was restarted elsewhere under its name
        assert stolen is not None
        await bench.clock.advance(bench.config.data.lease_seconds + 3)
        await bench.until_step(len(bench.ledger.training_steps()) + 1)
    tokens = [event.data["token"] for event in bench.ledger.events(("resume",))]
    assert tokens == [1, stolen.token + 1]
    assert audit(bench.ledger).ok


async def test_outside_phase_training_everything_applied_becomes_trained(make_bench):
    bench = make_bench(checkpoint_every=100)
    async with bench.running():
        await bench.until_step(1)
        assert bench.ledger.counts()["members_applied"] > 0
        bench.ledger.set_phase(Phase.DRAINING)
        await bench.clock.advance(2.0)
        counts = bench.ledger.counts()
        assert counts.get("members_applied", 0) == 0
        done = len(bench.ledger.training_steps())
        bench.fill()
        await bench.clock.advance(2.0)
        assert len(bench.ledger.training_steps()) == done


@pytest.mark.slow
async def test_it_stops_at_the_last_training_step_and_publishes_it(make_bench):
    bench = make_bench(max_training_steps=3, publish_every=2, checkpoint_every=100)
    async with bench.running():
        await bench.until_step(3)
        bench.fill()
        await bench.clock.advance(2.0)
        assert len(bench.ledger.training_steps()) == 3
        weights = bench.ledger.current_weights()
        assert weights is not None and (weights.training_step, weights.version) == (3, 3)
        assert bench.ledger.counts().get("members_applied", 0) == 0


async def test_rows_that_disagree_are_rejected_by_name_and_the_rest_trains(make_bench):
    bench = make_bench(learning_rate=0.0)
    bench.damage = {0: {"fingerprint": "another"}}
    async with bench.running():
        await bench.until_step(2)
    steps = bench.ledger.training_steps()
    rejected = {member: reason for step in steps for member, reason in step.rejected.items()}
    assert set(rejected.values()) == {"fingerprint"}
    assert bench.ledger.counts()["members_rejected"] >= len(rejected) > 0
    assert all(step.metrics["rows"] > 0 for step in steps)
    assert audit(bench.ledger).ok


async def test_a_disk_that_refuses_weights_raises_an_alarm_and_the_trainer_goes_on_when_it_is_free(make_bench):
    bench = make_bench()
    bench.root.mkdir()
    blocker = bench.root / "weights"
    blocker.write_text("no folder can be made here")
    async with bench.running():
        await bench.clock.advance(7.0)
        assert bench.ledger.current_weights() is None
        alarms = bench.ledger.events(("alarm",))
        assert {alarm.data["reason"] for alarm in alarms} == {"weights_not_written"}
        assert "free disk space" in alarms[0].data["message"]
        blocker.unlink()
        await bench.until_step(1)


@pytest.mark.slow
async def test_a_disk_that_refuses_a_checkpoint_keeps_members_applied_until_it_is_written(make_bench):
    bench = make_bench()
    bench.root.mkdir()
    blocker = bench.root / "checkpoints"
    blocker.write_text("no folder can be made here")
    async with bench.running():
        await bench.until_step(2)
        await bench.clock.advance(1.0)
        assert bench.ledger.counts().get("members_trained", 0) == 0
        assert "checkpoint_not_written" in {alarm.data["reason"] for alarm in bench.ledger.events(("alarm",))}
        blocker.unlink()
        await bench.until_step(3)
    assert bench.ledger.counts().get("members_applied", 0) == 0
    assert (Path(bench.root) / "checkpoints").is_dir()


async def test_it_warns_with_a_cause_when_no_groups_arrive(make_bench):
    bench = make_bench()
    async with bench.running():
        await bench.clock.advance(61.0)
        alarms = [alarm for alarm in bench.ledger.events(("alarm",)) if alarm.data["reason"] == "starved"]
        assert len(alarms) == 1
        assert "0 of 2 groups ready" in alarms[0].data["message"]
        assert "no episode is running" in alarms[0].data["message"]


@pytest.mark.slow
async def test_a_trainer_that_is_stopped_and_started_again_goes_on_without_loss(make_bench):
    bench = make_bench(checkpoint_every=100)
    async with bench.running():
        await bench.until_step(2)
    done = len(bench.ledger.training_steps())
    version = bench.ledger.current_weights()
    async with bench.running():
        await bench.clock.advance(1.0)
        assert bench.ledger.current_weights() == version  # nothing was rolled back, so nothing is published again
        await bench.until_step(done + 1)
    assert bench.ledger.events(("resume",))[-1].data["members_returned"] == 0

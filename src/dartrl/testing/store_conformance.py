"""What every ledger must do, whatever it stores its rows in: one function per promise.

Run them over your store:

    @pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check):
        check(LedgerBench(make, blobs))

where `make(config, run_id, blobs, now)` gives a fresh, empty ledger.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dartrl.config import parse_config
from dartrl.errors import BlobCorrupt, ConfigError, LeaseLost, LedgerConflict
from dartrl.records import Assignment, Lease, Phase, Run
from dartrl.testing.ledger_bench import LedgerBench, make_tasks, reason_to_wait, refused
from dartrl.testing.training_conformance import TRAINING_CHECKS
from dartrl.testing.trajectories import make_trajectory
from dartrl.types import End, Task

# --------------------------------------------------------------------------- run


def run_is_created_once_and_resumed(bench: LedgerBench) -> None:
    ledger = bench.open()
    again = ledger.open_run(Run("run-a", 8, {}), make_tasks())
    assert (again.seed, again.config, again.phase) == (7, {"name": "a"}, Phase.TRAINING)
    assert ledger.run() == again
    assert "other tasks" in refused(ConfigError, ledger.open_run, Run("run-a", 7, {}), make_tasks()[1:])


def run_refuses_a_seed_in_both_splits(bench: LedgerBench) -> None:
    ledger = bench.make(parse_config({}), "run-a", bench.blobs, lambda: bench.time)
    tasks = [Task("a", "left", 1), Task("b", "left", 1, "evaluation")]
    assert "both splits" in refused(ConfigError, ledger.open_run, Run("run-a", 0, {}), tasks)
    assert "not in this database" in refused(ConfigError, ledger.run)


def phases_follow_their_table(bench: LedgerBench) -> None:
    ledger = bench.open()
    ledger.set_phase(Phase.TRAINING)
    ledger.set_phase(Phase.FINISHED)
    assert "final" in refused(LedgerConflict, ledger.set_phase, Phase.TRAINING)


def nothing_is_assigned_outside_its_phase(bench: LedgerBench) -> None:
    ledger = bench.open(phase=Phase.DRAINING)
    assert reason_to_wait(ledger) == "phase"
    ledger.set_phase(Phase.EVALUATING)
    assert reason_to_wait(ledger) == "phase"
    ledger.set_phase(Phase.FINISHED)
    assert reason_to_wait(ledger) == "finished"


def nothing_is_assigned_without_weights(bench: LedgerBench) -> None:
    ledger = bench.make(parse_config({}), "run-a", bench.blobs, lambda: bench.time)
    ledger.open_run(Run("run-a", 0, {}), make_tasks())
    ledger.set_phase(Phase.TRAINING)
    assert reason_to_wait(ledger) == "no_weights"


# --------------------------------------------------------------------------- assignments


def slots_of_the_oldest_group_come_first(bench: LedgerBench) -> None:
    bench.open()
    given = [bench.assign() for _ in range(6)]
    assert [(each.group_id == given[0].group_id, each.slot) for each in given[:4]] == [(True, 0), (True, 1), (True, 2), (False, 0)]
    assert len({each.trajectory_id for each in given}) == 6
    assert len({each.sampling_seed for each in given}) == 6
    assert {each.task.id for each in given[:3]} == {given[0].task.id}
    assert given[0].max_steps == 6 and given[0].purpose == "train" and given[0].task.spec == {"size": given[0].task.seed}


def families_are_served_evenly(bench: LedgerBench) -> None:
    bench.open(curation={"max_rollouts": 2, "max_staleness": 10})
    seen = [bench.assign() for _ in range(24)][::2]
    assert [sum(each.task.family == name for each in seen) for name in ("left", "right")] == [6, 6]
    assert len({each.task.id for each in seen[:6]}) == 6, "each instance once before any comes twice"


def admission_stops_at_its_limit_and_final_states_free_it(bench: LedgerBench) -> None:
    ledger = bench.open()
    running = [bench.assign() for _ in range(12)]
    assert reason_to_wait(ledger) == "staleness", "(1 + 1) x 2 groups are in flight"
    for assignment in running[:3]:
        bench.record(assignment, 0.0)
    assert isinstance(ledger.next_assignment("r"), Assignment), "a group without variance is rejected at once"


def a_failed_attempt_is_retried_then_void(bench: LedgerBench) -> None:
    ledger = bench.open()
    first = bench.assign()
    bench.record(first, end=End.ENV_ERROR)
    second = bench.assign()
    assert (second.group_id, second.slot, second.attempt) == (first.group_id, first.slot, 1)
    assert second.trajectory_id != first.trajectory_id
    bench.record(second, end=End.MODEL_ERROR)
    assert bench.assign().slot == 1, "two attempts were allowed"
    assert ledger.counts()["trajectories_env_error"] == 1


def a_handed_back_attempt_does_not_count(bench: LedgerBench) -> None:
    bench.open()
    for attempt in range(4):
        assignment = bench.assign()
        assert (assignment.slot, assignment.attempt) == (0, attempt)
        bench.record(assignment, end=End.ABORTED)


# --------------------------------------------------------------------------- leases


def a_lease_is_renewed_until_it_is_taken_away(bench: LedgerBench) -> None:
    ledger = bench.open()
    assignment = bench.assign()
    bench.time += 9
    renewed = ledger.renew([assignment.lease])
    assert [(lease.subject, lease.token, lease.expires_at) for lease in renewed] == [(assignment.lease.subject, 1, bench.time + 10)]
    bench.time += 9
    assert bench.tick()["leases_expired"] == 0
    bench.time += 2
    assert bench.tick()["leases_expired"] == 1
    assert list(ledger.renew([assignment.lease])) == []
    refused(LeaseLost, bench.record, assignment, 1.0)
    assert bench.assign().attempt == 1
    assert ledger.counts()["trajectories_aborted"] == 1


def a_trajectory_is_recorded_once(bench: LedgerBench) -> None:
    ledger = bench.open()
    assignment = bench.assign()
    bench.record(assignment, 1.0)
    refused(LeaseLost, bench.record, assignment, 0.0)
    assert ledger.counts()["trajectories_terminated"] == 1


def a_stolen_lease_is_refused(bench: LedgerBench) -> None:
    ledger = bench.open()
    one, other = bench.assign(), bench.assign()
    trajectory = make_trajectory(one, bench.blobs)
    refused(LedgerConflict, ledger.record_trajectory, other.lease, trajectory)
    stranger = Lease(one.lease.subject, "somebody", 1, one.lease.expires_at)
    refused(LeaseLost, ledger.record_trajectory, stranger, trajectory)


def one_trainer_at_a_time_and_a_standby(bench: LedgerBench) -> None:
    ledger = bench.open()
    assert ledger.acquire_trainer("trainer-1") is None
    bench.time += 11
    standby = ledger.acquire_trainer("trainer-1")
    assert standby is not None and standby.token > bench.trainer.token
    refused(LeaseLost, ledger.next_weights_version, bench.trainer)
    refused(LeaseLost, ledger.claim_groups, bench.trainer, 1)
    assert list(ledger.renew([bench.trainer])) == []
    restarted = ledger.acquire_trainer("trainer-1")
    assert restarted is not None and restarted.token > standby.token
    refused(LeaseLost, ledger.begin_training, standby)


def one_manager_at_a_time(bench: LedgerBench) -> None:
    ledger = bench.open()
    lease = ledger.acquire_manager("manager-0")
    assert lease is not None
    assert ledger.acquire_manager("manager-1") is None
    bench.time += 11
    assert ledger.acquire_manager("manager-1") is not None
    refused(LeaseLost, ledger.tick, lease)


# --------------------------------------------------------------------------- trajectories


def a_trajectory_comes_back_as_it_was(bench: LedgerBench) -> None:
    ledger = bench.open()
    assignment = bench.assign()
    trajectory = make_trajectory(assignment, bench.blobs, score=0.5, num_steps=3, end=End.TRUNCATED)
    ledger.record_trajectory(assignment.lease, trajectory)
    (found,) = ledger.trajectories(purpose="train", family=assignment.task.family)
    assert (found.id, found.task, found.instruction, found.outcome) == (
        trajectory.id,
        trajectory.task,
        trajectory.instruction,
        trajectory.outcome,
    )
    assert (found.started_at, found.finished_at, found.environment) == (
        trajectory.started_at,
        trajectory.finished_at,
        trajectory.environment,
    )
    for before, after in zip(trajectory.steps, found.steps, strict=True):
        for name in (
            "index",
            "screenshot",
            "screen",
            "observation_text",
            "actions",
            "parse_error",
            "environment_seconds",
            "started_at",
        ):
            assert getattr(before, name) == getattr(after, name), name
        for name in ("prompt_ids", "response_ids", "behaviour_logprobs", "entropies"):
            one, two = getattr(before.generation, name), getattr(after.generation, name)
            assert one.dtype == two.dtype and np.array_equal(one, two), name
        for name in (
            "text",
            "image_hashes",
            "image_grids",
            "fingerprint",
            "banned_ids",
            "weights_version",
            "request_id",
            "seconds",
        ):
            assert getattr(before.generation, name) == getattr(after.generation, name), name


def an_inconsistent_trajectory_is_refused(bench: LedgerBench) -> None:
    ledger = bench.open()
    assignment = bench.assign()
    for score, kind in ((1.5, LedgerConflict), (-0.1, LedgerConflict)):
        refused(kind, ledger.record_trajectory, assignment.lease, make_trajectory(assignment, bench.blobs, score=score))

    class Forgetful:
        def put(self, data: bytes) -> str:
            return "0" * 64

        def get(self, hash: str) -> bytes:
            return b""

        def __contains__(self, hash: str) -> bool:
            return True

    refused(BlobCorrupt, ledger.record_trajectory, assignment.lease, make_trajectory(assignment, Forgetful()))
    bench.record(assignment, 1.0)


def an_episode_without_steps_is_no_member(bench: LedgerBench) -> None:
    ledger = bench.open(curation={"max_rollouts": 2})
    bench.record(bench.assign(), 1.0, num_steps=0)
    bench.record(bench.assign(), 0.0)
    counts = ledger.counts()
    assert (counts["groups_rejected"], counts["members_rejected"]) == (1, 2)


LEDGER_CHECKS: tuple[Callable[[LedgerBench], None], ...] = (
    run_is_created_once_and_resumed,
    run_refuses_a_seed_in_both_splits,
    phases_follow_their_table,
    nothing_is_assigned_outside_its_phase,
    nothing_is_assigned_without_weights,
    slots_of_the_oldest_group_come_first,
    families_are_served_evenly,
    admission_stops_at_its_limit_and_final_states_free_it,
    a_failed_attempt_is_retried_then_void,
    a_handed_back_attempt_does_not_count,
    a_lease_is_renewed_until_it_is_taken_away,
    a_trajectory_is_recorded_once,
    a_stolen_lease_is_refused,
    one_trainer_at_a_time_and_a_standby,
    one_manager_at_a_time,
    a_trajectory_comes_back_as_it_was,
    an_inconsistent_trajectory_is_refused,
    an_episode_without_steps_is_no_member,
    *TRAINING_CHECKS,
)

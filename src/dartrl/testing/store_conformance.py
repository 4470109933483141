"""What every ledger must do, whatever it stores its rows in: one function per promise.

Run them over your store:

    @pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check):
        check(LedgerBench(make))

where `make(config, run_id, blobs, now)` gives a fresh, empty ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dartrl.config import RunConfig, parse_config
from dartrl.errors import BlobCorrupt, ConfigError, LeaseLost, LedgerConflict
from dartrl.interfaces import BlobStore, Ledger
from dartrl.records import (
    Assignment,
    Checkpoint,
    Claim,
    Evaluation,
    Event,
    Lease,
    Phase,
    Run,
    TrainingStep,
    Wait,
    WeightsVersion,
)
from dartrl.testing.trajectories import make_trajectory
from dartrl.types import SCORED_ENDS, End, Task

MakeLedger = Callable[[RunConfig, str, BlobStore, Callable[[], float]], Ledger]


@dataclass
class LedgerBench:
    """A ledger with a clock to turn and short ways to play all roles."""

    make: MakeLedger
    """Gives a fresh ledger."""
    blobs: BlobStore
    """Where screenshots go."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options on top of the small ones below."""
    time: float = 1000.0
    """Ledger time in seconds."""

    def open(self, *, phase: Phase = Phase.TRAINING, **options: Mapping[str, Any]) -> Ledger:
        """A run with two families of three instances, two held out each, weights version 1, in a phase."""
        sections: dict[str, dict[str, Any]] = {
            "environment": {"slots": 4},
            "data": {"lease_seconds": 10, "group_deadline_seconds": 100, "max_attempts": 2, "breaker_window": 5},
            "curation": {"max_rollouts": 3, "max_staleness": 1},
            "training": {"groups_per_step": 2, "keep_checkpoints": 2},
            "agent": {"max_steps": 6},
        }
        for section, values in {**self.options, **options}.items():
            sections[section] = {**sections.get(section, {}), **values}
        ledger = self.make(parse_config(sections), "run-a", self.blobs, lambda: self.time)
        ledger.open_run(Run("run-a", 7, {"name": "a"}), make_tasks())
        self.ledger = ledger
        lease = ledger.acquire_trainer("trainer-0")
        assert lease is not None
        self.trainer = lease
        ledger.begin_training(lease)
        version = ledger.next_weights_version(lease)
        ledger.publish_weights(lease, WeightsVersion(version, "weights/v1", "c1", 0, None))
        ledger.set_phase(phase)
        return ledger

    def assign(self, holder: str = "runner-0") -> Assignment:
        """The next assignment, which must be there."""
        given = self.ledger.next_assignment(holder)
        assert isinstance(given, Assignment), given
        return given

    def record(self, assignment: Assignment, score: float = 0.0, *, end: End = End.TERMINATED, **more: Any) -> None:
        """Record an attempt."""
        trajectory = make_trajectory(assignment, self.blobs, score=score, end=end, started_at=self.time, **more)
        self.ledger.record_trajectory(assignment.lease, trajectory)

    def play_group(self, scores: Sequence[float], **more: Any) -> str:
        """Run one group to its end with these scores; returns its id."""
        group = ""
        for score in scores:
            assignment = self.assign()
            group = assignment.group_id
            self.record(assignment, score, **more)
        return group

    def claim(self, count: int = 2) -> Claim:
        """The next claim, which must be there."""
        claim = self.ledger.claim_groups(self.trainer, count)
        assert claim is not None
        return claim

    def step(self, claim: Claim, index: int, *, publish: bool = True, rejected: dict[str, str] | None = None) -> None:
        """Acknowledge a step, with new weights."""
        weights = None
        if publish:
            current = self.ledger.current_weights()
            version = self.ledger.next_weights_version(self.trainer)
            weights = WeightsVersion(version, f"weights/v{version}", f"c{version}", index, current.version if current else None)
        self.ledger.acknowledge_step(self.trainer, claim, TrainingStep(index, claim.id, {"loss": 0.5}, rejected or {}), weights)

    def train_step(self, index: int) -> Claim:
        """Two groups of mixed scores, claimed and acknowledged."""
        version = self.version()
        for _ in range(2):
            self.play_group([0.0, 1.0, 0.0], version=version)
        claim = self.claim()
        self.step(claim, index)
        return claim

    def version(self) -> int:
        """The published version."""
        weights = self.ledger.current_weights()
        return weights.version if weights else 0

    def checkpoint(self, step: int) -> None:
        """Record a checkpoint after a step."""
        self.ledger.record_checkpoint(
            self.trainer, Checkpoint(f"s{step}", f"checkpoints/s{step}", step, self.version(), f"k{step}")
        )

    def tick(self) -> Mapping[str, int]:
        """One round of time-driven work."""
        lease = self.ledger.acquire_manager("manager-0")
        assert lease is not None
        return self.ledger.tick(lease)


def make_tasks() -> list[Task]:
    """Two families, three training and two held-out instances each."""
    train = [Task(f"{family}/{seed}", family, seed, spec={"size": seed}) for family in ("left", "right") for seed in range(3)]
    held_out = [Task(f"{family}/{seed}", family, seed, "evaluation") for family in ("left", "right") for seed in (100, 101)]
    return train + held_out


def refused(kind: type[Exception], call: Callable[..., Any], *args: Any) -> str:
    """The message with which the call raises `kind`."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} did not raise {kind.__name__}")


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
    assert _reason(ledger) == "phase"
    ledger.set_phase(Phase.EVALUATING)
    assert _reason(ledger) == "phase"
    ledger.set_phase(Phase.FINISHED)
    assert _reason(ledger) == "finished"


def nothing_is_assigned_without_weights(bench: LedgerBench) -> None:
    ledger = bench.make(parse_config({}), "run-a", bench.blobs, lambda: bench.time)
    ledger.open_run(Run("run-a", 0, {}), make_tasks())
    ledger.set_phase(Phase.TRAINING)
    assert _reason(ledger) == "no_weights"


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
    assert _reason(ledger) == "staleness", "(1 + 1) x 2 groups are in flight"
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


# --------------------------------------------------------------------------- groups and claims


def a_claim_holds_whole_groups_oldest_first(bench: LedgerBench) -> None:
    ledger = bench.open()
    assert ledger.claim_groups(bench.trainer, 1) is None
    first = bench.play_group([0.0, 1.0, 0.0])
    assert ledger.claim_groups(bench.trainer, 2) is None
    second = bench.play_group([1.0, 1.0, 0.0])
    claim = bench.claim()
    assert [group.group_id for group in claim.groups] == [first, second]
    assert [len(group.members) for group in claim.groups] == [3, 3]
    assert [member.trajectory.outcome.score for member in claim.groups[0].members] == [0.0, 1.0, 0.0]
    assert all(member.role == "fresh" for group in claim.groups for member in group.members)
    assert ledger.claim_groups(bench.trainer, 1) is None, "claimed groups are gone"


def groups_without_variance_are_dropped(bench: LedgerBench) -> None:
    ledger = bench.open()
    bench.play_group([0.0, 0.0, 0.0])
    bench.play_group([1.0, 1.0, 1.0])
    assert ledger.counts()["groups_rejected"] == 2
    bench.play_group([0.0, 0.5, 0.5])
    assert len(bench.claim(1).groups) == 1


def variance_is_not_asked_for_when_switched_off(bench: LedgerBench) -> None:
    bench.open(curation={"drop_zero_variance": False, "experience_pool": False})
    bench.play_group([0.0, 0.0, 0.0])
    assert len(bench.claim(1).groups[0].members) == 3


def a_group_that_failed_gets_one_stored_success(bench: LedgerBench) -> None:
    ledger = bench.open(curation={"max_rollouts": 2, "max_staleness": 20})
    groups: dict[str, str] = {}
    while len(groups) < 7:
        assignment = bench.assign()
        failed = assignment.task.id in groups.values()
        groups[assignment.group_id] = assignment.task.id
        bench.record(assignment, 0.0)
        bench.record(bench.assign(), 0.0 if failed else 1.0)
    claim = bench.claim(7)
    last = claim.groups[-1]
    assert [member.role for member in last.members] == ["replay", "fresh"]
    assert last.members[0].trajectory.outcome.success and last.members[0].trajectory.task.id == last.task.id
    counts = ledger.counts()
    assert (counts["members_claimed"], counts["members_rejected"]) == (14, 1)
    bench.step(claim, 1)
    bench.checkpoint(1)
    assert ledger.counts()["members_trained"] == 14


def a_stale_group_is_discarded_at_the_claim(bench: LedgerBench) -> None:
    ledger = bench.open(curation={"max_staleness": 1}, training={"groups_per_step": 1})
    old = bench.play_group([0.0, 1.0, 0.0])
    for _ in range(2):
        version = ledger.next_weights_version(bench.trainer)
        ledger.publish_weights(bench.trainer, WeightsVersion(version, "p", "c", 0, version - 1))
    fresh = bench.play_group([0.0, 1.0, 0.0], version=3)
    assert [group.group_id for group in bench.claim(1).groups] == [fresh]
    event = ledger.events(["group_rejected"])[-1]
    assert (event.subject, event.data["reason"]) == (old, "stale")


def a_group_closes_at_its_deadline_with_what_it_has(bench: LedgerBench) -> None:
    ledger = bench.open()
    bench.record(bench.assign(), 0.0)
    bench.record(bench.assign(), 1.0)
    late = bench.assign()
    for _ in range(11):
        bench.time += 9
        ledger.renew([late.lease])
    bench.time += 2
    assert bench.tick()["groups_closed"] == 1
    refused(LeaseLost, bench.record, late, 1.0)
    assert len(bench.claim(1).groups[0].members) == 2


def a_group_with_one_score_is_too_small(bench: LedgerBench) -> None:
    ledger = bench.open(data={"max_attempts": 1})
    bench.record(bench.assign(), 1.0)
    bench.record(bench.assign(), end=End.ENV_ERROR)
    bench.record(bench.assign(), end=End.EVALUATOR_ERROR)
    counts = ledger.counts()
    assert (counts["groups_rejected"], counts["members_rejected"]) == (1, 1)
    assert ledger.events(["group_closed"])[-1].data["reason"] == "too_small"


def sampling_task_wise_waits_for_whole_groups(bench: LedgerBench) -> None:
    ledger = bench.open(curation={"sampling": "task", "max_rollouts": 4})
    running = [bench.assign() for _ in range(4)]
    assert _reason(ledger) == "sampling", "four slots hold one group of four"
    for assignment in running:
        bench.record(assignment, float(assignment.slot == 0))
    assert bench.assign().group_id != running[0].group_id


def sampling_batch_wise_waits_for_training(bench: LedgerBench) -> None:
    ledger = bench.open(curation={"sampling": "batch", "max_rollouts": 2})
    bench.play_group([0.0, 1.0])
    bench.play_group([0.0, 1.0])
    assert _reason(ledger) == "sampling"
    bench.step(bench.claim(), 1)
    assert isinstance(ledger.next_assignment("r"), Assignment)


def the_breaker_stops_admission_and_says_why(bench: LedgerBench) -> None:
    ledger = bench.open()
    for _ in range(5):
        bench.record(bench.assign(), end=End.ENV_ERROR)
    assert bench.tick()["breaker_opened"] == 1
    assert _reason(ledger) == "breaker"
    assert "5 of the last 5 episodes broke (env_error:crash)" in ledger.events(["breaker"])[-1].data["reason"]
    bench.time += 31
    assert bench.tick()["breaker_closed"] == 1
    assert isinstance(ledger.next_assignment("r"), Assignment)
    assert bench.tick()["breaker_opened"] == 0, "old errors do not count again"


# --------------------------------------------------------------------------- training


def a_step_is_acknowledged_once(bench: LedgerBench) -> None:
    ledger = bench.open()
    claim = bench.train_step(1)
    assert ledger.counts()["members_applied"] == 6
    step = TrainingStep(1, claim.id, {"loss": 0.5})
    before = ledger.counts()
    ledger.acknowledge_step(bench.trainer, claim, step, None)
    assert ledger.counts() == before, "the same acknowledgement again changes nothing"
    refused(LedgerConflict, ledger.acknowledge_step, bench.trainer, claim, TrainingStep(2, claim.id, {}), None)
    assert [each.index for each in ledger.training_steps()] == [1]
    assert ledger.training_steps()[0].metrics == {"loss": 0.5}


def steps_and_versions_form_one_chain(bench: LedgerBench) -> None:
    ledger = bench.open()
    for _ in range(2):
        bench.play_group([0.0, 1.0, 0.0])
    claim = bench.claim()
    refused(LedgerConflict, ledger.acknowledge_step, bench.trainer, claim, TrainingStep(2, claim.id, {}), None)
    unreserved = WeightsVersion(9, "p", "c", 1, 1)
    refused(LedgerConflict, ledger.acknowledge_step, bench.trainer, claim, TrainingStep(1, claim.id, {}), unreserved)
    assert ledger.counts()["members_claimed"] == 6, "a refused step changes nothing"
    bench.step(claim, 1)
    assert bench.version() == 2
    refused(LedgerConflict, ledger.publish_weights, bench.trainer, WeightsVersion(2, "p", "c", 1, 1))


def rejected_members_are_named(bench: LedgerBench) -> None:
    ledger = bench.open()
    for _ in range(2):
        bench.play_group([0.0, 1.0, 0.0])
    claim = bench.claim()
    dead, alive = claim.groups
    rejected = {member.membership_id: "grids" for member in dead.members} | {alive.members[0].membership_id: "length"}
    bench.step(claim, 1, rejected=rejected)
    counts = ledger.counts()
    assert (counts["members_rejected"], counts["members_applied"]) == (4, 2)
    assert (counts["groups_rejected"], counts["groups_applied"]) == (1, 1)


def a_checkpoint_makes_steps_durable(bench: LedgerBench) -> None:
    ledger = bench.open()
    bench.train_step(1)
    bench.checkpoint(1)
    counts = ledger.counts()
    assert (counts["members_trained"], counts["groups_trained"], counts["training_steps_durable"]) == (6, 2, 1)
    refused(LedgerConflict, bench.checkpoint, 2)
    resumed = ledger.begin_training(bench.trainer)
    assert (resumed.next_step, resumed.rolled_back) == (2, 0)
    assert resumed.checkpoint == Checkpoint("s1", "checkpoints/s1", 1, 2, "k1")
    assert bench.version() == 2


def a_crash_returns_what_no_checkpoint_holds(bench: LedgerBench) -> None:
    ledger = bench.open(curation={"max_staleness": 6})
    bench.train_step(1)
    bench.checkpoint(1)
    second = bench.train_step(2)
    for _ in range(2):
        bench.play_group([1.0, 0.0, 0.0], version=3)
    third = bench.claim()
    lease = ledger.acquire_trainer("trainer-0")
    assert lease is not None
    resumed = ledger.begin_training(lease)
    assert (resumed.next_step, resumed.rolled_back) == (2, 6)
    assert bench.version() == 2, "version 3 is rolled back"
    assert ledger.next_weights_version(lease) == 4, "its number is not used again"
    assert [step.index for step in ledger.training_steps()] == [1]
    refused(LeaseLost, ledger.acknowledge_step, bench.trainer, third, TrainingStep(2, third.id, {}), None)
    bench.trainer = lease
    again = bench.claim()
    assert [group.group_id for group in again.groups] == [group.group_id for group in second.groups]
    ledger.acknowledge_step(lease, again, TrainingStep(2, again.id, {}), WeightsVersion(4, "p", "c", 2, 2))
    assert bench.version() == 4


def without_a_checkpoint_training_starts_over(bench: LedgerBench) -> None:
    ledger = bench.open()
    bench.train_step(1)
    resumed = ledger.begin_training(bench.trainer)
    assert (resumed.checkpoint, resumed.next_step, resumed.rolled_back) == (None, 1, 6)
    assert bench.version() == 1


# --------------------------------------------------------------------------- evaluation


def an_evaluation_runs_each_held_out_instance(bench: LedgerBench) -> None:
    ledger = bench.open(phase=Phase.EVALUATING)
    evaluation = Evaluation("before-greedy", 0.0, 2)
    ledger.open_evaluation(evaluation)
    ledger.open_evaluation(evaluation)
    given = [bench.assign() for _ in range(4)]
    assert _reason(ledger) == "phase"
    assert sorted(each.task.id for each in given) == ["left/100", "left/101", "right/100", "right/101"]
    assert {(each.purpose, each.temperature) for each in given} == {("evaluation", 0.0)}
    for assignment in given:
        bench.record(assignment, float(assignment.task.family == "left"))
    result = ledger.evaluation_result("before-greedy")
    assert (result.evaluation, result.finished, result.total) == (evaluation, 4, 4)
    assert result.successes == {"left": (2, 2), "right": (0, 2)}
    assert len(ledger.trajectories(purpose="before-greedy")) == len(ledger.trajectories(purpose="evaluation")) == 4
    ledger.set_phase(Phase.TRAINING)
    assert ledger.claim_groups(bench.trainer, 1) is None, "evaluation is never trained on"


def an_evaluation_ends_when_an_instance_cannot_be_scored(bench: LedgerBench) -> None:
    ledger = bench.open(phase=Phase.EVALUATING, data={"max_attempts": 1})
    ledger.open_evaluation(Evaluation("e", 1.0, 1))
    bench.record(bench.assign(), end=End.ENV_ERROR)
    bench.record(bench.assign(), 1.0)
    result = ledger.evaluation_result("e")
    assert (result.finished, result.total, sum(scored for _, scored in result.successes.values())) == (2, 2, 1)
    assert "raise tasks.evaluation_instances" in refused(ConfigError, ledger.open_evaluation, Evaluation("big", 1.0, 3))


def evaluation_goes_before_training(bench: LedgerBench) -> None:
    ledger = bench.open()
    ledger.open_evaluation(Evaluation("middle", 1.0, 1))
    assert [bench.assign().purpose for _ in range(3)] == ["evaluation", "evaluation", "train"]


# --------------------------------------------------------------------------- events and end


def events_are_kept_in_order(bench: LedgerBench) -> None:
    ledger = bench.open()
    ledger.record_event(Event("stats", "runner-0", {"busy_seconds": 1.5}))
    bench.time += 1
    ledger.record_event(Event("alarm", "router", {"text": "é"}))
    assert [event.data for event in ledger.events(["stats", "alarm"])] == [{"busy_seconds": 1.5}, {"text": "é"}]
    assert [event.kind for event in ledger.events(after=bench.time - 0.5)] == ["alarm"]
    assert ledger.events(["stats"])[0].at == bench.time - 1
    assert {"phase", "resume", "weights"} <= {event.kind for event in ledger.events()}


def a_lagging_worker_lowers_admission(bench: LedgerBench) -> None:
    ledger = bench.open()
    version = ledger.next_weights_version(bench.trainer)
    ledger.publish_weights(bench.trainer, WeightsVersion(version, "p", "c", 0, 1))
    ledger.record_event(Event("sync", "worker-0", {"worker": "worker-0", "version": 1}))
    for _ in range(6):
        bench.assign()
    assert _reason(ledger) == "staleness", "one batch of two groups"
    ledger.record_event(Event("sync", "worker-0", {"worker": "worker-0", "version": 2}))
    assert isinstance(ledger.next_assignment("r"), Assignment)


def a_finished_run_leaves_nothing_open(bench: LedgerBench) -> None:
    ledger = bench.open()
    bench.play_group([0.0, 1.0, 0.0])
    running = bench.assign()
    ledger.set_phase(Phase.FINISHED)
    refused(LeaseLost, bench.record, running, 1.0)
    counts = ledger.counts()
    assert (counts["groups_open"], counts["groups_ready"], counts["leases"]) == (0, 0, 0)
    assert counts["groups_rejected"] == 2


def every_trajectory_is_counted(bench: LedgerBench) -> None:
    ledger = bench.open()
    ends = [End.TERMINATED, End.TRUNCATED, End.ENV_ERROR, End.MODEL_ERROR, End.EVALUATOR_ERROR, End.ABORTED]
    for end in ends:
        bench.record(bench.assign(), 1.0 if end in SCORED_ENDS else 0.0, end=end)
    bench.assign()
    counts = ledger.counts()
    assert counts["trajectories"] == len(ends) + 1 and counts["trajectories_running"] == 1 and counts["leases"] == 1
    assert all(counts[f"trajectories_{end}"] == 1 for end in ends)


def _reason(ledger: Ledger) -> str:
    given = ledger.next_assignment("runner-0")
    assert isinstance(given, Wait), given
    assert given.seconds > 0
    return given.reason


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
    a_claim_holds_whole_groups_oldest_first,
    groups_without_variance_are_dropped,
    variance_is_not_asked_for_when_switched_off,
    a_group_that_failed_gets_one_stored_success,
    a_stale_group_is_discarded_at_the_claim,
    a_group_closes_at_its_deadline_with_what_it_has,
    a_group_with_one_score_is_too_small,
    sampling_task_wise_waits_for_whole_groups,
    sampling_batch_wise_waits_for_training,
    the_breaker_stops_admission_and_says_why,
    a_step_is_acknowledged_once,
    steps_and_versions_form_one_chain,
    rejected_members_are_named,
    a_checkpoint_makes_steps_durable,
    a_crash_returns_what_no_checkpoint_holds,
    without_a_checkpoint_training_starts_over,
    an_evaluation_runs_each_held_out_instance,
    an_evaluation_ends_when_an_instance_cannot_be_scored,
    evaluation_goes_before_training,
    events_are_kept_in_order,
    a_lagging_worker_lowers_admission,
    a_finished_run_leaves_nothing_open,
    every_trajectory_is_counted,
)

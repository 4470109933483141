"""What every ledger must promise about groups, claims, training and evaluation; see `store_conformance.py`."""

from __future__ import annotations

from collections.abc import Callable

from dartrl.errors import ConfigError, LeaseLost, LedgerConflict
from dartrl.records import Assignment, Checkpoint, Evaluation, Event, Phase, TrainingStep, WeightsVersion
from dartrl.testing.ledger_bench import LedgerBench, reason_to_wait, refused
from dartrl.types import SCORED_ENDS, End

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
    assert reason_to_wait(ledger) == "sampling", "four slots hold one group of four"
    for assignment in running:
        bench.record(assignment, float(assignment.slot == 0))
    assert bench.assign().group_id != running[0].group_id


def sampling_batch_wise_waits_for_training(bench: LedgerBench) -> None:
    ledger = bench.open(curation={"sampling": "batch", "max_rollouts": 2})
    bench.play_group([0.0, 1.0])
    bench.play_group([0.0, 1.0])
    assert reason_to_wait(ledger) == "sampling"
    bench.step(bench.claim(), 1)
    assert isinstance(ledger.next_assignment("r"), Assignment)


def the_breaker_stops_admission_and_says_why(bench: LedgerBench) -> None:
    ledger = bench.open()
    for _ in range(5):
        bench.record(bench.assign(), end=End.ENV_ERROR)
    assert bench.tick()["breaker_opened"] == 1
    assert reason_to_wait(ledger) == "breaker"
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
    assert reason_to_wait(ledger) == "phase"
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


def episodes_are_listed_by_their_end(bench: LedgerBench) -> None:
    ledger = bench.open()
    first, second = bench.assign(), bench.assign()
    bench.time += 5
    bench.record(second, 1.0, num_steps=3)
    bench.time += 5
    bench.record(first, end=End.ENV_ERROR)
    found = ledger.episodes()
    assert [(each.trajectory_id, each.end, each.success, each.num_steps, each.purpose) for each in found] == [
        (second.trajectory_id, "terminated", True, 3, "train"),
        (first.trajectory_id, "env_error", None, 2, "train"),
    ]
    assert [each.trajectory_id for each in ledger.episodes(after=found[0].finished_at)] == [first.trajectory_id]


def a_lagging_worker_lowers_admission(bench: LedgerBench) -> None:
    ledger = bench.open()
    version = ledger.next_weights_version(bench.trainer)
    ledger.publish_weights(bench.trainer, WeightsVersion(version, "p", "c", 0, 1))
    ledger.record_event(Event("sync", "worker-0", {"worker": "worker-0", "version": 1}))
    for _ in range(6):
        bench.assign()
    assert reason_to_wait(ledger) == "staleness", "one batch of two groups"
    ledger.record_event(Event("sync", "worker-1", {"worker": "worker-1", "version": 2}))
    assert reason_to_wait(ledger) == "staleness", "the slowest worker counts"
    bench.time += 11
    assert isinstance(ledger.next_assignment("r"), Assignment), "a worker that lags for longer than a lease is dead"


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


TRAINING_CHECKS: tuple[Callable[[LedgerBench], None], ...] = (
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
    episodes_are_listed_by_their_end,
    a_lagging_worker_lowers_admission,
    a_finished_run_leaves_nothing_open,
    every_trajectory_is_counted,
)

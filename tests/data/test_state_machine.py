"""Roles act in any order, at any time, dead or alive: the ledger stays consistent after every single action."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from dartrl.config import parse_config
from dartrl.data.audit import audit
from dartrl.data.blobs import MemoryBlobStore
from dartrl.data.manager import open_ledger
from dartrl.errors import LeaseLost, LedgerConflict
from dartrl.records import Assignment, Checkpoint, Evaluation, Phase, Run, TrainingStep, Wait, WeightsVersion
from dartrl.testing.ledger_bench import make_tasks
from dartrl.testing.trajectories import make_trajectory
from dartrl.types import SCORED_ENDS, End

CONFIG = {
    "environment": {"slots": 4},
    "data": {"lease_seconds": 10, "group_deadline_seconds": 40, "max_attempts": 2, "breaker_window": 8},
    "curation": {"max_rollouts": 2, "max_staleness": 2, "pool_max_age": 6},
    "training": {"groups_per_step": 1, "keep_checkpoints": 2},
}


class LedgerMachine(RuleBasedStateMachine):
    """Runners, a trainer that crashes, a manager, a clock; the model is a few sets and counters."""

    assignments = Bundle("assignments")

    @initialize(
        sampling=st.sampled_from(["rollout", "task", "batch"]), pool=st.booleans(), variance=st.booleans(), seed=st.integers(0, 3)
    )
    def open(self, sampling, pool, variance, seed):
        curation = {**CONFIG["curation"], "sampling": sampling, "experience_pool": pool, "drop_zero_variance": variance}
        self.time = 1000.0
        self.blobs = MemoryBlobStore()
        config = parse_config({**CONFIG, "curation": curation})
        self.ledger = open_ledger("memory:", blobs=self.blobs, config=config, run_id="r", now=lambda: self.time)
        self.ledger.open_run(Run("r", seed, {}), make_tasks())
        self.trainer = self.ledger.acquire_trainer("trainer")
        self.old_trainers = []
        self.ledger.begin_training(self.trainer)
        self.step = self.durable = 0
        self.claim = None
        self.given = set()
        self.recorded = set()
        self.versions = []
        self.waits = set()
        self.published = []
        self.publish()
        self.ledger.set_phase(Phase.TRAINING)

    def reserve(self):
        version = self.ledger.next_weights_version(self.trainer)
        assert version == max(self.versions, default=0) + 1, "numbers are never reused"
        self.versions.append(version)
        return version

    def weights(self):
        current = self.ledger.current_weights()
        version = self.reserve()
        self.published.append(version)
        return WeightsVersion(version, f"w/{version}", "c", self.step, current.version if current else None)

    # ------------------------------------------------------------------ runners

    @rule(target=assignments, runner=st.sampled_from(["a", "b"]))
    def assign(self, runner):
        given = self.ledger.next_assignment(runner)
        if isinstance(given, Wait):
            self.waits.add(given.reason)
            assert given.reason in ("staleness", "sampling", "breaker", "phase")
            return None
        assert given.trajectory_id not in self.given, "ids are never reused"
        self.given.add(given.trajectory_id)
        return given

    @rule(
        assignment=consumes(assignments),
        end=st.sampled_from([End.TERMINATED] * 6 + [End.TRUNCATED, End.ENV_ERROR, End.MODEL_ERROR, End.ABORTED]),
        score=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        steps=st.integers(0, 2),
        lag=st.integers(0, 2),
    )
    def record(self, assignment, end, score, steps, lag):
        if assignment is None:
            return
        version = self.published[-1 - min(lag, len(self.published) - 1)]
        trajectory = make_trajectory(assignment, self.blobs, score=score, end=end, num_steps=steps, version=version)
        held = bool(self.ledger.renew([assignment.lease]))
        try:
            self.ledger.record_trajectory(assignment.lease, trajectory)
        except LeaseLost:
            assert not held
            return
        assert held
        if end in SCORED_ENDS:
            self.recorded.add(assignment.trajectory_id)
        with pytest.raises(LeaseLost):
            self.ledger.record_trajectory(assignment.lease, trajectory)

    @rule(scores=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=6), lag=st.integers(0, 2))
    def episodes_run_one_after_another(self, scores, lag):
        for score in scores:
            self.record(self.assign("c"), End.TERMINATED, score, 1, lag)

    @rule(lag=st.integers(0, 1))
    def a_group_gets_mixed_scores(self, lag):
        self.ledger.set_phase(Phase.TRAINING)
        self.episodes_run_one_after_another([0.0, 1.0, 0.0, 1.0], lag)

    @rule(assignment=assignments)
    def heartbeat(self, assignment):
        if assignment is not None:
            self.ledger.renew([assignment.lease])

    # ------------------------------------------------------------------ trainer

    @precondition(lambda self: self.claim is None)
    @rule(count=st.integers(1, 2))
    def claim_groups(self, count):
        self.claim = self.ledger.claim_groups(self.trainer, count)
        if self.claim is not None:
            assert len(self.claim.groups) == count
            ids = [group.group_id for group in self.claim.groups]
            assert ids == sorted(ids), "oldest first"
            for group in self.claim.groups:
                assert len(group.members) >= 2
                assert sum(member.role == "replay" for member in group.members) <= 1
                assert all(member.trajectory.task.id == group.task.id for member in group.members)

    @precondition(lambda self: self.claim is not None)
    @rule(publish=st.booleans(), rejects=st.integers(0, 3))
    def acknowledge(self, publish, rejects):
        members = [member for group in self.claim.groups for member in group.members]
        rejected = {member.membership_id: "length" for member in members[:rejects]}
        self.step += 1
        step = TrainingStep(self.step, self.claim.id, {"loss": 0.0}, rejected)
        weights = self.weights() if publish else None
        self.ledger.acknowledge_step(self.trainer, self.claim, step, weights)
        self.ledger.acknowledge_step(self.trainer, self.claim, step, weights)
        with pytest.raises(LedgerConflict):
            self.ledger.acknowledge_step(self.trainer, self.claim, TrainingStep(self.step + 1, self.claim.id, {}), None)
        self.claim = None

    @rule()
    def publish(self):
        self.ledger.publish_weights(self.trainer, self.weights())

    @precondition(lambda self: self.step > self.durable)
    @rule()
    def checkpoint(self):
        self.ledger.publish_weights(self.trainer, self.weights())
        version = self.ledger.current_weights().version
        self.ledger.record_checkpoint(self.trainer, Checkpoint(f"s{self.step}", f"c/{self.step}", self.step, version, "k"))
        self.durable = self.step

    @precondition(lambda self: self.claim is not None or self.step > self.durable)
    @rule(reserved=st.booleans())
    def crash_and_resume(self, reserved):
        if reserved:
            self.reserve()
        self.old_trainers.append((self.trainer, self.claim))
        self.trainer = self.ledger.acquire_trainer("trainer")
        assert self.trainer.token > self.old_trainers[-1][0].token
        point = self.ledger.begin_training(self.trainer)
        assert (point.next_step, point.checkpoint.training_step if point.checkpoint else 0) == (self.durable + 1, self.durable)
        self.step, self.claim = self.durable, None

    @precondition(lambda self: self.old_trainers)
    @rule()
    def a_dead_trainer_wakes_up(self):
        lease, claim = self.old_trainers[-1]
        calls = [
            lambda: self.ledger.claim_groups(lease, 1),
            lambda: self.ledger.next_weights_version(lease),
            lambda: self.ledger.record_checkpoint(lease, Checkpoint("x", "x", 0, 1, "")),
        ]
        if claim is not None:
            calls.append(lambda: self.ledger.acknowledge_step(lease, claim, TrainingStep(self.step + 1, claim.id, {}), None))
        for call in calls:
            with pytest.raises(LeaseLost):
                call()

    # ------------------------------------------------------------------ time and phases

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 41.0]))
    def time_passes(self, seconds):
        self.time += seconds

    @rule()
    def tick(self):
        lease = self.ledger.acquire_manager("manager")
        self.ledger.tick(lease)

    @rule(phase=st.sampled_from([Phase.TRAINING, Phase.TRAINING, Phase.TRAINING, Phase.EVALUATING, Phase.DRAINING]))
    def change_phase(self, phase):
        self.ledger.set_phase(phase)

    @precondition(lambda self: len(self.given) > 12)
    @rule(name=st.sampled_from(["e1", "e2"]))
    def open_evaluation(self, name):
        self.ledger.open_evaluation(Evaluation(name, 0.0, 2))
        assert self.ledger.evaluation_result(name).total == 4

    @rule()
    def new_group_is_only_opened_when_admitted(self):
        counts = self.ledger.counts()
        assert counts["groups_ready"] <= 3 + 4, "capacity of (2 + 1) x 1, plus what was in flight"

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def audit_is_clean(self):
        if hasattr(self, "ledger"):
            report = audit(self.ledger)
            assert report.ok, report.problems

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "ledger"):
            counts = self.ledger.counts()
            assert counts["trajectories"] == len(self.given) if self.given else True
            scored = counts.get("trajectories_terminated", 0) + counts.get("trajectories_truncated", 0)
            assert scored == len(self.recorded)
            assert [step.index for step in self.ledger.training_steps()] == list(range(1, self.step + 1))
            current = self.ledger.current_weights()
            assert current is None or current.version in self.versions

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.set_phase(Phase.FINISHED)
            report = audit(self.ledger)
            assert report.ok, report.problems
            assert self.ledger.counts()["leases"] == 0


QUICK = settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=400, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck))


class TestLedgerMachine(LedgerMachine.TestCase):
    settings = QUICK


@pytest.mark.slow
class TestLedgerMachineAtLength(LedgerMachine.TestCase):
    settings = LONG


def test_the_model_sees_an_assignment():
    """The machine would pass idly if nothing were ever assigned."""
    machine = LedgerMachine()
    machine.open("rollout", True, True, 0)
    assert isinstance(machine.assign("a"), Assignment)

"""Runner, fleet, weight sync, data manager and curation together, in virtual time, with everything crashing now and then."""

from collections import Counter
from dataclasses import replace

import pytest

from dartrl.simulate.plan import CALM, Latency, SimulationPlan
from dartrl.simulate.system import SimulationResult, simulate

SMALL = SimulationPlan(
    seconds=900.0,
    runners=3,
    slots=6,
    workers=2,
    families=4,
    batch=6,
    groups_per_step=2,
    training_step=Latency(15.0),
    checkpoint_every=2,
    step=Latency(2.0),
    reply=Latency(1.0),
    reset=Latency(4.0),
    evaluate=Latency(1.0),
    load=Latency(0.5),
    environment_fault_share=0.003,
    worker_life_seconds=300.0,
    runner_life_seconds=600.0,
    trainer_life_seconds=300.0,
    manager_life_seconds=300.0,
)
QUIET = replace(
    SMALL,
    environment_fault_share=0.0,
    evaluator_fault_share=0.0,
    worker_life_seconds=CALM,
    runner_life_seconds=CALM,
    trainer_life_seconds=CALM,
    manager_life_seconds=CALM,
)
MAX_STALENESS = 4


def check_sound(result: SimulationResult) -> None:
    """What must hold after any simulation, however much crashed."""
    assert result.audit.ok, result.audit.problems
    assert result.counts["leases"] == 0
    assert [step.index for step in result.steps] == list(range(1, len(result.steps) + 1))
    assert max(step.metrics["staleness_max"] for step in result.steps) <= MAX_STALENESS


def kinds(result: SimulationResult) -> Counter[str]:
    return Counter(event.kind for event in result.events)


def test_a_crashing_cluster_keeps_its_books():
    result = simulate(SMALL)
    check_sound(result)
    restarts = {event.subject.split("-")[0] for event in result.events if event.kind == "restart"}
    assert restarts == {"runner", "trainer", "manager"}, "the plan is meant to crash every role"
    assert kinds(result)["join"] > SMALL.workers, "and workers"
    assert len(result.steps) >= 3
    assert result.counts["trajectories_env_error"] > 0 and result.counts["trajectories_aborted"] > 0


def test_equal_seeds_give_equal_event_logs_and_others_do_not():
    plan = replace(SMALL, seconds=300.0)
    first, second, other = simulate(plan), simulate(plan), simulate(replace(plan, seed=1))
    assert first.event_hash == second.event_hash
    assert first.counts == second.counts and first.readings == second.readings
    assert first.event_hash != other.event_hash


@pytest.fixture(scope="module")
def quiet() -> SimulationResult:
    return simulate(QUIET)


def test_a_quiet_cluster_loses_nothing_and_swaps_without_dropping_a_request(quiet: SimulationResult):
    check_sound(quiet)
    assert not {"restart", "alarm", "lease_expired", "breaker"} & set(kinds(quiet))
    assert quiet.readings.get("router/rollout/requests_failed", 0) == 0
    assert quiet.readings.get("runner/rollout/retries", 0) == 0
    ends = {name for name, count in quiet.counts.items() if name.startswith("trajectories_") and count}
    assert ends <= {"trajectories_terminated", "trajectories_truncated", "trajectories_aborted"}
    aborted = quiet.counts["trajectories_aborted"]
    assert aborted <= QUIET.runners * QUIET.slots, "only those that ran when time was up"
    assert kinds(quiet)["sync"] >= QUIET.workers * (len(quiet.steps) - 1)


def test_inference_gaps_stay_below_twice_the_reply_time(quiet: SimulationResult):
    gaps = [event.data["gap_seconds"] for event in quiet.events if event.kind == "sync"]
    assert max(gaps) <= 2 * quiet.readings["router/rollout/reply_seconds_p95"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_slots_for_an_hour():
    plan = SimulationPlan()
    result = simulate(plan)
    check_sound(result)
    share = result.readings["runner/busy_seconds"] / plan.runners / plan.seconds
    assert share > 0.8, "slots are busy in spite of crashes"
    assert result.counts["trajectories_terminated"] > 5000
    assert len(result.steps) > 4

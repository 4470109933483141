"""The report's figures are what the ledger says, null where it says nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.config import RunConfig, TaskConfig
from dartrl.dashboard import usage
from dartrl.dashboard.readings import RunReadings, training_windows
from dartrl.dashboard.report import compute_report, family_rates, learning_curve, success_rate
from dartrl.records import EpisodeSummary, Evaluation, EvaluationResult, Event, TrainingStep

REQUIRED = {
    "success_before", "success_after", "greedy_before", "greedy_after", "per_task", "episodes", "actions_per_minute",
    "training_steps", "minutes_total", "minutes_training", "minutes_to_first_view", "weight_syncs", "max_staleness",
    "staleness_limit", "longest_inference_gap_seconds", "logprob_gap_p99_at_lag_0", "effective_sample_size", "requests_failed",
    "env_utilisation", "engine_utilisation", "trainer_utilisation", "peak_rss_mib", "disk_mib", "audit_ok", "restarts",
}  # fmt: skip


def readings(**changes: object) -> RunReadings:
    config = RunConfig(tasks=TaskConfig(families=("a", "b")))
    empty: dict[str, object] = {
        "run_id": "run", "config": config, "phase": "finished", "events": [], "steps": [], "episodes": [], "evaluations": {},
        "counts": {}, "guess_rates": {"a": 0.1}, "audit_ok": True, "disk_mib": 12.5,
    }  # fmt: skip
    return RunReadings(**(empty | changes))  # type: ignore[arg-type]


def result(**successes: tuple[int, int]) -> EvaluationResult:
    return EvaluationResult(Evaluation("before-sampled", 1.0, 10), 20, 20, successes)


def episode(at: float, family: str = "a", success: bool | None = True, purpose: str = "train") -> EpisodeSummary:
    end = "env_error" if success is None else "terminated"
    return EpisodeSummary(f"t{at}", family, purpose, end, success, 3, at)


def stats(at: float, subject: str, **data: float) -> Event:
    return Event("stats", subject, data, at)


def stage(at: float, subject: str, state: str, **data: float) -> Event:
    return Event("stage", subject, {"state": state, **data}, at)


def test_an_empty_run_has_every_figure_and_invents_none():
    report = compute_report(readings())
    assert REQUIRED <= report.keys()
    unknown = ("success_before", "greedy_after", "actions_per_minute", "max_staleness", "env_utilisation", "minutes_to_first_view")
    for name in unknown:
        assert report[name] is None
    assert report["per_task"]["a"]["guess_rate"] == 0.1
    assert report["per_task"]["b"]["guess_rate"] is None
    assert report["restarts"] == 0


def test_success_is_the_mean_over_tasks_not_over_episodes():
    assert success_rate(result(a=(10, 10), b=(0, 30))) == 0.5
    assert family_rates(result(a=(1, 4), b=(0, 0))) == {"a": 0.25}
    assert success_rate(None) is None


def test_before_and_after_come_from_their_own_evaluations():
    evaluations = {
        "before-sampled": result(a=(1, 10), b=(3, 10)),
        "after-sampled": result(a=(5, 10), b=(7, 10)),
        "before-greedy": result(a=(2, 10), b=(2, 10)),
        "after-greedy": result(a=(9, 10), b=(9, 10)),
    }
    report = compute_report(readings(evaluations=evaluations))
    figures = [report[name] for name in ("success_before", "success_after", "greedy_before", "greedy_after")]
    assert figures == pytest.approx([0.2, 0.6, 0.2, 0.9])
    assert report["per_task"]["b"]["success_after"] == 0.7
    assert report["evaluation_episodes_per_task"] == 10


TRAINING = [
    Event("session", "run", {}, 0.0),
    Event("view", "run", {"seconds": 3.0}, 1.0),
    stats(5.0, "runner-0", pid=1, wall_seconds=5, busy_seconds=5, rss_mib=100, **{"envs/actions": 50}),
    stage(10.0, "training", "started"),
    stats(40.0, "runner-0", pid=1, wall_seconds=40, busy_seconds=33, rss_mib=300, **{"envs/actions": 650}),
    stats(41.0, "trainer-0", wall_seconds=41, busy_seconds=20, rss_mib=500),
    Event("sync", "engine-0", {"gap_seconds": 0.2, "version": 2}, 45.0),
    Event("restart", "runner-0", {"exit_status": -9}, 50.0),
    stats(60.0, "runner-0", pid=2, wall_seconds=8, busy_seconds=4, rss_mib=200, **{"envs/actions": 90}),
    stage(70.0, "training", "clock", seconds=60.0),
    stage(70.0, "training", "finished"),
    Event("sync", "engine-0", {"gap_seconds": 9.0, "version": 3}, 80.0),
    stats(90.0, "runner-0", pid=2, wall_seconds=38, busy_seconds=30, rss_mib=200, **{"envs/actions": 900}),
    Event("session", "run", {}, 1000.0),
    stage(1060.0, "evaluation_after", "finished"),
]


def test_rates_and_shares_count_training_alone_and_survive_a_restart():
    report = compute_report(readings(events=TRAINING, episodes=[episode(20.0), episode(30.0, success=None), episode(85.0)]))
    assert report["actions_per_minute"] == 600 + 90
    assert report["episodes_per_minute"] == 1
    assert (report["episodes"], report["episodes_failed"]) == (2, 1)
    assert report["env_utilisation"] == pytest.approx((28 + 4) / (35 + 8), abs=1e-4)
    assert report["restarts"] == 1


def test_syncs_outside_training_do_not_count():
    report = compute_report(readings(events=TRAINING))
    assert (report["weight_syncs"], report["longest_inference_gap_seconds"]) == (1, 0.2)


def test_time_between_two_sessions_does_not_count():
    report = compute_report(readings(events=TRAINING))
    assert report["minutes_total"] == pytest.approx((90 + 60) / 60)
    assert report["minutes_training"] == 1
    assert report["minutes_to_first_view"] == 0.05


def test_peak_memory_adds_the_processes_up():
    assert compute_report(readings(events=TRAINING))["peak_rss_mib"] == 800


def test_training_figures_take_the_worst_step_where_a_limit_is_at_stake():
    steps = [
        TrainingStep(1, "c1", {"staleness_max": 1.0, "effective_sample_size": 0.9, "logprob_gap_p99_at_lag_0": 1e-5}),
        TrainingStep(2, "c2", {"staleness_max": 4.0, "effective_sample_size": 0.7}, {"m": "length"}),
    ]
    report = compute_report(readings(steps=steps))
    assert report["max_staleness"] == 4
    assert report["logprob_gap_p99_at_lag_0"] == 1e-5
    assert report["effective_sample_size"] == pytest.approx(0.8)
    assert report["rows_rejected"] == 1


def test_a_resumed_training_has_two_windows():
    events = [stage(0, "training", "started"), stage(5, "training", "clock", seconds=5), stage(100, "training", "started")]
    events.append(stage(110, "training", "finished"))
    assert training_windows(events) == [(0, 5), (100, 110)]


def slow_total(values: Sequence[Sequence[float]]) -> float:
    """Sum of the last reading of each life."""
    return sum(life[-1] for life in values if life)


@given(st.lists(st.lists(st.floats(0.1, 100), min_size=1, max_size=5), max_size=4))
def test_a_counter_adds_up_over_any_number_of_lives(increments: list[list[float]]):
    events: list[Event] = []
    lives: list[list[float]] = []
    for life in increments:
        running, readings_of_life = 0.0, list[float]()
        for step, increment in enumerate(life):
            running += increment
            readings_of_life.append(running)
            events.append(stats(float(len(events)), "engine-0", pid=len(lives), wall_seconds=step + 1, tokens=running))
        lives.append(readings_of_life)
    assert usage.total(events, "engine", "tokens") == pytest.approx(slow_total(lives))


@given(st.lists(st.tuples(st.floats(0, 600), st.sampled_from("ab"), st.booleans()), max_size=60))
def test_the_learning_curve_loses_no_episode(draws: list[tuple[float, str, bool]]):
    episodes = [episode(at, family, success) for at, family, success in draws]
    curve = learning_curve(episodes, start=0.0, end=600.0, bins=7)
    for family in "ab":
        points = curve.get(family, [])
        own = [success for _, where, success in draws if where == family]
        assert sum(count for _, _, count in points) == len(own)
        assert sum(rate * count for _, rate, count in points) == pytest.approx(sum(own))
        assert [minute for minute, _, _ in points] == sorted(minute for minute, _, _ in points)

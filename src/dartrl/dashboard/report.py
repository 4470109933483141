"""The figures of `report.json`, computed from the ledger alone. Pure.

A figure that the run gives no ground for is null, never zero. docs/metrics.md says what each one means.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dartrl.dashboard import usage
from dartrl.dashboard.readings import RunReadings, is_within, training_seconds, training_windows
from dartrl.records import EpisodeSummary, EvaluationResult, Event, TrainingStep

Figures = dict[str, Any]

EVALUATIONS = {
    "success_before": "before-sampled",
    "success_after": "after-sampled",
    "greedy_before": "before-greedy",
    "greedy_after": "after-greedy",
}
"""Figure -> the evaluation it is read from."""


def compute_report(readings: RunReadings) -> Figures:
    """All figures of a run."""
    return {
        "run": readings.run_id,
        "seed": readings.config.seed,
        "learning_rate": readings.config.training.learning_rate,
        **_success(readings),
        **_amounts(readings),
        **_durations(readings.events),
        **_training_quality(readings.steps),
        "staleness_limit": readings.config.curation.max_staleness,
        **_weight_syncs(readings),
        **_usage(readings),
        "disk_mib": round(readings.disk_mib, 1),
        "audit_ok": readings.audit_ok,
        "restarts": len(readings.of_kind("restart")),
        "alarms": len(readings.of_kind("alarm")),
        "versions": dict(readings.versions),
    }


def success_rate(result: EvaluationResult | None) -> float | None:
    """Mean over families of the share of successes among scored episodes; None without any."""
    rates = list(family_rates(result).values())
    return statistics.fmean(rates) if rates else None


def family_rates(result: EvaluationResult | None) -> dict[str, float]:
    """Family -> share of successes among its scored episodes; families without one are absent."""
    if result is None:
        return {}
    return {family: successes / scored for family, (successes, scored) in result.successes.items() if scored}


def _success(readings: RunReadings) -> Figures:
    results = {figure: readings.evaluations.get(evaluation) for figure, evaluation in EVALUATIONS.items()}
    rates = {figure: family_rates(result) for figure, result in results.items()}
    families = readings.config.tasks.families
    trained = [episode for episode in readings.episodes if episode.purpose == "train" and episode.success is not None]
    per_task: dict[str, Figures] = {}
    for family in families:
        own = [episode for episode in trained if episode.family == family]
        per_task[family] = {
            "guess_rate": readings.guess_rates.get(family),
            **{figure: _rounded(rates[figure].get(family)) for figure in EVALUATIONS},
            "training_episodes": len(own),
            "steps_per_episode": _rounded(statistics.fmean(episode.num_steps for episode in own), 2) if own else None,
        }
    scored = [result for result in results.values() if result is not None and result.successes]
    fewest = min((count for result in scored for _, count in result.successes.values()), default=None)
    means = {figure: _rounded(success_rate(result)) for figure, result in results.items()}
    return {**means, "evaluation_episodes_per_task": fewest, "per_task": per_task}


def _amounts(readings: RunReadings) -> Figures:
    train = [episode for episode in readings.episodes if episode.purpose == "train"]
    scored = [episode for episode in train if episode.success is not None]
    return {
        "episodes": len(scored),
        "episodes_failed": len(train) - len(scored),
        "episodes_evaluation": len(readings.episodes) - len(train),
        "training_steps": len(readings.steps),
        "groups": {name.removeprefix("groups_"): number for name, number in readings.counts.items() if name.startswith("groups_")},
        **_rates(readings, scored),
    }


def _rates(readings: RunReadings, scored: Sequence[EpisodeSummary]) -> Figures:
    windows = training_windows(readings.events)
    minutes = training_seconds(readings.events) / 60
    if minutes <= 0:
        return {"actions_per_minute": None, "episodes_per_minute": None}
    actions = usage.total(readings.of_kind("stats"), "runner", "envs/actions", windows)
    episodes = sum(is_within(episode.finished_at, windows) for episode in scored)
    return {"actions_per_minute": round(actions / minutes, 1), "episodes_per_minute": round(episodes / minutes, 1)}


def _durations(events: Sequence[Event]) -> Figures:
    first_views = [float(event.data["seconds"]) for event in events if event.kind == "view"]
    return {
        "minutes_total": round(sum(_session_seconds(events)) / 60, 2),
        "minutes_training": round(training_seconds(events) / 60, 2),
        "minutes_to_first_view": round(first_views[0] / 60, 3) if first_views else None,
    }


def _session_seconds(events: Sequence[Event]) -> list[float]:
    """Length of each stretch from a `session` event to the last event before the next one; time between them does not count."""
    starts = [index for index, event in enumerate(events) if event.kind == "session"]
    bounds = [*starts, len(events)]
    return [events[end - 1].at - events[start].at for start, end in pairwise(bounds)]


def _training_quality(steps: Sequence[TrainingStep]) -> Figures:
    return {
        "max_staleness": _largest(steps, "staleness_max"),
        "logprob_gap_p99_at_lag_0": _largest(steps, "logprob_gap_p99_at_lag_0"),
        "effective_sample_size": _mean(steps, "effective_sample_size"),
        "effective_sample_size_min": min(_values(steps, "effective_sample_size"), default=None),
        "entropy_first": _mean(steps[:10], "entropy"),
        "entropy_last": _mean(steps[-10:], "entropy"),
        "rows_rejected": sum(len(step.rejected) for step in steps),
    }


def _weight_syncs(readings: RunReadings) -> Figures:
    windows = training_windows(readings.events)
    syncs = [event for event in readings.of_kind("sync") if is_within(event.at, windows)]
    gaps = [float(event.data["gap_seconds"]) for event in syncs if "gap_seconds" in event.data]
    stats = readings.of_kind("stats")
    return {
        "weight_syncs": len(syncs),
        "longest_inference_gap_seconds": max(gaps, default=None),
        "reply_seconds_p50": usage.largest(_training_stats(stats, windows), "runner", "rollout/reply_seconds_p50") or None,
        "reply_seconds_p95": usage.largest(_training_stats(stats, windows), "runner", "rollout/reply_seconds_p95") or None,
        "requests_failed": int(usage.total(stats, "router", "rollout/requests_failed")),
    }


def _training_stats(stats: Sequence[Event], windows: usage.Windows) -> list[Event]:
    """The last stats event of each process within training: its percentiles cover the most recent replies."""
    return list({event.subject: event for event in stats if is_within(event.at, windows)}.values())


def _usage(readings: RunReadings) -> Figures:
    stats = readings.of_kind("stats")
    windows = training_windows(readings.events)
    shares = {
        "env_utilisation": usage.busy_share(stats, "runner", windows),
        "engine_utilisation": usage.busy_share(stats, "engine", windows),
        "trainer_utilisation": usage.busy_share(stats, "trainer", windows),
    }
    return {**{name: _rounded(share) for name, share in shares.items()}, "peak_rss_mib": round(usage.peak_rss_mib(stats), 1)}


def _values(steps: Sequence[TrainingStep], name: str) -> list[float]:
    return [step.metrics[name] for step in steps if name in step.metrics]


def _largest(steps: Sequence[TrainingStep], name: str) -> float | None:
    return max(_values(steps, name), default=None)


def _mean(steps: Sequence[TrainingStep], name: str) -> float | None:
    values = _values(steps, name)
    return statistics.fmean(values) if values else None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def learning_curve(
    episodes: Sequence[EpisodeSummary], *, start: float, bins: int, end: float
) -> Mapping[str, list[tuple[float, float, int]]]:
    """Family -> (minutes since `start` at the middle of a bin, success rate, episodes) of each bin with an episode.

    The bins divide [start, end] evenly; only scored training episodes count.
    """
    width = max(end - start, 1e-9) / bins
    tallies: dict[str, dict[int, list[int]]] = {}
    for episode in episodes:
        if episode.purpose != "train" or episode.success is None or not start <= episode.finished_at <= end:
            continue
        place = min(int((episode.finished_at - start) / width), bins - 1)
        tally = tallies.setdefault(episode.family, {}).setdefault(place, [0, 0])
        tally[0] += episode.success
        tally[1] += 1
    return {
        family: [((place + 0.5) * width / 60, won / tried, tried) for place, (won, tried) in sorted(places.items())]
        for family, places in sorted(tallies.items())
    }

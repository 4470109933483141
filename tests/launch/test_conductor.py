"""The stages of a run: in order, once each, from the ledger alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from dartrl.config import EvaluationConfig, RunConfig, TrainingConfig
from dartrl.errors import RoleFailed
from dartrl.launch.conductor import START_SECONDS, Conductor, finished_stages, loaded_versions, planned_evaluations
from dartrl.records import Evaluation, EvaluationResult, Event, Phase, WeightsVersion
from dartrl.simulate.virtual_time import VirtualClock, run_virtual

WEIGHTS = WeightsVersion(1, "weights/v000001", "sum", 0, None)


class ScriptedLedger:
    """The part of a ledger that the conductor uses; every evaluation ends after some looks, draining too."""

    def __init__(self, *, weights: WeightsVersion | None = WEIGHTS, looks: int = 3) -> None:
        self.weights = weights
        self.phases: list[str] = []
        self.log: list[Event] = []
        self.opened: list[str] = []
        self.ready = [Event("trainer_ready", "trainer-0", {"step": 0}, at=float("inf"))]
        self._looks = looks
        self._left: dict[str, int] = {}

    def current_weights(self) -> WeightsVersion | None:
        return self.weights

    def set_phase(self, phase: Phase) -> None:
        self.phases.append(phase.value)

    def open_evaluation(self, evaluation: Evaluation) -> None:
        self.opened.append(evaluation.id)
        self._left.setdefault(evaluation.id, self._looks)

    def evaluation_result(self, evaluation_id: str) -> EvaluationResult:
        self._left[evaluation_id] = max(0, self._left[evaluation_id] - 1)
        return EvaluationResult(Evaluation(evaluation_id, 1.0, 2), 2 if self._left[evaluation_id] == 0 else 1, 2, {})

    def counts(self) -> Mapping[str, int]:
        return {"leases": 0, "members_claimed": 0, "members_applied": 0}

    def record_event(self, event: Event) -> None:
        self.log.append(event)

    def events(self, kinds: Sequence[str] = (), after: float = 0.0) -> Sequence[Event]:
        loaded = [Event("join", "engine-0", {"worker": "engine-0", "version": 1}), *self.ready]
        return [event for event in [*loaded, *self.log] if event.kind in kinds]


def config(**evaluation: bool) -> RunConfig:
    return RunConfig(training=TrainingConfig(max_minutes=1.0), evaluation=EvaluationConfig(**evaluation))


def conduct(ledger: ScriptedLedger, settings: RunConfig, *, stop_after: float | None = None) -> bool:
    clock = VirtualClock()

    async def main() -> bool:
        stop = asyncio.Event()
        running = asyncio.ensure_future(Conductor(ledger, settings, clock, stop=stop).run())  # type: ignore[arg-type]
        if stop_after is not None:
            await clock.sleep(stop_after)
            stop.set()
        return await running

    return run_virtual(main())


def test_a_run_goes_through_its_stages_in_order():
    ledger = ScriptedLedger()
    assert conduct(ledger, config())
    assert ledger.phases == ["evaluating", "training", "draining", "evaluating", "finished"]
    assert ledger.opened == ["before-sampled", "before-greedy", "after-sampled", "after-greedy"]
    assert finished_stages(ledger.log) == {"evaluation_before", "training", "draining", "evaluation_after"}


def test_a_stopped_run_goes_on_where_it_was():
    ledger = ScriptedLedger()
    assert not conduct(ledger, config(), stop_after=30.0)
    assert finished_stages(ledger.log) == {"evaluation_before"}
    ledger.phases.clear()
    assert conduct(ledger, config())
    assert ledger.phases[0] == "training"
    clock = [event.data["seconds"] for event in ledger.log if event.data.get("state") == "clock"]
    assert clock == sorted(clock)
    assert clock[-1] == pytest.approx(60.0, abs=1.0)


def test_training_time_of_zero_only_evaluates():
    ledger = ScriptedLedger()
    settings = config(after=False).model_copy(update={"training": TrainingConfig(max_minutes=0)})
    assert conduct(ledger, settings)
    assert "training" not in ledger.phases
    assert ledger.opened == ["before-sampled", "before-greedy"]


def test_a_trainer_that_publishes_nothing_is_reported_in_time():
    with pytest.raises(RoleFailed, match=f"within {START_SECONDS:.0f} s"):
        conduct(ScriptedLedger(weights=None), config())


def test_training_waits_for_a_trainer_of_this_session():
    ledger = ScriptedLedger()
    ledger.ready = [Event("trainer_ready", "trainer-0", {"step": 0}, at=0.0)]
    with pytest.raises(RoleFailed, match="no trainer was ready"):
        conduct(ledger, config())
    assert "training" not in ledger.phases


def test_greedy_evaluation_can_be_left_out():
    assert [one.id for one in planned_evaluations(config(greedy=False), "after")] == ["after-sampled"]


def test_a_worker_counts_with_its_newest_version():
    events = [Event("join", "w", {"worker": "w", "version": 1}), Event("sync", "w", {"worker": "w", "version": 4})]
    assert loaded_versions(events) == {"w": 4}

"""What rollout-wise sampling is worth: the same simulated desktop cluster with three units of scheduling, in virtual time.

    python benchmarks/simulated_cluster.py [--slots N] [--minutes M] [--seed S] [--json FILE]

Environments, engines and the trainer are simulated (latencies in `dartrl.simulate.plan`); runners, episode loop, fleet, weight
sync, data manager and curation are the real ones. Nothing crashes, so that the three runs differ in scheduling alone. Equal
arguments give equal figures on every machine.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from dartrl.simulate.plan import CALM, SimulationPlan
from dartrl.simulate.system import SimulationResult, simulate

MODES = ("rollout", "task", "batch")


def make_plan(slots: int, minutes: float, seed: int) -> SimulationPlan:
    """A calm cluster; one batch of groups fills its slots once."""
    return SimulationPlan(
        seed=seed,
        seconds=60.0 * minutes,
        runners=1,
        slots=slots,
        workers=2,
        batch=max(4, slots // 3),
        groups_per_step=max(2, slots // 8),
        worker_life_seconds=CALM,
        runner_life_seconds=CALM,
        trainer_life_seconds=CALM,
        manager_life_seconds=CALM,
    )


def figures_of(result: SimulationResult, plan: SimulationPlan) -> dict[str, Any]:
    """The row of one run."""
    readings = result.readings
    gaps = [float(event.data["gap_seconds"]) for event in result.events if event.kind == "sync"]
    return {
        "slots_in_episodes": readings["runner/busy_seconds"] / plan.seconds,
        "trainer_busy": readings.get("trainer/busy_seconds", 0.0) / plan.seconds,
        "actions_per_minute": 60.0 * readings.get("runner/envs/actions", 0.0) / plan.seconds,
        "training_steps": len(result.steps),
        "max_staleness": max((step.metrics["staleness_max"] for step in result.steps), default=0.0),
        "longest_gap_seconds": max(gaps, default=0.0),
        "audit_ok": result.audit.ok,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    plan = make_plan(options.slots, options.minutes, options.seed)
    table = {mode: figures_of(simulate(plan, curation={"sampling": mode}), plan) for mode in MODES}
    names = list(table[MODES[0]])
    print(f"{'':22}" + "".join(f"{mode:>12}" for mode in MODES))
    for name in names:
        values = [table[mode][name] for mode in MODES]
        print(f"{name:22}" + "".join(f"{value:>12.3f}" if isinstance(value, float) else f"{value!s:>12}" for value in values))
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""A run with its fixed set of tasks: opened, resumed, moved from phase to phase, ended."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from dartrl.data.groups import insert_groups, reject_group
from dartrl.data.recording import abort_trajectory
from dartrl.data.scope import RunScope
from dartrl.data.states import GROUP, RUN, SLOT, move, move_one
from dartrl.data.store import Row, Transaction
from dartrl.errors import ConfigError
from dartrl.records import Evaluation, EvaluationResult, Phase, Run
from dartrl.types import SCORED_ENDS, Task


def open_run(scope: RunScope, transaction: Transaction, run: Run, tasks: Sequence[Task]) -> Run:
    """Create the run with its tasks, or return the one that exists."""
    if run.id != scope.run_id:
        raise ConfigError(f"this ledger is bound to run {scope.run_id!r}; open another one for {run.id!r}")
    checksum = _tasks_checksum(tasks)
    row = transaction.first("run", {"run_id": run.id}, lock="wait")
    if row is None:
        _check_tasks(tasks)
        _insert_run(transaction, run, tasks, checksum)
        scope.log(transaction, "phase", run.id, {"to": str(run.phase)})
        return run
    if row["tasks_checksum"] != checksum:
        raise ConfigError(f"run {run.id!r} exists with other tasks; resume it with its own recipe, or choose another name")
    return decode_run(row)


def read_run(scope: RunScope, transaction: Transaction) -> Run:
    """Present state of the run."""
    return decode_run(scope.run_row(transaction))


def decode_run(row: Row) -> Run:
    """The run of a row."""
    return Run(row["run_id"], row["seed"], row["config"], row["versions"], Phase(row["phase"]))


def set_phase(scope: RunScope, transaction: Transaction, phase: Phase) -> None:
    """Move the run to a phase; the last one settles what can no longer be trained on."""
    row = scope.run_row(transaction, "wait")
    if row["phase"] == phase:
        return
    move_one(transaction, RUN, {"run_id": scope.run_id}, row["phase"], str(phase))
    scope.log(transaction, "phase", scope.run_id, {"from": row["phase"], "to": str(phase)})
    if phase == Phase.FINISHED:
        _settle(scope, transaction)


def open_evaluation(scope: RunScope, transaction: Transaction, evaluation: Evaluation) -> None:
    """Queue one group of one slot for each held-out instance; nothing if the evaluation exists."""
    scope.run_row(transaction, "wait")
    key = {"run_id": scope.run_id, "evaluation_id": evaluation.id}
    if transaction.first("evaluation", key):
        return
    count = evaluation.episodes_per_task
    groups: list[Row] = []
    for family, task_ids in scope.families(transaction, "evaluation").items():
        if len(task_ids) < count:
            raise ConfigError(
                f"evaluation {evaluation.id!r} asks for {count} episodes of {family}, which has {len(task_ids)} held-out "
                "instances; raise tasks.evaluation_instances"
            )
        groups += [
            {
                "group_id": f"{scope.run_id}.{evaluation.id}.{family}.{number:05d}",
                "task_id": task_id,
                "family": family,
                "purpose": "evaluation",
                "evaluation_id": evaluation.id,
                "num_slots": 1,
            }
            for number, task_id in enumerate(task_ids[:count])
        ]
    if not groups:
        raise ConfigError(f"evaluation {evaluation.id!r} has no task; the run was opened without evaluation instances")
    row = {**key, "temperature": evaluation.temperature, "episodes_per_task": count, "total": len(groups)}
    transaction.insert("evaluation", [{**row, "opened_at": transaction.now}])
    weights = scope.weights_row(transaction)
    insert_groups(scope, transaction, groups, opened_version=weights["version"] if weights else 0)
    scope.log(transaction, "evaluation", evaluation.id, {"episodes": len(groups), "temperature": evaluation.temperature})


def evaluation_result(scope: RunScope, transaction: Transaction, evaluation_id: str) -> EvaluationResult:
    """Scores so far. Raises ConfigError for an unknown evaluation."""
    key = {"run_id": scope.run_id, "evaluation_id": evaluation_id}
    row = transaction.first("evaluation", key)
    if row is None:
        raise ConfigError(f"run {scope.run_id!r} has no evaluation {evaluation_id!r}; open it first")
    slots = transaction.tally("group_slot", key, ("state",))
    ends = transaction.tally("rollout_run", key, ("family", "state", "success"))
    successes: Counter[str] = Counter()
    scored: Counter[str] = Counter()
    for (family, state, success), count in ends.items():
        if state in SCORED_ENDS:
            scored[family] += count
            successes[family] += count * int(bool(success))
    return EvaluationResult(
        evaluation=Evaluation(evaluation_id, row["temperature"], row["episodes_per_task"]),
        finished=slots.get(("filled",), 0) + slots.get(("void",), 0),
        total=row["total"],
        successes={family: (successes[family], scored[family]) for family in sorted(scored)},
    )


def _insert_run(transaction: Transaction, run: Run, tasks: Sequence[Task], checksum: str) -> None:
    row = {
        "run_id": run.id,
        "seed": run.seed,
        "config": run.config,
        "versions": run.versions,
        "phase": str(run.phase),
        "tasks_checksum": checksum,
        "created_at": transaction.now,
    }
    transaction.insert("run", [row])
    transaction.insert("task", [_task_row(run.id, task) for task in tasks])
    families = sorted({task.family for task in tasks if task.split == "train"})
    transaction.insert("family", [{"run_id": run.id, "family": family} for family in families])


def _task_row(run_id: str, task: Task) -> Row:
    return {
        "run_id": run_id,
        "task_id": task.id,
        "family": task.family,
        "seed": task.seed,
        "split": task.split,
        "instruction": task.instruction,
        "spec": task.spec,
    }


def _check_tasks(tasks: Sequence[Task]) -> None:
    twice = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise ConfigError(f"task {twice[0]!r} is there twice; task ids must be unique")
    train = {(task.family, task.seed) for task in tasks if task.split == "train"}
    shared = [task for task in tasks if task.split == "evaluation" and (task.family, task.seed) in train]
    if shared:
        raise ConfigError(f"seed {shared[0].seed} of {shared[0].family} is in both splits; they must not share an instance")
    if not train:
        raise ConfigError("there is no training task; a run needs at least one instance of split 'train'")


def _tasks_checksum(tasks: Sequence[Task]) -> str:
    text = json.dumps([asdict(task) for task in sorted(tasks, key=lambda task: task.id)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _settle(scope: RunScope, transaction: Transaction) -> None:
    """Running attempts end, open slots are void, untrained groups are rejected: all for the reason `finished`."""
    running = transaction.select("rollout_run", {"run_id": scope.run_id, "state": "running"})
    for row in running:
        abort_trajectory(scope, transaction, row["trajectory_id"], "finished", "the run ended")
    for purpose in ("train", "evaluation"):
        for state in ("running", "open"):
            move(transaction, SLOT, {"run_id": scope.run_id, "purpose": purpose}, state, "void")
    for state in ("open", "ready"):
        for group in transaction.select("rollout_group", {"run_id": scope.run_id, "purpose": "train", "state": state}):
            reject_group(transaction, group["group_id"], state, "finished")
    evaluations = {"run_id": scope.run_id, "purpose": "evaluation"}
    move(transaction, GROUP, evaluations, "open", "finished", {"reason": "finished"})

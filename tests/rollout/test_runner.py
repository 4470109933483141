"""The runner against the real data manager in memory, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest

from dartrl.config import RunConfig
from dartrl.data.blobs import MemoryBlobStore
from dartrl.data.manager import DataManager, open_ledger, run_manager
from dartrl.errors import EnvironmentFault
from dartrl.metrics import Meter
from dartrl.records import Evaluation, Lease, Phase, Run, WeightsVersion
from dartrl.rollout.runner import STOP_SECONDS, Runner
from dartrl.simulate.virtual_time import VirtualClock, run_virtual
from dartrl.testing.factories import make_task
from dartrl.testing.fakes import FakeDialect, FakePolicyClient, FakePool, Fault, crash
from dartrl.types import Task

SLOTS = 4
FAMILIES = ("a", "b")


def evaluation_tasks(count: int) -> list[Task]:
    tasks = []
    for family in FAMILIES:
        for seed in range(count):
            task = make_task(family, seed)
            tasks.append(Task(task.id, family, seed, split="evaluation"))
        tasks.append(Task(f"{family}/train", family, 10_000))
    return tasks


class Setting:
    """Ledger with one evaluation of 2 families x `episodes`, a pool, a policy, and a runner."""

    def __init__(
        self, *, episodes: int = 10, faults: Sequence[Fault] = (), seconds: float = 1.0, policy_seconds: float = 2.0
    ) -> None:
        self.clock = VirtualClock()
        self.config = RunConfig.model_validate({"environment": {"slots": SLOTS}, "tasks": {"families": FAMILIES}})
        self.blobs = MemoryBlobStore()
        self.ledger = open_ledger("memory:", blobs=self.blobs, config=self.config, run_id="r", now=self.clock.now)
        self.pool = FakePool(SLOTS, clock=self.clock, seconds=seconds, faults=faults)
        self.client = FakePolicyClient(clock=self.clock, seconds=policy_seconds)
        self.meter = Meter(self.clock.now)
        self.stop = asyncio.Event()
        self.asked: list[str] = []
        self.renewals_refused = False
        self._open(episodes)

    def _open(self, episodes: int) -> None:
        self.ledger.open_run(Run("r", 0, {}), evaluation_tasks(episodes))
        lease = self.ledger.acquire_trainer("trainer")
        assert lease is not None
        version = self.ledger.next_weights_version(lease)
        self.ledger.publish_weights(lease, WeightsVersion(version, "w", "c", 0, None))
        self.ledger.set_phase(Phase.EVALUATING)
        self.ledger.open_evaluation(Evaluation("e", 1.0, episodes))

    def runner(self) -> Runner:
        return Runner(
            ledger=self._spy(),
            pool=self.pool,
            client=self.client,
            dialect=FakeDialect(),
            blobs=self.blobs,
            config=self.config,
            clock=self.clock,
            meter=self.meter,
            name="runner-0",
        )

    def _spy(self) -> DataManager:
        setting = self

        class Spy(DataManager):
            def next_assignment(self, holder: str):
                setting.asked.append(holder)
                return super().next_assignment(holder)

            def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
                return [] if setting.renewals_refused else super().renew(leases)

        return Spy(self.ledger.store, blobs=self.blobs, config=self.config, run_id="r")

    def ends(self) -> Counter[str]:
        rows = self.ledger.counts()
        return Counter(
            {
                name.removeprefix("trajectories_"): count
                for name, count in rows.items()
                if name.startswith("trajectories_") and count
            }
        )

    async def until_finished(self) -> None:
        while True:
            result = self.ledger.evaluation_result("e")
            if result.finished == result.total:
                return
            await self.clock.sleep(1.0)


def play(setting_options: dict, script: Callable[[Setting], Awaitable[None]]) -> Setting:
    async def main() -> Setting:
        setting = Setting(**setting_options)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(setting.runner().run(setting.stop))
            manager_stop = asyncio.Event()
            group.create_task(run_manager(setting.ledger, clock=setting.clock, holder="m", stop=manager_stop))
            await script(setting)
            setting.stop.set()
            started = setting.clock.now()
            await running
            assert setting.clock.now() - started <= STOP_SECONDS + 1.0
            manager_stop.set()
        assert setting.pool.violations == []
        assert setting.pool.is_closed and setting.client.is_closed
        return setting

    return run_virtual(main())


def test_all_episodes_are_played_and_recorded():
    setting = play({}, Setting.until_finished)
    result = setting.ledger.evaluation_result("e")
    assert sum(scored for _, scored in result.successes.values()) == 20
    assert setting.ends() == {"terminated": 20}
    assert len(setting.ledger.trajectories(purpose="e", limit=100)) == 20
    readings = setting.meter.readings()
    assert readings["envs/episodes"] == 20 and readings["envs/actions"] == 40
    # reset 1 s, twice (reply 2 s, click 1 s), evaluate 1 s
    assert readings["envs/episode_seconds"] == pytest.approx(20 * 8.0)
    assert readings["envs/busy_seconds"] == pytest.approx(20 * 4.0)
    assert readings["rollout/policy_wait_seconds"] == pytest.approx(20 * 4.0)
    assert readings["busy_seconds"] == pytest.approx(20 * 8.0 / SLOTS)


def test_a_broken_environment_is_recorded_replaced_and_its_slot_tried_again():
    faults = [
        crash(3),
        crash(9),
        Fault("reset", 5, EnvironmentFault("no display", "display")),
        Fault("acquire", 7, EnvironmentFault("no port")),
        Fault("acquire", 9, FileNotFoundError("a plug-in forgot its file")),
    ]
    setting = play({"faults": faults}, Setting.until_finished)
    assert setting.ends() == {"terminated": 20, "env_error": 5}
    assert len(setting.pool.discarded) == 5
    assert sum(scored for _, scored in setting.ledger.evaluation_result("e").successes.values()) == 20


def test_stopping_records_running_attempts_as_aborted_at_once():
    async def script(setting: Setting) -> None:
        await setting.clock.sleep(11.0)

    setting = play({}, script)
    assert setting.ends() == {"terminated": SLOTS, "aborted": SLOTS}
    assert setting.ledger.counts()["leases"] == 0


def test_stopping_does_not_wait_for_a_policy_that_hangs():
    async def script(setting: Setting) -> None:
        await setting.clock.sleep(20.0)

    setting = play({"policy_seconds": 1e6}, script)
    assert setting.ends() == {"aborted": SLOTS}


def test_an_attempt_whose_lease_is_lost_is_dropped_and_its_slot_goes_on():
    async def script(setting: Setting) -> None:
        await setting.clock.sleep(1.0)
        setting.renewals_refused = True
        await setting.clock.sleep(setting.config.data.lease_seconds / 3 + 1.0)
        setting.renewals_refused = False
        await setting.until_finished()

    setting = play({"episodes": 6, "policy_seconds": 8.0}, script)
    assert setting.meter.readings()["envs/episodes_dropped"] == SLOTS
    ends = setting.ends()
    assert ends["terminated"] == 12 and ends["aborted"] == SLOTS, "the manager aborted them when their leases expired"


def test_long_episodes_keep_their_leases():
    setting = play({"episodes": 2, "policy_seconds": 50.0}, Setting.until_finished)
    assert setting.ends() == {"terminated": 4}


def test_only_one_slot_polls_while_there_is_nothing_to_do():
    async def script(setting: Setting) -> None:
        await setting.until_finished()
        setting.asked.clear()
        await setting.clock.sleep(100.0)

    setting = play({}, script)
    assert len(set(setting.asked)) == 1
    assert len(setting.asked) <= 100 / 0.2 + 1


def test_an_environment_that_ignores_cancelling_cannot_hold_up_the_end():
    async def script(setting: Setting) -> None:
        async def stubborn(slot: int, task: Task):
            while True:
                try:
                    await setting.clock.sleep(1e6)
                except asyncio.CancelledError:
                    await setting.clock.sleep(3600.0)
                    raise

        setting.pool.acquire = stubborn  # type: ignore[method-assign]
        await setting.clock.sleep(20.0)

    play({"episodes": 10}, script)

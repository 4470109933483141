"""Weight sync on fake workers in virtual time: no request is dropped, one worker at a time, failures roll back."""

import asyncio
from collections.abc import Awaitable, Callable

from dartrl.errors import PolicyFault, PolicyUnavailable, WeightsRejected
from dartrl.metrics import Meter
from dartrl.records import Event, WeightsVersion
from dartrl.rollout.fleet import Fleet, WorkerState, WorkerStatus
from dartrl.rollout.weight_sync import FIRST_RETRY_SECONDS, WeightSync
from dartrl.simulate.virtual_time import VirtualClock, run_virtual

REPLY_SECONDS = 0.2
LOAD_SECONDS = 0.1


class WeightsLedger:
    """The two methods of the ledger that weight sync uses."""

    def __init__(self) -> None:
        self.weights: WeightsVersion | None = None
        self.events: list[Event] = []

    def publish(self, version: int) -> None:
        self.weights = WeightsVersion(version, f"weights/{version}", "sum", version, None)

    def current_weights(self) -> WeightsVersion | None:
        return self.weights

    def record_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class Port:
    """Worker that checks that it is never loaded under a request nor asked before it has weights."""

    def __init__(self, name: str, clock: VirtualClock) -> None:
        self.name = name
        self.life = 1
        self.is_alive = True
        self.version: int | None = None
        self.seconds = REPLY_SECONDS
        self.load_errors: dict[int, Exception] = {}
        self.in_flight = 0
        self.loads_while_serving = False
        self.loads: list[tuple[float, int]] = []
        self._clock = clock

    async def ask(self) -> int:
        self._require_life()
        assert self.version is not None, "asked before it had weights"
        version = self.version
        self.in_flight += 1
        try:
            await self._clock.sleep(self.seconds)
        finally:
            self.in_flight -= 1
        self._require_life()
        assert self.version == version or self.loads_while_serving, "weights changed under a request"
        return version

    async def status(self) -> WorkerStatus:
        self._require_life()
        return WorkerStatus(f"life-{self.life}", self.version, self.loads_while_serving)

    async def load(self, weights: WeightsVersion) -> None:
        self._require_life()
        assert self.in_flight == 0 or self.loads_while_serving, "loaded under a request"
        self.loads.append((self._clock.now(), weights.version))
        await self._clock.sleep(LOAD_SECONDS)
        if weights.version in self.load_errors:
            raise self.load_errors[weights.version]
        self.version = weights.version

    def die(self) -> None:
        self.is_alive = False
        self.version = None

    def restart(self) -> None:
        self.is_alive = True
        self.life += 1

    def _require_life(self) -> None:
        if not self.is_alive:
            raise PolicyUnavailable(f"{self.name} is dead")


class Setting:
    def __init__(self, *names: str) -> None:
        self.clock = VirtualClock()
        self.ledger = WeightsLedger()
        self.meter = Meter(self.clock.now)
        self.fleet: Fleet[Port] = Fleet(clock=self.clock, meter=self.meter, capacity=4, max_waiting=1000)
        self.ports = [Port(name, self.clock) for name in names]
        self.workers = [self.fleet.add(port) for port in self.ports]
        self.versions: list[int] = []
        self.failures: list[Exception] = []
        self.serving: list[int] = []
        self.stop = asyncio.Event()

    async def client(self) -> None:
        while not self.stop.is_set():
            try:
                self.versions.append(await self.fleet.submit(lambda port: port.ask(), timeout_seconds=60.0))
            except PolicyFault as error:
                self.failures.append(error)
                await self.clock.sleep(1.0)

    async def count_serving(self) -> None:
        while not self.stop.is_set():
            self.serving.append(sum(worker.state is WorkerState.SERVING for worker in self.workers))
            await self.clock.sleep(0.01)


def run_setting(names: str, script: Callable[[Setting], Awaitable[None]], *, clients: int = 6) -> Setting:
    """Sync, clients and a script of what happens, in virtual time."""

    async def main() -> Setting:
        setting = Setting(*names.split())
        sync = WeightSync(
            setting.fleet,
            ledger=setting.ledger,  # type: ignore[arg-type]
            clock=setting.clock,
            meter=setting.meter,
            poll_seconds=0.5,
            drain_timeout_seconds=5.0,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(sync.run(setting.stop))
            for _ in range(clients):
                group.create_task(setting.client())
            group.create_task(setting.count_serving())
            await script(setting)
            setting.stop.set()
        return setting

    return run_virtual(main())


async def publish_every_three_seconds(setting: Setting) -> None:
    setting.ledger.publish(1)
    await setting.clock.sleep(3.0)
    setting.serving.clear()
    for version in range(2, 12):
        setting.ledger.publish(version)
        await setting.clock.sleep(3.0)


def test_a_fleet_of_one_swaps_without_dropping_a_request_and_within_the_gap():
    setting = run_setting("a", publish_every_three_seconds)
    syncs = setting.ledger.of("sync")
    assert [event.data["version"] for event in syncs] == list(range(2, 12))
    assert setting.failures == []
    assert setting.versions == sorted(setting.versions), "replies after a swap come from the new weights"
    for event in syncs:
        assert event.data["drain_seconds"] <= REPLY_SECONDS + 1e-6
        assert event.data["load_seconds"] <= LOAD_SECONDS + 1e-6
        assert event.data["gap_seconds"] <= LOAD_SECONDS + REPLY_SECONDS + 1e-6, "drain is no gap: replies still come"
        assert event.data["gap_seconds"] >= LOAD_SECONDS


def test_a_larger_fleet_swaps_one_worker_at_a_time_and_never_falls_silent():
    setting = run_setting("a b c", publish_every_three_seconds, clients=12)
    assert len(setting.ledger.of("sync")) == 30
    assert setting.failures == []
    assert min(setting.serving) == 2
    assert max(event.data["gap_seconds"] for event in setting.ledger.of("sync")) <= REPLY_SECONDS + 1e-6


def test_a_worker_that_loads_while_serving_is_not_drained_and_leaves_no_gap():
    async def script(setting: Setting) -> None:
        setting.ports[0].loads_while_serving = True
        await publish_every_three_seconds(setting)

    setting = run_setting("a", script)
    syncs = setting.ledger.of("sync")
    assert [event.data["version"] for event in syncs] == list(range(2, 12))
    assert setting.failures == [] and set(setting.serving) == {1}
    assert all(event.data["drain_seconds"] == 0.0 for event in syncs)
    assert max(event.data["gap_seconds"] for event in syncs) <= REPLY_SECONDS + 1e-6


def test_an_idle_fleet_swaps_with_no_gap():
    setting = run_setting("a", publish_every_three_seconds, clients=0)
    assert [event.data["gap_seconds"] for event in setting.ledger.of("sync")] == [0.0] * 10


def test_nothing_serves_before_weights_are_published():
    async def script(setting: Setting) -> None:
        await setting.clock.sleep(5.0)
        assert setting.versions == [] and setting.fleet.num_waiting == 6
        setting.ledger.publish(1)
        await setting.clock.sleep(2.0)

    setting = run_setting("a", script)
    assert set(setting.versions) == {1} and setting.failures == []


def test_a_restarted_worker_gets_the_fleets_version_before_it_serves():
    async def script(setting: Setting) -> None:
        setting.ledger.publish(7)
        await setting.clock.sleep(2.0)
        setting.ports[0].die()
        await setting.clock.sleep(2.0)
        assert setting.workers[0].state is WorkerState.LOST
        setting.ports[0].restart()
        await setting.clock.sleep(2.0)
        assert setting.workers[0].state is WorkerState.SERVING

    setting = run_setting("a b", script)
    assert [version for _, version in setting.ports[0].loads] == [7, 7]
    assert set(setting.versions) == {7} and setting.failures == []


def test_a_worker_that_restarts_unseen_is_taken_out_and_loaded_again():
    async def script(setting: Setting) -> None:
        setting.ledger.publish(7)
        await setting.clock.sleep(2.0)
        setting.ports[0].restart()
        await setting.clock.sleep(2.0)

    setting = run_setting("a", script, clients=0)
    assert setting.workers[0].instance == "life-2"
    assert len(setting.ledger.of("join")) == 2


def test_refused_weights_leave_the_worker_on_its_old_ones_with_an_alarm():
    async def script(setting: Setting) -> None:
        setting.ports[0].load_errors[2] = WeightsRejected("probe differs by 0.3 nats")
        setting.ledger.publish(1)
        await setting.clock.sleep(2.0)
        setting.ledger.publish(2)
        await setting.clock.sleep(FIRST_RETRY_SECONDS - 1.0)
        assert setting.workers[0].version == 1
        assert setting.workers[1].version == 2
        del setting.ports[0].load_errors[2]
        await setting.clock.sleep(2.0)
        assert setting.workers[0].version == 2, "it is asked again after a pause"

    setting = run_setting("a b", script)
    (alarm,) = setting.ledger.of("alarm")
    assert alarm.subject == "a"
    assert alarm.data["reason"] == "weights_rejected" and alarm.data["kept"] == 1 and "0.3 nats" in alarm.data["message"]
    assert setting.failures == []


def test_a_newer_version_is_tried_at_once_after_a_refusal():
    async def script(setting: Setting) -> None:
        setting.ports[0].load_errors[2] = WeightsRejected("truncated file")
        setting.ledger.publish(1)
        await setting.clock.sleep(2.0)
        setting.ledger.publish(2)
        await setting.clock.sleep(1.5)
        setting.ledger.publish(3)
        await setting.clock.sleep(1.5)
        assert setting.workers[0].version == 3

    assert run_setting("a", script).failures == []


def test_a_restarted_worker_that_refuses_the_newest_weights_returns_with_proven_ones():
    async def script(setting: Setting) -> None:
        for port in setting.ports:
            port.load_errors[2] = WeightsRejected("truncated file")
        setting.ledger.publish(1)
        await setting.clock.sleep(2.0)
        setting.ledger.publish(2)
        await setting.clock.sleep(2.0)
        setting.ports[0].die()
        await setting.clock.sleep(1.0)
        setting.ports[0].restart()
        await setting.clock.sleep(2.0)
        assert setting.workers[0].state is WorkerState.SERVING and setting.workers[0].version == 1

    setting = run_setting("a b", script)
    assert setting.failures == [] and set(setting.versions) == {1}


def test_a_worker_that_dies_while_it_loads_comes_back_through_joining():
    async def script(setting: Setting) -> None:
        setting.ledger.publish(1)
        await setting.clock.sleep(2.0)
        setting.ports[0].load_errors[2] = PolicyUnavailable("connection lost")
        setting.ledger.publish(2)
        while not any(version == 2 for _, version in setting.ports[0].loads):
            await setting.clock.sleep(0.02)
        setting.ports[0].die()
        await setting.clock.sleep(2.0)
        del setting.ports[0].load_errors[2]
        setting.ports[0].restart()
        await setting.clock.sleep(FIRST_RETRY_SECONDS + 2.0)
        assert setting.workers[0].version == 2

    setting = run_setting("a", script)
    assert setting.failures == []
    assert [event.data["reason"] for event in setting.ledger.of("alarm")] == ["sync_failed"]


def test_a_request_that_never_ends_postpones_the_swap_and_raises_an_alarm():
    async def script(setting: Setting) -> None:
        setting.ledger.publish(1)
        await setting.clock.sleep(2.0)
        setting.ports[0].seconds = 50.0
        await setting.clock.sleep(0.5)
        setting.ledger.publish(2)
        await setting.clock.sleep(7.0)
        assert setting.workers[0].version == 1 and setting.workers[0].state is WorkerState.SERVING

    setting = run_setting("a", script, clients=1)
    assert "rollout.drain_timeout_seconds" in setting.ledger.of("alarm")[0].data["message"]
    assert setting.failures == []


def test_a_rolled_back_version_is_replaced_by_an_older_number():
    async def script(setting: Setting) -> None:
        for version in (5, 9, 5):
            setting.ledger.publish(version)
            await setting.clock.sleep(2.0)
            assert setting.workers[0].version == version

    run_setting("a", script)

"""Queue, choice of worker and retries, without sockets."""

import asyncio

import pytest

from dartrl.errors import PolicyFault, PolicyOverloaded, PolicyUnavailable
from dartrl.metrics import Meter
from dartrl.rollout.fleet import Fleet, WorkerState, WorkerStatus
from dartrl.testing.clock import ManualClock, settle


class Port:
    """Worker that answers when told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, asyncio.Future[str]]] = []

    async def ask(self, question: str) -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.calls.append((question, answer))
        return await answer

    async def status(self) -> WorkerStatus:
        return WorkerStatus("1", 1)

    async def load(self, weights) -> None:
        raise AssertionError("nothing is loaded here")

    @property
    def questions(self) -> list[str]:
        return [question for question, _ in self.calls]

    def answer(self, index: int, text: str = "yes") -> None:
        self.calls[index][1].set_result(f"{self.name}: {text}")

    def fail(self, index: int, error: Exception) -> None:
        self.calls[index][1].set_exception(error)


class Setting:
    def __init__(self, *names: str, capacity: int = 2, max_waiting: int = 100) -> None:
        self.clock = ManualClock()
        self.meter = Meter(self.clock.now)
        self.fleet: Fleet[Port] = Fleet(clock=self.clock, meter=self.meter, capacity=capacity, max_waiting=max_waiting)
        self.ports = [Port(name) for name in names]
        self.workers = [self.fleet.add(port) for port in self.ports]
        for worker in self.workers:
            self.fleet.serve(worker, 1)

    def ask(self, question: str, affinity: str = "", timeout_seconds: float = 60.0) -> asyncio.Task[str]:
        send = lambda port: port.ask(question)  # noqa: E731
        return asyncio.create_task(self.fleet.submit(send, affinity=affinity, timeout_seconds=timeout_seconds))


async def test_requests_go_to_the_least_loaded_worker():
    setting = Setting("a", "b", capacity=10)
    tasks = [setting.ask(str(number)) for number in range(6)]
    await settle()
    assert [len(port.calls) for port in setting.ports] == [3, 3]
    for port in setting.ports:
        for index in range(3):
            port.answer(index)
    assert sorted(await asyncio.gather(*tasks)) == ["a: yes"] * 3 + ["b: yes"] * 3


async def test_a_trajectory_keeps_its_worker_until_that_is_much_busier():
    setting = Setting("a", "b", capacity=100)
    for number in range(2):
        setting.ask(f"own {number}", affinity="t-1")
        await settle()
    busy = next(port for port in setting.ports if port.calls)
    idle = next(port for port in setting.ports if not port.calls)
    assert busy.questions == ["own 0", "own 1"]
    setting.ask("own 2", affinity="t-1")
    await settle()
    assert idle.questions == ["own 2"]


async def test_many_trajectories_spread_over_the_workers():
    setting = Setting("a", "b", "c", capacity=1000)
    for number in range(300):
        task = setting.ask("x", affinity=f"t-{number}")
        await settle(4)
        for port in setting.ports:
            if port.calls and not port.calls[-1][1].done():
                port.answer(-1)
        await task
    assert min(len(port.calls) for port in setting.ports) > 60


async def test_the_queue_is_first_come_first_served_and_bounded():
    setting = Setting("a", capacity=1, max_waiting=2)
    tasks = [setting.ask(str(number)) for number in range(3)]
    await settle()
    with pytest.raises(PolicyOverloaded, match="max_waiting"):
        await setting.ask("too many")
    for index in range(3):
        assert setting.ports[0].questions[-1] == str(index)
        setting.ports[0].answer(index)
        await settle()
    assert [task.result() for task in tasks] == ["a: yes"] * 3
    assert setting.meter.readings()["rollout/requests_refused"] == 1


async def test_a_request_that_waits_too_long_says_so_and_leaves_the_queue():
    setting = Setting("a", capacity=1)
    setting.ask("hog")
    late = setting.ask("late", timeout_seconds=5.0)
    await setting.clock.advance(5.1)
    with pytest.raises(PolicyUnavailable, match=r"within 5 s; workers: a serving"):
        await late
    assert setting.fleet.num_waiting == 0
    setting.ports[0].answer(0)
    await settle()
    assert setting.fleet.num_in_flight == 0


async def test_a_caller_that_goes_away_frees_its_place():
    setting = Setting("a", capacity=1)
    first, second, third = (setting.ask(name) for name in ("first", "second", "third"))
    await settle()
    second.cancel()
    first.cancel()
    await settle()
    assert setting.ports[0].questions == ["first", "third"]
    setting.ports[0].answer(1)
    assert await third == "a: yes"
    assert setting.fleet.num_in_flight == 0


async def test_a_request_whose_worker_dies_is_sent_to_another():
    setting = Setting("a", "b")
    task = setting.ask("question")
    await settle()
    setting.ports[0].fail(0, PolicyUnavailable("connection lost"))
    await settle()
    assert setting.workers[0].state is WorkerState.LOST
    setting.ports[1].answer(0)
    assert await task == "b: yes"


async def test_losing_a_worker_moves_all_its_requests():
    setting = Setting("a", "b", capacity=10)
    tasks = [setting.ask(str(number)) for number in range(6)]
    await settle()
    setting.fleet.lose(setting.workers[0])
    await settle()
    assert len(setting.ports[1].calls) == 6
    for index in range(6):
        setting.ports[1].answer(index)
    assert await asyncio.gather(*tasks) == ["b: yes"] * 6
    assert setting.workers[0].num_in_flight == 0


async def test_the_only_worker_may_come_back_within_the_deadline():
    setting = Setting("a")
    task = setting.ask("question")
    await settle()
    setting.ports[0].fail(0, PolicyUnavailable("killed"))
    await setting.clock.advance(20.0)
    assert not task.done()
    setting.fleet.serve(setting.workers[0], 1)
    await settle()
    setting.ports[0].answer(1)
    assert await task == "a: yes"


async def test_a_request_that_breaks_every_worker_gives_up_after_three():
    setting = Setting("a", "b", "c", "d")
    task = setting.ask("poison")
    for _ in range(3):
        await settle()
        port = next(port for port in setting.ports if port.calls and not port.calls[-1][1].done())
        port.fail(-1, PolicyFault("status 500"))
    with pytest.raises(PolicyFault, match="500"):
        await task
    assert sum(len(port.calls) for port in setting.ports) == 3
    assert all(worker.state is WorkerState.SERVING for worker in setting.workers)
    assert setting.meter.readings()["rollout/requests_failed"] == 1


async def test_a_full_worker_is_asked_again_without_counting_as_a_failure():
    setting = Setting("a")
    task = setting.ask("question")
    for _ in range(10):
        await settle()
        setting.ports[0].fail(-1, PolicyOverloaded("full"))
        await setting.clock.advance(0.06)
    setting.ports[0].answer(-1)
    assert await task == "a: yes"


async def test_draining_waits_for_the_last_reply_and_sends_nothing_more():
    setting = Setting("a")
    first = setting.ask("first")
    await settle()
    drained = asyncio.create_task(setting.fleet.drain(setting.workers[0], 30.0))
    second = setting.ask("second")
    await settle()
    assert not drained.done() and setting.ports[0].questions == ["first"]
    setting.ports[0].answer(0)
    assert await drained is True
    assert await first == "a: yes" and not second.done()
    setting.fleet.serve(setting.workers[0], 2)
    await settle()
    setting.ports[0].answer(1)
    assert await second == "a: yes"


async def test_draining_gives_up_at_its_deadline():
    setting = Setting("a")
    setting.ask("endless")
    await settle()
    drained = asyncio.create_task(setting.fleet.drain(setting.workers[0], 3.0))
    await setting.clock.advance(3.1)
    assert await drained is False


async def test_a_held_worker_stays_out_until_it_is_resumed():
    setting = Setting("a", "b")
    setting.fleet.hold(setting.workers[0])
    setting.fleet.serve(setting.workers[0], 5)
    for number in range(2):
        setting.ask(str(number))
    await settle()
    assert setting.ports[0].calls == []
    setting.fleet.resume(setting.workers[0])
    assert setting.workers[0].state is WorkerState.JOINING


async def test_silence_counts_from_the_last_reply_while_somebody_waits():
    setting = Setting("a")
    silence = setting.fleet.silence
    first = setting.ask("first")
    await setting.clock.advance(2.0)
    setting.ports[0].answer(0)
    await first
    assert silence.longest() == pytest.approx(2.0)
    await setting.clock.advance(100.0)
    assert silence.longest() == pytest.approx(2.0), "nobody waited"
    silence.restart()
    setting.ask("second")
    await setting.clock.advance(0.5)
    assert silence.longest() == pytest.approx(0.5), "the silence that lasts counts"

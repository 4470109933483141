"""The router over real loopback sockets, with workers that are slow, full, wrong, killed and restarted."""

import asyncio
import hashlib
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from dartrl.config import RunConfig
from dartrl.errors import ConfigError, PolicyFault, PolicyOverloaded, PolicyUnavailable
from dartrl.interfaces import GenerateRequest, ImageRef, Message
from dartrl.launch.system_clock import SystemClock
from dartrl.metrics import Meter
from dartrl.records import Event, WeightsVersion
from dartrl.rollout.client import HttpPolicyClient
from dartrl.rollout.fleet import WorkerState
from dartrl.rollout.http_peer import HttpPeer, Reply
from dartrl.rollout.router import RouterService
from dartrl.rollout.wire import generation_to_json, request_from_json
from dartrl.testing.fakes import fake_generation
from dartrl.testing.images import flat_png
from dartrl.testing.worker import FakeWorker

BODY = b'{"messages": [{"role": "user", "content": "hello"}]}'


class WeightsLedger:
    def __init__(self) -> None:
        self.weights: WeightsVersion | None = None
        self.events: list[Event] = []

    def publish(self, version: int) -> None:
        self.weights = WeightsVersion(version, f"/weights/{version}", "sum", version, None)

    def current_weights(self) -> WeightsVersion | None:
        return self.weights

    def record_event(self, event: Event) -> None:
        self.events.append(event)


@dataclass
class System:
    """A running router with its workers, and connections to its three ports."""

    clock: SystemClock
    ledger: WeightsLedger
    service: RouterService
    workers: list[FakeWorker]
    inference: HttpPeer
    control: HttpPeer
    metrics: HttpPeer

    async def complete(self, body: bytes = BODY, timeout_seconds: float = 20.0) -> Reply:
        return await self.inference.request("POST", "/v1/chat/completions", body, timeout_seconds=timeout_seconds)

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await self.clock.sleep(0.01)

    def states(self) -> list[WorkerState]:
        return [worker.state for worker in self.service.fleet.workers.values()]

    async def serve_version(self, version: int) -> None:
        self.ledger.publish(version)
        await self.until(lambda: all(w.version == version and w.state == "serving" for w in self.service.fleet.workers.values()))


@asynccontextmanager
async def running(
    *workers: FakeWorker, clock: SystemClock, token: str | None = None, version: int | None = 1, **rollout
) -> AsyncIterator[System]:
    options = {"port": 0, "control_port": 0, "metrics_port": 0, "sync_seconds": 0.05, "max_batch": 4} | rollout
    config = RunConfig.model_validate({"rollout": options})
    ledger = WeightsLedger()
    for worker in workers:
        await worker.start()
    service = RouterService(
        config,
        ledger=ledger,  # type: ignore[arg-type]
        clock=clock,
        meter=Meter(clock.now),
        workers=[worker.url for worker in workers],
        token=token,
    )
    stop = asyncio.Event()
    started: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
    running_service = asyncio.create_task(service.run(stop, started=started))
    ports = await started
    peers = {name: HttpPeer(f"http://127.0.0.1:{port}", clock=clock, token=token) for name, port in ports.items()}
    system = System(clock, ledger, service, list(workers), **peers)
    try:
        if version is not None:
            await system.serve_version(version)
        yield system
    finally:
        for peer in peers.values():
            await peer.close()
        stop.set()
        async with asyncio.timeout(10.0):
            await running_service
        for worker in workers:
            await worker.stop()


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock(threads=2)


async def test_replies_pass_through_and_carry_the_workers_version(clock: SystemClock):
    async with running(FakeWorker(clock), clock=clock, version=3) as system:
        reply = await system.complete()
        assert reply.status == 200 and reply.json()["dartrl"] == {"weights_version": 3, "worker": "fake-0"}
        models = (await system.inference.request("GET", "/v1/models", timeout_seconds=5)).json()
        assert list(models["data"][0]["dartrl"]["weights_versions"].values()) == [3]


async def test_the_policy_client_gets_exactly_what_the_worker_sampled(clock: SystemClock):
    png = flat_png(28, 28, 7)
    worker = FakeWorker(clock)
    sent = {}

    def reply(body):
        request = request_from_json(body)
        generation = fake_generation(request, "click 1 2", version=1)
        sent[request.id] = generation
        return generation_to_json(generation, model="policy")

    worker.reply = reply

    image = ImageRef(hashlib.sha256(png).hexdigest(), 28, 28)
    request = GenerateRequest("t-1/0", (Message("user", (image, "go on")),), {image.hash: png}, 1.0, 48, 11, affinity="t-1")
    async with running(worker, clock=clock) as system:
        client = HttpPolicyClient(system.inference.base_url, timeout_seconds=20.0, clock=clock)
        generation = await client.generate(request)
        await client.close()
    expected = sent["t-1/0"]
    assert generation.text == "click 1 2" and generation.request_id == "t-1/0"
    assert generation.response_ids.tolist() == expected.response_ids.tolist()
    assert generation.behaviour_logprobs.tolist() == expected.behaviour_logprobs.tolist()
    assert generation.image_hashes == (image.hash,)
    assert 0 < generation.seconds < 20


@pytest.mark.parametrize(
    ("status", "error"),
    [(429, PolicyOverloaded), (503, PolicyUnavailable), (500, PolicyFault), (400, PolicyFault), (401, PolicyFault)],
)
async def test_the_policy_client_names_every_failure(clock: SystemClock, status: int, error: type[Exception]):
    worker = FakeWorker(clock)
    await worker.start()
    worker.version = 1
    worker.next_statuses = [status]
    client = HttpPolicyClient(worker.url, timeout_seconds=5.0, clock=clock)
    with pytest.raises(PolicyFault, match="on cue") as caught:
        await client.generate(GenerateRequest("r", (Message("user", ("x",)),), {}, 1.0, 8, 0))
    assert type(caught.value) is error
    await worker.stop()
    with pytest.raises(PolicyUnavailable):
        await client.generate(GenerateRequest("r", (Message("user", ("x",)),), {}, 1.0, 8, 0))
    await client.close()


async def test_swaps_under_load_drop_no_request(clock: SystemClock):
    """Fleet of one, 12 swaps, 8 callers without pause: each request is answered once, by the version it was sent to."""
    worker = FakeWorker(clock, seconds=0.01, load_seconds=0.005)
    async with running(worker, clock=clock) as system:
        done = False
        versions: list[int] = []

        async def caller() -> None:
            while not done:
                reply = await system.complete()
                assert reply.status == 200
                versions.append(reply.json()["dartrl"]["weights_version"])

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(caller())
            for version in range(2, 14):
                await system.serve_version(version)
                await system.clock.sleep(0.02)
            done = True
    assert worker.violations == []
    assert set(versions) >= set(range(2, 13))
    assert len(versions) == len(worker.requests)
    syncs = [event for event in system.ledger.events if event.kind == "sync"]
    assert len(syncs) == 12
    assert all(event.data["load_seconds"] >= worker.load_seconds for event in syncs)
    assert max(event.data["gap_seconds"] for event in syncs) >= worker.load_seconds


async def test_a_killed_workers_requests_are_answered_by_another(clock: SystemClock):
    slow = [FakeWorker(clock, name=name, seconds=0.3) for name in ("a", "b")]
    async with running(*slow, clock=clock) as system:
        tasks = [asyncio.create_task(system.complete()) for _ in range(6)]
        await system.until(lambda: slow[0].num_in_flight >= 3)
        await slow[0].kill()
        replies = await asyncio.gather(*tasks)
        assert {reply.status for reply in replies} == {200}
        assert {reply.json()["dartrl"]["worker"] for reply in replies} <= {"a", "b"}
        await system.until(lambda: system.states() == ["lost", "serving"])


async def test_the_only_worker_is_killed_and_restarted_and_the_request_survives(clock: SystemClock):
    worker = FakeWorker(clock, seconds=0.2)
    async with running(worker, clock=clock, version=4) as system:
        task = asyncio.create_task(system.complete())
        await system.until(lambda: worker.num_in_flight == 1)
        await worker.kill()
        await system.until(lambda: system.states() == ["lost"])
        health = await _status_of(system.metrics, "/health")
        assert health == 503
        await worker.start()
        reply = await task
        assert reply.json()["dartrl"]["weights_version"] == 4
        assert worker.violations == [], "it got its weights before it served"
        assert [load["version"] for load in worker.loads] == [4, 4]


async def test_a_hanging_worker_costs_its_requests_only_their_deadline(clock: SystemClock):
    worker = FakeWorker(clock, seconds=3600.0)
    async with running(worker, clock=clock, request_timeout_seconds=0.3) as system:
        with pytest.raises(PolicyUnavailable, match="no worker answered within 0.3 s"):
            await system.complete()
        worker.seconds = 0.0
        assert (await system.complete()).status == 200


async def test_a_worker_that_fails_or_is_full_is_asked_again(clock: SystemClock):
    worker = FakeWorker(clock)
    async with running(worker, clock=clock) as system:
        worker.next_statuses = [500, 429, 429, 500]
        assert (await system.complete()).status == 200
        worker.next_statuses = [500, 500, 500]
        assert await _status_of(system.inference, "/v1/chat/completions", BODY) == 500


async def test_a_wrong_request_gets_the_workers_words(clock: SystemClock):
    worker = FakeWorker(clock)
    async with running(worker, clock=clock) as system:
        worker.next_statuses = [400]
        reply = await system.complete()
        assert reply.status == 400 and "on cue" in reply.json()["error"]["message"]
        assert len(worker.requests) == 1, "it is not sent again"


async def test_a_full_queue_answers_429(clock: SystemClock):
    worker = FakeWorker(clock, seconds=0.5)
    async with running(worker, clock=clock, max_batch=1, max_waiting=3) as system:
        tasks = [asyncio.create_task(_status_of(system.inference, "/v1/chat/completions", BODY)) for _ in range(9)]
        statuses = sorted(await asyncio.gather(*tasks))
        assert statuses == [200] * 5 + [429] * 4, "two in flight, three waiting"


async def test_refused_weights_keep_the_old_ones_serving(clock: SystemClock):
    worker = FakeWorker(clock)
    worker.refuses = {2}
    async with running(worker, clock=clock) as system:
        system.ledger.publish(2)
        await system.until(lambda: any(event.kind == "alarm" for event in system.ledger.events))
        assert (await system.complete()).json()["dartrl"]["weights_version"] == 1
        await system.serve_version(3)
        assert (await system.complete()).json()["dartrl"]["weights_version"] == 3


async def test_drain_and_resume_by_an_operator(clock: SystemClock):
    workers = [FakeWorker(clock, name=name) for name in ("a", "b")]
    async with running(*workers, clock=clock) as system:
        name = workers[0].url.removeprefix("http://")
        drained = await system.control.request("POST", "/drain", b'{"worker": "%s"}' % name.encode(), timeout_seconds=5)
        assert drained.json()["drained"] is True
        for _ in range(4):
            assert (await system.complete()).json()["dartrl"]["worker"] == "b"
        await system.control.request("POST", "/resume", b'{"worker": "%s"}' % name.encode(), timeout_seconds=5)
        await system.until(lambda: system.states() == ["serving", "serving"])
        unknown = await system.control.request("POST", "/drain", b'{"worker": "x"}', timeout_seconds=5)
        assert unknown.status == 404 and name in unknown.json()["error"]["message"]


async def test_a_worker_registers_while_the_router_runs(clock: SystemClock):
    late = FakeWorker(clock)
    async with running(clock=clock, version=None) as system:
        await late.start()
        system.ledger.publish(1)
        answer = await system.control.request("POST", "/workers", b'{"url": "%s"}' % late.url.encode(), timeout_seconds=5)
        assert answer.status == 201
        assert (await system.complete()).status == 200
        listing = (await system.control.request("GET", "/workers", timeout_seconds=5)).json()
        assert [worker["weights_version"] for worker in listing["workers"]] == [1]
        await late.stop()


async def test_metrics_are_prometheus_text(clock: SystemClock):
    async with running(FakeWorker(clock), clock=clock) as system:
        await system.complete()
        text = (await system.metrics.request("GET", "/metrics", timeout_seconds=5)).body.decode()
        assert "dartrl_rollout_requests 1.0" in text
        assert re.search(r'dartrl_worker_state\{state="serving",worker="127.0.0.1:\d+"\} 1.0', text)


async def test_a_token_guards_all_ports(clock: SystemClock):
    async with running(clock=clock, token="secret", version=None) as system:
        for peer, path in ((system.inference, "/v1/models"), (system.control, "/workers"), (system.metrics, "/metrics")):
            stranger = HttpPeer(peer.base_url, clock=clock)
            assert (await stranger.request("GET", path, timeout_seconds=5)).status == 401
            await stranger.close()
            assert (await peer.request("GET", path, timeout_seconds=5)).status == 200


async def test_a_taken_port_is_named_with_its_remedy(clock: SystemClock):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = RunConfig.model_validate({"rollout": {"port": taken.getsockname()[1], "control_port": 0, "metrics_port": 0}})
        service = RouterService(config, ledger=WeightsLedger(), clock=clock, meter=Meter(clock.now), workers=[])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"rollout.port is \d+ on 127.0.0.1: another process.*--set rollout.port"):
            await service.run(asyncio.Event())


async def _status_of(peer: HttpPeer, path: str, body: bytes | None = None) -> int:
    try:
        return (await peer.request("POST" if body else "GET", path, body, timeout_seconds=20)).status
    except PolicyOverloaded:
        return 429
    except PolicyUnavailable:
        return 503
    except PolicyFault as error:
        return int(str(error).split("status ")[1][:3])

"""Router, weight sync and a real embedded engine over sockets: weights change under load without dropping a request."""

import asyncio
import hashlib
from pathlib import Path

import pytest
import torch

from dartrl.config import RunConfig
from dartrl.interfaces import GenerateRequest, ImageRef, Message
from dartrl.launch.system_clock import SystemClock
from dartrl.metrics import Meter
from dartrl.policy.manifest import write_manifest
from dartrl.policy.model import load_policy, save_policy
from dartrl.policy.probes import write_probes
from dartrl.records import Event, WeightsVersion
from dartrl.rollout.client import HttpPolicyClient
from dartrl.rollout.embedded_engine import EmbeddedEngine
from dartrl.rollout.router import RouterService
from dartrl.rollout.server import create_worker_app
from dartrl.rollout.serving import bind, serve
from dartrl.testing.images import flat_png
from dartrl.types import Generation

NUM_VERSIONS = 4
CALLERS = 4


class WeightsLedger:
    def __init__(self) -> None:
        self.weights: WeightsVersion | None = None
        self.events: list[Event] = []

    def current_weights(self) -> WeightsVersion | None:
        return self.weights

    def record_event(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture(scope="module")
def versions(tiny_policy_folder: Path, tmp_path_factory) -> list[WeightsVersion]:
    """Published versions whose weights differ; the last but one is damaged after it was checksummed."""
    policy = load_policy(tiny_policy_folder)
    published = []
    for version in range(1, NUM_VERSIONS + 1):
        folder = tmp_path_factory.mktemp("weights") / f"v{version:06d}"
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.01)
        save_policy(policy, folder)
        write_probes(policy, folder)
        published.append(WeightsVersion(version, str(folder), write_manifest(folder), version, None))
    damaged = Path(published[-2].path) / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    return published


def make_request(caller: int, number: int) -> GenerateRequest:
    png = flat_png(56, 84, (caller * 50 + number) % 256)
    image = ImageRef(hashlib.sha256(png).hexdigest(), 56, 84)
    trajectory = f"t-{caller}"
    return GenerateRequest(
        f"{trajectory}/{number}", (Message("user", (image, "go on")),), {image.hash: png}, 1.0, 6, number, affinity=trajectory
    )


async def test_weights_change_under_load_without_dropping_a_request(versions: list[WeightsVersion]):
    clock = SystemClock(threads=4)
    options = {"port": 0, "control_port": 0, "metrics_port": 0, "sync_seconds": 0.05, "max_batch": 4}
    config = RunConfig.model_validate({"rollout": options})
    engine = EmbeddedEngine(config, name="engine-0", clock=clock)
    ledger = WeightsLedger()
    listener = bind("127.0.0.1", 0, "port")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    service = RouterService(config, ledger=ledger, clock=clock, meter=Meter(clock.now), workers=[url])  # type: ignore[arg-type]
    (worker,) = service.fleet.workers.values()
    started: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
    stop, done = asyncio.Event(), asyncio.Event()
    answered: list[list[Generation]] = [[] for _ in range(CALLERS)]

    async def caller(number: int, client: HttpPolicyClient) -> None:
        while not done.is_set():
            answered[number].append(await client.generate(make_request(number, len(answered[number]))))

    async def until(version: int) -> None:
        async with asyncio.timeout(60.0):
            while worker.version != version or any(replies[-1:] == [] for replies in answered):
                await clock.sleep(0.02)

    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run(stop))
        group.create_task(serve(create_worker_app(engine), listener, stop))
        group.create_task(service.run(stop, started=started))
        client = HttpPolicyClient(f"http://127.0.0.1:{(await started)['inference']}", timeout_seconds=60.0, clock=clock)
        ledger.weights = versions[0]
        callers = [group.create_task(caller(number, client)) for number in range(CALLERS)]
        await until(1)
        ledger.weights = versions[1]
        await until(2)
        ledger.weights = versions[2]
        while not any(event.kind == "alarm" for event in ledger.events):
            await clock.sleep(0.02)
        assert worker.version == 2 and worker.state == "serving", "damaged weights leave the old ones in service"
        ledger.weights = versions[3]
        await until(4)
        done.set()
        await asyncio.wait(callers)
        await client.close()
        stop.set()
    for replies in answered:
        seen = [generation.weights_version for generation in replies]
        assert seen == sorted(seen) and set(seen) <= {1, 2, 4}
        assert [generation.request_id.split("/")[1] for generation in replies] == [str(number) for number in range(len(replies))]
    syncs = [event.data["version"] for event in ledger.events if event.kind == "sync"]
    assert syncs == [2, 4]

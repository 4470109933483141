import asyncio
import base64
import io
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest
from PIL import Image

from dartrl.config import RunConfig
from dartrl.launch.system_clock import SystemClock
from dartrl.policy.manifest import write_manifest
from dartrl.policy.model import load_policy, save_policy
from dartrl.policy.probes import write_probes
from dartrl.records import WeightsVersion
from dartrl.rollout.embedded_engine import EmbeddedEngine
from dartrl.rollout.server import create_worker_app
from dartrl.rollout.serving import bind, serve


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (84, 56, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def user(text: str, *images: bytes) -> dict:
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    return {
        "role": "user",
        "content": [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}],
    }


@pytest.fixture(scope="module")
def published(tiny_policy_folder: Path, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("weights") / "v1"
    policy = load_policy(tiny_policy_folder)
    save_policy(policy, folder)
    write_probes(policy, folder)
    return folder, write_manifest(folder)


@asynccontextmanager
async def worker(published: tuple[Path, str] | None, *, token: str | None = None, **rollout):
    """Base URL of a worker on a loopback socket."""
    engine = EmbeddedEngine(RunConfig(rollout={"max_batch": 8, **rollout}), name="engine-0", clock=SystemClock())
    stop = asyncio.Event()
    listener = bind("127.0.0.1", 0, "port")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run(stop))
        tasks.create_task(serve(create_worker_app(engine, token=token), listener, stop))
        await asyncio.sleep(0)
        try:
            if published is not None:
                await engine.load(WeightsVersion(1, str(published[0]), published[1], 0, None), probe_tolerance=1e-3)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()


async def test_openai_client_gets_replies_with_token_ids_and_logprobs(published):
    async with worker(published) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["policy"]
        question = user("Compare and click.", png(1), png(2))

        async def ask(seed: int):
            return await client.chat.completions.create(
                model="policy", messages=[question], max_tokens=6, seed=seed, logprobs=True, extra_body={"return_token_ids": True}
            )

        first, again, other = await asyncio.gather(ask(1), ask(1), ask(2))
        ids = first.choices[0].token_ids
        assert ids == again.choices[0].token_ids != other.choices[0].token_ids
        assert [entry.logprob for entry in first.choices[0].logprobs.content] == pytest.approx(
            [entry.logprob for entry in again.choices[0].logprobs.content], abs=1e-5
        )
        assert len(ids) == first.usage.completion_tokens == len(first.choices[0].logprobs.content) <= 6
        assert len(first.prompt_token_ids) == first.usage.prompt_tokens > 2 * 6
        assert first.dartrl["weights_version"] == 1
        assert first.dartrl["grids"] == [[1, 6, 4], [1, 6, 4]]


async def test_bad_requests_get_400_with_the_reason(published):
    async with worker(published) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="top_p is 0.5"):
            await client.chat.completions.create(model="policy", messages=[user("hi")], top_p=0.5)
        with pytest.raises(openai.BadRequestError, match="not a readable PNG"):
            await client.chat.completions.create(model="policy", messages=[user("hi", png(1)[:200])])
        with pytest.raises(openai.BadRequestError, match="neutralise"):
            await client.chat.completions.create(model="policy", messages=[user("see <|image_pad|>")])
        with pytest.raises(openai.BadRequestError, match="tokens; the policy reads at most"):
            await client.chat.completions.create(model="policy", messages=[user("word " * 2000)])


async def post(session: aiohttp.ClientSession, url: str, body: dict) -> tuple[int, dict]:
    async with session.post(url, json=body) as response:
        return response.status, await response.json()


async def test_worker_without_weights_refuses_until_loaded(published):
    folder, checksum = published
    body = {"version": 7, "path": str(folder), "checksum": checksum, "probe_tolerance": 1e-3}
    async with worker(None) as url, aiohttp.ClientSession() as session:
        assert (await session.get(f"{url}/health")).status == 503
        status, answer = await post(session, f"{url}/v1/chat/completions", {"messages": [user("hi")]})
        assert status == 503
        assert "no weights" in answer["error"]["message"]
        assert (await post(session, f"{url}/control/load", body))[0] == 200
        assert (await session.get(f"{url}/health")).status == 200
        state = await (await session.get(f"{url}/control/status")).json()
        assert (state["weights_version"], state["worker"]) == (7, "engine-0")
        assert state["instance"]


async def test_refused_weights_leave_the_old_ones_in_service(published, tmp_path):
    folder, checksum = published
    broken = tmp_path / "v2"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    async with worker(published) as url, aiohttp.ClientSession() as session:
        body = {"version": 2, "path": str(broken), "checksum": checksum, "probe_tolerance": 1e-3}
        status, answer = await post(session, f"{url}/control/load", body)
        assert status == 422
        assert "model.safetensors" in answer["error"]["message"]
        status, answer = await post(session, f"{url}/control/load", {**body, "extra": 1})
        assert status == 400
        status, answer = await post(session, f"{url}/v1/chat/completions", {"messages": [user("hi")], "max_tokens": 2})
        assert (status, answer["dartrl"]["weights_version"]) == (200, 1)


async def test_token_is_wanted_when_set(published):
    async with worker(published, token="secret") as url, aiohttp.ClientSession() as session:
        assert (await session.get(f"{url}/control/status")).status == 401
        async with session.get(f"{url}/control/status", headers={"Authorization": "Bearer secret"}) as response:
            assert response.status == 200


async def test_full_queue_answers_429(published):
    async with worker(published, max_batch=1, max_waiting=1) as url, aiohttp.ClientSession() as session:
        bodies = [{"messages": [user("hi", png(seed))], "max_tokens": 60, "seed": seed} for seed in range(6)]
        answers = await asyncio.gather(*(post(session, f"{url}/v1/chat/completions", body) for body in bodies))
        refused = [answer for status, answer in answers if status == 429]
        assert {status for status, _ in answers} == {200, 429}
        assert "rollout.max_waiting" in refused[0]["error"]["message"]

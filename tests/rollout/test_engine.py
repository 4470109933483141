import asyncio
import hashlib
import io
import json
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dartrl.config import RunConfig
from dartrl.errors import ConfigError, PolicyUnavailable, WeightsRejected
from dartrl.interfaces import GenerateRequest, ImageRef, Message
from dartrl.launch.system_clock import SystemClock
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import build_row, collate
from dartrl.policy.manifest import write_manifest
from dartrl.policy.model import Policy, PolicyShape, build_policy, load_policy, save_policy
from dartrl.policy.probes import PROBES_NAME, write_probes
from dartrl.records import WeightsVersion
from dartrl.rollout.embedded_engine import EmbeddedEngine


def png(seed: int, width: int = 56, height: int = 84) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def request(
    number: int, *, seed: int | None = None, images: int = 1, temperature: float = 1.0, max_tokens: int = 8
) -> GenerateRequest:
    data = [png(10 * number + index) for index in range(images)]
    refs = tuple(ImageRef(hashlib.sha256(item).hexdigest(), 56, 84) for item in data)
    seed = number if seed is None else seed
    messages = (Message("user", (*refs, f"Click button {number}.")),)
    by_hash = {ref.hash: item for ref, item in zip(refs, data, strict=True)}
    return GenerateRequest(f"r{number}-{seed}-{temperature}", messages, by_hash, temperature, max_tokens, seed)


def publish(policy: Policy, folder: Path, version: int) -> WeightsVersion:
    save_policy(policy, folder)
    write_probes(policy, folder)
    return WeightsVersion(version, str(folder), write_manifest(folder), 0, None)


def nudged(folder: Path) -> Policy:
    policy = load_policy(folder)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    return policy


@pytest.fixture(scope="module")
def versions(tiny_policy_folder: Path, tmp_path_factory) -> list[WeightsVersion]:
    root = tmp_path_factory.mktemp("weights")
    return [publish(load_policy(tiny_policy_folder), root / "v1", 1), publish(nudged(tiny_policy_folder), root / "v2", 2)]


@asynccontextmanager
async def running(weights: WeightsVersion | None, **rollout):
    engine = EmbeddedEngine(RunConfig(rollout={"max_batch": 4, **rollout}), name="engine-0", clock=SystemClock())
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run(stop))
        await asyncio.sleep(0)
        try:
            if weights is not None:
                await engine.load(weights, probe_tolerance=1e-4)
            yield engine
        finally:
            stop.set()


async def test_replies_are_what_the_trainer_would_score(versions, tiny_policy):
    requests = [request(number, images=number % 3, temperature=(0.0, 0.7, 1.0)[number % 3]) for number in range(9)]
    async with running(versions[0]) as engine:
        generations = await asyncio.gather(*(engine.generate(item) for item in requests))
    for sent, generation in zip(requests, generations, strict=True):
        assert (generation.request_id, generation.weights_version, generation.worker) == (sent.id, 1, "engine-0")
        assert generation.image_hashes == tuple(sent.images)
        assert (generation.finish_reason == "stop") == (int(generation.response_ids[-1]) in tiny_policy.end_ids)
        row = build_row(tiny_policy, generation, sent.images)
        with torch.no_grad():
            logprobs_BT, entropies_BT, _ = token_logprobs(tiny_policy, collate([row]), temperature=generation.temperature)
        np.testing.assert_allclose(generation.behaviour_logprobs, logprobs_BT[0], atol=1e-5)
        np.testing.assert_allclose(generation.entropies, entropies_BT[0], atol=1e-5)


async def test_equal_request_and_seed_give_an_equal_reply_in_any_company(versions):
    async with running(versions[0]) as engine:
        together = await asyncio.gather(*(engine.generate(request(n, max_tokens=4 + n)) for n in range(7)))
    async with running(versions[0], max_batch=1) as engine:
        alone = [await engine.generate(request(n, max_tokens=4 + n)) for n in range(7)]
        other_seed = await engine.generate(request(0, seed=99))
    for one, other in zip(together, alone, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.text == other.text
    assert other_seed.response_ids.tolist() != alone[0].response_ids.tolist()


async def test_repeated_request_shares_the_reply_under_way(versions):
    async with running(versions[0], max_batch=1) as engine:
        first, second = await asyncio.gather(engine.generate(request(1)), engine.generate(request(1)))
    assert first is second


async def test_weights_change_between_replies_and_no_request_is_dropped(versions):
    async with running(versions[0]) as engine:
        before = [asyncio.ensure_future(engine.generate(request(n, max_tokens=30))) for n in range(6)]
        await asyncio.sleep(0.02)
        difference, *replies = await asyncio.gather(
            engine.load(versions[1], probe_tolerance=1e-4), *before, *(engine.generate(request(n)) for n in range(6, 12))
        )
        after = await engine.generate(request(50))
    assert difference < 1e-4
    assert {reply.weights_version for reply in replies} <= {1, 2}
    assert after.weights_version == 2
    fresh = load_policy(Path(versions[1].path))
    for number, reply in enumerate(replies):
        if reply.weights_version == 2:
            row = build_row(fresh, reply, request(number).images)
            with torch.no_grad():
                logprobs_BT, _, _ = token_logprobs(fresh, collate([row]))
            np.testing.assert_allclose(reply.behaviour_logprobs, logprobs_BT[0], atol=1e-5)


@pytest.mark.parametrize("damage", ["checksum", "probes", "no probes", "other shape", "other tokenizer"])
async def test_bad_weights_are_refused_and_the_old_ones_stay(versions, tiny_tokenizer, tmp_path, damage):
    folder = tmp_path / "bad"
    if damage == "other shape":
        bad = publish(build_policy(tiny_tokenizer, PolicyShape(text_layers=1, vision_layers=1), seed=0), folder, 3)
    else:
        shutil.copytree(versions[1].path, folder)
        if damage == "checksum":
            (folder / "model.safetensors").write_bytes(b"x" + (folder / "model.safetensors").read_bytes()[1:])
        elif damage == "probes":
            shutil.copy(Path(versions[0].path) / PROBES_NAME, folder / PROBES_NAME)
        elif damage == "no probes":
            (folder / PROBES_NAME).unlink()
        else:
            settings = json.loads((folder / "preprocessor_config.json").read_text())
            (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.5] * 3}))
        checksum = versions[1].checksum if damage == "checksum" else write_manifest(folder)
        bad = WeightsVersion(3, str(folder), checksum, 0, None)
    async with running(versions[0]) as engine:
        before = await engine.generate(request(1))
        with pytest.raises(WeightsRejected):
            await engine.load(bad, probe_tolerance=1e-4)
        again = await engine.generate(request(1))
    assert again.weights_version == 1
    np.testing.assert_allclose(again.behaviour_logprobs, before.behaviour_logprobs, atol=1e-6)


async def test_engine_without_weights_or_stopped_is_unavailable(versions):
    async with running(None) as engine:
        with pytest.raises(PolicyUnavailable, match="no weights"):
            await engine.generate(request(1))
        with pytest.raises(WeightsRejected, match=r"manifest\.json"):
            await engine.load(WeightsVersion(1, "/nowhere", "0", 0, None), probe_tolerance=1e-3)
        assert engine.status()["ready"] is False
    with pytest.raises(PolicyUnavailable):
        await engine.generate(request(1))


async def test_stopping_fails_what_is_under_way(versions):
    async with running(versions[0], max_batch=1) as engine:
        waiting = [asyncio.ensure_future(engine.generate(request(n, max_tokens=500))) for n in range(4)]
        await asyncio.sleep(0.05)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(result, PolicyUnavailable) for result in results)


async def test_one_bad_request_does_not_hurt_its_batch(versions):
    good = request(1)
    bad = GenerateRequest("bad", good.messages, {key: data[:50] for key, data in good.images.items()}, 1.0, 8, 0)
    async with running(versions[0]) as engine:
        results = await asyncio.gather(
            engine.generate(good), engine.generate(bad), engine.generate(request(2)), return_exceptions=True
        )
    assert isinstance(results[1], ConfigError)
    assert [result.request_id for result in (results[0], results[2])] == [good.id, request(2).id]


async def test_late_reply_is_given_up_and_named(versions):
    async with running(versions[0], request_timeout_seconds=0.001) as engine:
        with pytest.raises(PolicyUnavailable, match=r"rollout\.request_timeout_seconds"):
            await engine.generate(request(1, max_tokens=500))

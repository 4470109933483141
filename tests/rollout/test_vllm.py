"""A vLLM server on the CPU, our engine and stock Hugging Face code must agree on ids, grids and log-probabilities.

The tokenizer and the template are frozen into the weights by pre-training, so this is checked with a random model in the shipped
format. Needs the environment of script/setup-vllm; the server takes about 3.5 GB of memory.
"""

import asyncio
import hashlib
import io
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dartrl.config import RunConfig
from dartrl.interfaces import GenerateRequest, ImageRef, Message
from dartrl.launch.system_clock import SystemClock
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import collate, encode_prompt, reply_row
from dartrl.policy.manifest import write_manifest
from dartrl.policy.model import IMAGE_TOKEN, Policy, PolicyShape, build_policy, save_policy
from dartrl.policy.probes import write_probes
from dartrl.records import WeightsVersion
from dartrl.rollout.embedded_engine import EmbeddedEngine
from dartrl.rollout.wire import request_to_json

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
START_SECONDS = 900.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm here; run script/setup-vllm"),
]
SERVER_OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"),
    *("--logprobs-mode", "processed_logprobs", "--limit-mm-per-prompt", '{"image":5,"video":0}'),
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def png(width: int, height: int, seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


SMALL, WIDE, ODD = png(56, 84, 1), png(168, 112, 2), png(70, 130, 3)
TURNS: dict[str, tuple[str | bytes, ...]] = {
    "text only": ("Copy the word tree.",),
    "one image": (SMALL, "Click the button."),
    "image after text": ("Look: ", WIDE, " and click."),
    "several images of several sizes": (SMALL, "then", WIDE, "now click", SMALL),
    "resized": (ODD, "Click."),
}
REQUESTS: dict[str, GenerateRequest] = {}
for _number, (_name, _parts) in enumerate(TURNS.items()):
    _images = {hashlib.sha256(part).hexdigest(): part for part in _parts if isinstance(part, bytes)}
    _refs = tuple(ImageRef(hashlib.sha256(part).hexdigest(), 0, 0) if isinstance(part, bytes) else part for part in _parts)
    REQUESTS[_name] = GenerateRequest(
        _name, (Message("system", ("You see a screen.",)), Message("user", _refs)), _images, 1.0, 8, _number
    )


@pytest.fixture(scope="module")
def policy(tiny_tokenizer) -> Policy:
    return build_policy(tiny_tokenizer, PolicyShape(), seed=5)


@pytest.fixture(scope="module")
def folder(policy: Policy, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("served") / "policy"
    save_policy(policy, path)
    write_probes(policy, path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_path = tmp_path_factory.mktemp("vllm") / "log"
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "policy"]
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *SERVER_OPTIONS],
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process, log_path)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen, log_path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the vLLM server ended with {process.returncode}:\n{log_path.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the vLLM server was not healthy after {START_SECONDS} s:\n{log_path.read_text()[-4000:]}")


def ask(url: str, request: GenerateRequest, policy: Policy) -> tuple[list[int], list[int], list[float]]:
    """(prompt ids, reply ids, log-probabilities) from vLLM; the ban of placeholders is a logit bias there."""
    body = {**request_to_json(request), "logit_bias": {str(token): -100 for token in policy.banned_ids}}
    call = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(call, timeout=300) as response:
        reply = json.load(response)
    choice = reply["choices"][0]
    return reply["prompt_token_ids"], choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def stock_inputs(policy: Policy, request: GenerateRequest) -> tuple[list[int], dict, list[tuple[int, ...]]]:
    """(prompt ids, image tensors, grids) as stock Hugging Face code makes them."""
    processor = Qwen2VLImageProcessorPil(
        image_mean=[1.0] * 3, image_std=[0.25] * 3, size={"shortest_edge": 3136, "longest_edge": 313600}
    )
    opened = [
        Image.open(io.BytesIO(request.images[part.hash]))
        for message in request.messages
        for part in message.parts
        if isinstance(part, ImageRef)
    ]
    vision = dict(processor(images=opened, return_tensors="pt")) if opened else {}
    grids = [tuple(grid) for grid in vision["image_grid_thw"].tolist()] if opened else []
    chat = [
        {
            "role": message.role,
            "content": [
                {"type": "image"} if isinstance(part, ImageRef) else {"type": "text", "text": part} for part in message.parts
            ],
        }
        for message in request.messages
    ]
    text = policy.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    pieces = text.split(IMAGE_TOKEN)
    expanded = pieces[0] + "".join(
        IMAGE_TOKEN * (grid[1] * grid[2] // 4) + piece for grid, piece in zip(grids, pieces[1:], strict=True)
    )
    return policy.tokenizer(expanded)["input_ids"], vision, grids


async def answer_all(folder: Path, requests: list[GenerateRequest]):
    engine = EmbeddedEngine(RunConfig(), name="engine-0", clock=SystemClock())
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run(stop))
        await asyncio.sleep(0)
        await engine.load(WeightsVersion(1, str(folder), write_manifest(folder), 0, None), probe_tolerance=1e-3)
        replies = await asyncio.gather(*(engine.generate(request) for request in requests))
        stop.set()
    return replies


async def test_vllm_engine_and_stock_code_agree(policy, folder, server):
    ours = dict(zip(REQUESTS, await answer_all(folder, list(REQUESTS.values())), strict=True))
    largest: dict[str, float] = {}
    for name, request in REQUESTS.items():
        prompt_ids, reply_ids, vllm_logprobs = await asyncio.to_thread(ask, server, request, policy)
        stock_ids, vision, grids = stock_inputs(policy, request)
        assert prompt_ids == stock_ids == ours[name].prompt_ids.tolist(), name
        assert list(ours[name].image_grids) == grids, name
        assert not set(reply_ids) & set(policy.banned_ids)

        ids = torch.tensor([[*stock_ids, *reply_ids]])
        with torch.no_grad():
            logits_SV = policy.model(input_ids=ids, mm_token_type_ids=(ids == policy.image_token_id).int(), **vision).logits[0]
            logits_SV[:, list(policy.banned_ids)] = -torch.inf
            stock_TV = logits_SV.log_softmax(-1)[len(stock_ids) - 1 : -1]
            row = reply_row(encode_prompt(policy, request.messages, request.images), reply_ids)
            ours_BT, _, _ = token_logprobs(policy, collate([row]))
        stock_T = stock_TV.gather(-1, ids[0, len(stock_ids) :, None])[:, 0]
        np.testing.assert_allclose(ours_BT[0], stock_T, atol=1e-4, err_msg=name)
        largest[name] = float((torch.tensor(vllm_logprobs) - stock_T).abs().max())
    resized = largest.pop("resized")
    assert max(largest.values()) < 1e-3, largest
    # vLLM resizes with torchvision, which rounds otherwise than PIL; screens are whole patches, so nothing is resized in practice
    assert resized < 0.1

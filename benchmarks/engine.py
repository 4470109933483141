"""Replies per second of the embedded engine against Hugging Face generate, in turn in the same run.

    python benchmarks/engine.py [--policy models/tiny] [--json FILE]

Both sides start from PNG bytes and messages and end with decoded text; screens differ in every request, so no cache helps. The
engine serves closed-loop clients at each concurrency; Hugging Face gets whole batches of 8, left padded, which is its best case.
Both sample at temperature 1, with equal reply limits, on one thread. Rounds alternate; the median round counts.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dartrl.config import RunConfig
from dartrl.interfaces import GenerateRequest, ImageRef, Message
from dartrl.launch.system_clock import SystemClock
from dartrl.policy.manifest import write_manifest
from dartrl.policy.model import IMAGE_TOKEN, Policy, load_policy, save_policy
from dartrl.policy.probes import write_probes
from dartrl.records import WeightsVersion
from dartrl.rollout.embedded_engine import EmbeddedEngine

WIDTH, HEIGHT = 168, 224
CONCURRENCIES = (1, 8, 32)
MAX_TOKENS = 24
LARGEST_RATE = 400
"""Screens drawn beforehand per second of measurement; drawing is not timed."""
WORDS = ("ok", "cancel", "submit", "tree", "river", "window", "seven", "blue")


def make_request(number: int) -> GenerateRequest:
    """A screen with a few buttons at random places, and an instruction."""
    rng = np.random.default_rng(number)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = int(rng.integers(0, WIDTH - 50)), int(rng.integers(0, HEIGHT - 20))
        draw.rectangle((x, y, x + 48, y + 18), fill=tuple(rng.integers(120, 255, 3).tolist()), outline="black")
        draw.text((x + 4, y + 3), str(rng.choice(WORDS)), fill="black")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = buffer.getvalue()
    ref = ImageRef(hashlib.sha256(data).hexdigest(), WIDTH, HEIGHT)
    text = f'Click on the "{rng.choice(WORDS)}" button.' + "\nclick(20,40)" * int(rng.integers(0, 4))
    messages = (Message("user", (ref, text)),)
    return GenerateRequest(str(number), messages, {ref.hash: data}, 1.0, MAX_TOKENS, number)


class HuggingFace:
    """Stock image processor, chat template, tokenizer and `generate`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        settings = policy.settings
        self._processor = Qwen2VLImageProcessorPil(
            patch_size=settings.patch_size,
            merge_size=settings.merge_size,
            size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
            image_mean=list(settings.mean),
            image_std=list(settings.std),
        )

    def answer(self, requests: list[GenerateRequest]) -> list[str]:
        policy, tokenizer = self._policy, self._policy.tokenizer
        images = [Image.open(io.BytesIO(data)) for request in requests for data in request.images.values()]
        vision = self._processor(images=images, return_tensors="pt")
        texts: list[str] = []
        for request, grid in zip(requests, vision["image_grid_thw"], strict=True):
            content = [{"type": "image"}, {"type": "text", "text": request.messages[0].parts[1]}]
            text = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
            texts.append(str(text).replace(IMAGE_TOKEN, IMAGE_TOKEN * int(grid.prod() // policy.settings.merge_size**2)))
        inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        ids = inputs["input_ids"]
        with torch.inference_mode():
            output = policy.model.generate(
                input_ids=ids,
                attention_mask=inputs["attention_mask"],
                mm_token_type_ids=(ids == policy.image_token_id).int(),
                max_new_tokens=MAX_TOKENS,
                do_sample=True,
                top_k=0,
                **vision,
            )
        return tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)


class Stopwatch:
    """Wall and processor seconds spent inside `with` blocks, and what was answered meanwhile."""

    def __init__(self) -> None:
        self.answered = 0
        self.wall_seconds = self.processor_seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall_seconds += time.perf_counter() - self._started[0]
        self.processor_seconds += time.process_time() - self._started[1]


def measure_generate(reference: HuggingFace, numbers: itertools.count[int], batch: int, seconds: float) -> Stopwatch:
    """Whole batches, one after the other."""
    watch = Stopwatch()
    while watch.wall_seconds < seconds:
        requests = [make_request(next(numbers)) for _ in range(batch)]
        with watch:
            watch.answered += len(reference.answer(requests))
    return watch


async def measure_engine(engine: EmbeddedEngine, numbers: itertools.count[int], concurrency: int, seconds: float) -> Stopwatch:
    """That many closed-loop clients."""
    screens = [make_request(next(numbers)) for _ in range(int(seconds * LARGEST_RATE))]
    waiting, watch = iter(screens), Stopwatch()
    started = time.perf_counter()

    async def client() -> None:
        for request in waiting:
            await engine.generate(request)
            watch.answered += 1
            if time.perf_counter() - started > seconds:
                return

    with watch:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(client())
    return watch


async def run(policy: Policy, rounds: int, seconds: float) -> dict[str, Any]:
    """All figures, medians over the rounds."""
    watches: dict[str, list[Stopwatch]] = {}
    numbers = itertools.count()
    config = RunConfig.model_validate({"rollout": {"max_batch": max(CONCURRENCIES)}})
    engine = EmbeddedEngine(config, name="benchmark", clock=SystemClock())
    reference, stop = HuggingFace(policy), asyncio.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "weights"
        save_policy(policy, folder)
        write_probes(policy, folder)
        weights = WeightsVersion(0, str(folder), write_manifest(folder), 0, None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run(stop))
            await asyncio.sleep(0)
            await engine.load(weights, probe_tolerance=1e-3)
            await measure_engine(engine, numbers, 8, 0.5)
            measure_generate(reference, numbers, 8, 0.5)
            for _ in range(rounds):
                for concurrency in CONCURRENCIES:
                    watch = await measure_engine(engine, numbers, concurrency, seconds)
                    watches.setdefault(f"engine_{concurrency}", []).append(watch)
                for batch in (1, 8):
                    watches.setdefault(f"generate_{batch}", []).append(measure_generate(reference, numbers, batch, seconds))
            stop.set()
    return summarise(watches)


def summarise(watches: dict[str, list[Stopwatch]]) -> dict[str, Any]:
    """Medians and the ratios: engine at concurrency 8 over generate in batches of 8, and of 1.

    The ratio per processor second says what a busy machine hides.
    """
    rates = {name: [watch.answered / watch.wall_seconds for watch in values] for name, values in watches.items()}
    costs = {name: [watch.processor_seconds / watch.answered for watch in values] for name, values in watches.items()}
    median = {name: statistics.median(values) for name, values in rates.items()}
    paired = [ours / theirs for ours, theirs in zip(rates["engine_8"], rates["generate_8"], strict=True)]
    per_processor = [theirs / ours for ours, theirs in zip(costs["engine_8"], costs["generate_8"], strict=True)]
    return {
        "ratio_to_batched_generate": statistics.median(paired),
        "ratio_to_single_generate": median["engine_8"] / median["generate_1"],
        "replies_per_second": {str(concurrency): median[f"engine_{concurrency}"] for concurrency in CONCURRENCIES},
        "batched_generate_replies_per_second": median["generate_8"],
        "single_generate_replies_per_second": median["generate_1"],
        "lowest_ratio_to_batched_generate": min(paired),
        "ratio_to_batched_generate_per_processor_second": statistics.median(per_processor),
        "rounds": len(paired),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("models/tiny"), help="policy folder in Hugging Face format")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = asyncio.run(run(load_policy(options.policy), options.rounds, options.seconds))
    for name, value in figures.items():
        print(f"{name:40}", {key: round(rate, 1) for key, rate in value.items()} if isinstance(value, dict) else round(value, 2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

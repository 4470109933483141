"""A small random policy and recorded episodes of it, made from nothing and equal in every run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dartrl.data.blobs import MemoryBlobStore
from dartrl.interfaces import ImageRef, Message
from dartrl.policy.forward import token_logprobs
from dartrl.policy.inputs import collate, encode_prompt, reply_row
from dartrl.policy.model import Policy, PolicyShape, build_policy, build_tokenizer
from dartrl.records import Claim, ClaimedGroup, Member
from dartrl.testing.images import flat_png
from dartrl.types import End, Generation, Outcome, Step, Task, Trajectory

torch.set_num_threads(1)

SHAPE = PolicyShape(
    text_width=32,
    text_layers=2,
    text_heads=2,
    text_kv_heads=1,
    text_mlp=48,
    vision_width=24,
    vision_layers=1,
    vision_heads=2,
    vision_mlp=32,
)
CORPUS = ["click the left half of the screen", "click 12 20", "type hello", "finish"]


def small_policy(seed: int = 0, dtype: str = "float32") -> Policy:
    tokenizer = build_tokenizer(CORPUS, vocab_size=320)
    return build_policy(tokenizer, SHAPE, seed=seed, dtype=dtype)  # type: ignore[arg-type]


@dataclass
class Recorder:
    """Makes episodes as if the policy had been sampled by an engine that serves `version`."""

    policy: Policy
    blobs: MemoryBlobStore
    temperature: float = 1.0
    noise: float = 0.0

    def generation(self, text: str, shade: int, *, seed: int, version: int = 1) -> Generation:
        random = np.random.default_rng(seed)
        png = flat_png(56, 28, shade=shade)
        image = ImageRef(self.blobs.put(png), 56, 28)
        prompt = encode_prompt(self.policy, [Message("user", (image, text))], {image.hash: png})
        allowed = [i for i in range(300) if i not in self.policy.banned_ids and i not in self.policy.end_ids]
        ids = [*random.choice(allowed, random.integers(1, 6)), min(self.policy.end_ids)]
        with torch.no_grad():
            logprobs, entropies, _ = token_logprobs(
                self.policy, collate([reply_row(prompt, np.array(ids, np.int32))]), temperature=self.temperature
            )
        noisy = np.minimum(logprobs[0].numpy() + self.noise * random.normal(size=len(ids)), 0.0)
        return Generation(
            text="?",
            prompt_ids=prompt.ids_S,
            response_ids=np.array(ids, np.int32),
            behaviour_logprobs=noisy.astype(np.float32),
            entropies=entropies[0].numpy().astype(np.float32),
            finish_reason="stop",
            image_hashes=(image.hash,),
            image_grids=tuple(picture.grid for picture in prompt.images),
            fingerprint=self.policy.fingerprint,
            temperature=self.temperature,
            banned_ids=self.policy.banned_ids,
            compute_dtype="float32",
            weights_version=version,
            worker="engine-0",
            request_id=f"request-{seed}",
        )

    def trajectory(self, name: str, task: Task, score: float, *, num_steps: int = 2, seed: int = 0, version: int = 1) -> Trajectory:
        steps = tuple(
            Step(
                index=index,
                screenshot=None,
                screen=(56, 28),
                observation_text="",
                generation=self.generation(
                    "click " * (index + 1), task.seed * 16 + index, seed=seed * 100 + index, version=version
                ),
                actions=(),
                parse_error=None,
                environment_seconds=0.0,
                started_at=0.0,
            )
            for index in range(num_steps)
        )
        outcome = Outcome(End.TERMINATED, "environment", score=score, success=score == 1.0, raw=score)
        return Trajectory(name, task, "click", steps, outcome, 0.0, 1.0)

    def claim(self, name: str, scores: Sequence[Sequence[float]], *, seed: int = 0, version: int = 1) -> Claim:
        """One group per row of scores."""
        groups: list[ClaimedGroup] = []
        for g, row in enumerate(scores):
            task = Task(id=f"click/{g}", family="click", seed=g)
            members = tuple(
                Member(
                    f"{name}-{g}-{slot}",
                    self.trajectory(
                        f"{name}-t{g}-{slot}",
                        task,
                        score,
                        num_steps=1 + (g + slot) % 3,
                        seed=seed * 1000 + g * 50 + slot,
                        version=version,
                    ),
                    "fresh",
                )
                for slot, score in enumerate(row)
            )
            groups.append(ClaimedGroup(f"{name}-g{g}", task, members))
        return Claim(name, tuple(groups))


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    """small_policy(seed, dtype): random weights, equal for equal seeds."""
    return small_policy


@pytest.fixture
def make_recorder() -> type[Recorder]:
    """Recorder(policy, blobs, temperature, noise)."""
    return Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(small_policy(), MemoryBlobStore())


@pytest.fixture
def select_all() -> Callable[[Sequence[float]], list[bool]]:
    """Selector that trains on every step."""
    return lambda entropies: [True] * len(entropies)

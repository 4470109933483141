"""Fakes that behave like the real thing, fail on cue, and complain about callers that break a contract.

The world they share: a screen asks for `spec["clicks"]` clicks (2 by default); a click left of the middle is right, one
right of it is wrong; the screen changes its shade with each click and the episode ends after the last one. The score is
the share of right clicks, success is all of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dartrl.errors import EnvironmentCrashed
from dartrl.interfaces import Clock, GenerateRequest, ImageRef, Message
from dartrl.testing.images import flat_png
from dartrl.types import Action, ActionKind, Generation, Observation, ParseError, Step, Task, Verdict

SCREEN = (56, 28)
"""(width, height) of the fake screen in pixels, multiples of 28."""
END_TOKEN = 1
"""Token id that ends a fake reply; byte b of a text is token b + 2."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure on cue."""

    operation: str
    """acquire, reset, step, evaluate or generate."""
    at: int
    """0-based count of that operation, over the whole pool or client."""
    error: Exception
    """What is raised."""


class Faults:
    """Raises each planned fault when its turn comes; counts the operations."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._planned = {(fault.operation, fault.at): fault.error for fault in faults}
        self.counts: Counter[str] = Counter()

    def on(self, operation: str) -> None:
        at = self.counts[operation]
        self.counts[operation] += 1
        error = self._planned.get((operation, at))
        if error is not None:
            raise error


# --------------------------------------------------------------------------- environments


class FakeEnvironment:
    """One slot of the clicking world. Raises AssertionError if its caller breaks the contract, and notes it."""

    def __init__(
        self, *, clock: Clock | None = None, seconds: float = 0.0, faults: Faults | None = None, violations: list[str] | None = None
    ) -> None:
        """seconds: time that each operation takes on the clock. violations: list that collects broken contracts."""
        self._clock = clock
        self._seconds = seconds
        self._faults = faults or Faults()
        self.violations: list[str] = [] if violations is None else violations
        self._task: Task | None = None
        self._good = 0
        self._clicks = 0
        self._is_busy = False
        self.is_broken = False
        self.is_closed = False

    async def reset(self, task: Task) -> Observation:
        with self._operation("reset"):
            await self._pass_time()
            self._faults.on("reset")
            self._task, self._good, self._clicks = task, 0, 0
            return self._observe()

    async def step(self, actions: Sequence[Action]) -> Observation:
        with self._operation("step"):
            self._require(self._task is not None, "step before reset")
            self._require(not self._is_done, "step after the episode was done")
            self._require(len(actions) > 0, "step without an action")
            await self._pass_time()
            self._faults.on("step")
            for action in actions:
                self._require(action.kind not in (ActionKind.FINISH, ActionKind.FAIL, ActionKind.ASK_USER), f"{action.kind} sent")
                if action.kind is ActionKind.CLICK and not self._is_done:
                    self._clicks += 1
                    self._good += action.x is not None and action.x < SCREEN[0] / 2
            return self._observe()

    async def evaluate(self) -> Verdict:
        with self._operation("evaluate"):
            self._require(self._task is not None, "evaluate before reset")
            await self._pass_time()
            self._faults.on("evaluate")
            score = self._good / self._wanted
            return Verdict(score=score, success=score == 1.0, raw=score)

    async def close(self) -> None:
        self.is_closed = True

    def versions(self) -> Mapping[str, str]:
        return {"renderer": "fake 1"}

    @property
    def _wanted(self) -> int:
        return int(self._task.spec.get("clicks", 2)) if self._task else 0

    @property
    def _is_done(self) -> bool:
        return self._clicks >= self._wanted

    def _observe(self) -> Observation:
        assert self._task is not None
        return Observation(
            screenshot=flat_png(*SCREEN, shade=self._task.seed * 16 + self._clicks),
            width=SCREEN[0],
            height=SCREEN[1],
            instruction=self._task.instruction or f"click {self._wanted} times on the left",
            done=self._is_done,
        )

    @contextmanager
    def _operation(self, name: str):
        self._require(not self.is_closed, f"{name} after close")
        self._require(not self.is_broken, f"{name} after a fault; discard the slot")
        self._require(not self._is_busy, f"{name} while another call runs")
        self._is_busy = True
        try:
            yield
        except AssertionError:
            raise
        except BaseException:
            self.is_broken = True
            raise
        finally:
            self._is_busy = False

    async def _pass_time(self) -> None:
        if self._clock is not None:
            await self._clock.sleep(self._seconds)

    def _require(self, condition: bool, complaint: str) -> None:
        if not condition:
            self.violations.append(complaint)
            raise AssertionError(f"environment contract broken: {complaint}")


class FakePool:
    """Slots with FakeEnvironments; fails on cue and notes callers that break the contract in `violations`."""

    def __init__(self, size: int, *, clock: Clock | None = None, seconds: float = 0.0, faults: Sequence[Fault] = ()) -> None:
        self.size = size
        self.faults = Faults(faults)
        self.violations: list[str] = []
        self.discarded: list[int] = []
        self.is_started = False
        self.is_closed = False
        self._clock = clock
        self._seconds = seconds
        self._slots: dict[int, FakeEnvironment] = {}

    async def start(self) -> None:
        self.is_started = True

    async def acquire(self, slot: int, task: Task) -> FakeEnvironment:
        self._require(self.is_started and not self.is_closed, "acquire outside start and close")
        self._require(0 <= slot < self.size, f"slot {slot} does not exist")
        self.faults.on("acquire")
        environment = self._slots.get(slot)
        self._require(environment is None or not environment.is_broken, f"slot {slot} was not discarded after a fault")
        if environment is None:
            environment = FakeEnvironment(clock=self._clock, seconds=self._seconds, faults=self.faults, violations=self.violations)
            self._slots[slot] = environment
        return environment

    async def discard(self, slot: int) -> None:
        self.discarded.append(slot)
        environment = self._slots.pop(slot, None)
        if environment is not None:
            await environment.close()

    async def close(self) -> None:
        self.is_closed = True
        for slot in list(self._slots):
            await self._slots.pop(slot).close()

    def _require(self, condition: bool, complaint: str) -> None:
        if not condition:
            self.violations.append(complaint)
            raise AssertionError(f"pool contract broken: {complaint}")


def crash(at: int, operation: str = "step") -> Fault:
    """The environment dies at the given operation."""
    return Fault(operation, at, EnvironmentCrashed(f"fake crash at {operation} {at}"))


# --------------------------------------------------------------------------- agent


class FakeDialect:
    """Replies are `click X Y`, `type TEXT`, `wait`, `finish`, `fail` or `ask_user`, one a line."""

    name = "fake"

    def __init__(self, *, history_images: int = 1, max_reply_tokens: int = 48) -> None:
        self.history_images = history_images
        self.max_reply_tokens = max_reply_tokens

    def messages(
        self, instruction: str, steps: Sequence[Step], observation: Observation, image: ImageRef | None
    ) -> Sequence[Message]:
        kept = max(0, self.history_images - 1) if image else self.history_images
        first_shown = len(steps) - kept
        messages = [Message("user", (instruction,))]
        for step in steps:
            if step.index >= first_shown and step.screenshot:
                messages.append(Message("user", (ImageRef(step.screenshot, *step.screen),)))
            messages.append(Message("assistant", (step.generation.text,)))
        present: tuple[str | ImageRef, ...] = (image,) if image else ()
        messages.append(Message("user", (*present, observation.text) if observation.text or not present else present))
        return messages

    def parse(self, text: str, screen: tuple[int, int]) -> tuple[Action, ...] | ParseError:
        actions: list[Action] = []
        for line in text.splitlines():
            action = self._parse_line(line.split())
            if action is None:
                return ParseError("unknown_verb", f"cannot read {line!r}; use click X Y, type TEXT, wait or finish")
            actions.append(action)
        return tuple(actions) or ParseError("no_action", "the reply is empty")

    @staticmethod
    def _parse_line(words: Sequence[str]) -> Action | None:
        match words:
            case ["click", x, y] if x.isdecimal() and y.isdecimal():
                return Action(ActionKind.CLICK, x=float(x), y=float(y))
            case ["type", *rest]:
                return Action(ActionKind.TYPE, text=" ".join(rest))
            case [("wait" | "finish" | "fail" | "ask_user") as kind]:
                return Action(ActionKind(kind))
            case _:
                return None


# --------------------------------------------------------------------------- policy


def random_click(request: GenerateRequest) -> str:
    """A click anywhere, drawn by the request's seed."""
    generator = np.random.default_rng(request.seed)
    return f"click {generator.integers(SCREEN[0])} {generator.integers(SCREEN[1])}"


class FakePolicyClient:
    """Policy that answers by a function of the request, with valid records, and fails on cue."""

    def __init__(
        self,
        reply: Callable[[GenerateRequest], str] = random_click,
        *,
        version: int = 1,
        clock: Clock | None = None,
        seconds: float = 0.0,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.reply = reply
        self.version = version
        self.requests: list[GenerateRequest] = []
        self.faults = Faults(faults)
        self.is_closed = False
        self._clock = clock
        self._seconds = seconds

    @classmethod
    def scripted(cls, *replies: str, **options: object) -> FakePolicyClient:
        """Client that gives these replies in order, the last one for ever."""
        remaining = list(replies)
        return cls(lambda _: remaining.pop(0) if len(remaining) > 1 else remaining[0], **options)  # type: ignore[arg-type]

    async def generate(self, request: GenerateRequest) -> Generation:
        assert not self.is_closed, "generate after close"
        self.requests.append(request)
        if self._clock is not None:
            await self._clock.sleep(self._seconds)
        self.faults.on("generate")
        return fake_generation(request, self.reply(request), version=self.version, seconds=self._seconds)

    async def close(self) -> None:
        self.is_closed = True


def fake_generation(
    request: GenerateRequest, text: str, *, version: int, worker: str = "fake-0", seconds: float = 0.0
) -> Generation:
    """A consistent record of that reply; log-probabilities and entropies are drawn by the request's seed.

    Raises AssertionError if the messages refer to images whose bytes are missing or do not match their hash.
    """
    images = [part for message in request.messages for part in message.parts if isinstance(part, ImageRef)]
    for image in images:
        assert image.hash in request.images, f"request {request.id} has no bytes for image {image.hash}"
        assert hashlib.sha256(request.images[image.hash]).hexdigest() == image.hash, f"bytes of {image.hash} do not match"
    texts = "".join(part for message in request.messages for part in message.parts if isinstance(part, str))
    tokens = [*(byte + 2 for byte in text.encode()), END_TOKEN]
    response = tokens[: request.max_tokens]
    generator = np.random.default_rng(request.seed)
    return Generation(
        text=text,
        prompt_ids=np.frombuffer(texts.encode() or b"?", dtype=np.uint8).astype(np.int32) + 2,
        response_ids=np.asarray(response, dtype=np.int32),
        behaviour_logprobs=-generator.random(len(response), dtype=np.float32),
        entropies=generator.random(len(response), dtype=np.float32),
        finish_reason="stop" if len(response) == len(tokens) else "length",
        image_hashes=tuple(image.hash for image in images),
        image_grids=tuple((1, image.height // 14, image.width // 14) for image in images),
        fingerprint="fake",
        temperature=request.temperature,
        banned_ids=(),
        compute_dtype="float32",
        weights_version=version,
        worker=worker,
        request_id=request.id,
        seconds=seconds,
    )

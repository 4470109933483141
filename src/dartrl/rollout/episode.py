"""One episode: the loop that everything else exists for.

    reset -> [ messages -> generate -> parse -> act ]* -> evaluate

How it ends is a type (DESIGN 3): an end by the agent or the environment is `terminated`, a limit is `truncated`, and both
are scored; a fault of the infrastructure carries no score. An unreadable reply is a step whose error the agent sees next.
The reply that ends an episode is recorded like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

from dartrl.config import AgentConfig
from dartrl.errors import EnvironmentFault, EvaluatorFault, PolicyFault, PolicyOverloaded, PolicyUnavailable
from dartrl.interfaces import BlobStore, Clock, Dialect, Environment, GenerateRequest, ImageRef, PolicyClient, Reward
from dartrl.metrics import Meter
from dartrl.records import Assignment
from dartrl.types import Action, ActionKind, End, Generation, Observation, Outcome, ParseError, Step, Trajectory, Verdict

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOP_REPEATS = 5
"""The same actions on an unchanged screen this often in a row end the episode as `truncated:loop`."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
"""Pauses between attempts at a reply double from the first to the longest, within the request's deadline."""

_VERDICTS_OF_THE_AGENT = {ActionKind.FINISH: "finished", ActionKind.FAIL: "failed", ActionKind.ASK_USER: "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTools:
    """What every episode of a runner shares."""

    client: PolicyClient
    """Answers prompts."""
    dialect: Dialect
    """Writes prompts and reads replies."""
    blobs: BlobStore
    """Receives the screenshots."""
    clock: Clock
    """Time and blocking work."""
    meter: Meter
    """Receives the readings `envs/*` and `rollout/*`."""
    agent: AgentConfig
    """Limits of an episode."""
    reply_timeout_seconds: float
    """Deadline of one reply, retries included."""
    reward: Reward | None = None
    """Replaces the environment's verdict if set."""


async def run_episode(assignment: Assignment, environment: Environment, tools: EpisodeTools) -> Trajectory:
    """The attempt, however it ended; never raises for a broken episode.

    Cancelling asks the episode to end: the steps so far come back as `aborted:shutdown`, at once.
    """
    episode = _Episode(assignment, environment, tools)
    try:
        outcome = await episode.play()
    except asyncio.CancelledError:
        outcome = Outcome(End.ABORTED, "shutdown")
    except EnvironmentFault as fault:
        outcome = Outcome(End.ENV_ERROR, fault.kind, detail=_one_line(fault))
    except EvaluatorFault as fault:
        outcome = Outcome(End.EVALUATOR_ERROR, "evaluator", detail=_one_line(fault))
    except PolicyFault as fault:
        outcome = Outcome(End.MODEL_ERROR, _policy_reason(fault), detail=_one_line(fault))
    except Exception as error:  # noqa: BLE001 - a broken episode becomes a record
        log.exception("episode broke trajectory=%s task=%s stage=%s", assignment.trajectory_id, assignment.task.id, episode.stage)
        outcome = Outcome(_UNEXPECTED[episode.stage], "crash", detail=_one_line(error))
    return episode.trajectory(outcome)


def unplayed_trajectory(assignment: Assignment, outcome: Outcome, at: float) -> Trajectory:
    """The record of an assignment for which no environment could be had."""
    task = assignment.task
    return Trajectory(assignment.trajectory_id, task, task.instruction, (), outcome, started_at=at, finished_at=at)


def reply_seed(sampling_seed: int, step: int) -> int:
    """Seed of the reply at a step, in [0, 2^63): equal for equal arguments, unrelated for different ones."""
    digest = hashlib.sha256(f"{sampling_seed}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


_UNEXPECTED = {"agent": End.ABORTED, "environment": End.ENV_ERROR, "evaluator": End.EVALUATOR_ERROR}


class _Episode:
    """State of one attempt while it runs."""

    def __init__(self, assignment: Assignment, environment: Environment, tools: EpisodeTools) -> None:
        self.stage = "agent"
        self._assignment = assignment
        self._environment = environment
        self._tools = tools
        self._clock = tools.clock
        self._started_at = tools.clock.now()
        self._instruction = assignment.task.instruction
        self._versions: dict[str, str] = {}
        self._steps: list[Step] = []
        self._num_parse_errors = 0
        self._repeats = _RepeatCounter()
        self._recent: deque[tuple[str, bytes]] = deque(maxlen=max(1, tools.dialect.history_images))

    # ------------------------------------------------------------------ the loop

    async def play(self) -> Outcome:
        """How the attempt ended. Raises the fault that broke it."""
        observation = await self._in_environment("reset", self._environment.reset(self._assignment.task))
        self._instruction = observation.instruction or self._assignment.task.instruction
        self._versions = dict(self._environment.versions())
        image = await self._store_screenshot(observation)
        error_text = ""
        while not observation.done:
            limit = self._limit_reached()
            if limit:
                return await self._score(End.TRUNCATED, limit)
            step = await self._ask(observation, image, error_text)
            ending = _ending(step.actions)
            to_do = step.actions[:-1] if ending else step.actions
            if to_do:
                observation = await self._act(step, to_do)
                image = await self._store_screenshot(observation)
            else:
                self._steps.append(step)
            if ending:
                return await self._score(End.TERMINATED, ending)
            error_text = step.parse_error.message if step.parse_error else ""
        return await self._score(End.TERMINATED, "environment")

    async def _ask(self, observation: Observation, image: ImageRef | None, error_text: str) -> Step:
        """The next step as far as the policy decides it."""
        started_at = self._clock.now()
        if error_text:
            observation = replace(observation, text=f"{observation.text}\n{error_text}".lstrip())
        generation = await self._generate(self._request(observation, image))
        screen = (observation.width, observation.height)
        parsed = self._read(generation, screen)
        self._num_parse_errors += isinstance(parsed, ParseError)
        return Step(
            index=len(self._steps),
            screenshot=self._recent[-1][0] if observation.screenshot else None,
            screen=screen,
            observation_text=observation.text,
            generation=generation,
            actions=() if isinstance(parsed, ParseError) else parsed,
            parse_error=parsed if isinstance(parsed, ParseError) else None,
            environment_seconds=0.0,
            started_at=started_at,
        )

    async def _act(self, step: Step, actions: tuple[Action, ...]) -> Observation:
        """What is seen after the actions; the step is recorded even if they fail."""
        self._repeats.add((step.screenshot, step.observation_text, step.actions))
        started = self._clock.now()
        try:
            return await self._in_environment("step", self._environment.step(actions))
        finally:
            self._steps.append(replace(step, environment_seconds=self._clock.now() - started))

    def _limit_reached(self) -> str | None:
        agent = self._tools.agent
        if len(self._steps) >= self._assignment.max_steps:
            return "steps"
        if self._num_parse_errors >= agent.max_parse_errors:
            return "parse_errors"
        if self._repeats.count >= LOOP_REPEATS:
            return "loop"
        if self._clock.now() - self._started_at >= agent.episode_timeout_seconds:
            return "time"
        return None

    # ------------------------------------------------------------------ policy

    def _request(self, observation: Observation, image: ImageRef | None) -> GenerateRequest:
        dialect = self._tools.dialect
        index = len(self._steps)
        messages = tuple(dialect.messages(self._instruction, self._steps, observation, image))
        wanted = {part.hash for message in messages for part in message.parts if isinstance(part, ImageRef)}
        return GenerateRequest(
            id=f"{self._assignment.trajectory_id}/{index}",
            messages=messages,
            images={hash: data for hash, data in self._recent if hash in wanted},
            temperature=self._assignment.temperature,
            max_tokens=dialect.max_reply_tokens,
            seed=reply_seed(self._assignment.sampling_seed, index),
            affinity=self._assignment.trajectory_id,
        )

    async def _generate(self, request: GenerateRequest) -> Generation:
        """A reply, asked for again after pauses while the service is full or away, until the deadline."""
        meter, timeout = self._tools.meter, self._tools.reply_timeout_seconds
        fault: PolicyFault = PolicyUnavailable(f"no reply to {request.id} within {timeout:g} s")
        pause = FIRST_PAUSE_SECONDS
        started = self._clock.now()
        try:
            async with self._clock.timeout(timeout):
                while True:
                    try:
                        generation = await self._tools.client.generate(request)
                        meter.observe("rollout/reply_seconds", self._clock.now() - started)
                        return generation
                    except (PolicyOverloaded, PolicyUnavailable) as error:
                        fault = error
                    meter.add("rollout/retries")
                    await self._clock.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        except TimeoutError:
            raise fault from None
        finally:
            meter.add("rollout/policy_wait_seconds", self._clock.now() - started)

    def _read(self, generation: Generation, screen: tuple[int, int]) -> tuple[Action, ...] | ParseError:
        if generation.finish_reason == "length":
            limit = len(generation.response_ids)
            return ParseError("truncated", f"The reply was cut off after {limit} tokens. Give a shorter one.")
        parsed = self._tools.dialect.parse(generation.text, screen)
        if isinstance(parsed, ParseError):
            return parsed
        return parsed[: _first_ending(parsed)] or ParseError("no_action", "The reply contains no action.")

    # ------------------------------------------------------------------ environment

    async def _in_environment(self, operation: str, call: Awaitable[T]) -> T:
        """Result of an operation of the environment, timed; `stage` tells where an unexpected error came from."""
        self.stage = "evaluator" if operation == "evaluate" else "environment"
        started = self._clock.now()
        try:
            result = await call
        finally:
            seconds = self._clock.now() - started
            self._tools.meter.observe(f"envs/{operation}_seconds", seconds)
            self._tools.meter.add("envs/busy_seconds", seconds)
        self.stage = "agent"
        return result

    async def _store_screenshot(self, observation: Observation) -> ImageRef | None:
        """Reference to the stored screenshot; only those that a prompt may still show stay in memory."""
        if observation.screenshot is None:
            return None
        hash = await self._clock.run_blocking(self._tools.blobs.put, observation.screenshot)
        self._recent.append((hash, observation.screenshot))
        if self._tools.dialect.history_images == 0:
            return None
        return ImageRef(hash, observation.width, observation.height)

    # ------------------------------------------------------------------ outcome

    async def _score(self, end: End, reason: str) -> Outcome:
        """The scored outcome. A task marked `infeasible` is solved by saying so, and by nothing else."""
        is_infeasible = self._assignment.task.spec.get("infeasible") is True
        if reason == "failed" or is_infeasible:
            solved = is_infeasible and reason == "failed"
            verdict = Verdict(score=float(solved), success=solved, raw=float(solved))
        else:
            verdict = await self._in_environment("evaluate", self._environment.evaluate())
        outcome = _scored(end, reason, verdict, raw=verdict.raw)
        if self._tools.reward is not None:
            self.stage = "evaluator"
            outcome = _scored(end, reason, self._tools.reward(self.trajectory(outcome), verdict), raw=verdict.raw)
        return outcome

    def trajectory(self, outcome: Outcome) -> Trajectory:
        """The record of the attempt as it stands."""
        return Trajectory(
            id=self._assignment.trajectory_id,
            task=self._assignment.task,
            instruction=self._instruction,
            steps=tuple(self._steps),
            outcome=outcome,
            started_at=self._started_at,
            finished_at=self._clock.now(),
            environment=self._versions,
        )


class _RepeatCounter:
    """How often in a row the same thing was added."""

    def __init__(self) -> None:
        self.count = 0
        self._last: object = None

    def add(self, thing: object) -> None:
        self.count = self.count + 1 if thing == self._last else 1
        self._last = thing


def _ending(actions: tuple[Action, ...]) -> str | None:
    return _VERDICTS_OF_THE_AGENT.get(actions[-1].kind) if actions else None


def _first_ending(actions: tuple[Action, ...]) -> int:
    """Number of actions up to the first that ends the episode, itself included."""
    for index, action in enumerate(actions):
        if action.kind in _VERDICTS_OF_THE_AGENT:
            return index + 1
    return len(actions)


def _scored(end: End, reason: str, verdict: Verdict, *, raw: float) -> Outcome:
    if not (math.isfinite(verdict.score) and 0.0 <= verdict.score <= 1.0):
        raise EvaluatorFault(f"score is {verdict.score}; must be in [0, 1]")
    return Outcome(end, reason, score=verdict.score, success=verdict.success, raw=raw)


def _policy_reason(fault: PolicyFault) -> str:
    if isinstance(fault, PolicyOverloaded):
        return "overloaded"
    return "unavailable" if isinstance(fault, PolicyUnavailable) else "server"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]

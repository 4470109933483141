"""The episode loop against the clicking world of dartrl.testing.fakes."""

import asyncio
import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.config import AgentConfig
from dartrl.errors import EnvironmentTimeout, EvaluatorFault, PolicyFault, PolicyOverloaded, PolicyUnavailable
from dartrl.interfaces import ImageRef
from dartrl.metrics import Meter
from dartrl.rollout.episode import LOOP_REPEATS, EpisodeTools, reply_seed, run_episode
from dartrl.testing.clock import ManualClock, settle
from dartrl.testing.factories import make_assignment, make_task
from dartrl.testing.fakes import FakeDialect, FakeEnvironment, FakePolicyClient, Fault, Faults, crash
from dartrl.types import End, Observation, Trajectory, Verdict


class DictBlobs:
    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        hash = hashlib.sha256(data).hexdigest()
        self.stored[hash] = data
        return hash

    def get(self, hash: str) -> bytes:
        return self.stored[hash]

    def __contains__(self, hash: str) -> bool:
        return hash in self.stored


def make_tools(client: FakePolicyClient, clock: ManualClock | None = None, **changes) -> EpisodeTools:
    clock = clock or ManualClock()
    tools = EpisodeTools(
        client=client,
        dialect=FakeDialect(),
        blobs=DictBlobs(),
        clock=clock,
        meter=Meter(clock.now),
        agent=AgentConfig(),
        reply_timeout_seconds=60.0,
    )
    return replace(tools, **changes)


async def play(*replies: str, task=None, max_steps: int = 10, environment: FakeEnvironment | None = None, **changes) -> Trajectory:
    environment = environment or FakeEnvironment()
    assignment = make_assignment(task, max_steps=max_steps)
    trajectory = await run_episode(assignment, environment, make_tools(FakePolicyClient.scripted(*replies), **changes))
    assert environment.violations == []
    return trajectory


def ended(trajectory: Trajectory) -> tuple[End, str, float | None, bool | None]:
    outcome = trajectory.outcome
    return outcome.end, outcome.reason, outcome.score, outcome.success


async def test_an_episode_that_the_environment_ends_is_scored():
    trajectory = await play("click 3 3", "click 40 3")
    assert ended(trajectory) == (End.TERMINATED, "environment", 0.5, False)
    assert [step.index for step in trajectory.steps] == [0, 1]
    assert trajectory.instruction == "click 2 times on the left"
    assert trajectory.environment == {"renderer": "fake 1"}


async def test_finish_is_recorded_and_scored_as_the_screen_stands():
    trajectory = await play("click 3 3", "finish")
    assert ended(trajectory) == (End.TERMINATED, "finished", 0.5, False)
    assert trajectory.steps[-1].generation.text == "finish"
    assert trajectory.steps[-1].actions[0].kind == "finish"


async def test_actions_before_finish_in_one_reply_are_carried_out_and_those_after_it_dropped():
    trajectory = await play("click 3 3\nclick 3 4\nfinish\nclick 50 3")
    assert ended(trajectory) == (End.TERMINATED, "finished", 1.0, True)
    assert [action.kind for action in trajectory.steps[0].actions] == ["click", "click", "finish"]


@pytest.mark.parametrize(("infeasible", "score"), [(False, 0.0), (True, 1.0)])
async def test_giving_up_is_right_only_for_an_infeasible_task(infeasible: bool, score: float):
    trajectory = await play("fail", task=make_task(infeasible=infeasible))
    assert ended(trajectory) == (End.TERMINATED, "failed", score, infeasible)


async def test_finishing_an_infeasible_task_scores_nothing():
    trajectory = await play("click 3 3", "click 3 3", task=make_task(infeasible=True))
    assert ended(trajectory) == (End.TERMINATED, "environment", 0.0, False)


async def test_the_step_limit_truncates_and_scores():
    trajectory = await play("click 3 3", task=make_task(clicks=4), max_steps=2)
    assert ended(trajectory) == (End.TRUNCATED, "steps", 0.5, False)
    assert len(trajectory.steps) == 2


async def test_an_unreadable_reply_is_a_step_and_the_agent_sees_why():
    client = FakePolicyClient.scripted("jump", "click 3 3", "click 3 3")
    trajectory = await run_episode(make_assignment(), FakeEnvironment(), make_tools(client))
    assert ended(trajectory) == (End.TERMINATED, "environment", 1.0, True)
    first, second, third = trajectory.steps
    assert first.parse_error is not None and first.actions == ()
    assert "cannot read 'jump'" in second.observation_text
    assert second.screenshot == first.screenshot
    assert third.observation_text == ""
    assert client.requests[1].messages[-1].parts[-1] == second.observation_text


async def test_too_many_unreadable_replies_truncate():
    trajectory = await play("jump", agent=AgentConfig(max_parse_errors=2))
    assert ended(trajectory) == (End.TRUNCATED, "parse_errors", 0.0, False)
    assert len(trajectory.steps) == 2


async def test_a_reply_cut_off_by_its_length_is_never_carried_out():
    trajectory = await play("click 3 3", max_steps=1, dialect=FakeDialect(max_reply_tokens=4))
    (step,) = trajectory.steps
    assert step.parse_error is not None and step.parse_error.kind == "truncated"
    assert step.generation.finish_reason == "length"
    assert trajectory.outcome.score == 0.0


async def test_the_same_action_on_an_unchanged_screen_is_a_loop():
    trajectory = await play("wait", max_steps=50)
    assert ended(trajectory) == (End.TRUNCATED, "loop", 0.0, False)
    assert len(trajectory.steps) == LOOP_REPEATS


async def test_the_same_action_on_changing_screens_is_no_loop():
    trajectory = await play("click 3 3", task=make_task(clicks=LOOP_REPEATS + 3), max_steps=50)
    assert ended(trajectory) == (End.TERMINATED, "environment", 1.0, True)


async def test_the_time_limit_truncates():
    clock = ManualClock()
    tools = make_tools(
        FakePolicyClient.scripted("click 3 3", clock=clock, seconds=6.0), clock, agent=AgentConfig(episode_timeout_seconds=10.0)
    )
    task = asyncio.create_task(run_episode(make_assignment(make_task(clicks=9)), FakeEnvironment(), tools))
    await clock.advance(60.0)
    trajectory = await task
    assert ended(trajectory) == (End.TRUNCATED, "time", pytest.approx(2 / 9), False)
    assert len(trajectory.steps) == 2


async def test_a_crash_of_the_environment_keeps_the_steps_but_gives_no_score():
    environment = FakeEnvironment(faults=Faults([crash(1)]))
    trajectory = await play("click 3 3", environment=environment)
    assert ended(trajectory) == (End.ENV_ERROR, "crash", None, None)
    assert len(trajectory.steps) == 2
    assert "fake crash" in trajectory.outcome.detail


async def test_faults_of_each_side_have_their_own_end_and_no_score():
    cases = [
        (Fault("reset", 0, EnvironmentTimeout("slow", "reset")), End.ENV_ERROR, "reset"),
        (Fault("step", 0, KeyError("bug in a plug-in")), End.ENV_ERROR, "crash"),
        (Fault("evaluate", 0, EvaluatorFault("no reference")), End.EVALUATOR_ERROR, "evaluator"),
        (Fault("evaluate", 0, ZeroDivisionError()), End.EVALUATOR_ERROR, "crash"),
    ]
    for fault, end, reason in cases:
        trajectory = await play(
            "finish" if fault.operation == "evaluate" else "click 3 3", environment=FakeEnvironment(faults=Faults([fault]))
        )
        assert ended(trajectory) == (end, reason, None, None), fault


async def test_a_fault_of_the_policy_is_a_model_error_at_once():
    client = FakePolicyClient(faults=[Fault("generate", 0, PolicyFault("bad request"))])
    trajectory = await run_episode(make_assignment(), FakeEnvironment(), make_tools(client))
    assert ended(trajectory) == (End.MODEL_ERROR, "server", None, None)


async def test_a_full_or_absent_service_is_asked_again_with_the_same_request():
    clock = ManualClock()
    client = FakePolicyClient.scripted(
        "click 3 3", faults=[Fault("generate", 0, PolicyOverloaded("full")), Fault("generate", 1, PolicyUnavailable("restart"))]
    )
    tools = make_tools(client, clock)
    task = asyncio.create_task(run_episode(make_assignment(), FakeEnvironment(), tools))
    await clock.advance(1.0)
    trajectory = await task
    assert trajectory.outcome.end is End.TERMINATED
    assert len({request.id for request in client.requests[:3]}) == 1
    assert len({request.seed for request in client.requests[:3]}) == 1
    assert tools.meter.readings()["rollout/retries"] == 2


@pytest.mark.parametrize(("error", "reason"), [(PolicyOverloaded, "overloaded"), (PolicyUnavailable, "unavailable")])
async def test_retries_end_at_the_deadline(error: type[Exception], reason: str):
    clock = ManualClock()
    client = FakePolicyClient(faults=[Fault("generate", at, error("no")) for at in range(1000)])
    task = asyncio.create_task(
        run_episode(make_assignment(), FakeEnvironment(), make_tools(client, clock, reply_timeout_seconds=5.0))
    )
    await clock.advance(5.1)
    assert task.done()
    assert ended(await task) == (End.MODEL_ERROR, reason, None, None)


async def test_a_reply_that_never_comes_is_a_model_error_at_the_deadline():
    clock = ManualClock()
    client = FakePolicyClient(clock=clock, seconds=1e9)
    task = asyncio.create_task(run_episode(make_assignment(), FakeEnvironment(), make_tools(client, clock)))
    await clock.advance(61.0)
    assert ended(await task) == (End.MODEL_ERROR, "unavailable", None, None)


async def test_cancelling_hands_back_the_steps_so_far():
    clock = ManualClock()
    client = FakePolicyClient.scripted("click 3 3", clock=clock, seconds=1.0)
    task = asyncio.create_task(run_episode(make_assignment(make_task(clicks=9)), FakeEnvironment(), make_tools(client, clock)))
    await clock.advance(2.5)
    task.cancel()
    await settle(3)
    assert task.done()
    trajectory = await task
    assert ended(trajectory) == (End.ABORTED, "shutdown", None, None)
    assert len(trajectory.steps) == 2


async def test_screenshots_are_stored_and_only_the_history_window_is_sent():
    client = FakePolicyClient.scripted("click 3 3")
    tools = make_tools(client, dialect=FakeDialect(history_images=3))
    trajectory = await run_episode(make_assignment(make_task(clicks=6)), FakeEnvironment(), tools)
    hashes = [step.screenshot for step in trajectory.steps]
    assert len(set(hashes)) == 6
    assert all(hash in tools.blobs for hash in hashes)
    for index, request in enumerate(client.requests):
        assert list(request.images) == hashes[max(0, index - 2) : index + 1]
    for step in trajectory.steps:
        assert step.generation.image_hashes[-1] == step.screenshot


class TextEnvironment(FakeEnvironment):
    async def reset(self, task):
        return Observation(text="say finish", instruction="obey")

    async def evaluate(self):
        return Verdict(1.0, True, 1.0)


async def test_text_environments_fit_the_same_loop():
    client = FakePolicyClient.scripted("jump", "finish")
    tools = make_tools(client, dialect=FakeDialect(history_images=0))
    trajectory = await run_episode(make_assignment(), TextEnvironment(), tools)
    assert ended(trajectory) == (End.TERMINATED, "finished", 1.0, True)
    assert [step.screenshot for step in trajectory.steps] == [None, None]
    assert trajectory.steps[1].observation_text.startswith("say finish\ncannot read")
    assert not any(
        isinstance(part, ImageRef) for request in client.requests for message in request.messages for part in message.parts
    )


async def test_a_reward_plugin_replaces_the_score_and_the_raw_number_stays():
    def shorter_is_better(trajectory: Trajectory, verdict: Verdict) -> Verdict:
        return Verdict(verdict.score / len(trajectory.steps), verdict.success, -9.0)

    trajectory = await play("click 3 3", reward=shorter_is_better)
    assert (trajectory.outcome.score, trajectory.outcome.success, trajectory.outcome.raw) == (0.5, True, 1.0)


async def test_a_score_out_of_range_is_an_evaluator_error():
    trajectory = await play("click 3 3", reward=lambda _, verdict: Verdict(2.0, True, 1.0))
    assert ended(trajectory) == (End.EVALUATOR_ERROR, "evaluator", None, None)


async def test_equal_assignments_give_equal_episodes():
    first, second = [
        await run_episode(make_assignment(make_task(clicks=5)), FakeEnvironment(), make_tools(FakePolicyClient())) for _ in range(2)
    ]
    assert [step.generation.text for step in first.steps] == [step.generation.text for step in second.steps]
    assert first.outcome == second.outcome


@given(seed=st.integers(0, 2**63 - 1), steps=st.integers(2, 200))
def test_reply_seeds_are_distinct_and_in_range(seed: int, steps: int):
    seeds = [reply_seed(seed, step) for step in range(steps)]
    assert len(set(seeds)) == steps
    assert all(0 <= value < 2**63 for value in seeds)

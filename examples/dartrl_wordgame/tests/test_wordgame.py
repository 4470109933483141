"""The plug-in alone, against dartrl's conformance suite, and inside dartrl's own episode loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from dartrl_wordgame.dialect import WordDialect
from dartrl_wordgame.environment import WordGame, WordGamePool
from dartrl_wordgame.reward import letters
from dartrl_wordgame.task_set import SHAPES, WordTasks, make_task

from dartrl.config import AgentConfig, load_recipe
from dartrl.errors import ConfigError
from dartrl.interfaces import Dialect, EnvironmentPool, TaskSet
from dartrl.launch.plugins import create_dialect, create_pool, create_task_set, load_reward
from dartrl.metrics import Meter
from dartrl.rollout.episode import EpisodeTools, run_episode
from dartrl.testing.clock import ManualClock
from dartrl.testing.environment_conformance import ENVIRONMENT_CHECKS, open_bench
from dartrl.testing.factories import make_assignment
from dartrl.testing.fakes import FakePolicyClient
from dartrl.types import Action, ActionKind, End, Observation, ParseError, Task

RECIPE = Path(__file__).parents[1] / "wordgame-tiny-cpu.toml"
TYPED = "Thought: type\nAction: type(content='{}')"


def game(*rounds: list[str]):
    return make_assignment(Task("game/0", "game", 0, spec={"rounds": list(rounds)}))


async def play(assignment, *replies: str, reward=None):
    config = AgentConfig(dialect="wordgame", history_images=0, max_reply_tokens=400)
    clock = ManualClock()
    client = FakePolicyClient.scripted(*replies)
    tools = EpisodeTools(
        client=client,
        dialect=WordDialect(config),
        blobs=None,  # type: ignore[arg-type]  # a text environment stores no screenshots
        clock=clock,
        meter=Meter(clock.now),
        agent=config,
        reply_timeout_seconds=10.0,
        reward=reward,
    )
    return await run_episode(assignment, WordGame(), tools), client


@pytest.mark.parametrize("check", ENVIRONMENT_CHECKS, ids=lambda check: check.__name__)
async def test_the_game_keeps_the_promises_of_an_environment(check):
    tasks = make_task("rounds", 0, "train"), make_task("rounds", 1, "train")
    async with open_bench(lambda: WordGamePool(2), *tasks, actions=(Action(ActionKind.TYPE, text="x"),)) as bench:
        await check(bench)


def test_the_recipe_finds_every_part_by_its_entry_point():
    config = load_recipe(RECIPE)
    dialect = create_dialect(config.agent)
    pool = create_pool(config, ManualClock())
    tasks = create_task_set(config.tasks.set)
    assert isinstance(dialect, WordDialect) and dialect.max_reply_tokens == 24
    assert isinstance(pool, WordGamePool) and pool.size == 16
    assert isinstance(tasks, TaskSet) and len(tasks.tasks(config.tasks.families, "train", 5)) == 15
    assert load_reward(config.environment.reward) is letters


async def test_saying_the_first_word_in_every_round_wins():
    trajectory, client = await play(game(["cat", "dog"], ["sun"]), TYPED.format("cat"), TYPED.format("sun"))
    assert (trajectory.outcome.end, trajectory.outcome.reason) == (End.TERMINATED, "environment")
    assert trajectory.outcome.success and trajectory.outcome.score == 1.0
    assert [step.observation_text for step in trajectory.steps] == ['"cat" "dog"', '"sun"']
    assert [request.messages[0].parts for request in client.requests] == [
        ('Enter the username "cat" and the password "dog" into the text fields and press login.\nclick(80,64)',),
        ('Enter "sun" into the text field and press Submit.\nclick(80,64)',),
    ]


async def test_half_a_word_earns_half_a_point_but_no_success():
    trajectory, _ = await play(game(["table"], ["cats"]), TYPED.format("table"), TYPED.format("cake"), reward=letters)
    assert trajectory.outcome.score == pytest.approx((1 + 2 / 4) / 2)
    assert trajectory.outcome.success is False and trajectory.outcome.raw == 1.0


async def test_an_unreadable_reply_leaves_the_words_in_place():
    trajectory, client = await play(game(["cat"]), "I say cat", TYPED.format("cat"), reward=letters)
    assert trajectory.outcome.success and trajectory.outcome.score == 1.0
    assert trajectory.steps[0].parse_error is not None
    assert client.requests[0].messages == client.requests[1].messages


async def test_longer_words_are_no_shorter_words():
    trajectory, _ = await play(game(["cat"]), TYPED.format("cats"), reward=letters)
    assert trajectory.outcome.score == pytest.approx(3 / 4) and not trajectory.outcome.success


def test_only_typing_is_an_action():
    dialect = WordDialect(AgentConfig())
    assert dialect.parse(TYPED.format("it\\'s"), (0, 0)) == (Action(ActionKind.TYPE, text="it's"),)
    refused = dialect.parse("Action: click(start_box='(1,2)')", (0, 0))
    assert isinstance(refused, ParseError) and "type(content='word')" in refused.message


def test_words_cannot_spell_special_tokens():
    (message,) = WordDialect(AgentConfig()).messages("", (), Observation(text='"<|im_end|>"'), None)
    assert "<|im_end|>" not in str(message.parts)


@pytest.mark.parametrize("family", SHAPES)
def test_tasks_are_reproducible_and_splits_share_neither_seeds_nor_words(family):
    first, second = WordTasks().tasks([family], "train", 30), WordTasks().tasks([family], "train", 30)
    held_out = WordTasks().tasks([family], "evaluation", 30)
    assert first == second and len({task.id for task in first}) == 30
    assert not {task.seed for task in first} & {task.seed for task in held_out}
    assert not words_of(first) & words_of(held_out)
    assert all(len(words) == count for task in first for words, count in zip(task.spec["rounds"], SHAPES[family], strict=True))


def words_of(tasks) -> set[str]:
    return {word for task in tasks for words in task.spec["rounds"] for word in words}


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean rounds"):
        WordTasks().tasks(["round"], "train", 1)


def test_every_part_fits_its_interface():
    dialect: Dialect = WordDialect(AgentConfig())
    pool: EnvironmentPool = WordGamePool(1)
    assert (dialect.name, pool.size) == ("wordgame", 1)

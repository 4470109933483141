"""Supervised training: schedules, and a miniature of both stages that learns."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dartrl.agent.demonstration import (
    SCREENS_FILE,
    STATES_FILE,
    SUMMARY_FILE,
    DemonstratedState,
    Element,
    ExpertAction,
    state_to_json,
)
from dartrl.policy.model import PolicyShape, load_policy
from dartrl.testing.clock import ManualClock
from dartrl.train.next_action import is_right
from dartrl.train.supervised import (
    PROGRESS_FILE,
    CopyStage,
    JointStage,
    StageConfig,
    SupervisedPlan,
    create_initial_policy,
    learning_rate_share,
    page_share,
    train_policy,
)
from dartrl.types import ActionKind

HEIGHT, WIDTH = 84, 84
SMALL = PolicyShape(
    text_width=64, text_layers=2, text_heads=2, text_kv_heads=1, text_mlp=96, vision_width=32, vision_heads=2, vision_layers=1
)


def write_squares(folder: Path, count: int) -> None:
    """States whose task is to click a dark square or to type a quoted word."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    states, screens = [], []
    for seed in range(count):
        x, y = (int(value) * 4 for value in random.integers(2, 16, size=2))
        screen = np.full((HEIGHT, WIDTH, 3), 255, dtype=np.uint8)
        screen[y : y + 16, x : x + 16] = 0
        elements = (Element("square", (x, y, 16, 16), "div"),)
        word = "".join(random.choice(list("abcdef"), size=2))
        click = ("click", "Click the square.", ExpertAction(ActionKind.CLICK, "square", (x, y, 16, 16)))
        typing = ("type", f'Enter "{word}".', ExpertAction(ActionKind.TYPE, "type", text=word))
        family, instruction, expert = click if seed % 4 else typing
        states.append(DemonstratedState(family, seed, 0, instruction, (), expert, elements))
        screens.append(screen)
    (folder / STATES_FILE).write_text("".join(json.dumps(state_to_json(state)) + "\n" for state in states))
    (folder / SCREENS_FILE).write_bytes(np.stack(screens).tobytes())
    (folder / SUMMARY_FILE).write_text(json.dumps({"states": count, "height": HEIGHT, "width": WIDTH}))


def test_learning_rate_warms_up_stays_and_decays() -> None:
    stage = StageConfig(steps=100, warmup_steps=10, constant_share=0.5, final_share=0.1)
    shares = [learning_rate_share(stage, step) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert set(shares[9:50]) == {1.0}
    assert all(earlier >= later for earlier, later in zip(shares[50:], shares[51:], strict=False))
    assert 0.1 <= shares[-1] < 0.12


def test_share_of_pages_falls_and_stays() -> None:
    stage = JointStage(steps=100, first_page_share=0.6, last_page_share=0.2, page_decay=0.5)
    assert page_share(stage, 0) == 0.6
    assert page_share(stage, 25) == pytest.approx(0.4)
    assert page_share(stage, 50) == page_share(stage, 99) == pytest.approx(0.2)


def test_right_action_is_judged_by_words_and_boxes() -> None:
    expert = ExpertAction(ActionKind.DRAG, "small box", (10, 60, 20, 20), (90, 80, 28, 28))
    state = DemonstratedState("drag-box", 0, 0, "Drag.", (), expert, ())
    assert is_right("Thought: small box\nAction: drag(start_box='(12,78)', end_box='(92,104)')", state)
    assert not is_right("Thought: small box\nAction: drag(start_box='(12,78)', end_box='(92,120)')", state)
    assert not is_right("Thought: large box\nAction: drag(start_box='(12,78)', end_box='(92,104)')", state)
    assert not is_right("Thought: small box\nAction: click(start_box='(12,78)')", state)
    typing = DemonstratedState("enter-text", 0, 0, "Type.", (), ExpertAction(ActionKind.TYPE, "type", text="aB"), ())
    assert is_right("Thought: type\nAction: type(content='aB')", typing)
    assert not is_right("Thought: type\nAction: type(content='Ab')", typing)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_miniature_pretraining_learns_to_point_and_copy(tmp_path: Path, processes: int) -> None:
    torch.set_num_threads(1)
    write_squares(tmp_path / "demonstrations", 240)
    write_squares(tmp_path / "pages", 40)
    plan = SupervisedPlan(
        collection=tmp_path / "demonstrations",
        pages=tmp_path / "pages",
        work_dir=tmp_path,
        copy=CopyStage(steps=40, text_rows=8, measure_every=40, warmup_steps=5),
        joint=JointStage(steps=60, screens=6, text_rows=4, measure_every=10, keep_every=30, warmup_steps=5),
        seed=0,
        processes=processes,
    )
    create_initial_policy(plan, 800, SMALL)
    folder = train_policy(plan, ManualClock)
    lines = [json.loads(line) for line in (tmp_path / PROGRESS_FILE).read_text().splitlines()]
    joint = [line for line in lines if line["stage"] == "joint"]
    assert [line["step"] for line in joint] == [10, 20, 30, 40, 50, 60]
    assert joint[-1]["loss"] < 0.6 * joint[0]["loss"]
    assert plan.stage(30).exists() and folder == plan.stage(60)
    weights = load_policy(folder).model.state_dict()
    start = load_policy(plan.initial).model.state_dict()
    assert all(not torch.equal(weights[name], start[name]) for name in ("lm_head.weight", "model.visual.patch_embed.proj.weight"))

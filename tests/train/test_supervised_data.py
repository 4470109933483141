"""Lessons: exactly what the policy is asked later, and text that is replaced everywhere at once."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dartrl.agent.compact import CompactDialect
from dartrl.agent.demonstration import SUMMARY_FILE, DemonstratedState, Element, ExpertAction
from dartrl.config import AgentConfig
from dartrl.errors import ConfigError
from dartrl.interfaces import ImageRef, Message
from dartrl.policy.inputs import encode_prompt, image_of_pixels
from dartrl.policy.model import Policy, PolicyShape, build_policy, build_tokenizer
from dartrl.train.supervised_data import (
    ADDED_TOKENS,
    CopyLessons,
    LessonWriter,
    askable,
    expert_reply,
    load_collection,
    screen_turns,
    task_text,
    tokenizer_corpus,
)
from dartrl.types import Action, ActionKind

SCREEN = (168, 224)
LOGIN = 'Enter the username "vinnie" and the password "aB3x" into the text fields and press login.'
HISTORY = (Action(ActionKind.CLICK, x=72, y=84), Action(ActionKind.TYPE, text="vinnie"), Action(ActionKind.CLICK, x=60, y=140))
TYPING = DemonstratedState(
    "login-user",
    1,
    3,
    LOGIN,
    HISTORY,
    ExpertAction(ActionKind.TYPE, "type", text="aB3x"),
    (Element("Login", (2, 150, 60, 30), "button"),),
)
DRAGGING = DemonstratedState(
    "drag-box",
    2,
    0,
    "Drag the smaller box so that it is completely inside the larger box.",
    (),
    ExpertAction(ActionKind.DRAG, "small box", (10, 60, 20, 20), (90, 80, 28, 28)),
    (
        Element("small box", (10, 60, 20, 20), "div"),
        Element("Submit", (2, 170, 90, 28), "button"),
        Element("Submit", (20, 180, 30, 9), "word"),
    ),
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = build_tokenizer(
        tokenizer_corpus([TYPING, DRAGGING], np.random.default_rng(0)), vocab_size=900, added_tokens=ADDED_TOKENS
    )
    shape = PolicyShape(text_width=32, text_layers=1, text_mlp=32, text_heads=2, vision_width=24, vision_heads=2, vision_layers=1)
    return build_policy(tokenizer, shape, seed=0)


def tokens(policy: Policy, text: str) -> list[str]:
    return policy.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens


def test_a_coordinate_is_one_token_and_a_click_is_nine(policy: Policy) -> None:
    assert all(len(tokens(policy, str(number))) == 1 for number in range(256))
    reply = expert_reply(ExpertAction(ActionKind.CLICK, "Login", (2, 150, 60, 30)), SCREEN) + "<|im_end|>"
    assert len(tokens(policy, reply)) == 9


def test_replies_are_read_back_as_the_same_action() -> None:
    dialect = CompactDialect(AgentConfig())
    for expert in (TYPING.expert, DRAGGING.expert, ExpertAction(ActionKind.SCROLL, "textarea", (0, 50, 100, 90), direction="down")):
        assert expert is not None
        assert dialect.parse(expert_reply(expert, SCREEN), SCREEN) == (expert.at_centers(4),)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_typed_text_arrives_exactly(text: str) -> None:
    expert = ExpertAction(ActionKind.TYPE, "type", text=text)
    parsed = CompactDialect(AgentConfig()).parse(expert_reply(expert, SCREEN), SCREEN)
    assert parsed == (Action(ActionKind.TYPE, text=text),)


@pytest.mark.parametrize("has_image", [True, False])
def test_row_begins_with_the_ids_of_the_prompt(policy: Policy, has_image: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (224, 168, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    question = task_text(LOGIN, HISTORY)
    image = image_of_pixels(policy.settings, pixels, "one") if has_image else None
    parts = (ImageRef("one", 168, 224), question) if has_image else (question,)
    prompt = encode_prompt(policy, (Message("user", parts),), {"one": buffer.getvalue()})
    row = LessonWriter(policy).row([(question, "Thought: type"), ('"Login"', "Login")], image)
    length = len(prompt.ids_S)
    assert row.ids_S[:length].tolist() == prompt.ids_S.tolist()
    assert row.positions_3S[:, :length].tolist() == prompt.positions_3S.tolist()
    assert not row.is_label_S[:length].any()
    labelled = policy.tokenizer.decode(row.ids_S[row.is_label_S])
    assert labelled == "Thought: type<|im_end|>Login<|im_end|>"


def test_copied_strings_are_replaced_in_sentence_history_and_answer() -> None:
    lessons, random = CopyLessons([TYPING]), np.random.default_rng(0)
    seen: set[str] = set()
    for _ in range(50):
        question, answer = lessons.turn(random)
        user, password = re.findall(r'"(.*?)"', question)
        assert f"type({user})" in question
        assert answer == f"Thought: type\nAction: type(content='{password}')"
        seen.add(password)
    assert len(seen) > 40


def test_copying_needs_a_typing_step() -> None:
    with pytest.raises(ConfigError, match="types"):
        CopyLessons([DRAGGING])


def test_questions_name_each_thing_once() -> None:
    assert [element.label for element in askable(DRAGGING.elements)] == ["small box", "Submit"]
    twice = (Element("ok", (0, 60, 20, 20), "button"), Element("ok", (50, 60, 20, 20), "button"))
    assert askable(twice) == []


def test_first_turn_of_a_screen_is_its_task() -> None:
    turns = screen_turns(DRAGGING, 4, np.random.default_rng(0), SCREEN)
    assert turns[0] == (DRAGGING.instruction, "Thought: small box\nAction: drag(start_box='(20,72)', end_box='(104,96)')")
    assert len(turns) == 2


def test_incomplete_collection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete collection"):
        load_collection(tmp_path)
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"states": 1, "height": 2, "width": 2}))
    (tmp_path / "states.jsonl").write_text("")
    (tmp_path / "screens.u8").write_bytes(bytes(12))
    with pytest.raises(ConfigError, match="0 states for 1 screens"):
        load_collection(tmp_path)

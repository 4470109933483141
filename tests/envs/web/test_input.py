"""Typed actions as input events: every key is known, text is never changed, points are never lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.agent.keys import CANONICAL_KEYS, MODIFIERS
from dartrl.envs.web.input import DRAG_MOVES, InputEvent, input_events
from dartrl.envs.web.keyboard import CHARACTER_KEYS, MODIFIER_BITS
from dartrl.errors import EnvironmentFault
from dartrl.types import Action, ActionKind


def keys_down(events: list[InputEvent]) -> list[dict]:
    return [dict(event.params) for event in events if event.params.get("type") in ("keyDown", "rawKeyDown")]


@pytest.mark.parametrize("key", sorted(CANONICAL_KEYS))
def test_every_canonical_key_is_on_the_keyboard(key):
    down, up = input_events(Action(ActionKind.PRESS, keys=(key,)))
    assert down.params["key"] == up.params["key"]
    assert down.params["windowsVirtualKeyCode"] > 0
    assert up.params["type"] == "keyUp"


def test_modifiers_are_those_of_the_agent():
    assert set(MODIFIERS) == set(MODIFIER_BITS)


def test_an_unknown_key_is_an_error():
    with pytest.raises(EnvironmentFault, match="'hyper' is not on the keyboard"):
        input_events(Action(ActionKind.PRESS, keys=("hyper",)))


def test_a_hotkey_holds_all_its_keys_and_writes_nothing():
    events = input_events(Action(ActionKind.HOTKEY, keys=("ctrl", "shift", "t")))
    assert [event.params["type"] for event in events] == ["rawKeyDown"] * 3 + ["keyUp"] * 3
    assert [event.params["key"] for event in events] == ["Control", "Shift", "T", "T", "Shift", "Control"]
    assert events[2].params["modifiers"] == MODIFIER_BITS["ctrl"] | MODIFIER_BITS["shift"]


def test_shift_alone_writes_the_upper_character():
    events = input_events(Action(ActionKind.HOTKEY, keys=("shift", "1")))
    assert keys_down(events)[-1]["text"] == "!"


@given(st.text(st.characters(codec="utf-8")))
def test_typed_text_is_sent_whole_and_in_order(text):
    written = ""
    for event in input_events(Action(ActionKind.TYPE, text=text)):
        if event.method == "Input.insertText" or event.params["type"] == "keyDown":
            written += event.params["text"]
    assert written == text.replace("\r\n", "\r").replace("\n", "\r")


@given(st.sampled_from(sorted(CHARACTER_KEYS)))
def test_a_character_is_typed_with_the_key_that_writes_it(character):
    (down,) = keys_down(input_events(Action(ActionKind.TYPE, text=character)))
    assert (down["key"], down["text"]) == (character, character)
    assert bool(down["modifiers"]) == (character in '~!@#$%^&*()_+{}|:"<>?' or character.isupper())


@pytest.mark.parametrize(
    ("kind", "button", "counts"),
    [
        (ActionKind.CLICK, "left", [1]),
        (ActionKind.DOUBLE, "left", [1, 2]),
        (ActionKind.RIGHT, "right", [1]),
        (ActionKind.MIDDLE, "middle", [1]),
    ],
)
def test_a_click_moves_presses_and_releases(kind, button, counts):
    move, *clicks = input_events(Action(kind, x=12.0, y=34.0))
    assert move.params == {"type": "mouseMoved", "x": 12.0, "y": 34.0}
    assert [event.params["type"] for event in clicks] == ["mousePressed", "mouseReleased"] * len(counts)
    assert [event.params["clickCount"] for event in clicks[::2]] == counts
    assert {event.params["button"] for event in clicks} == {button}


@given(*[st.integers(0, 223)] * 4)
def test_a_drag_goes_from_one_end_to_the_other_with_the_button_held(x, y, to_x, to_y):
    events = [event.params for event in input_events(Action(ActionKind.DRAG, x=x, y=y, to_x=to_x, to_y=to_y))]
    assert (events[1]["type"], events[1]["x"], events[1]["y"]) == ("mousePressed", x, y)
    assert (events[-1]["type"], events[-1]["x"], events[-1]["y"]) == ("mouseReleased", to_x, to_y)
    assert all(event["buttons"] == 1 for event in events[1:-1])
    assert len([event for event in events if event["type"] == "mouseMoved"]) == DRAG_MOVES + 1
    assert [event["button"] for event in events if event["type"] == "mouseReleased"] == ["none"] * DRAG_MOVES + ["left"]
    assert (events[-2]["x"], events[-2]["y"]) == (to_x, to_y)


def test_a_move_is_delivered_at_once():
    move, nothing = (event.params for event in input_events(Action(ActionKind.MOVE, x=3.0, y=4.0)))
    assert (move["type"], nothing["type"], nothing["button"]) == ("mouseMoved", "mouseReleased", "none")


@pytest.mark.parametrize("kind", [ActionKind.CLICK, ActionKind.MOVE, ActionKind.DRAG])
def test_a_missing_point_is_an_error_and_never_a_guess(kind):
    with pytest.raises(EnvironmentFault, match="has no point"):
        input_events(Action(kind))


def test_a_scroll_without_a_point_happens_in_the_middle():
    (event,) = input_events(Action(ActionKind.SCROLL, direction="right"))
    assert "(innerWidth / 2, innerHeight / 2, " in event.params["expression"]


@pytest.mark.parametrize("kind", [ActionKind.WAIT, ActionKind.FINISH, ActionKind.FAIL, ActionKind.ASK_USER])
def test_some_actions_touch_nothing(kind):
    assert input_events(Action(kind, text="done")) == []

"""Demonstrated states: JSON and back, and where actions land."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dartrl.agent.demonstration import (
    DemonstratedState,
    Element,
    ExpertAction,
    expert_from_json,
    is_inside,
    state_from_json,
    state_to_json,
)
from dartrl.types import Action, ActionKind

coordinates = st.floats(0, 200).map(lambda value: round(value, 1))
boxes = st.tuples(coordinates, coordinates, coordinates, coordinates)
labels = st.text(max_size=12)
directions = st.sampled_from(["up", "down", "left", "right"])
experts = st.one_of(
    st.builds(lambda label, box: ExpertAction(ActionKind.CLICK, label, box), labels, boxes),
    st.builds(lambda label, box, to: ExpertAction(ActionKind.DRAG, label, box, to), labels, boxes, boxes),
    st.builds(lambda text: ExpertAction(ActionKind.TYPE, "type", text=text), labels),
    st.builds(lambda box, where: ExpertAction(ActionKind.SCROLL, "area", box, direction=where), boxes, directions),
)
actions = st.one_of(
    st.builds(lambda x, y: Action(ActionKind.CLICK, x=x, y=y), coordinates, coordinates),
    st.builds(lambda x, y: Action(ActionKind.DRAG, x=x, y=y, to_x=y, to_y=x), coordinates, coordinates),
    st.builds(lambda text: Action(ActionKind.TYPE, text=text), labels),
    st.builds(lambda x, where: Action(ActionKind.SCROLL, x=x, y=x, direction=where), coordinates, directions),
)
states = st.builds(
    DemonstratedState,
    family=st.sampled_from(["click-test", "drag-box"]),
    seed=st.integers(0, 10**8),
    index=st.integers(0, 9),
    instruction=st.text(max_size=30),
    history=st.lists(actions, max_size=5).map(tuple),
    expert=st.none() | experts,
    elements=st.lists(st.builds(Element, labels, boxes, st.sampled_from(["button", "word"])), max_size=4).map(tuple),
)


@given(states)
def test_state_survives_json(state: DemonstratedState) -> None:
    assert state_from_json(json.loads(json.dumps(state_to_json(state)))) == state


@given(boxes.filter(lambda box: box[2] >= 4 and box[3] >= 4), st.sampled_from([1, 2, 4]))
def test_centers_lie_in_the_box_on_the_grid(box: tuple[float, float, float, float], grid: int) -> None:
    action = ExpertAction(ActionKind.CLICK, "ok", box).at_centers(grid)
    assert action.x is not None and action.y is not None
    assert action.x % grid == 0 and action.y % grid == 0
    assert is_inside(action.x, action.y, box)


def test_drag_from_script_has_both_ends() -> None:
    expert = expert_from_json({"kind": "drag", "label": "small box", "box": [10, 60, 20, 20], "to": [100, 90, 28, 28]})
    assert expert.at_centers(4) == Action(ActionKind.DRAG, x=20, y=72, to_x=112, to_y=104)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="teleport"):
        expert_from_json({"kind": "teleport", "label": "x"})

"""Demonstrated states: what an expert would do on a screen, and what can be pointed at there. Pure records and their JSON.

Written by an environment's collector, read by supervised training; neither knows the other. A collection is one folder:
`states.jsonl` has a line per state, `screens.u8` the screens of its lines (rows x columns x RGB, one byte each, back to back),
and `collection.json`, written last, says that it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dartrl.types import Action, ActionKind

STATES_FILE = "states.jsonl"
SCREENS_FILE = "screens.u8"
SUMMARY_FILE = "collection.json"

Box = tuple[float, float, float, float]
"""Left, top, width, height in screen pixels."""


@dataclass(frozen=True, slots=True)
class Element:
    """Something on the screen that can be pointed at."""

    label: str
    """Its words, or what it is."""
    box: Box
    """Where it is."""
    kind: str
    """Tag name, or `word` for a plain word of text."""


@dataclass(frozen=True, slots=True)
class ExpertAction:
    """The next correct action, with the boxes inside which it would be as good."""

    kind: ActionKind
    """click, type, drag or scroll."""
    label: str
    """The target in words; what a policy should think of first."""
    box: Box | None = None
    """Where the action begins; None for typing."""
    to_box: Box | None = None
    """Where a drag ends."""
    text: str = ""
    """Text to type."""
    direction: str | None = None
    """Direction of a scroll."""

    def at_centers(self, grid: int = 1) -> Action:
        """The action at the centres of its boxes, coordinates rounded to multiples of `grid` pixels."""
        x, y = _center(self.box, grid)
        to_x, to_y = _center(self.to_box, grid)
        return Action(self.kind, x=x, y=y, to_x=to_x, to_y=to_y, direction=self.direction, text=self.text)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class DemonstratedState:
    """One screen; without an expert action it only teaches perception."""

    family: str
    """Task family, or the name of a generator of pages."""
    seed: int
    """Seed of the episode or of the page."""
    index: int
    """0-based step of the episode."""
    instruction: str
    """The task in words; empty for pages without a task."""
    history: tuple[Action, ...]
    """Actions that led here, the expert's and disturbances."""
    expert: ExpertAction | None
    """What to do next."""
    elements: tuple[Element, ...]
    """What can be pointed at."""

    @property
    def order(self) -> tuple[str, int, int]:
        """Sorting key: independent of the order in which states were collected."""
        return self.family, self.seed, self.index


def is_inside(x: float, y: float, box: Box) -> bool:
    """True if the point lies in the box or on its edge."""
    left, top, width, height = box
    return left <= x <= left + width and top <= y <= top + height


def expert_from_json(data: Mapping[str, Any]) -> ExpertAction:
    """The action that an expert script returned."""
    return ExpertAction(
        kind=ActionKind(data["kind"]),
        label=data["label"],
        box=_box(data.get("box")),
        to_box=_box(data.get("to")),
        text=data.get("text") or "",
        direction=data.get("direction"),
    )


def state_to_json(state: DemonstratedState) -> dict[str, Any]:
    """A JSON-ready mapping."""
    expert = state.expert
    return {
        "family": state.family,
        "seed": state.seed,
        "index": state.index,
        "instruction": state.instruction,
        "history": [_action_to_json(action) for action in state.history],
        "expert": None
        if expert is None
        else {
            "kind": expert.kind.value,
            "label": expert.label,
            "box": expert.box,
            "to": expert.to_box,
            "text": expert.text,
            "direction": expert.direction,
        },
        "elements": [[element.label, *element.box, element.kind] for element in state.elements],
    }


def state_from_json(data: Mapping[str, Any]) -> DemonstratedState:
    """Inverse of `state_to_json`."""
    expert = data["expert"]
    return DemonstratedState(
        family=data["family"],
        seed=data["seed"],
        index=data["index"],
        instruction=data["instruction"],
        history=tuple(_action_from_json(action) for action in data["history"]),
        expert=None if expert is None else expert_from_json(expert),
        elements=tuple(element_from_json(element) for element in data["elements"]),
    )


def element_from_json(data: list[Any]) -> Element:
    """An element as a script lists it: label, left, top, width, height, kind."""
    label, left, top, width, height, kind = data
    return Element(str(label), (float(left), float(top), float(width), float(height)), str(kind))


def _action_to_json(action: Action) -> dict[str, Any]:
    fields = {name: getattr(action, name) for name in ("x", "y", "to_x", "to_y", "direction", "text")}
    return {"kind": action.kind.value, **{name: value for name, value in fields.items() if value not in (None, "")}}


def _action_from_json(data: Mapping[str, Any]) -> Action:
    fields = {name: value for name, value in data.items() if name != "kind"}
    return Action(ActionKind(data["kind"]), **fields)


def _box(values: Any) -> Box | None:
    if not values:
        return None
    left, top, width, height = values
    return float(left), float(top), float(width), float(height)


def _center(box: Box | None, grid: int) -> tuple[float | None, float | None]:
    if box is None:
        return None, None
    left, top, width, height = box
    return float(round((left + width / 2) / grid) * grid), float(round((top + height / 2) / grid) * grid)

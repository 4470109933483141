"""Typed actions as input events of the browser, each acknowledged before the next picture is taken.

`input_events` is pure. A page is handed mouse moves at its next frame or before the next other event, so each move is
followed by the release of no button, which no page can see; no frame is ever drawn while input is under way, because
the two together can hang the frame, and with it the browser (seen with Chromium 156 on a busy machine). For the same
reason scrolling is done by script and not by a wheel event.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dartrl.envs.web.browser import Page
from dartrl.envs.web.keyboard import CHARACTER_KEYS, MODIFIER_BITS, NAMED_KEYS, SHIFT, Key
from dartrl.errors import EnvironmentFault
from dartrl.interfaces import Clock
from dartrl.types import Action, ActionKind

SCROLL_PIXELS = 100
"""Distance of one scroll action; half the height of the smallest screen."""

DRAG_MOVES = 8
"""Mouse moves between the two ends of a drag."""

WAIT_SECONDS = 0.5
"""Length of the wait action."""

TEXT_RUNS = re.compile(r"\r\n|[\r\n]|[ -~]|[^\r\n -~]+")
"""Line ends, keys of the keyboard one by one, and runs of everything else (so that no combined character is torn)."""

BUTTONS = {"left": 1, "right": 2, "middle": 4}
"""Bits of the `buttons` field."""

SCROLL_DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
"""Signs of the horizontal and vertical distance."""

SCROLL_SCRIPT = """((x, y, dx, dy) => {
  let element = document.elementFromPoint(x, y) || document.scrollingElement;
  const options = {deltaX: dx, deltaY: dy, clientX: x, clientY: y, bubbles: true, cancelable: true, composed: true};
  if (!element.dispatchEvent(new WheelEvent('wheel', options))) return;
  for (; element; element = element.parentElement) {
    const style = getComputedStyle(element);
    const scrolls = /auto|scroll|overlay/.test(dy ? style.overflowY : style.overflowX);
    if (!scrolls && element !== document.scrollingElement) continue;
    const [left, top] = [element.scrollLeft, element.scrollTop];
    element.scrollBy({left: dx, top: dy, behavior: 'instant'});
    if (element.scrollLeft !== left || element.scrollTop !== top) return;
  }
})"""
"""What a wheel does: an event that the page may cancel, then the innermost box under the pointer that can still move."""


@dataclass(frozen=True, slots=True)
class InputEvent:
    """One DevTools command."""

    method: str
    """Command name."""
    params: Mapping[str, Any]
    """Its parameters."""


async def perform(page: Page, action: Action, clock: Clock) -> None:
    """Carry out one action and wait until the page has received it. Sends nothing twice. Raises EnvironmentFault."""
    if action.kind is ActionKind.WAIT:
        await clock.sleep(WAIT_SECONDS)
        return
    sent = [page.send(event.method, event.params) for event in input_events(action)]
    if sent:
        await page.collect(sent, f"the input events of {action.kind}")


def input_events(action: Action) -> list[InputEvent]:
    """The events of one action, in order; empty for kinds that do not touch the page."""
    kind = action.kind
    if kind in (ActionKind.CLICK, ActionKind.DOUBLE, ActionKind.RIGHT, ActionKind.MIDDLE):
        return _clicks(action)
    if kind is ActionKind.MOVE:
        return pointer_moves(*_point(action))
    if kind is ActionKind.DRAG:
        return _drag(action)
    if kind is ActionKind.SCROLL:
        return [_scroll(action)]
    if kind is ActionKind.TYPE:
        return [event for run in TEXT_RUNS.findall(action.text) for event in _typed(run)]
    if kind is ActionKind.PRESS:
        return [event for name in action.keys for event in _chord((name,))]
    if kind is ActionKind.HOTKEY:
        return _chord(action.keys)
    return []


def _clicks(action: Action) -> list[InputEvent]:
    button = {ActionKind.RIGHT: "right", ActionKind.MIDDLE: "middle"}.get(action.kind, "left")
    x, y = _point(action)
    events = [_mouse("mouseMoved", x, y)]  # the press that follows delivers it
    for count in (1, 2) if action.kind is ActionKind.DOUBLE else (1,):
        events.append(_mouse("mousePressed", x, y, button=button, buttons=BUTTONS[button], clickCount=count))
        events.append(_mouse("mouseReleased", x, y, button=button, buttons=0, clickCount=count))
    return events


def _drag(action: Action) -> list[InputEvent]:
    x, y = _point(action)
    if action.to_x is None or action.to_y is None:
        raise EnvironmentFault(f"action {action.kind} has no target", "guest_api")
    held: dict[str, Any] = {"button": "left", "buttons": BUTTONS["left"]}
    events = [_mouse("mouseMoved", x, y), _mouse("mousePressed", x, y, clickCount=1, **held)]
    for move in range(1, DRAG_MOVES + 1):
        share = move / DRAG_MOVES
        between = (x + (action.to_x - x) * share, y + (action.to_y - y) * share)
        events += pointer_moves(*between, **held)
    events.append(_mouse("mouseReleased", action.to_x, action.to_y, button="left", buttons=0, clickCount=1))
    return events


def _scroll(action: Action) -> InputEvent:
    x, y = ("innerWidth / 2", "innerHeight / 2") if action.x is None else _point(action)
    across, down = SCROLL_DIRECTIONS[action.direction or "down"]
    call = f"{SCROLL_SCRIPT}({x}, {y}, {across * SCROLL_PIXELS}, {down * SCROLL_PIXELS})"
    return InputEvent("Runtime.evaluate", {"expression": call})


def _typed(run: str) -> list[InputEvent]:
    if run in ("\n", "\r", "\r\n"):
        return _press(NAMED_KEYS["enter"], 0)
    if run in CHARACTER_KEYS:
        key = CHARACTER_KEYS[run]
        return _press(key, SHIFT if key.shifted else 0)
    return [InputEvent("Input.insertText", {"text": run})]


def _chord(names: tuple[str, ...]) -> list[InputEvent]:
    """All keys down in order, then up in reverse."""
    modifiers = 0
    down: list[InputEvent] = []
    up: list[InputEvent] = []
    for name in names:
        modifiers |= MODIFIER_BITS.get(name, 0)
        key = _key(name, shifted=bool(modifiers & SHIFT))
        pressed, released = _press(key, modifiers)
        down.append(pressed)
        up.append(released)
    return down + up[::-1]


def _key(name: str, *, shifted: bool) -> Key:
    if shifted and len(name) == 1:
        plain = CHARACTER_KEYS.get(name)
        for key in CHARACTER_KEYS.values():
            if plain is not None and key.shifted and key.code == plain.code:
                return key
    found = NAMED_KEYS.get(name) or CHARACTER_KEYS.get(name)
    if found is None:
        raise EnvironmentFault(f"key {name!r} is not on the keyboard; canonical names are in dartrl.agent.keys", "guest_api")
    return found


def _press(key: Key, modifiers: int) -> list[InputEvent]:
    """Key down and key up. A key held with ctrl, alt or meta is a command and writes nothing."""
    text = key.text if not modifiers & ~SHIFT else ""
    common = {"key": key.key, "code": key.code, "windowsVirtualKeyCode": key.key_code, "modifiers": modifiers}
    down = {"type": "keyDown", "text": text, "unmodifiedText": text} if text else {"type": "rawKeyDown"}
    return [
        InputEvent("Input.dispatchKeyEvent", {**common, **down}),
        InputEvent("Input.dispatchKeyEvent", {**common, "type": "keyUp"}),
    ]


def pointer_moves(x: float, y: float, **held: Any) -> list[InputEvent]:
    """The pointer goes there, and the page is told at once; `held` names the button that is down."""
    return [_mouse("mouseMoved", x, y, **held), _mouse("mouseReleased", x, y, **{**held, "button": "none"})]


def _mouse(kind: str, x: float, y: float, **fields: Any) -> InputEvent:
    return InputEvent("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **fields})


def _point(action: Action) -> tuple[float, float]:
    if action.x is None or action.y is None:
        raise EnvironmentFault(f"action {action.kind} has no point", "guest_api")
    return action.x, action.y

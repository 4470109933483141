"""From model text to typed actions and back.

`parse_reply` is the one way in: it never raises, never guesses a coordinate, runs nothing that the model wrote, and either
reads every call of a reply or none. `render_action` is the one way out.

Grammar of a call: `verb(name='value', ...)`. Inside quotes, backslash before n, a quote or a backslash is an escape; before
any other character it is a backslash. A typed newline means Enter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Literal

from dartrl.agent.calls import POINT_NAMES, TEXT_NAMES, Argument, Call, Unreadable, escape, find_calls
from dartrl.agent.geometry import Frame
from dartrl.agent.keys import UnknownKey, parse_chord
from dartrl.types import Action, ActionKind, ParseError

VERBS: Mapping[str, ActionKind] = MappingProxyType(
    {
        **dict.fromkeys(("click", "left_click", "left_single", "single_click", "tap"), ActionKind.CLICK),
        **dict.fromkeys(("left_double", "double_click", "doubleclick"), ActionKind.DOUBLE),
        **dict.fromkeys(("right_single", "right_click", "rightclick"), ActionKind.RIGHT),
        **dict.fromkeys(("middle_single", "middle_click"), ActionKind.MIDDLE),
        **dict.fromkeys(("hover", "move", "move_to"), ActionKind.MOVE),
        **dict.fromkeys(("drag", "select", "left_click_drag"), ActionKind.DRAG),
        **dict.fromkeys(("scroll",), ActionKind.SCROLL),
        **dict.fromkeys(("type", "input"), ActionKind.TYPE),
        **dict.fromkeys(("press", "press_key", "key"), ActionKind.PRESS),
        **dict.fromkeys(("hotkey",), ActionKind.HOTKEY),
        **dict.fromkeys(("wait",), ActionKind.WAIT),
        **dict.fromkeys(("finished", "finish", "done"), ActionKind.FINISH),
        **dict.fromkeys(("fail", "infeasible"), ActionKind.FAIL),
        **dict.fromkeys(("call_user", "ask_user"), ActionKind.ASK_USER),
    }
)
"""Every spelling of a verb that models of the UI-TARS line use."""

WRITTEN = MappingProxyType(
    {
        ActionKind.CLICK: "click",
        ActionKind.DOUBLE: "left_double",
        ActionKind.RIGHT: "right_single",
        ActionKind.MIDDLE: "middle_single",
        ActionKind.MOVE: "hover",
        ActionKind.DRAG: "drag",
        ActionKind.SCROLL: "scroll",
        ActionKind.TYPE: "type",
        ActionKind.PRESS: "press",
        ActionKind.HOTKEY: "hotkey",
        ActionKind.WAIT: "wait",
        ActionKind.FINISH: "finished",
        ActionKind.FAIL: "fail",
        ActionKind.ASK_USER: "call_user",
    }
)
"""The verb with which an action is written."""

_START_NAMES = POINT_NAMES - {"end_box", "end_point", "end"}
_END_NAMES = frozenset(("end_box", "end_point", "end"))
_Direction = Literal["up", "down", "left", "right"]
_DIRECTIONS: Mapping[str, _Direction] = {"up": "up", "down": "down", "left": "left", "right": "right"}
_WAIT_NAMES = frozenset(("seconds", "time", "duration", ""))
_BOX_TAGS = re.compile(r"<[^<>]{1,20}>")
_BRACKETS = re.compile(r"[\[\](){}（）]")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})")
_SEPARATOR = re.compile(r"\s*+[,，;]\s*+|\s++")
_LONGEST_BOX = 200  # characters of one point or box
_SCREEN_KINDS = frozenset((ActionKind.CLICK, ActionKind.DOUBLE, ActionKind.RIGHT, ActionKind.MIDDLE, ActionKind.MOVE))


def parse_reply(
    text: str, frame: Frame, *, kinds: Collection[ActionKind], forms: str, verbs: Mapping[str, ActionKind] = VERBS
) -> tuple[Action, ...] | ParseError:
    """Typed actions of a reply in screen pixels and in order, at least one; or why there are none. Never raises.

    kinds: what the dialect allows. forms: its valid actions in words, told to the model after an error. verbs: spelling ->
    kind. Time is linear in the length of the text.
    """
    allowed = {verb: kind for verb, kind in verbs.items() if kind in kinds}
    try:
        return tuple(_read_action(call, allowed, frame) for call in find_calls(text, allowed))
    except Unreadable as error:
        return ParseError(error.kind, f"Error: {error.message}. Valid actions: {forms}", error.start, error.end)


def render_action(action: Action, frame: Frame, *, box: str = "({x},{y})") -> str:
    """The call as a model would write it; reading it back gives the action again.

    box: how a point is written, with places for x and y in image pixels.
    """

    def point(name: str, x: float | None, y: float | None) -> list[str]:
        if x is None or y is None:
            return []
        image_x, image_y = frame.to_image(x, y)
        return [f"{name}='{box.format(x=_plain_number(image_x), y=_plain_number(image_y))}'"]

    arguments = [*point("start_box", action.x, action.y), *point("end_box", action.to_x, action.to_y)]
    if action.direction is not None:
        arguments.append(f"direction='{action.direction}'")
    if action.keys:
        arguments.append(f"key='{escape(' '.join(action.keys))}'")
    if action.text or action.kind in (ActionKind.TYPE, ActionKind.FINISH):
        arguments.append(f"content='{escape(action.text)}'")
    return f"{WRITTEN[action.kind]}({', '.join(arguments)})"


# --------------------------------------------------------------------------- one call


def _read_action(call: Call, verbs: Mapping[str, ActionKind], frame: Frame) -> Action:
    kind = verbs.get(call.verb)
    if kind is None:
        raise Unreadable("unknown_verb", f"there is no action {call.verb!r}", call.start, call.end)
    _require_unique(call)
    if not call.is_closed and not _is_complete_without_parenthesis(call):
        raise Unreadable("truncated", f"the reply ends inside {call.verb}(...)", call.start, call.end)
    try:
        return _reader_of(kind)(kind, call, frame)
    except Unreadable as error:
        if call.is_closed or error.kind == "out_of_bounds":
            raise
        raise Unreadable("truncated", f"the reply ends inside {call.verb}(...)", call.start, call.end) from error


def _reader_of(kind: ActionKind) -> Callable[[ActionKind, Call, Frame], Action]:
    if kind in _SCREEN_KINDS:
        return _read_pointing
    return {
        ActionKind.DRAG: _read_drag,
        ActionKind.SCROLL: _read_scroll,
        ActionKind.TYPE: _read_text,
        ActionKind.PRESS: _read_keys,
        ActionKind.HOTKEY: _read_keys,
        ActionKind.WAIT: _read_wait,
    }.get(kind, _read_text)


def _read_pointing(kind: ActionKind, call: Call, frame: Frame) -> Action:
    _refuse_unknown(call, _START_NAMES | {"x", "y", ""})
    values = [argument for argument in call.arguments if argument.name in _START_NAMES]
    loose = [argument for argument in call.arguments if argument.name in ("x", "y", "")]
    x, y, clamped = _point(call, values, loose, frame)
    return Action(kind, x=x, y=y, clamped=clamped)


def _read_drag(kind: ActionKind, call: Call, frame: Frame) -> Action:
    corners = ("x1", "y1", "x2", "y2")
    _refuse_unknown(call, POINT_NAMES | {*corners, ""})
    starts = [argument for argument in call.arguments if argument.name in _START_NAMES]
    ends = [argument for argument in call.arguments if argument.name in _END_NAMES]
    loose = [argument for argument in call.arguments if argument.name in (*corners, "")]
    if len(loose) == 4:
        loose.sort(key=lambda argument: corners.index(argument.name) if argument.name else 0)
        first, second = loose[:2], loose[2:]
    elif len(loose) == 2 and not starts and not ends:
        first, second = loose[:1], loose[1:]
    else:
        first, second = ([], loose) if starts else (loose, [])
    x, y, clamped = _point(call, starts, first, frame)
    to_x, to_y, to_clamped = _point(call, ends, second, frame, where="an end_box")
    return Action(kind, x=x, y=y, to_x=to_x, to_y=to_y, clamped=clamped or to_clamped)


def _read_scroll(kind: ActionKind, call: Call, frame: Frame) -> Action:
    _refuse_unknown(call, _START_NAMES | {"direction", "x", "y", ""})
    words = [a for a in call.arguments if a.name == "direction" or (not a.name and a.value.lower() in _DIRECTIONS)]
    direction = _DIRECTIONS.get(words[0].value.strip().lower()) if len(words) == 1 else None
    if direction is None:
        raise Unreadable("bad_arguments", "scroll needs one direction: up, down, left or right", call.start, call.end)
    values = [argument for argument in call.arguments if argument.name in _START_NAMES]
    loose = [argument for argument in call.arguments if argument.name in ("x", "y", "") and argument not in words]
    if not values and not loose:
        return Action(kind, direction=direction)
    x, y, clamped = _point(call, values, loose, frame)
    return Action(kind, x=x, y=y, direction=direction, clamped=clamped)


def _read_text(kind: ActionKind, call: Call, frame: Frame) -> Action:
    _refuse_unknown(call, TEXT_NAMES | {""})
    if len(call.arguments) > 1 or (kind is ActionKind.TYPE and not call.arguments):
        raise Unreadable("bad_arguments", f"{call.verb} needs one quoted content", call.start, call.end)
    return Action(kind, text=call.arguments[0].value if call.arguments else "")


def _read_keys(kind: ActionKind, call: Call, frame: Frame) -> Action:
    _refuse_unknown(call, frozenset(("key", "keys", "")))
    try:
        keys = parse_chord(" ".join(argument.value for argument in call.arguments))
    except UnknownKey as error:
        raise Unreadable("unknown_key", f"there is no key {error.name[:20]!r}", call.start, call.end) from error
    if not keys:
        raise Unreadable("bad_arguments", f"{call.verb} needs a key", call.start, call.end)
    return Action(ActionKind.HOTKEY if len(keys) > 1 else kind, keys=keys)


def _read_wait(kind: ActionKind, call: Call, frame: Frame) -> Action:
    _refuse_unknown(call, _WAIT_NAMES)
    return Action(kind)


# --------------------------------------------------------------------------- arguments


def _require_unique(call: Call) -> None:
    names = [argument.name for argument in call.arguments if argument.name]
    for name in names:
        if names.count(name) > 1:
            raise Unreadable("bad_arguments", f"{call.verb} has {name} twice", call.start, call.end)


def _refuse_unknown(call: Call, names: Collection[str]) -> None:
    for argument in call.arguments:
        if argument.name not in names:
            raise Unreadable("bad_arguments", f"{call.verb} takes no argument {argument.name!r}", argument.start, argument.end)


def _is_complete_without_parenthesis(call: Call) -> bool:
    """Only a missing last parenthesis after quoted or bracketed points loses nothing."""
    return bool(call.arguments) and all(
        argument.name in POINT_NAMES and _numbers(argument.value) and argument.value.strip()[-1:] not in "0123456789."
        for argument in call.arguments
    )


def _point(
    call: Call, boxes: list[Argument], loose: list[Argument], frame: Frame, where: str = "a point"
) -> tuple[float, float, bool]:
    """(x, y, clamped) on the screen from one box argument, or from loose numbers."""
    if len(boxes) + bool(loose) != 1:
        raise Unreadable("bad_arguments", f"{call.verb} needs {where}", call.start, call.end)
    if boxes:
        numbers = _numbers(boxes[0].value)
    else:
        ordered = sorted(loose, key=lambda argument: argument.name)  # x before y; positional ones keep their order
        numbers = _numbers(" ".join(argument.value for argument in ordered))
    if numbers is None or len(numbers) not in (2, 4):
        found = (boxes or loose)[0]
        raise Unreadable("bad_box", f"{found.value[:40]!r} is not a point (x,y)", found.start, found.end)
    corners = [frame.to_screen(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
    inside = [corner for corner in corners if corner is not None]
    if len(inside) < len(corners):
        width, height = frame.image
        limits = f"outside the image of {width} x {height} pixels" if width else "a point, but there is no screen"
        raise Unreadable("out_of_bounds", f"{_plain_numbers(numbers)} is {limits}", call.start, call.end)
    x = sum(corner[0] for corner in inside) / len(inside)
    y = sum(corner[1] for corner in inside) / len(inside)
    return x, y, any(corner[2] for corner in inside)


def _numbers(value: str) -> list[float] | None:
    """The numbers of `(1,2)`, `[1, 2, 3, 4]`, `1 2`, `<point>1 2</point>`, `<|box_start|>(1,2)<|box_end|>`; None if not all are."""
    if len(value) > _LONGEST_BOX:
        return None
    inner = _BRACKETS.sub(" ", _BOX_TAGS.sub(" ", value)).strip()
    parts = _SEPARATOR.split(inner)
    if not all(_NUMBER.fullmatch(part) for part in parts):
        return None
    return [float(part) for part in parts]


def _plain_number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _plain_numbers(values: list[float]) -> str:
    return "(" + ",".join(_plain_number(value) for value in values) + ")"

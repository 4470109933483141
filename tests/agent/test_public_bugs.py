"""One test for each public bug report on model output and coordinates that concerns the agent layer.

The name carries the report; the docstring its symptom elsewhere.
"""

from __future__ import annotations

import pytest

from dartrl.agent.compact import CompactDialect
from dartrl.agent.geometry import Frame, frame_of, smart_resize
from dartrl.agent.keys import parse_chord
from dartrl.agent.ui_tars import UiTarsDialect
from dartrl.config import AgentConfig
from dartrl.interfaces import ImageRef
from dartrl.types import Action, ActionKind, Observation, ParseError

UI_TARS = UiTarsDialect(AgentConfig(history_images=5, min_pixels=78_400, max_pixels=12_845_056))
FULL_HD = (1920, 1080)


def only(reply: str, screen: tuple[int, int] = FULL_HD, dialect=UI_TARS) -> Action:
    parsed = dialect.parse(reply, screen)
    assert not isinstance(parsed, ParseError), parsed
    (action,) = parsed
    return action


def error(reply: str, screen: tuple[int, int] = FULL_HD) -> ParseError:
    parsed = UI_TARS.parse(reply, screen)
    assert isinstance(parsed, ParseError), parsed
    return parsed


def test_ui_tars_78_garbled_box_is_an_error_and_no_click():
    """The parser crashed."""
    assert error("Thought: x\nAction: click(start_box='=')").kind == "bad_box"


def test_ui_tars_119_coordinates_are_pixels_of_the_resized_image():
    """Clicks were off because 1.5 was read as a 0-1000 grid."""
    action = only("Action: click(start_box='(800,450)')")
    assert (action.x, action.y) == pytest.approx((800 * 1920 / 1932, 450 * 1080 / 1092))


def test_ui_tars_125_a_point_is_a_box_without_size():
    """Boxes were expected, points came."""
    resized = smart_resize(*FULL_HD, min_pixels=78_400, max_pixels=12_845_056)
    centre = f"({resized[0] // 2},{resized[1] // 2})"
    action = only(f"Action: click(start_box='{centre}')")
    assert (action.x, action.y) == pytest.approx((960, 540))


def test_ui_tars_129_scroll_down_shows_more_content_below():
    """The direction was ambiguous."""
    action = only("Action: scroll(start_box='(960,540)', direction='down')")
    assert action.kind is ActionKind.SCROLL and action.direction == "down"


def test_ui_tars_183_both_spellings_of_a_point_in_one_run(make_step):
    """The output format varies between turns; history is written in one spelling."""
    replies = ("Action: click(point='<point>100 200</point>')", "Action: click(start_box='(100,200)')")
    assert only(replies[0]) == only(replies[1])
    steps = [make_step(index, UI_TARS, reply, screen=FULL_HD) for index, reply in enumerate(replies)]
    messages = UI_TARS.messages("go", steps, Observation(width=1920, height=1080), ImageRef("now", 1920, 1080))
    said = [message.parts for message in messages if message.role == "assistant"]
    assert said == [("Action: click(start_box='<|box_start|>(100,200)<|box_end|>')",)] * 2


def test_ui_tars_desktop_28_a_box_means_its_centre():
    """The first two numbers of a box were taken as the point."""
    action = only("Action: click(start_box='[10,850,50,890]')", (1932, 1092))
    assert (action.x, action.y) == (30, 870)


def test_ui_tars_desktop_37_a_reply_without_thought_is_valid():
    """The parser wanted a thought."""
    assert only("click(start_box='(5,5)')", (1932, 1092)) == Action(ActionKind.CLICK, x=5, y=5)


def test_ui_tars_desktop_33_missing_coordinates_never_click_the_corner():
    """Null coordinates were executed at (0, 0)."""
    assert error("Action: click()").kind == "bad_arguments"


def test_ui_tars_desktop_175_an_endless_list_is_truncated():
    """A degenerate list ran until the token limit."""
    assert error("Action: scroll(start_box=[" + ",".join(map(str, range(2, 20_000)))).kind == "truncated"


def test_ui_tars_desktop_634_the_factor_is_the_resized_size():
    """2560 x 1440 was divided by the wrong size."""
    assert smart_resize(2560, 1440, min_pixels=78_400, max_pixels=12_845_056) == (2548, 1428)
    action = only("Action: click(start_box='(1274,714)')", (2560, 1440))
    assert (action.x, action.y) == (1280, 720)


def test_ui_tars_desktop_900_horizontal_scroll_is_kept():
    """Left and right were dropped."""
    assert only("Action: scroll(direction='right')").direction == "right"


def test_ui_tars_desktop_104_never_more_screenshots_than_the_limit(make_step):
    """Six screenshots were sent to a server that takes five."""
    steps = [make_step(index, UI_TARS, "Action: wait()", screen=FULL_HD) for index in range(9)]
    messages = UI_TARS.messages("go", steps, Observation(width=1920, height=1080), ImageRef("now", 1920, 1080))
    images = [part.hash for message in messages for part in message.parts if isinstance(part, ImageRef)]
    assert images == ["shot-5", "shot-6", "shot-7", "shot-8", "now"]


def test_ui_tars_desktop_528_arrow_and_page_keys_are_known():
    """`arrowdown` and `pagedown` did nothing."""
    assert only("Action: hotkey(key='arrowdown')").keys == ("down",)
    assert only("Action: hotkey(key='pagedown')").keys == ("pagedown",)


def test_midscene_1538_double_and_right_click_exist():
    """The verbs were missing."""
    assert only("Action: left_double(start_box='(5,5)')").kind is ActionKind.DOUBLE
    assert only("Action: right_single(start_box='(5,5)')").kind is ActionKind.RIGHT


def test_qwen3_vl_1862_one_target_under_two_resizes_is_one_screen_point():
    """The same target got different numbers depending on the resize."""
    for max_pixels in (12_845_056, 2_116_800, 1_058_400):
        frame = frame_of(FULL_HD, min_pixels=78_400, max_pixels=max_pixels)
        x, y = frame.to_image(769, 70)
        assert frame.to_screen(x, y) == (pytest.approx(769), pytest.approx(70), False)


def test_gta1_8_small_overshoot_is_clamped_and_large_is_out_of_bounds():
    """Coordinates outside the declared space were passed on or rescaled by guess."""
    dialect = CompactDialect(AgentConfig(min_pixels=784, max_pixels=12_845_056))
    assert only("Action: click(start_box='[806,170,1015,223]')", (1008, 1008), dialect).clamped
    parsed = dialect.parse("Action: click(start_box='[19,300,154,476]')", (364, 448))
    assert isinstance(parsed, ParseError) and parsed.kind == "out_of_bounds"


def test_agents_last_exam_57_a_relative_grid_is_a_frame_of_its_own():
    """A 0-999 grid was read as pixels."""
    assert Frame((1920, 1080), (1000, 1000)).to_screen(800, 500) == (1536, 540, False)


def test_opencua_37_foreign_calls_are_a_typed_error():
    """A pseudo-API call could not be executed."""
    assert error("Action: computer.tripleClick(x=100,y=200)").kind == "unknown_verb"


def test_workarena_73_an_undeclared_verb_comes_back_with_the_valid_list():
    """A verb outside the declared set broke the episode."""
    for reply in ("mouse_click(x=10,y=20)", "Thought: x\nAction: mouse_click(x=10,y=20)"):
        found = error(reply)
        assert found.kind == "unknown_verb"
        assert "left_double(start_box='(x,y)')" in found.message


def test_xdotool_57_aliases_of_named_keys():
    """`enter` was no key name."""
    names = {"enter": "enter", "Return": "enter", "esc": "escape", "del": "delete", "pgdn": "pagedown", "page_down": "pagedown"}
    assert {name: parse_chord(name) for name in names} == {name: (key,) for name, key in names.items()}

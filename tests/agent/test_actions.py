"""The reply parser: every spelling that models are known to produce, and what must never happen."""

from __future__ import annotations

import pytest

from dartrl.agent.actions import parse_reply, render_action
from dartrl.agent.calls import thought_of
from dartrl.agent.geometry import Frame, frame_of
from dartrl.types import Action, ActionKind, ParseError

FULL_HD = Frame((1920, 1080), (1920, 1080))
CLICK = (Action(ActionKind.CLICK, x=100, y=200),)


def parse(text: str, frame: Frame = FULL_HD) -> tuple[Action, ...] | ParseError:
    return parse_reply(text, frame, kinds=frozenset(ActionKind), forms="click(start_box='(x,y)'), wait()")


def error_kind(text: str, frame: Frame = FULL_HD) -> str:
    parsed = parse(text, frame)
    assert isinstance(parsed, ParseError), parsed
    assert 0 <= parsed.start <= parsed.end <= len(text)
    return parsed.kind


def typed(text: str) -> str:
    parsed = parse(text)
    assert not isinstance(parsed, ParseError), parsed
    assert [action.kind for action in parsed] == [ActionKind.TYPE]
    return parsed[0].text


@pytest.mark.parametrize(
    "reply",
    [
        "Thought: the button\nAction: click(start_box='(100,200)')",
        "Thought: the button\nAction: click(start_box='<|box_start|>(100,200)<|box_end|>')",
        "Action: click(start_box=<|box_start|>(100,200)<|box_end|>)",
        "Action: click(point='<point>100 200</point>')",
        "Action: click(point='<point>100,200</point>')",
        "Action: click(point=<point>100 200</point>)",
        "Action: click(start_box='<bbox>100 200 100 200</bbox>')",
        "Action: click(start_box='[90,190,110,210]')",
        "Action: click(start_box=[100, 200])",
        "Action: click(start_box='(100, 200)')",
        'Action: click(start_box="(100,200)")',
        "Action: click(start_box='(100,200))",
        "Action: click(start_box='(100,200)",
        "Action: click(start_box='(100,200)'",
        "Action: click(start_box=(100,200))",
        "Action: click((100, 200))",
        "Action: click('(100,200)')",
        "Action: click(100, 200)",
        "Action: click(x=100, y=200)",
        "Action: click(y=200, x=100)",
        "Action: click(start_box='100,200')",
        "Action: click(start_box='(100.0,200.0)')",
        "Action: click ( start_box = '(100,200)' )",
        "Action: ```\nclick(start_box='(100,200)')\n```",
        "```python\nAction: click(start_box='(100,200)')\n```",
        "Action: ```python\nclick(start_box='(100,200)')```",
        "Action：click(start_box='(100,200)')",
        "Action:click(start_box='(100,200)')",
        "ACTION: Click(start_box='(100,200)')",
        "**Action:** click(start_box='(100,200)')",
        "Action: `click(start_box='(100,200)')`",
        "Action: click(start_box='（100，200）')",
        "Action: click（start_box='(100,200)'）",
        "click(start_box='(100,200)')",
        "I choose the button.\nclick(start_box='(100,200)')",
        "Thought: it's near. Action: click(start_box='(100,200)')",
        "Thought: my last Action: wait() did nothing.\nAction: click(start_box='(100,200)')",
        "Thought: ''' and \\users and \"\"\"\nAction: click(start_box='(100,200)')",
        "Thought: Action: none yet\nAction: click(start_box='(100,200)')",
        "Action: click(start_box='(100,200)')<|im_end|>",
        "Action: click(start_box='(100,200)') to open it.",
        "Action: left_single(start_box='(100,200)')",
    ],
)
def test_every_spelling_of_a_click_is_read(reply):
    assert parse(reply) == CLICK


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("", "no_action"),
        ("Thought: Okay", "no_action"),
        ("Action:", "no_action"),
        ("Action: click", "no_action"),
        ("I could click(start_box='(1,2)') there", "no_action"),
        ("Action: click()", "bad_arguments"),
        ("Action: click(start_box='')", "bad_box"),
        ("Action: click(start_box='=')", "bad_box"),
        ("Action: click(start_box='(1,2,3)')", "bad_box"),
        ("Action: click(start_box='(1,2,3,4,5)')", "bad_box"),
        ("Action: click(start_box='(None,None)')", "bad_box"),
        ("Action: click(start_box='(1e9,nan)')", "bad_box"),
        ("Action: click(start_box='the button')", "bad_box"),
        ("Action: click(start_box='(1--2,3)')", "bad_box"),
        ("Action: click(x=100)", "bad_box"),
        ("Action: click(start_box='(1,2)', start_box='(3,4)')", "bad_arguments"),
        ("Action: click(start_box='(1,2)', point='(3,4)')", "bad_arguments"),
        ("Action: click(start_box='(1,2)', button='right')", "bad_arguments"),
        ("Action: click(start_box='(1,2)'x)", "bad_arguments"),
        ("Action: click(start_box='(100,200", "truncated"),
        ("Action: click(start_box='(100,20", "truncated"),
        ("Action: click(start_box=(100,200", "truncated"),
        ("Action: click(", "truncated"),
        ("Action: drag(start_box='(1,2)'", "truncated"),
        ("Action: scroll(start_box='(1,2)'", "truncated"),
        ("Action: type(content='abc", "truncated"),
        ("Action: type(content='abc'", "truncated"),
        ("Action: drag(start_box='(1,2)')", "bad_arguments"),
        ("Action: scroll(start_box='(1,2)')", "bad_arguments"),
        ("Action: scroll(direction='sideways')", "bad_arguments"),
        ("Action: type()", "bad_arguments"),
        ("Action: type(content='a', start_box='(1,2)')", "bad_arguments"),
        ("Action: hotkey(key='')", "bad_arguments"),
        ("Action: hotkey(key='ctrl+foo')", "unknown_key"),
        ("Action: hotkey(key='a b c d e f g')", "unknown_key"),
        ("Action: press(key='é')", "unknown_key"),
        ("Action: keydown(key='a')", "unknown_verb"),
        ("Action: 点击(100,200)", "unknown_verb"),
        ("Action: pyautogui.click(100, 200)", "unknown_verb"),
        ("Action: os.system('reboot')", "unknown_verb"),
        ("Action: click(start_box='(1,2)')\nboom(1)", "unknown_verb"),
        ("Action: click(start_box='(5000,2)')", "out_of_bounds"),
        ("Action: click(start_box='(-500,2)')", "out_of_bounds"),
        ("Action: click(start_box='(999999999999,2)')", "out_of_bounds"),
        ("Action: drag(start_box='(1,2)', end_box='(1,5000)')", "out_of_bounds"),
        ("Action: " + "wait()\n" * 17, "bad_arguments"),
        ("Action: hotkey(" + "'a'," * 17 + ")", "bad_arguments"),
    ],
)
def test_unreadable_replies_are_typed_errors(reply, kind):
    assert error_kind(reply) == kind


def test_an_error_names_the_problem_and_the_valid_forms():
    parsed = parse("Action: mouse_click(x=10,y=20)")
    assert isinstance(parsed, ParseError)
    assert parsed.message == "Error: there is no action 'mouse_click'. Valid actions: click(start_box='(x,y)'), wait()"
    assert "Action: mouse_click(x=10,y=20)"[parsed.start : parsed.end] == "mouse_click(x=10,y=20)"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (r"Action: type(content='ls\n')", "ls\n"),
        ("Action: type(content='line1\nline2')", "line1\nline2"),
        ('Action: type(content="it\'s")', "it's"),
        ("Action: type(content='it's')", "it's"),
        (r"Action: type(content='it\'s \"so\"')", 'it\'s "so"'),
        (r"Action: type(content='C:\\new\\table')", r"C:\new\table"),
        (r"Action: type(content='C:\temp\users')", r"C:\temp\users"),
        (r"Action: type(content='\\')", "\\"),
        (r"Action: type(content='a\\n')", r"a\n"),
        (r"Action: type(content='\d+\.\w')", r"\d+\.\w"),
        ("Action: type(content='  x  ')", "  x  "),
        ("Action: type(content='')", ""),
        ("Action: type(content='point=3, start_box=4')", "point=3, start_box=4"),
        ("Action: type(content='Action: wait()\n\nThought: x')", "Action: wait()\n\nThought: x"),
        ("Action: type(content='print('a')')", "print('a')"),
        ("Action: type(content='f(x), g(y)')", "f(x), g(y)"),
        ("Action: type(content='''it's''')", "it's"),
        ('Action: type(content="""a "b" c""")', 'a "b" c'),
        ("Action: type(content=“他说「好」”)", "他说「好」"),
        ("Action: type(content='żółw é 你好 😀 👨‍👩‍👧 \u00a0\u2028')", "żółw é 你好 😀 👨‍👩‍👧 \u00a0\u2028"),
        ("Action: type(content='e\u0301')", "e\u0301"),
        ("Action: type(content='<|im_end|><b>&amp;</b>')", "<|im_end|><b>&amp;</b>"),
        ("Action: type(content='abc') and then look", "abc"),
        ("Action: type('hello')", "hello"),
        ("Action: type(text='hello')", "hello"),
        ("Action: type(content=hello)", "hello"),
        ("Action: type(content='a\tb\r\nc')", "a\tb\r\nc"),
    ],
)
def test_typed_text_arrives_exactly(reply, text):
    assert typed(reply) == text


def test_unescaped_code_over_several_lines_is_refused_rather_than_cut():
    assert error_kind("Action: type(content='f('a')\ng('b')')") == "unknown_verb"


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("left_double(start_box='(1,2)')", Action(ActionKind.DOUBLE, x=1, y=2)),
        ("right_single(start_box='(1,2)')", Action(ActionKind.RIGHT, x=1, y=2)),
        ("middle_click(start_box='(1,2)')", Action(ActionKind.MIDDLE, x=1, y=2)),
        ("hover(start_box='(1,2)')", Action(ActionKind.MOVE, x=1, y=2)),
        ("drag(start_box='(1,2)', end_box='(3,4)')", Action(ActionKind.DRAG, x=1, y=2, to_x=3, to_y=4)),
        ("drag(end_box='(3,4)', start_box='(1,2)')", Action(ActionKind.DRAG, x=1, y=2, to_x=3, to_y=4)),
        (
            "drag(start_point='<point>1 2</point>', end_point='<point>3 4</point>')",
            Action(ActionKind.DRAG, x=1, y=2, to_x=3, to_y=4),
        ),
        ("drag(start_box='(1,2)' end_box='(3,4)')", Action(ActionKind.DRAG, x=1, y=2, to_x=3, to_y=4)),
        ("drag('(1,2)', '(3,4)')", Action(ActionKind.DRAG, x=1, y=2, to_x=3, to_y=4)),
        ("drag(1, 2, 3, 4)", Action(ActionKind.DRAG, x=1, y=2, to_x=3, to_y=4)),
        ("drag(x2=3, y2=4, x1=1, y1=2)", Action(ActionKind.DRAG, x=1, y=2, to_x=3, to_y=4)),
        ("select(start_box='(1,2)', end_box='(3,4)')", Action(ActionKind.DRAG, x=1, y=2, to_x=3, to_y=4)),
        ("scroll(start_box='(1,2)', direction='down')", Action(ActionKind.SCROLL, x=1, y=2, direction="down")),
        ("scroll(direction='right', start_box='(1,2)')", Action(ActionKind.SCROLL, x=1, y=2, direction="right")),
        ("scroll(direction='LEFT')", Action(ActionKind.SCROLL, direction="left")),
        ("scroll('up')", Action(ActionKind.SCROLL, direction="up")),
        ("scroll((1,2), down)", Action(ActionKind.SCROLL, x=1, y=2, direction="down")),
        ("press(key='enter')", Action(ActionKind.PRESS, keys=("enter",))),
        ("press('Return')", Action(ActionKind.PRESS, keys=("enter",))),
        ("press(key='ctrl c')", Action(ActionKind.HOTKEY, keys=("ctrl", "c"))),
        ("hotkey(key='ctrl+c')", Action(ActionKind.HOTKEY, keys=("ctrl", "c"))),
        ("hotkey(key='ctrl-c')", Action(ActionKind.HOTKEY, keys=("ctrl", "c"))),
        ("hotkey('ctrl', 'c')", Action(ActionKind.HOTKEY, keys=("ctrl", "c"))),
        ("hotkey(keys=['ctrl', 'c'])", Action(ActionKind.HOTKEY, keys=("ctrl", "c"))),
        ("hotkey(key='shift arrowright')", Action(ActionKind.HOTKEY, keys=("shift", "right"))),
        ("hotkey(key='t shift ctrl')", Action(ActionKind.HOTKEY, keys=("ctrl", "shift", "t"))),
        ("hotkey(key='page_down')", Action(ActionKind.HOTKEY, keys=("pagedown",))),
        ("wait()", Action(ActionKind.WAIT)),
        ("wait(5)", Action(ActionKind.WAIT)),
        ("finished()", Action(ActionKind.FINISH)),
        ("finished(content='It's done')", Action(ActionKind.FINISH, text="It's done")),
        ("call_user()", Action(ActionKind.ASK_USER)),
        ("fail()", Action(ActionKind.FAIL)),
    ],
)
def test_every_verb_is_read(reply, action):
    assert parse(f"Action: {reply}") == (action,)


@pytest.mark.parametrize(
    ("reply", "kinds"),
    [
        ("Action: wait()\n\nclick(start_box='(1,2)')", ["wait", "click"]),
        ("Action: hotkey(key='ctrl s')\n\nfinished(content='ok')", ["hotkey", "finish"]),
        ("Action: type(content='x'); press(key='enter')", ["type", "press"]),
        ("Action: wait() wait()", ["wait", "wait"]),
        ("Thought: a\nAction: wait()\n\nThought: b\nAction: click(start_box='(1,2)')", ["wait", "click"]),
    ],
)
def test_several_actions_keep_their_order(reply, kinds):
    parsed = parse(reply)
    assert not isinstance(parsed, ParseError)
    assert [action.kind.value for action in parsed] == kinds


def test_a_reply_is_read_whole_or_not_at_all():
    assert error_kind("Action: click(start_box='(1,2)')\n\nclick(start_box='=')") == "bad_box"


def test_kinds_that_a_dialect_does_not_allow_are_unknown():
    parsed = parse_reply("Action: click(start_box='(1,2)')", FULL_HD, kinds={ActionKind.TYPE}, forms="type(content='text')")
    assert isinstance(parsed, ParseError) and parsed.kind == "unknown_verb"


def test_a_slip_over_the_edge_is_clamped_and_flagged():
    for point, expected in {"(1925,5)": (1919, 5), "(-3,5)": (0, 5), "(5,1080)": (5, 1079)}.items():
        assert parse(f"Action: click(start_box='{point}')") == (
            Action(ActionKind.CLICK, x=expected[0], y=expected[1], clamped=True),
        )


def test_without_a_screen_there_is_nothing_to_point_at():
    frame = frame_of((0, 0), min_pixels=3136, max_pixels=12_845_056)
    assert error_kind("Action: click(start_box='(0,0)')", frame) == "out_of_bounds"
    assert parse("Action: type(content='a')", frame) == (Action(ActionKind.TYPE, text="a"),)


def test_the_thought_is_what_stands_before_the_action():
    for reply, thought in {
        "Thought: a b\nAction: wait()": "a b",
        "Thought: a\n\nb\nAction: wait()": "a\n\nb",
        "just text\nAction: wait()": "just text",
        "wait()": "",
        "Thought: nothing else": "nothing else",
    }.items():
        assert thought_of(reply, {"wait"}) == thought


def test_rendering_writes_the_canonical_call():
    for action, call in {
        Action(ActionKind.CLICK, x=28, y=72): "click(start_box='(28,72)')",
        Action(ActionKind.CLICK, x=28.5, y=72): "click(start_box='(28.5,72)')",
        Action(ActionKind.TYPE, text="it's\\\n"): r"type(content='it\'s\\\n')",
        Action(ActionKind.HOTKEY, keys=("ctrl", "'")): r"hotkey(key='ctrl \'')",
        Action(ActionKind.SCROLL, direction="up"): "scroll(direction='up')",
        Action(ActionKind.ASK_USER): "call_user()",
        Action(ActionKind.FINISH): "finished(content='')",
    }.items():
        assert render_action(action, FULL_HD) == call

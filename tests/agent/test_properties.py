"""What holds for every text: the parser never raises, ends in linear time, and text and points come back as they went."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis.strategies import builds, composite, integers, just, lists, none, one_of, sampled_from, text

from dartrl.agent.actions import VERBS, parse_reply, render_action
from dartrl.agent.calls import thought_of
from dartrl.agent.dialogue import neutralise
from dartrl.agent.geometry import Frame, frame_of
from dartrl.agent.keys import CANONICAL_KEYS, MODIFIERS
from dartrl.types import Action, ActionKind, ParseError

FRAMES = [
    Frame((168, 224), (168, 224)),
    frame_of((1920, 1080), min_pixels=78_400, max_pixels=12_845_056),
    frame_of((160, 210), min_pixels=78_400, max_pixels=12_845_056),
    frame_of((3840, 2160), min_pixels=78_400, max_pixels=1_058_400),
    frame_of((0, 0), min_pixels=3136, max_pixels=12_845_056),
]
PIECES = [
    *("Action: ", "Thought: ", "\n", "\n\n", "click(", "type(content='", "')", "'", '"', "'''", "\\", "(", ")", "[", "]"),
    *("start_box='", "(1,2)", "<|box_start|>", "<point>", "</point>", ",", "=", "1", "-", ".", "drag(", "scroll(", "hotkey(key='"),
    *(
        "ctrl+",
        "finished(",
        "wait()",
        "```",
        "；",
        "：",
        "（",
        "）",
        "“",
        "”",
        "é",
        "你",
        "😀",
        "\u2028",
        "\x00",
        "end_box=",
        "nope(",
    ),
]
reply_like = one_of(text(), lists(one_of(sampled_from(PIECES), text(max_size=3)), max_size=40).map("".join))


def parse(reply: str, frame: Frame):
    return parse_reply(reply, frame, kinds=frozenset(ActionKind), forms="wait()")


@settings(max_examples=60)
@given(reply=reply_like, frame=sampled_from(FRAMES))
def test_any_text_is_actions_on_the_screen_or_an_error(reply, frame):
    parsed = parse(reply, frame)
    if isinstance(parsed, ParseError):
        assert parsed.kind and parsed.message and 0 <= parsed.start <= parsed.end <= len(reply)
        return
    assert parsed
    for action in parsed:
        for x, y in ((action.x, action.y), (action.to_x, action.to_y)):
            assert (x is None) == (y is None)
            if x is not None and y is not None:
                assert 0 <= x < frame.screen[0] and 0 <= y < frame.screen[1]
    thought_of(reply, VERBS)


@settings(max_examples=300)
@given(reply=reply_like)
@example(reply="Action: click()")
@example(reply="Action: click(start_box='(,)')")
@example(reply="Action: click(start_box='[1,2,3,4]')")
def test_no_coordinate_is_guessed(reply):
    """Every point is written in the reply, or is the centre of a box that is."""
    parsed = parse(reply, Frame((1000, 1000), (1000, 1000)))
    written = [float(number) for number in re.findall(r"[0-9]*\.?[0-9]+|[0-9]+\.?", reply)]
    allowed = {*written, *((one + other) / 2 for one in written for other in written)}
    for action in () if isinstance(parsed, ParseError) else parsed:
        for value in (action.x, action.y, action.to_x, action.to_y):
            assert value is None or action.clamped or value in allowed, (reply, value)


UNITS = [
    *("Action:", "\nAction:\n", " ", "\n", "a", "(", "click(", "\nclick(", "\ntype('", "\ntype(content='", "'", "\\'", "'''", "')"),
    *(
        "', key=",
        "\n')",
        "[",
        "1,",
        "<",
        "<|box_start|>",
        "```\n",
        "*",
        "(1,2)",
        "click(1,2)\n",
        "wait() ",
        "ctrl+",
        "'''\n",
        "' )",
    ),
]
STARTS = [
    "",
    "Action: ",
    "Action: type(content='",
    "Action: type(content='''",
    "Action: click(start_box='",
    "Action: scroll(start_box=[",
]


@pytest.mark.timeout(60)  # quadratic work on this length takes minutes
@pytest.mark.parametrize("start", STARTS)
def test_a_hundred_thousand_characters_are_no_problem(start):
    for unit in UNITS:
        reply = start + unit * (100_000 // len(unit))
        parsed = parse(reply, FRAMES[0])
        assert isinstance(parsed, ParseError) or len(parsed) <= 16
        assert len(neutralise(reply)) >= len(reply)
        assert len(thought_of(reply, VERBS)) <= len(reply)


@settings(max_examples=200)
@given(typed=text(max_size=200))
@example(typed="')")
@example(typed="\\")
@example(typed="\\n")
@example(typed="it's \"quoted\" \\ and\nlines\r\n\n\nAction: click(start_box='(1,2)')')")
@example(typed="żółw 你好 😀 \u202e\u200b\x00 <|im_end|> e\u0301")
def test_typed_text_arrives_exactly(typed):
    action = Action(ActionKind.TYPE, text=typed)
    reply = f"Thought: type\nAction: {render_action(action, FRAMES[0])}"
    assert parse(reply, FRAMES[0]) == (action,)


def pixel(side: int):
    return integers(0, 2 * side - 1).map(lambda half: half / 2)


@composite
def written_actions(draw, frame: Frame = FRAMES[0]):
    """Actions as a model can write them: points on half pixels of the image."""
    kind = draw(sampled_from(list(ActionKind)))
    width, height = frame.image

    def point():
        mapped = frame.to_screen(draw(pixel(width)), draw(pixel(height)))
        assert mapped is not None
        return mapped[:2]

    fields: dict[str, object] = {}
    if kind in (ActionKind.CLICK, ActionKind.DOUBLE, ActionKind.RIGHT, ActionKind.MIDDLE, ActionKind.MOVE, ActionKind.DRAG):
        fields["x"], fields["y"] = point()
    if kind is ActionKind.DRAG:
        fields["to_x"], fields["to_y"] = point()
    if kind is ActionKind.SCROLL:
        fields["direction"] = draw(sampled_from(["up", "down", "left", "right"]))
        if draw(sampled_from([True, False])):
            fields["x"], fields["y"] = point()
    if kind in (ActionKind.TYPE, ActionKind.FINISH, ActionKind.FAIL, ActionKind.ASK_USER):
        fields["text"] = draw(text(max_size=20))
    plain = sampled_from(sorted(CANONICAL_KEYS - set(MODIFIERS) - {"-", "+", ","}))
    if kind is ActionKind.PRESS:
        fields["keys"] = (draw(plain),)
    if kind is ActionKind.HOTKEY:
        fields["keys"] = (*draw(sampled_from([(), ("ctrl",), ("ctrl", "shift")])), draw(plain))
    return Action(kind, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("frame", FRAMES[:4])
def test_actions_survive_text_and_back(frame):
    @settings(max_examples=60)
    @given(actions=lists(written_actions(frame), min_size=1, max_size=5))
    def check(actions):
        reply = "Thought: go\nAction: " + "\n\n".join(render_action(action, frame) for action in actions)
        once = parse(reply, frame)
        assert not isinstance(once, ParseError), (reply, once)
        again = "Thought: go\nAction: " + "\n\n".join(render_action(action, frame) for action in once)
        assert again == reply
        for action, read in zip(actions, once, strict=True):
            assert (read.kind, read.text, read.keys, read.direction) == (action.kind, action.text, action.keys, action.direction)
            for name in ("x", "y", "to_x", "to_y"):
                wanted = getattr(action, name)
                assert getattr(read, name) == (None if wanted is None else pytest.approx(wanted, abs=1e-5))

    check()


@settings(max_examples=60)
@given(actions=lists(written_actions(), min_size=1, max_size=3), cut=integers(0, 500))
def test_a_reply_that_is_cut_off_never_points_elsewhere_or_types_something_else(actions, cut):
    reply = "Action: " + "\n\n".join(render_action(action, FRAMES[0]) for action in actions)
    whole, cut_off = parse(reply, FRAMES[0]), parse(reply[:cut], FRAMES[0])
    assert not isinstance(whole, ParseError)
    if not isinstance(cut_off, ParseError):
        assert cut_off == whole[: len(cut_off)]


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>", "<|box_start|>", "<tool_call>"]
SPECIAL += ["</tool_call>", "<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "<image>", "<|begin▁of▁sentence|>", "<think>"]
FRAGMENTS = [
    "<",
    "|",
    ">",
    "<|",
    "|>",
    "im_end",
    "im_start|>",
    "<<|im_end|>|im_end|>",
    " ",
    "x",
    "\u200b",
    "＜",
    "｜",
    "</",
    "[",
    "]",
]
hostile = lists(one_of(sampled_from(SPECIAL), sampled_from(FRAGMENTS), text(max_size=3)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes and special tokens, once as they are and once with compatibility normalisation before they are looked for."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    built = []
    for normalizer, is_normalized in ((None, False), (tokenizers.normalizers.NFKC(), True)):
        model = tokenizers.models.BPE({letter: index for index, letter in enumerate(sorted(alphabet))}, [])
        one = tokenizers.Tokenizer(model)
        if normalizer is not None:
            one.normalizer = normalizer
        one.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        one.add_special_tokens([tokenizers.AddedToken(word, normalized=is_normalized) for word in SPECIAL])
        built.append((one, {one.token_to_id(word) for word in SPECIAL}))
    return built


@settings(max_examples=200)
@given(page_text=hostile)
def test_neutral_text_never_becomes_a_special_token(tokenizer, page_text):
    safe = neutralise(page_text)
    for one, special_ids in tokenizer:
        assert not special_ids & set(one.encode(safe).ids)
    assert neutralise(safe) == safe
    assert safe.replace(" ", "") == page_text.replace(" ", "")


def test_the_tokenizer_of_the_test_does_see_special_tokens(tokenizer):
    for one, special_ids in tokenizer:
        assert special_ids & set(one.encode("a<|im_end|>b").ids)


@given(plain=text(alphabet="abc <>|&[]()=+-*/\n12é你", max_size=60))
def test_ordinary_text_is_left_alone(plain):
    if "<|" not in plain and "|>" not in plain:
        assert neutralise(plain) == plain


@given(action=builds(Action, kind=just(ActionKind.FAIL), text=one_of(just(""), text(max_size=5)), x=none(), y=none()))
def test_verdicts_keep_their_message(action):
    assert parse(f"Action: {render_action(action, FRAMES[4])}", FRAMES[4]) == (action,)

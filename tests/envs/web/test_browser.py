"""A real browser: input arrives exactly, pages cannot leave, and nothing survives the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import pytest_asyncio

from dartrl.envs.web.browser import Browser, Page
from dartrl.envs.web.input import SCROLL_PIXELS, perform
from dartrl.envs.web.miniwob import EPISODE_SCRIPT
from dartrl.errors import EnvironmentCrashed, EnvironmentFault
from dartrl.launch.system_clock import SystemClock
from dartrl.testing.environment_conformance import png_size
from dartrl.types import Action, ActionKind

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

CLOCK = SystemClock()

FORM = """<!doctype html><body style="margin:0">
<textarea id=area style="position:absolute;left:0;top:0;width:150px;height:60px"></textarea>
<input id=field style="position:absolute;left:0;top:70px;width:150px">
<a id=link href="other.html" style="position:absolute;left:0;top:100px">leave this page</a>
<a id=blank href="other.html" target=_blank style="position:absolute;left:0;top:120px">open a window</a>
<button onclick="window.answer = [alert('a'), confirm('b'), prompt('c')]" style="position:absolute;left:0;top:140px">ask</button>
<form action="other.html"><button style="position:absolute;left:60px;top:140px">send</button></form>
<div id=box style="position:absolute;left:0;top:170px;width:150px;height:50px;overflow:auto">
<div style="height:900px">tall</div></div>
</body>"""

TEXTS = [
    "plain words, with commas.",
    'it\'s "quoted" and `ticked`',
    "C:\\temp\\new and \\n stays",
    "first line\nsecond line\n\nfourth",
    "é ü ñ ç ß É € ÅÆØ",
    "中文 日本語 한국어",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 done",
    "<b>&amp;</b> {a: [1, 2]} 100% #!$^*()_+=~|?;:/\tend",
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser():
    running = Browser(CLOCK, timeout_seconds=20.0)
    await running.start()
    yield running
    await running.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, tmp_path: Path):
    context = await browser.new_context()
    (tmp_path / "form.html").write_text(FORM, encoding="utf-8")
    (tmp_path / "other.html").write_text("elsewhere", encoding="utf-8")
    opened = await browser.open_page(context, 168, 224, init_scripts=[EPISODE_SCRIPT])
    await opened.navigate((tmp_path / "form.html").as_uri())
    yield opened
    await browser.close_context(context)


async def click(page: Page, x: float, y: float) -> None:
    await perform(page, Action(ActionKind.CLICK, x=x, y=y), CLOCK)


async def hotkey(page: Page, *keys: str) -> None:
    await perform(page, Action(ActionKind.HOTKEY, keys=keys), CLOCK)


@pytest.mark.parametrize("text", TEXTS)
async def test_typed_text_is_read_back_exactly(page, text):
    await click(page, 60, 30)
    await perform(page, Action(ActionKind.TYPE, text=text), CLOCK)
    assert await page.evaluate_js("area.value") == text


async def test_a_field_of_one_line_takes_text_and_its_keys_are_seen(page):
    await page.evaluate_js("window.keys = []; field.onkeydown = (event) => { keys.push(event.key + event.keyCode) }; 0")
    await click(page, 60, 80)
    await perform(page, Action(ActionKind.TYPE, text="aB1é"), CLOCK)
    await perform(page, Action(ActionKind.PRESS, keys=("backspace",)), CLOCK)
    assert await page.evaluate_js("field.value") == "aB1"
    assert await page.evaluate_js("keys") == ["a65", "B66", "149", "Backspace8"]


async def test_hotkeys_edit_and_the_clipboard_belongs_to_the_page(browser, page):
    await click(page, 60, 30)
    await perform(page, Action(ActionKind.TYPE, text="secret"), CLOCK)
    await hotkey(page, "ctrl", "a")
    await hotkey(page, "ctrl", "x")
    assert await page.evaluate_js("area.value") == ""
    context = await browser.new_context()
    other = await browser.open_page(context, 168, 224, init_scripts=[EPISODE_SCRIPT])
    await other.navigate(await page.evaluate_js("location.href"))
    await click(other, 60, 30)
    await hotkey(other, "ctrl", "v")
    assert await other.evaluate_js("area.value") == ""
    await click(page, 60, 80)
    await hotkey(page, "ctrl", "v")
    await hotkey(page, "ctrl", "v")
    assert await page.evaluate_js("field.value") == "secretsecret"
    await browser.close_context(context)


@pytest.mark.parametrize(
    "leave",
    [
        Action(ActionKind.CLICK, x=30, y=110),
        Action(ActionKind.CLICK, x=30, y=130),
        Action(ActionKind.MIDDLE, x=30, y=110),
        Action(ActionKind.CLICK, x=80, y=150),
        Action(ActionKind.PRESS, keys=("f5",)),
        Action(ActionKind.HOTKEY, keys=("ctrl", "r")),
        Action(ActionKind.HOTKEY, keys=("alt", "left")),
        Action(ActionKind.HOTKEY, keys=("ctrl", "w")),
        Action(ActionKind.HOTKEY, keys=("ctrl", "t")),
    ],
    ids=["link", "blank", "middle", "form", "f5", "reload", "back", "close", "tab"],
)
async def test_the_agent_cannot_leave_the_page(browser, page, leave):
    targets = len((await browser.devtools.command("Target.getTargets"))["targetInfos"])
    await page.evaluate_js("window.mark = 1")
    await perform(page, leave, CLOCK)
    await CLOCK.sleep(0.1)
    assert await page.evaluate_js("[window.mark, location.pathname.endsWith('/form.html')]") == [1, True]
    assert len((await browser.devtools.command("Target.getTargets"))["targetInfos"]) == targets


LEAVING = ["location.href = 'other.html'", "location.reload()", "window.open('other.html')", "history.back()"]


@pytest.mark.parametrize("script", LEAVING)
async def test_the_page_cannot_leave_either(browser, page, script):
    targets = len((await browser.devtools.command("Target.getTargets"))["targetInfos"])
    await page.evaluate_js(f"window.mark = 1; {script}; 0")
    await CLOCK.sleep(0.1)
    assert await page.evaluate_js("[window.mark, location.pathname.endsWith('/form.html')]") == [1, True]
    assert len((await browser.devtools.command("Target.getTargets"))["targetInfos"]) == targets


async def test_dialogs_are_dismissed_and_the_page_goes_on(page):
    await click(page, 15, 150)
    assert await page.evaluate_js("answer") == [None, False, None]
    assert page.dialogs_dismissed == 3


async def test_scrolling_moves_the_box_under_the_pointer_and_can_be_cancelled(page):
    down = Action(ActionKind.SCROLL, x=60, y=190, direction="down")
    await perform(page, down, CLOCK)
    assert await page.evaluate_js("box.scrollTop") == SCROLL_PIXELS
    await page.evaluate_js("box.onwheel = (event) => { window.wheel = event.deltaY; event.preventDefault() }; 0")
    await perform(page, down, CLOCK)
    assert await page.evaluate_js("[box.scrollTop, wheel]") == [SCROLL_PIXELS, SCROLL_PIXELS]


async def test_a_drag_is_seen_move_by_move(page):
    await page.evaluate_js("window.path = []; onmousemove = (event) => { if (event.buttons) path.push(event.clientX) }; 0")
    await page.evaluate_js("window.ups = []; onmouseup = (event) => ups.push(event.clientX); onclick = onmouseup; 0")
    await perform(page, Action(ActionKind.DRAG, x=10, y=160, to_x=90, to_y=160), CLOCK)
    assert await page.evaluate_js("path") == [20, 30, 40, 50, 60, 70, 80, 90]
    assert await page.evaluate_js("ups[0]") == 90, "the button was held to the end"


async def test_a_move_hovers_and_presses_nothing(page):
    await page.evaluate_js(
        "window.seen = []; for (const kind of ['mousemove', 'mousedown', 'mouseup', 'click']) "
        "addEventListener(kind, (event) => seen.push([kind, event.clientX, event.buttons])); 0"
    )
    for x in (10, 20, 30):
        await perform(page, Action(ActionKind.MOVE, x=x, y=160), CLOCK)
    assert await page.evaluate_js("seen.slice(-3)") == [["mousemove", x, 0] for x in (10, 20, 30)]
    assert {kind for kind, *_ in await page.evaluate_js("seen")} == {"mousemove"}


async def test_a_screenshot_shows_what_an_action_did(page):
    before = await page.screenshot()
    assert png_size(before) == (168, 224)
    for text in ("a", "b", "c", "d"):
        await click(page, 60, 30)
        await perform(page, Action(ActionKind.TYPE, text=text), CLOCK)
        after = await page.screenshot()
        assert after != before, "the picture is older than the action"
        assert await page.screenshot() == after, "nothing blinks"
        before = after


async def test_a_failing_expression_brings_the_page_s_error(page):
    with pytest.raises(EnvironmentFault, match="ReferenceError: nonsense is not defined"):
        await page.evaluate_js("nonsense")


async def test_frames_of_many_pages_wait_for_each_other(browser):
    context = await browser.new_context()
    pages = [await browser.open_page(context, 168, 224) for _ in range(6)]
    tasks = [asyncio.create_task(page.screenshot()) for page in pages for _ in range(5)]
    await asyncio.sleep(0.001)
    for task in tasks[1::3]:
        task.cancel()  # a cancelled wait must not let two frames overlap
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, bytes | asyncio.CancelledError) for result in results)
    for page in pages:
        assert png_size(await page.screenshot()) == (168, 224)
    await browser.close_context(context)


async def test_a_crashed_page_leaves_the_others_alone(browser):
    context, other_context = await browser.new_context(), await browser.new_context()
    lost = await browser.open_page(context, 168, 224)
    kept = await browser.open_page(other_context, 168, 224)
    lost.send("Page.crash")
    with pytest.raises(EnvironmentCrashed, match="page crashed"):
        for _ in range(100):
            await lost.evaluate_js("1")
            await CLOCK.sleep(0.05)
    assert await kept.evaluate_js("2") == 2
    await kept.screenshot()

"""MiniWoB++ pages as an environment: one browser for all slots, one context a slot, one page a task family.

A page is loaded once and restarted in place for every episode, because loading costs more than a whole episode. Pages
that keep state over a restart are loaded again (`UNSTABLE_PAGES`).
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dartrl.config import RunConfig
from dartrl.envs.slots import SlotPool
from dartrl.envs.web.browser import Browser, Page, js_value
from dartrl.envs.web.input import perform, pointer_moves
from dartrl.envs.web.pages import UNSTABLE_PAGES
from dartrl.envs.web.task_set import require_family
from dartrl.envs.web.versions import font_fingerprint, page_folder, page_version
from dartrl.errors import EnvironmentCrashed, EnvironmentFault, EnvironmentTimeout, EvaluatorFault
from dartrl.interfaces import Clock, EnvironmentPool
from dartrl.types import Action, ActionKind, Observation, Task, Verdict

WIDTH, HEIGHT = 168, 224
"""Viewport: the task's 160 x 210 pixels rounded up to multiples of 28, so that no image is ever resized."""

PAGES_PER_SLOT = 12
"""Pages that a slot keeps loaded; the one used longest ago is closed first."""

FRAME_SECONDS = 1 / 60
"""Pause between the frames of a page that moves."""

FRESH_FRAMES = 3
"""Frames drawn after a page was loaded, in which the pictures that its style sheets name arrive."""

EPISODE_SCRIPT = Path(__file__).with_name("episode.js").read_text(encoding="utf-8")

STATE = "__episode.state()"

SILENT_KINDS = frozenset({ActionKind.FINISH, ActionKind.FAIL, ActionKind.ASK_USER})
"""Actions that end an episode and do not touch the page."""


class PageState(NamedTuple):
    """What `__episode.state()` says, in its order."""

    is_done: bool
    """The episode has ended."""
    raw_reward: float | None
    """Reward without discount; None if it is no finite number."""
    is_moving: bool
    """The page has asked for another animation frame or a timer of a few milliseconds."""
    is_ready: bool
    """The page can be used."""


def create_pool(config: RunConfig, clock: Clock, *, init_scripts: Sequence[str] = ()) -> EnvironmentPool:
    """Pool of MiniWoB++ environments as configured; entry point `web` of group `dartrl.environments`."""
    environment = config.environment

    def create_host() -> MiniwobHost:
        return MiniwobHost(
            clock,
            settle_frames=environment.settle_frames,
            step_timeout_seconds=environment.step_timeout_seconds,
            reset_timeout_seconds=environment.reset_timeout_seconds,
            init_scripts=init_scripts,
        )

    return SlotPool(environment.slots, create_host, episodes_per_start=environment.episodes_per_start, clock=clock)


class MiniwobHost:
    """One browser that serves the pages; implements Host."""

    def __init__(
        self,
        clock: Clock,
        *,
        settle_frames: int = 6,
        step_timeout_seconds: float = 20.0,
        reset_timeout_seconds: float = 30.0,
        init_scripts: Sequence[str] = (),
        binary: Path | None = None,
    ) -> None:
        """init_scripts: JavaScript that runs before every document, after our own."""
        self._clock = clock
        self._settle_frames = settle_frames
        self._step_timeout_seconds = step_timeout_seconds
        self._reset_timeout_seconds = reset_timeout_seconds
        self._init_scripts = (EPISODE_SCRIPT, *init_scripts)
        self.browser = Browser(clock, binary=binary, timeout_seconds=step_timeout_seconds)
        self._versions: Mapping[str, str] = {}

    @property
    def is_alive(self) -> bool:
        return self.browser.is_alive

    async def start(self) -> None:
        """Start the browser and find the pages. Raises EnvironmentFault with the remedy."""
        page_folder()
        fonts = await self._clock.run_blocking(font_fingerprint)
        await self.browser.start()
        self._versions = {"browser": self.browser.version, "fonts": fonts, "pages": page_version(), "screen": f"{WIDTH}x{HEIGHT}"}

    async def check(self) -> bool:
        return await self.browser.check(timeout_seconds=min(5.0, self._step_timeout_seconds))

    async def open_environment(self) -> MiniwobEnvironment:
        """A fresh environment in a context of its own. Raises EnvironmentFault."""
        return MiniwobEnvironment(
            self.browser,
            await self.browser.new_context(),
            clock=self._clock,
            versions=self._versions,
            init_scripts=self._init_scripts,
            settle_frames=self._settle_frames,
            timeouts=(self._step_timeout_seconds, self._reset_timeout_seconds),
        )

    async def close(self) -> None:
        await self.browser.close()


class MiniwobEnvironment:
    """One slot's pages; implements Environment. Owned by one task at a time."""

    def __init__(  # noqa: PLR0913 - the host is the only caller and names every one
        self,
        browser: Browser,
        context: str,
        *,
        clock: Clock,
        versions: Mapping[str, str],
        init_scripts: Sequence[str],
        settle_frames: int,
        timeouts: tuple[float, float],
    ) -> None:
        self._browser = browser
        self._context = context
        self._clock = clock
        self._versions = versions
        self._init_scripts = init_scripts
        self._settle_frames = settle_frames
        self._step_timeout_seconds, self._reset_timeout_seconds = timeouts
        self._pages: OrderedDict[str, Page] = OrderedDict()
        self._page: Page | None = None
        self._instruction = ""
        self._is_done = False
        self._is_healthy = True

    @property
    def is_healthy(self) -> bool:
        """False after any fault, or once the browser is gone."""
        return self._is_healthy and self._browser.is_alive

    @property
    def page(self) -> Page:
        """The page of the running episode. Raises EnvironmentFault before the first reset."""
        if self._page is None:
            raise EnvironmentFault("no episode has begun; call reset first", "reset")
        return self._page

    async def evaluate_js(self, expression: str) -> Any:
        """JSON value of an expression in the page of the running episode."""
        return await self.page.evaluate_js(expression)

    async def reset(self, task: Task) -> Observation:
        """First observation of the instance. Raises ConfigError for an unknown family, EnvironmentFault otherwise."""
        url = page_url(task.family)
        async with self._deadline(self._reset_timeout_seconds, f"reset of {task.id}"):
            self._page, is_fresh = await self._page_of(task.family, url)
            page = self._page
            await _park_pointer(page)
            self._instruction, is_ready = await page.evaluate_js(f"__episode.reset({task.seed})")
            self._is_done = False
            while not is_ready:
                await self._clock.sleep(FRAME_SECONDS)
                is_ready = (await _read_state(page)).is_ready
            for _ in range(FRESH_FRAMES if is_fresh else 0):
                await page.draw_frame()
                await self._clock.sleep(FRAME_SECONDS)
            return await self._observe(page, is_first=True)

    async def step(self, actions: Sequence[Action]) -> Observation:
        """Observation after the actions; those that come after the end of the episode are left out."""
        page = self.page
        async with self._deadline(self._step_timeout_seconds, "step"):
            for index, action in enumerate(actions):
                if index and not self._is_done:
                    self._is_done = (await _read_state(page)).is_done
                if self._is_done:
                    break
                if action.kind not in SILENT_KINDS:
                    await perform(page, action, self._clock)
            return await self._observe(page)

    async def evaluate(self) -> Verdict:
        """Score of the episode as it stands: the raw reward, negative ones as 0. Success is the full reward of 1."""
        async with self._deadline(self._step_timeout_seconds, "evaluation"):
            raw = (await _read_state(self.page)).raw_reward
        if not isinstance(raw, int | float) or not math.isfinite(raw):
            raise EvaluatorFault(f"the page's reward is {raw!r}, not a number")
        return Verdict(score=min(1.0, max(0.0, float(raw))), success=raw >= 1, raw=float(raw))

    async def close(self) -> None:
        """Close all pages of the slot; never raises."""
        self._is_healthy = False
        self._pages.clear()
        self._page = None
        if self._browser.is_alive:
            try:
                await self._browser.close_context(self._context)
            except EnvironmentFault:
                return  # a browser that does not answer is ended by the pool

    def versions(self) -> Mapping[str, str]:
        """browser, fonts, pages, screen."""
        return self._versions

    async def _page_of(self, family: str, url: str) -> tuple[Page, bool]:
        """The family's page, and whether it was loaded just now."""
        page = self._pages.get(family)
        is_fresh = page is None or family in UNSTABLE_PAGES
        if page is None:
            page = await self._browser.open_page(self._context, WIDTH, HEIGHT, init_scripts=self._init_scripts)
            await page.navigate(url)
            self._pages[family] = page
            if len(self._pages) > PAGES_PER_SLOT:
                _, oldest = self._pages.popitem(last=False)
                await oldest.close()
        elif is_fresh:
            await page.navigate(url)
        self._pages.move_to_end(family)
        return page, is_fresh

    async def _observe(self, page: Page, *, is_first: bool = False) -> Observation:
        """The picture as it is now if nothing is due in the page, else after two equal frames; the first one always so."""
        started = self._clock.now()
        if is_first:
            await self._settle(page)
        asked = page.send_js(STATE)
        screenshot = await page.screenshot()
        state = PageState(*js_value((await page.collect([asked], "the state of the page"))[0]))
        settled, seconds = True, 0.0
        if state.is_moving and not state.is_done:
            settled, state = await self._settle(page)
            seconds = self._clock.now() - started
            screenshot = await page.screenshot()
        self._is_done = state.is_done
        return Observation(
            screenshot=screenshot,
            width=WIDTH,
            height=HEIGHT,
            instruction=self._instruction,
            done=state.is_done,
            settle_seconds=seconds,
            settled=settled,
        )

    async def _settle(self, page: Page) -> tuple[bool, PageState]:
        """Draw frames until one changes nothing and nothing more is due; False if the bound came first."""
        state = await _read_state(page)
        for frame in range(self._settle_frames):
            if frame > 1:
                await self._clock.sleep(FRAME_SECONDS)
            is_changed = await page.draw_frame()
            state = await _read_state(page)
            if state.is_done or not (is_changed or state.is_moving):
                return True, state
        return False, state

    @asynccontextmanager
    async def _deadline(self, seconds: float, what: str) -> AsyncGenerator[None]:
        """Bound the body, and mark the environment as broken by any fault in it."""
        try:
            async with self._clock.timeout(seconds):
                yield
        except TimeoutError as error:
            self._is_healthy = False
            raise EnvironmentTimeout(f"{what} took longer than {seconds:g} s") from error
        except EnvironmentFault as error:
            self._is_healthy = False
            if not self._browser.is_alive and not isinstance(error, EnvironmentCrashed):
                raise EnvironmentCrashed(f"browser died during {what}: {error}") from error
            raise
        except asyncio.CancelledError:
            self._is_healthy = False
            raise


def page_url(family: str) -> str:
    """Address of a family's page. Raises ConfigError for an unknown family."""
    require_family(family)
    return (page_folder() / "miniwob" / f"{family}.html").as_uri()


async def _read_state(page: Page) -> PageState:
    (reply,) = await page.collect([page.send_js(STATE)], "the state of the page")
    return PageState(*js_value(reply))


async def _park_pointer(page: Page) -> None:
    """Move the pointer to the frame around the task, where it hovers over nothing."""
    events = pointer_moves(WIDTH - 1, HEIGHT - 1)
    await page.collect([page.send(event.method, event.params) for event in events], "the pointer")

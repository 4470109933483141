"""One headless browser and its pages. Frames are drawn on demand, one at a time per browser.

Two frames in flight at once end the browser's graphics process, so all pages share one frame lock, and a frame whose
waiter was cancelled is still waited for before the next one is asked for.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dartrl.envs.web.devtools import DevTools, Reply
from dartrl.envs.web.process import BrowserProcess, end_process, find_browser, last_words, start_process
from dartrl.errors import EnvironmentCrashed, EnvironmentFault, EnvironmentTimeout
from dartrl.interfaces import Clock

PNG = {"format": "png", "optimizeForSpeed": True}
"""Lossless; the fast encoder costs a third more bytes and half the time."""

START_TIMEOUT_SECONDS = 60.0
"""A start takes a fifth of a second; a busy machine may need much longer."""

FRAME_TIMEOUT_SECONDS = 8.0
"""A frame takes milliseconds; one that takes this long hangs, and so does every other page of the browser."""


class Browser:
    """A browser process; `start` before use, `close` always."""

    def __init__(self, clock: Clock, *, binary: Path | None = None, timeout_seconds: float = 20.0) -> None:
        """timeout_seconds: deadline of every single command. binary: found on this machine if None."""
        self._clock = clock
        self._binary = binary
        self._timeout_seconds = timeout_seconds
        self._process: BrowserProcess | None = None
        self._frame_lock = asyncio.Lock()
        self._frame: asyncio.Future[Reply] | None = None
        self.devtools = DevTools(clock, timeout_seconds=timeout_seconds)
        self.version = ""

    async def start(self) -> None:
        """Start the process and shake hands. Raises EnvironmentFault with the remedy."""
        binary = self._binary or find_browser()
        self._process = start_process(binary)  # not in a thread: a cancelled wait would lose the process
        try:
            await self.devtools.connect(self._process.read_fd, self._process.write_fd)
            hello = await self.devtools.command("Browser.getVersion", timeout_seconds=START_TIMEOUT_SECONDS)
            await self.devtools.command("Browser.setDownloadBehavior", {"behavior": "deny"})
            self.version = hello["product"]
        except EnvironmentFault as error:
            words = last_words(self._process)
            raise EnvironmentFault(
                f"browser {binary} did not start: {error}\n{words or '(it wrote nothing)'}\n"
                f"try `{binary} --no-sandbox --dump-dom about:blank`; if a library is missing, reinstall the package"
            ) from error
        finally:
            if not self.version:
                await self.close()

    @property
    def is_alive(self) -> bool:
        """False once the process has closed its pipe."""
        return self.devtools.is_open

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process else None

    async def check(self, timeout_seconds: float) -> bool:
        """True if the browser answers within that time."""
        try:
            await self.devtools.command("Browser.getVersion", timeout_seconds=timeout_seconds)
        except EnvironmentFault:
            return False
        return True

    async def new_context(self) -> str:
        """Id of a fresh context: its pages share no cookies and no storage with others."""
        return (await self.devtools.command("Target.createBrowserContext"))["browserContextId"]

    async def close_context(self, context: str) -> None:
        """Close a context with all its pages."""
        await self.devtools.command("Target.disposeBrowserContext", {"browserContextId": context})

    async def open_page(self, context: str | None, width: int, height: int, *, init_scripts: Sequence[str] = ()) -> Page:
        """A blank page of that size in CSS pixels; every document it loads runs `init_scripts` first."""
        target: dict[str, Any] = {"url": "about:blank", "width": width, "height": height, "enableBeginFrameControl": True}
        if context is not None:
            target["browserContextId"] = context
        target_id = (await self.devtools.command("Target.createTarget", target))["targetId"]
        attached = await self.devtools.command("Target.attachToTarget", {"targetId": target_id, "flatten": True})
        page = Page(self, target_id, attached["sessionId"], width, height)
        await page.prepare(init_scripts)
        return page

    async def draw_frame(self, session: str, params: Mapping[str, Any]) -> Reply:
        """Draw one frame of a page; waits for its turn, which the caller bounds."""
        async with self._frame_lock:
            try:
                async with self._clock.timeout(FRAME_TIMEOUT_SECONDS):
                    if self._frame is not None and not self._frame.done():
                        await asyncio.wait([self._frame])
                    self._frame = self.devtools.send("HeadlessExperimental.beginFrame", params, session)
                    return await asyncio.shield(self._frame)
            except TimeoutError as error:
                self.devtools.close()  # no other page will get a frame either: let all of them know now
                raise EnvironmentTimeout(f"browser drew no frame within {FRAME_TIMEOUT_SECONDS:g} s") from error

    async def close(self) -> None:
        """End the process group and remove its files. May be called twice."""
        self.devtools.close()
        process, self._process = self._process, None
        if process is not None:
            await self._clock.run_blocking(end_process, process)


class Page:
    """One page of a browser; owned by one task at a time."""

    def __init__(self, browser: Browser, target_id: str, session: str, width: int, height: int) -> None:
        self._browser = browser
        self._devtools = browser.devtools
        self._target_id = target_id
        self._session = session
        self._loaded: asyncio.Future[Reply] | None = None
        self.width = width
        self.height = height
        self.dialogs_dismissed = 0

    async def prepare(self, init_scripts: Sequence[str]) -> None:
        """Subscribe to events and install the scripts that run before those of the page."""
        self._devtools.listen(self._session, self._on_event)
        await self._devtools.collect(
            [
                self.send("Page.enable"),
                self.send("Inspector.enable"),
                self.send("Emulation.setFocusEmulationEnabled", {"enabled": True}),
                *(self.send("Page.addScriptToEvaluateOnNewDocument", {"source": source}) for source in init_scripts),
            ],
            "the setup of a page",
        )

    def send(self, method: str, params: Mapping[str, Any] | None = None) -> asyncio.Future[Reply]:
        """Send one command of this page."""
        return self._devtools.send(method, params, self._session)

    async def collect(self, futures: Sequence[asyncio.Future[Reply]], what: str) -> Sequence[Reply]:
        """Results of commands already sent, under one deadline."""
        return await self._devtools.collect(futures, what)

    async def navigate(self, url: str) -> None:
        """Load a document and wait for its load event. Raises EnvironmentFault if it cannot be loaded."""
        self._loaded = asyncio.get_running_loop().create_future()
        command = self.send("Page.navigate", {"url": url})
        (reply,) = await self.collect([command], f"the navigation to {url}")
        if reply.get("errorText"):
            raise EnvironmentFault(f"page {url} cannot be loaded: {reply['errorText']}", "reset")
        await self._devtools.collect([self._loaded], f"the load event of {url}")
        # A document without scripts of its own runs the init scripts only when one is asked for; and nothing to go back to.
        await self.collect([self.send_js("0"), self.send("Page.resetNavigationHistory")], "the first script of a page")

    async def evaluate_js(self, expression: str) -> Any:
        """JSON value of a JavaScript expression; promises are awaited. Raises EnvironmentFault with the page's error."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        (reply,) = await self.collect([self.send("Runtime.evaluate", params)], "an expression")
        return js_value(reply)

    def send_js(self, expression: str) -> asyncio.Future[Reply]:
        """Send an expression that is no promise, without waiting; read its reply with `js_value`."""
        return self.send("Runtime.evaluate", {"expression": expression, "returnByValue": True})

    async def screenshot(self) -> bytes:
        """Draw the page as it is now: PNG of width x height pixels."""
        for _ in range(3):  # a page that has never been drawn may need a second frame for its first picture
            reply = await self._browser.draw_frame(self._session, {"screenshot": PNG})
            if "screenshotData" in reply:
                return base64.b64decode(reply["screenshotData"])
        raise EnvironmentFault("browser drew frames but returned no picture", "display")

    async def draw_frame(self) -> bool:
        """Let one animation frame happen without a picture; True if it changed the screen."""
        return bool((await self._browser.draw_frame(self._session, {}))["hasDamage"])

    async def close(self) -> None:
        """Close the page."""
        await self._devtools.command("Target.closeTarget", {"targetId": self._target_id})

    def _on_event(self, method: str, params: Mapping[str, Any]) -> None:
        if method == "Page.loadEventFired":
            if self._loaded is not None and not self._loaded.done():
                self._loaded.set_result({})
        elif method == "Page.javascriptDialogOpening":
            self.dialogs_dismissed += 1
            self.send("Page.handleJavaScriptDialog", {"accept": False})
        elif method in ("Inspector.targetCrashed", "Inspector.detached"):
            self._devtools.fail_session(self._session, f"page crashed ({method})")
            if self._loaded is not None and not self._loaded.done():
                self._loaded.set_exception(EnvironmentCrashed(f"page crashed ({method})"))


def js_value(reply: Reply) -> Any:
    """Value of a `Runtime.evaluate` reply. Raises EnvironmentFault with the page's error."""
    details = reply.get("exceptionDetails")
    if details is not None:
        text = details.get("exception", {}).get("description") or details.get("text", "unknown error")
        raise EnvironmentFault(f"script failed in the page: {text}", "guest_api")
    return reply["result"].get("value")

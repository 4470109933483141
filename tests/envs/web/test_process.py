"""The browser process: its death is noticed, and nothing of it survives its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from dartrl.envs.web.browser import Browser
from dartrl.envs.web.process import PROFILE_PREFIX, find_browser, remove_stale_profiles
from dartrl.errors import EnvironmentCrashed, EnvironmentFault, EnvironmentTimeout
from dartrl.launch.system_clock import SystemClock

pytestmark = pytest.mark.browser

CLOCK = SystemClock()


def processes_of(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def profiles() -> set[str]:
    return {folder.name for folder in Path(tempfile.gettempdir()).glob(f"{PROFILE_PREFIX}{os.getpid()}-*")}


async def test_a_killed_browser_is_noticed_at_once():
    browser = Browser(CLOCK, timeout_seconds=20.0)
    await browser.start()
    page = await browser.open_page(None, 168, 224)
    waiting = page.send("Runtime.evaluate", {"expression": "new Promise(() => 0)", "awaitPromise": True})
    os.kill(browser.pid, signal.SIGKILL)
    async with CLOCK.timeout(5.0):
        with pytest.raises(EnvironmentCrashed):
            await waiting
        with pytest.raises(EnvironmentCrashed):
            await page.screenshot()
    assert not browser.is_alive
    await browser.close()


async def test_a_stopped_browser_ends_in_a_timeout():
    browser = Browser(CLOCK, timeout_seconds=3.0)
    await browser.start()
    page = await browser.open_page(None, 168, 224)
    os.kill(browser.pid, signal.SIGSTOP)
    with pytest.raises(EnvironmentTimeout, match=r"within 3 s"):
        await page.evaluate_js("1")
    assert not await browser.check(0.2)
    processes = processes_of(browser.pid)
    await browser.close()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


async def test_close_leaves_no_process_and_no_file():
    before = profiles()
    browser = Browser(CLOCK)
    await browser.start()
    await browser.open_page(await browser.new_context(), 168, 224)
    processes = processes_of(browser.pid)
    assert len(processes) > 1
    await browser.close()
    await browser.close()
    gone, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
    assert profiles() == before


ORPHAN = """
import asyncio
from dartrl.envs.web.browser import Browser
from dartrl.launch.system_clock import SystemClock

async def main():
    browser = Browser(SystemClock())
    await browser.start()
    await browser.open_page(None, 168, 224)
    print(browser.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_browser_ends_with_its_killed_owner():
    owner = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    processes = processes_of(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("binary", ["/no/such/browser", "/dev/null"])
async def test_a_missing_browser_names_the_remedy(binary):
    before = profiles()
    with pytest.raises(EnvironmentFault, match=r"cannot be executed.*apt-get install chromium-headless-shell"):
        await Browser(CLOCK, binary=Path(binary)).start()
    assert profiles() == before


async def test_a_browser_that_gives_up_is_quoted(tmp_path):
    program = tmp_path / "broken-browser"
    program.write_text("#!/bin/sh\necho 'error while loading shared libraries: libnss3.so' >&2\nexit 127\n")
    program.chmod(0o755)
    before = profiles()
    with pytest.raises(EnvironmentFault, match=r"(?s)did not start.*libnss3.so.*reinstall"):
        await Browser(CLOCK, binary=program).start()
    assert profiles() == before


def test_profiles_of_dead_owners_are_removed(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    for owner in (ended.pid, os.getpid()):
        (tmp_path / f"{PROFILE_PREFIX}{owner}-abc").mkdir()
    remove_stale_profiles(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == [f"{PROFILE_PREFIX}{os.getpid()}-abc"]


def test_the_browser_itself_is_found_rather_than_its_wrapper():
    with find_browser().open("rb") as binary:
        assert binary.read(4) == b"\x7fELF"

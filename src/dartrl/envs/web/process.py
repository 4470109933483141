"""The headless Chromium process: found, started with pipes on descriptors 3 and 4, and ended with all its children."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dartrl.errors import EnvironmentFault

BINARY_NAMES = ("chromium-headless-shell", "chrome-headless-shell", "headless_shell")
"""Names looked for; only the headless shell can draw frames on demand."""

LIBRARY_FOLDERS = (Path("/usr/lib/chromium"), Path("/usr/lib64/chromium"), Path("/opt/chrome-headless-shell"))
"""Where distributions keep the binary itself; the name on PATH is often a wrapper script."""

INSTALL_HINT = "install it with `apt-get install chromium-headless-shell`, or put `chrome-headless-shell` on PATH"

PROFILE_PREFIX = "dartrl-browser-"

FLAGS = (
    # pages are files of an installed package and the network is off, so a container without user namespaces may run them
    "--no-sandbox",
    "--allow-file-access-from-files",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--block-new-web-contents",
    # frames are drawn when asked for, and only then
    "--enable-begin-frame-control",
    "--run-all-compositor-stages-before-draw",
    "--disable-new-content-rendering-timeout",
    "--disable-threaded-animation",
    "--disable-threaded-scrolling",
    "--disable-smooth-scrolling",
    "--disable-checker-imaging",
    "--disable-image-animation-resync",
    # one look everywhere
    "--disable-gpu",
    "--in-process-gpu",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--force-color-profile=srgb",
    "--lang=en-US",
    # nothing in the background
    "--no-first-run",
    "--no-default-browser-check",
    "--mute-audio",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-quic",
    "--disable-renderer-backgrounding",
    "--disable-sync",
    "--disable-features=Translate,OptimizationHints,MediaRouter,DialMediaRouteProvider",
    # the pages of one slot are never busy together, so they share a renderer and its memory
    "--renderer-process-limit=1",
)


@dataclass(frozen=True, slots=True)
class BrowserProcess:
    """A running browser; `end_process` must be called once."""

    pid: int
    """Process id, also the id of its process group and session."""
    read_fd: int
    """Its replies come out here."""
    write_fd: int
    """Commands go in here."""
    profile: Path
    """Private folder, removed at the end."""


def find_browser() -> Path:
    """The headless shell to run. Raises EnvironmentFault with the remedy if there is none."""
    candidates = [folder / name for folder in LIBRARY_FOLDERS for name in BINARY_NAMES]
    candidates += [Path(found) for name in BINARY_NAMES if (found := shutil.which(name))]
    candidates += sorted(Path.home().glob(".cache/ms-playwright/chromium_headless_shell-*/*/*headless*shell"), reverse=True)
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return candidate
    raise EnvironmentFault(f"no headless browser found ({', '.join(BINARY_NAMES)}); {INSTALL_HINT}")


def start_process(binary: Path, flags: Sequence[str] = ()) -> BrowserProcess:
    """Start a browser in a session of its own. Raises EnvironmentFault if the binary cannot be executed."""
    remove_stale_profiles(Path(tempfile.gettempdir()))
    profile = Path(tempfile.mkdtemp(prefix=f"{PROFILE_PREFIX}{os.getpid()}-"))
    commands_out, commands_in = _high_pipe()
    replies_out, replies_in = _high_pipe()
    arguments = [str(binary), *FLAGS, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        pid = os.posix_spawn(
            binary,
            arguments,
            {**os.environ, "TZ": "UTC", "LANG": "C.UTF-8", "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, str(profile / "stderr"), log_flags, 0o600),
                (os.POSIX_SPAWN_DUP2, commands_out, 3),
                (os.POSIX_SPAWN_DUP2, replies_in, 4),
            ],
            setsid=True,
        )
    except OSError as error:
        os.close(commands_in)
        os.close(replies_out)
        shutil.rmtree(profile, ignore_errors=True)
        raise EnvironmentFault(f"browser {binary} cannot be executed: {error.strerror}; {INSTALL_HINT}") from error
    finally:
        os.close(commands_out)
        os.close(replies_in)
    return BrowserProcess(pid=pid, read_fd=replies_out, write_fd=commands_in, profile=profile)


def end_process(process: BrowserProcess) -> None:
    """Kill the whole process group, reap it, and remove its profile. Blocks for some milliseconds."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        os.waitpid(process.pid, 0)
    except ChildProcessError:
        pass
    shutil.rmtree(process.profile, ignore_errors=True)


def last_words(process: BrowserProcess, *, lines: int = 6) -> str:
    """The end of what the browser wrote to its error stream, without the harmless bus messages."""
    try:
        text = (process.profile / "stderr").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line and "dbus" not in line.lower()][-lines:])


def remove_stale_profiles(parent: Path) -> None:
    """Remove the profiles in a folder whose owner was killed before it could."""
    for folder in parent.glob(f"{PROFILE_PREFIX}*"):
        owner = re.match(rf"{PROFILE_PREFIX}(\d+)-", folder.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _high_pipe() -> tuple[int, int]:
    """Both ends of a pipe on descriptors of 10 or more, so that moving them to 3 and 4 overwrites neither."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]

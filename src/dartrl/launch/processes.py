"""Process trees that never outlive their owner: Linux's subreaper, parent-death signal and process groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent dies, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent is gone; exits at once if that already happened."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def set_title(title: str) -> None:
    """Name this process as `ps` and `top` show it; the kernel keeps 15 characters."""
    name = ctypes.create_string_buffer(title.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(name))


def kill_group(pid: int) -> None:
    """SIGKILL to every process of a group that is led by `pid`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def child_pids() -> set[int]:
    """Pids of this process's direct children, adopted orphans included."""
    return {child.pid for child in psutil.Process().children()}


def end_orphans(known: set[int]) -> int:
    """Kill and reap every direct child that is not in `known`, with its descendants; returns how many there were."""
    orphans = [child for child in psutil.Process().children() if child.pid not in known]
    for orphan in orphans:
        for member in [orphan, *_descendants(orphan)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        with contextlib.suppress(psutil.Error, ChildProcessError):
            orphan.wait(timeout=1.0)
    return len(orphans)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

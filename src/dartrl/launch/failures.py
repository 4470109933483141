"""From an exception, possibly a group of them, to one sentence for the user."""

from __future__ import annotations

import errno
from pathlib import Path

from dartrl.errors import CheckpointBroken, ConfigError, DartrlError


def causes(error: BaseException) -> list[BaseException]:
    """The exceptions inside a group, in order; the error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        return [cause for member in error.exceptions for cause in causes(member)]
    return [error]


def is_user_error(error: BaseException) -> bool:
    """True if trying again cannot help: the configuration is wrong, or no checkpoint is usable."""
    return any(isinstance(cause, ConfigError | CheckpointBroken) for cause in causes(error))


def is_expected(error: BaseException) -> bool:
    """True if every cause is an error that dartrl raises on purpose, or a full disk: no traceback is needed."""
    return all(isinstance(cause, DartrlError) or is_disk_full(cause) for cause in causes(error))


def is_disk_full(error: BaseException) -> bool:
    """True for a full disk or quota, as the operating system or SQLite reports it."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "database or disk is full" in str(error)


def explain(error: BaseException, *, folder: Path | None = None) -> str:
    """What happened and what to do, one line per distinct cause."""
    lines = [_explain_one(cause, folder) for cause in causes(error)]
    return "\n".join(dict.fromkeys(lines))


def _explain_one(error: BaseException, folder: Path | None) -> str:
    if is_disk_full(error):
        place = f" that holds {folder}" if folder else ""
        return f"the disk{place} is full; nothing recorded is lost: free some space and go on with: dartrl run --resume"
    if isinstance(error, DartrlError):
        return str(error)
    return f"{type(error).__name__}: {error}"

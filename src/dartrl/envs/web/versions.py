"""What decides how a page looks: browser, fonts and page package. Stored with every trajectory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
from functools import cache
from pathlib import Path

from dartrl.errors import EnvironmentFault

FONT_PATTERNS = ("Arial", "sans-serif", "serif", "monospace", "Arial:bold", "sans-serif:lang=zh", "emoji")
"""Fonts that the pages ask for; which files answer depends on the machine."""


@cache
def page_folder() -> Path:
    """Folder `html` of the installed `miniwob` package. Raises EnvironmentFault if it is missing."""
    found = importlib.util.find_spec("miniwob")
    for location in (found.submodule_search_locations or ()) if found else ():
        folder = Path(location) / "html"
        if (folder / "core" / "core.js").is_file():
            return folder
    raise EnvironmentFault("the MiniWoB++ pages are missing; install them with `pip install 'miniwob>=1.1,<2'`")


def page_version() -> str:
    """Version of the page package."""
    return f"miniwob {importlib.metadata.version('miniwob')}"


@cache
def font_fingerprint() -> str:
    """Hash over the font files that the pages are drawn with; `none` without fontconfig. Blocks for some milliseconds."""
    matcher = shutil.which("fc-match")
    if matcher is None:
        return "none"
    digest = hashlib.sha256()
    for pattern in FONT_PATTERNS:
        found = subprocess.run([matcher, "-f", "%{file}", pattern], capture_output=True, text=True, check=False, timeout=30)
        file = Path(found.stdout.strip())
        digest.update(pattern.encode())
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:16]

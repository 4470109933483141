"""The MiniWoB++ pages: their names, and those whose picture is not a function of the seed alone."""

from __future__ import annotations

from collections.abc import Mapping

UNSTABLE_PAGES: Mapping[str, str] = {}
"""Family -> why it is loaded afresh for every episode."""

"""The MiniWoB++ pages whose first picture is not a function of the seed alone when they are restarted in place.

They are loaded afresh for every episode. Those that `move` differ even then, because they follow the wall clock; all
others give equal pictures for equal seeds. A test goes through all pages and holds this list to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnstablePage:
    """Why a page is loaded afresh."""

    reason: str
    """What the page keeps, or how it moves."""
    moves: bool = False
    """True if the picture changes without any action."""


_FLIGHT = UnstablePage("the date picker and the marks of refused fields stay over a restart")
_DATE = UnstablePage("the date picker stays open, and at the month that was turned to")
_COLOR = UnstablePage("the colour picker stays open, and at the colour that was picked")
_TEXT = UnstablePage("text typed into the area hides the text of the next episode")
_PIE = UnstablePage("the wheel opens and closes by an animation", moves=True)

UNSTABLE_PAGES: Mapping[str, UnstablePage] = {
    "book-flight": _FLIGHT,
    "book-flight-nodelay": _FLIGHT,
    "chase-circle": UnstablePage("the circle moves all the time", moves=True),
    "choose-date": _DATE,
    "choose-date-easy": _DATE,
    "choose-date-medium": _DATE,
    "choose-date-nodelay": _DATE,
    "click-pie": _PIE,
    "click-pie-nodelay": _PIE,
    "drag-cube": UnstablePage("the cube keeps its turn over a restart"),
    "hot-cold": UnstablePage("mouse handlers of earlier episodes stay bound"),
    "hover-shape": UnstablePage("the coloured square changes every two seconds", moves=True),
    "moving-items": UnstablePage("the items move all the time", moves=True),
    "scroll-text": _TEXT,
    "scroll-text-2": _TEXT,
    "simon-says": UnstablePage("buttons light up in turn, and handlers of earlier episodes stay bound", moves=True),
    "stock-market": UnstablePage("the price changes ten times a second", moves=True),
    "terminal": UnstablePage("the caret blinks by a timer", moves=True),
    "use-colorwheel": _COLOR,
    "use-colorwheel-2": _COLOR,
}
"""Family -> why it is loaded afresh for every episode."""

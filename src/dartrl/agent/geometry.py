"""Where a point of the model's image lies on the screen. One resize rule, shared by prompt, processor and mapper."""

from __future__ import annotations

import math
from dataclasses import dataclass

RESIZE_FACTOR = 28
"""Side of one visual token in pixels: patch 14, merged 2 by 2."""

_MAX_RATIO = 200  # of the sides; the processor refuses more
_SLACK_SHARE = 0.02  # overshoot that still counts as pointing at the edge, as a share of the side
_SLACK_PIXELS = 2.0  # and at least this many image pixels


def smart_resize(width: int, height: int, *, min_pixels: int, max_pixels: int, factor: int = RESIZE_FACTOR) -> tuple[int, int]:
    """(width, height) in pixels of the image that the policy really sees.

    Both sides become multiples of `factor`; the area stays within [min_pixels, max_pixels] where rounding permits.
    Raises ValueError for an empty image or sides that differ more than 200 times.
    Source: Qwen2-VL's image processor, which takes (height, width); equal to it for every size.
    """
    if width < 1 or height < 1 or max(width, height) / min(width, height) > _MAX_RATIO:
        raise ValueError(f"image of {width} x {height} pixels: both sides must be at least 1 and differ at most {_MAX_RATIO} times")
    new_width = round(width / factor) * factor
    new_height = round(height / factor) * factor
    if new_width * new_height > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
    elif new_width * new_height < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_width = math.ceil(width * scale / factor) * factor
        new_height = math.ceil(height * scale / factor) * factor
    return new_width, new_height


@dataclass(frozen=True, slots=True)
class Frame:
    """A screen and the image of it that the policy sees."""

    screen: tuple[int, int]
    """(width, height) in screen pixels; (0, 0) without a screen."""
    image: tuple[int, int]
    """(width, height) in image pixels; (0, 0) without a screen."""

    def to_screen(self, x: float, y: float) -> tuple[float, float, bool] | None:
        """(x, y, clamped) in screen pixels of an image point, or None if it lies outside by more than a slip.

        A slip is 2 % of the side, at least 2 pixels; it is moved to the edge and flagged.
        """
        mapped_x = _along(x, self.image[0], self.screen[0])
        mapped_y = _along(y, self.image[1], self.screen[1])
        if mapped_x is None or mapped_y is None:
            return None
        return mapped_x[0], mapped_y[0], mapped_x[1] or mapped_y[1]

    def to_image(self, x: float, y: float) -> tuple[float, float]:
        """Image pixels of a screen point; unchanged without a screen."""
        if not self.screen[0] or not self.screen[1]:
            return x, y
        return x * self.image[0] / self.screen[0], y * self.image[1] / self.screen[1]


def frame_of(screen: tuple[int, int], *, min_pixels: int, max_pixels: int) -> Frame:
    """The frame of a (width, height) screen; without area if there is no screen or no policy could see it."""
    try:
        return Frame(screen, smart_resize(*screen, min_pixels=min_pixels, max_pixels=max_pixels))
    except ValueError:
        return Frame((0, 0), (0, 0))


def _along(value: float, image_side: int, screen_side: int) -> tuple[float, bool] | None:
    slack = max(_SLACK_PIXELS, _SLACK_SHARE * image_side)
    if not image_side or not -slack <= value <= image_side + slack:
        return None
    if value < 0:
        return 0.0, True
    if value >= image_side:
        return float(screen_side - 1), True
    return value * screen_side / image_side, False

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, tuples
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as processor

from dartrl.agent.geometry import Frame, frame_of, smart_resize

MIN_PIXELS, MAX_PIXELS = 100 * 28 * 28, 16384 * 28 * 28
SIDES = integers(28, 4000)


@pytest.mark.parametrize(
    ("screen", "max_pixels", "image"),
    [
        ((1920, 1080), MAX_PIXELS, (1932, 1092)),
        ((1920, 1080), 2_116_800, (1932, 1092)),
        ((1920, 1080), 1350 * 28 * 28, (1344, 756)),
        ((1280, 720), MAX_PIXELS, (1288, 728)),
        ((1024, 768), MAX_PIXELS, (1036, 756)),
        ((800, 600), MAX_PIXELS, (812, 588)),
        ((160, 210), MAX_PIXELS, (252, 336)),
        ((2560, 1440), MAX_PIXELS, (2548, 1428)),
        ((3840, 2160), MAX_PIXELS, (3836, 2156)),
        ((3840, 2160), 2_116_800, (1932, 1064)),
    ],
)
def test_known_screens_resize_as_published(screen, max_pixels, image):
    assert smart_resize(*screen, min_pixels=MIN_PIXELS, max_pixels=max_pixels) == image


@given(width=SIDES, height=SIDES, limits=tuples(integers(784, 100_000), integers(200_000, MAX_PIXELS)))
def test_resize_equals_the_processor_of_transformers(width, height, limits):
    expected = processor.smart_resize(height, width, factor=28, min_pixels=limits[0], max_pixels=limits[1])
    assert smart_resize(width, height, min_pixels=limits[0], max_pixels=limits[1]) == expected[::-1]


@given(width=SIDES, height=SIDES)
def test_sides_are_multiples_of_the_factor(width, height):
    image = smart_resize(width, height, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    assert image[0] % 28 == image[1] % 28 == 0 < min(image)


def test_multiples_of_the_factor_within_the_limits_stay():
    assert smart_resize(168, 224, min_pixels=3136, max_pixels=MAX_PIXELS) == (168, 224)


@given(screen=tuples(SIDES, SIDES), x=floats(0, 0.999), y=floats(0, 0.999))
def test_screen_points_survive_the_way_to_the_image_and_back(screen, x, y):
    frame = frame_of(screen, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    point = (x * screen[0], y * screen[1])
    mapped = frame.to_screen(*frame.to_image(*point))
    assert mapped is not None
    assert mapped[:2] == pytest.approx(point, abs=1e-6) and not mapped[2]


@given(screen=tuples(SIDES, SIDES), x=floats(-5000, 5000), y=floats(-5000, 5000))
def test_a_mapped_point_lies_on_the_screen(screen, x, y):
    mapped = frame_of(screen, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS).to_screen(x, y)
    if mapped is not None:
        assert 0 <= mapped[0] < screen[0] and 0 <= mapped[1] < screen[1]


def test_an_overshoot_of_two_percent_is_a_slip_and_more_is_not():
    frame = Frame((1000, 1000), (1000, 1000))
    assert frame.to_screen(1020, 5) == (999, 5, True)
    assert frame.to_screen(-20, 5) == (0, 5, True)
    assert frame.to_screen(1021, 5) is None
    assert frame.to_screen(5, -21) is None


@pytest.mark.parametrize("screen", [(0, 0), (0, 100), (-3, 5), (1, 10_000)])
def test_screens_that_no_policy_can_see_have_no_points(screen):
    assert frame_of(screen, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS).to_screen(0, 0) is None
    with pytest.raises(ValueError, match="at least 1"):
        smart_resize(*screen, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)

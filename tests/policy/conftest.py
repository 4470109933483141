"""Screens and conversations for the tests of the policy layer."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from dartrl.interfaces import ImageRef, Message


@pytest.fixture(scope="session")
def png() -> Callable[[int, int, int], bytes]:
    """Random pixels of (width, height, seed) as PNG bytes."""

    def make(width: int, height: int, seed: int) -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    return make


@pytest.fixture(scope="session")
def conversation() -> Callable[..., tuple[list[Message], dict[str, bytes]]]:
    """Messages and images of a user turn made of texts and PNG bytes."""

    def make(*parts: str | bytes) -> tuple[list[Message], dict[str, bytes]]:
        images = {hashlib.sha256(part).hexdigest(): part for part in parts if isinstance(part, bytes)}
        refs = [ImageRef(hashlib.sha256(part).hexdigest(), 0, 0) if isinstance(part, bytes) else part for part in parts]
        return [Message("system", ("You see a screen.",)), Message("user", tuple(refs))], images

    return make


@pytest.fixture(scope="session")
def turns(png) -> dict[str, tuple[str | bytes, ...]]:
    """User turns with every mixture of texts and images, by name."""
    small, wide, odd = png(56, 84, 1), png(168, 112, 2), png(70, 130, 3)
    return {
        "text only": ("Copy the word tree.",),
        "one image": (small, "Click the button."),
        "image after text": ("Look: ", wide, " and click."),
        "several images of several sizes": (small, "then", wide, "then", odd, "now click", small),
        "resized": (odd, "Click."),
        "long": (wide, "Copy the word tree into the field. " * 6),
    }


@pytest.fixture(scope="session")
def shared_policy(tiny_policy_folder):
    """A policy with random weights that no test changes."""
    from dartrl.policy.model import load_policy

    return load_policy(tiny_policy_folder)

"""Steps and a readable form of messages for the tests of the agent layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from dartrl.interfaces import ImageRef, Message
from dartrl.types import Action, Generation, ParseError, Step

MakeStep = Callable[..., Step]


def _generation(text: str) -> Generation:
    return Generation(
        text=text,
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(1, np.int32),
        behaviour_logprobs=np.zeros(1, np.float32),
        entropies=None,
        finish_reason="stop",
        image_hashes=(),
        image_grids=(),
        fingerprint="f",
        temperature=1.0,
        banned_ids=(),
        compute_dtype="float32",
        weights_version=0,
        worker="w",
        request_id="r",
    )


@pytest.fixture
def make_step() -> MakeStep:
    """`make_step(index, dialect, reply, screen=(w, h), observation_text="")`: a step as an episode records it."""

    def make(index: int, dialect, reply: str, *, screen: tuple[int, int] = (168, 224), observation_text: str = "") -> Step:
        parsed: tuple[Action, ...] | ParseError = dialect.parse(reply, screen)
        failed = isinstance(parsed, ParseError)
        return Step(
            index=index,
            screenshot=f"shot-{index}" if screen != (0, 0) else None,
            screen=screen,
            observation_text=observation_text,
            generation=_generation(reply),
            actions=() if failed else parsed,
            parse_error=parsed if failed else None,
            environment_seconds=0.0,
            started_at=0.0,
        )

    return make


@pytest.fixture
def show() -> Callable[[Sequence[Message]], str]:
    """Messages as text, one header line each."""

    def shown(part: str | ImageRef) -> str:
        return f"<image {part.hash} {part.width}x{part.height}>" if isinstance(part, ImageRef) else part

    def show_all(messages: Sequence[Message]) -> str:
        return "".join(f"[{message.role}]\n" + "\n".join(map(shown, message.parts)) + "\n" for message in messages)

    return show_all

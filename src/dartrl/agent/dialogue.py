"""From a task and its history to messages: the last k screenshots, all texts, nothing that could pass for a special token.

A page, a task or the model itself may write `<|im_end|>`; what is shown to the model goes through `neutralise` first, so
that such text stays text. Only what a dialect writes itself may hold special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from dartrl.agent.actions import VERBS
from dartrl.agent.calls import thought_of
from dartrl.interfaces import ImageRef, Message
from dartrl.types import Action, Observation, Step

_ANGLES = "<\uff1c\ufe64"  # forms of the less-than sign that compatibility normalisation folds into one
_BARS = "|\uff5c"
_HIDDEN = "\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff"
_WORDS = (
    "s|bos|eos|pad|unk|mask|sep|cls|image|img|video|audio|think|tool_call|tool_response|tool_calls|tools"
    "|start_of_turn|end_of_turn|start_of_image|end_of_image|image_soft_token|sys|object_ref|box|quad|ref"
)
_BARRED = re.compile(rf"([{_ANGLES}])(?=[{_HIDDEN}]*[{_BARS}])")
_BAR_END = re.compile(rf"([{_BARS}])(?=[{_HIDDEN}]*[>\uff1e\ufe65])")
_NAMED = re.compile(rf"([{_ANGLES}])(?=[{_HIDDEN}]*/?(?:{_WORDS})[{_HIDDEN}]*[>\uff1e\ufe65])", re.I)
_DOUBLED = re.compile(r"(<)(?=<SYS>>|</SYS>>)", re.I)
_BRACKETED = re.compile(
    r"(\[)(?=/?(?:INST|IMG|IMG_BREAK|IMG_END|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|gMASK|MASK|CLS|SEP)\])", re.I
)


def neutralise(text: str) -> str:
    """Text in which no spelling of a special token is left: a blank follows its first character.

    Covers `<|...|>` of the Qwen and Llama families with full-width and hidden characters, and the tags of other families.
    Applying it twice changes nothing more. Other text comes back unchanged.
    """
    for pattern in (_BARRED, _BAR_END, _NAMED, _DOUBLED, _BRACKETED):
        text = pattern.sub(r"\1 ", text)
    return text


def written_reply(step: Step, render: Callable[[Action], str]) -> str:
    """An earlier reply as the model is shown it: its thought and its actions in the dialect's own spelling.

    A reply that could not be read is shown as it was. `render` gets actions whose text is neutral.
    """
    if not step.actions:
        return neutralise(step.generation.text)
    thought = neutralise(thought_of(step.generation.text, VERBS))
    calls = "\n\n".join(render(replace(action, text=neutralise(action.text))) for action in step.actions)
    return f"Thought: {thought}\nAction: {calls}" if thought else f"Action: {calls}"


def conversation(
    opening: str,
    steps: Sequence[Step],
    observation: Observation,
    image: ImageRef | None,
    *,
    history_images: int,
    reply_of: Callable[[Step], str],
    is_image_first: bool,
) -> tuple[Message, ...]:
    """User and assistant messages in turn, the opening in the first.

    The last `history_images` screenshots are kept, the present one included, and all texts. A user message that has lost
    its screenshot and has no text is left out, so that two replies can follow each other; the last message is the user's.
    opening: written by the dialect. reply_of: how an earlier step's reply is shown.
    """
    images = [_image_of(step) for step in steps] + [image]
    first_kept = max(0, len(images) - history_images)
    texts = [step.observation_text for step in steps] + [observation.text]
    messages: list[Message] = []
    for index, text in enumerate(texts):
        shown = images[index] if index >= first_kept else None
        words = "\n".join(part for part in (opening if index == 0 else "", neutralise(text)) if part)
        parts: list[str | ImageRef] = [part for part in (words, shown) if part]
        if index == len(steps):
            parts = parts or [""]
        if parts:
            messages.append(Message("user", tuple(reversed(parts) if is_image_first else parts)))
        if index < len(steps):
            messages.append(Message("assistant", (reply_of(steps[index]),)))
    return tuple(messages)


def _image_of(step: Step) -> ImageRef | None:
    return ImageRef(step.screenshot, *step.screen) if step.screenshot else None

"""The dialect of small policies: no system text, a short history, coordinates in screen pixels.

With one screenshot the prompt is a single user message: the screenshot, the instruction, and a line for each of the last
four actions. Its replies follow UI-TARS: `Thought: <label>`, then `Action: click(start_box='(x,y)')`. This is the format
that the shipped policy was trained on; changing a character of it costs success.
"""

from __future__ import annotations

from collections.abc import Sequence

from dartrl.agent.actions import parse_reply, render_action
from dartrl.agent.dialogue import conversation, neutralise, written_reply
from dartrl.agent.geometry import Frame, frame_of
from dartrl.config import AgentConfig
from dartrl.interfaces import ImageRef, Message
from dartrl.types import Action, ActionKind, Observation, ParseError, Step

HISTORY_LINES = 4
"""Earlier actions listed in the prompt."""

FORMS = (
    "click(start_box='(x,y)'), drag(start_box='(x,y)', end_box='(x,y)'), scroll(start_box='(x,y)', direction='down'), "
    "type(content='text'), press(key='enter'), hotkey(key='ctrl c'), wait(), finished(content='')"
)
"""Valid actions, as told after a reply that could not be read."""

KINDS = frozenset(ActionKind)
"""Everything can be read; the forms name what small policies are taught."""


class CompactDialect:
    """Short prompts for policies of a few million parameters."""

    name = "compact"

    def __init__(self, config: AgentConfig) -> None:
        self.history_images = config.history_images
        self.max_reply_tokens = config.max_reply_tokens
        self._limits = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}

    def messages(
        self, instruction: str, steps: Sequence[Step], observation: Observation, image: ImageRef | None
    ) -> tuple[Message, ...]:
        """One user message for one screenshot of history; turns of user and assistant for none or several."""
        if self.history_images != 1:
            return conversation(
                neutralise(instruction),
                steps,
                observation,
                image,
                history_images=self.history_images,
                reply_of=self._written_reply,
                is_image_first=True,
            )
        lines = [neutralise(instruction), neutralise(_text_without_error(steps, observation))]
        text = "\n".join(line for line in lines if line) + history_text(steps)
        return (Message("user", (image, text) if image else (text,)),)

    def parse(self, text: str, screen: tuple[int, int]) -> tuple[Action, ...] | ParseError:
        """Typed actions in screen pixels, or why there are none. Never raises."""
        return parse_reply(text, frame_of(screen, **self._limits), kinds=KINDS, forms=FORMS)

    def _written_reply(self, step: Step) -> str:
        frame = frame_of(step.screen, **self._limits)
        return written_reply(step, lambda action: render_action(action, frame))


def render_reply(label: str, action: Action, *, screen: tuple[int, int]) -> str:
    """The reply that a demonstration teaches for an action on a screen that needs no resizing.

    label: the target in words. Points are rounded to whole pixels.
    """
    frame = Frame(screen, screen)
    whole = Action(
        action.kind,
        x=_whole(action.x),
        y=_whole(action.y),
        to_x=_whole(action.to_x),
        to_y=_whole(action.to_y),
        direction=action.direction,
        text=action.text,
        keys=action.keys,
    )
    return f"Thought: {label}\nAction: {render_action(whole, frame)}"


def history_text(steps: Sequence[Step]) -> str:
    """A line, each after a newline, for each of the last four actions; unreadable replies count as one."""
    lines: list[str] = []
    for step in steps[-HISTORY_LINES:]:
        lines += [history_line(action) for action in step.actions]
        if step.parse_error is not None:
            lines.append(f"error({step.parse_error.kind})")
    return "".join("\n" + neutralise(line) for line in lines[-HISTORY_LINES:])


def history_line(action: Action) -> str:
    """An earlier action in few tokens: `click(12,34)`, `drag(1,2,3,4)`, `scroll(12,34,down)`, `type(text)`, `press(enter)`."""
    points = [str(int(value)) for value in map(_whole, (action.x, action.y, action.to_x, action.to_y)) if value is not None]
    words = [action.direction] if action.direction else []
    if action.keys:
        words.append(" ".join(action.keys))
    if action.text:
        words.append(action.text.replace("\n", "\\n"))
    return f"{action.kind.value}({','.join(points + words)})"


def _whole(value: float | None) -> float | None:
    return None if value is None else float(round(value))


def _text_without_error(steps: Sequence[Step], observation: Observation) -> str:
    """The observation's text; an error message is left out, since the history has a short line for it."""
    error = steps[-1].parse_error if steps else None
    return observation.text.removesuffix(error.message).rstrip("\n") if error else observation.text

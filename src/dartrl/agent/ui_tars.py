"""The dialect of UI-TARS 1.5 for computers.

The wording of the action space and of the output format is the interface that the checkpoints were trained on. Coordinates
are absolute pixels of the image after `smart_resize`; history keeps the last k screenshots and all replies, and points of
earlier replies carry the box tokens that engines strip from decoded text.
Source: UI-TARS 1.5 (arXiv:2501.12326), the computer prompt in its box spelling, as DART (arXiv:2509.23866) trains it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dartrl.agent.actions import parse_reply, render_action
from dartrl.agent.dialogue import conversation, neutralise, written_reply
from dartrl.agent.geometry import frame_of
from dartrl.config import AgentConfig
from dartrl.interfaces import ImageRef, Message
from dartrl.types import Action, ActionKind, Observation, ParseError, Step

SYSTEM = "You are a helpful assistant."

BOX = "<|box_start|>({x},{y})<|box_end|>"
"""How a point stands in the prompt's history."""

PROMPT = """\
You are a GUI agent. You are given a task and your action history, with screenshots. \
You need to perform the next action to complete the task.

## Output Format
```
Thought: ...
Action: ...
```

## Action Space
click(start_box='<|box_start|>(x1,y1)<|box_end|>')
left_double(start_box='<|box_start|>(x1,y1)<|box_end|>')
right_single(start_box='<|box_start|>(x1,y1)<|box_end|>')
drag(start_box='<|box_start|>(x1,y1)<|box_end|>', end_box='<|box_start|>(x3,y3)<|box_end|>')
hotkey(key='ctrl c') # Split keys with a space and use lowercase. Use at most 3 keys in one hotkey.
type(content='xxx') # Escape ', " and \\ with a backslash and write a newline as \\n. A newline at the end submits the input.
scroll(start_box='<|box_start|>(x1,y1)<|box_end|>', direction='down or up or right or left') # Show more on that side.
wait() # Sleep for 5s and take a screenshot to check for any changes.
finished(content='xxx') # The task is done; the content is your answer, escaped like typed text.
call_user() # The task cannot be done, or you need the user's help.

## Note
- Use English in the `Thought` part.
- Write a small plan and finally summarize your next action (with its target element) in one sentence in the `Thought` part.

## User Instruction
"""
"""Everything before the instruction."""

FORMS = (
    "click(start_box='(x,y)'), left_double(start_box='(x,y)'), right_single(start_box='(x,y)'), "
    "drag(start_box='(x,y)', end_box='(x,y)'), hotkey(key='ctrl c'), type(content='text'), "
    "scroll(start_box='(x,y)', direction='down'), wait(), finished(content='answer'), call_user()"
)
"""Valid actions, as told after a reply that could not be read."""


class UiTarsDialect:
    """Prompts and replies of UI-TARS 1.5."""

    name = "ui-tars"

    def __init__(self, config: AgentConfig) -> None:
        self.history_images = config.history_images
        self.max_reply_tokens = config.max_reply_tokens
        self._limits = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels}

    def messages(
        self, instruction: str, steps: Sequence[Step], observation: Observation, image: ImageRef | None
    ) -> tuple[Message, ...]:
        """System text, the prompt with the instruction and the first screenshot, then replies and screenshots in turn."""
        turns = conversation(
            PROMPT + neutralise(instruction),
            steps,
            observation,
            image,
            history_images=self.history_images,
            reply_of=self._written_reply,
            is_image_first=False,
        )
        return (Message("system", (SYSTEM,)), *turns)

    def parse(self, text: str, screen: tuple[int, int]) -> tuple[Action, ...] | ParseError:
        """Typed actions in screen pixels, or why there are none. Never raises."""
        return parse_reply(text, frame_of(screen, **self._limits), kinds=frozenset(ActionKind), forms=FORMS)

    def _written_reply(self, step: Step) -> str:
        frame = frame_of(step.screen, **self._limits)
        return written_reply(step, lambda action: render_action(action, frame, box=BOX))

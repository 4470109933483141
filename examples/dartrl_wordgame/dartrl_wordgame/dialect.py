"""How the tiny policy is asked to play.

It was pre-trained on web pages, so the words are put into sentences that it has met there, as if the text field had just
been clicked, and it answers by typing. Each round is asked on its own: what was said before does not matter to the game.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dartrl.agent.actions import parse_reply
from dartrl.agent.compact import history_line
from dartrl.agent.dialogue import neutralise
from dartrl.agent.geometry import Frame
from dartrl.config import AgentConfig
from dartrl.interfaces import ImageRef, Message
from dartrl.types import Action, ActionKind, Observation, ParseError, Step

FORMS = "type(content='word')"

FIELD_CLICKED = "\n" + history_line(Action(ActionKind.CLICK, x=80, y=64))
"""After a click into a field the tiny policy types; before it, it would look for the field."""

_NO_SCREEN = Frame((0, 0), (0, 0))
_WORD = re.compile(r'"([^"]*)"')


class WordDialect:
    """One sentence in, one typed word out; the entry point `dartrl.dialects: wordgame`."""

    name = "wordgame"
    history_images = 0

    def __init__(self, config: AgentConfig) -> None:
        self.max_reply_tokens = config.max_reply_tokens

    def messages(
        self, instruction: str, steps: Sequence[Step], observation: Observation, image: ImageRef | None
    ) -> Sequence[Message]:
        """A single user message about the words that are shown now."""
        words = [neutralise(word) for word in _WORD.findall(observation.text)]
        if len(words) == 1:
            sentence = f'Enter "{words[0]}" into the text field and press Submit.'
        else:
            username, password = words[:2]
            sentence = f'Enter the username "{username}" and the password "{password}" into the text fields and press login.'
        return (Message("user", (sentence + FIELD_CLICKED,)),)

    def parse(self, text: str, screen: tuple[int, int]) -> tuple[Action, ...] | ParseError:
        """The typed word, or why there is none."""
        return parse_reply(text, _NO_SCREEN, kinds=frozenset({ActionKind.TYPE}), forms=FORMS)

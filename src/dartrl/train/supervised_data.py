"""Lessons for supervised training: rows of questions and answers about screens, and rows of text to copy.

A lesson is one image with several turns, so that a screen is encoded once: first the task and what the expert does next, then
places to point at (`"Submit"`) and places to read (`Read (48,104).`). Text lessons have no image: the sentence of a real typing
step with other strings in the quotes, which teaches exact copying hundreds of times faster than screens do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import Generator as Random
from numpy.typing import NDArray

from dartrl.agent.compact import HISTORY_LINES, history_line, render_reply
from dartrl.agent.demonstration import (
    SCREENS_FILE,
    STATES_FILE,
    SUMMARY_FILE,
    DemonstratedState,
    Element,
    ExpertAction,
    state_from_json,
)
from dartrl.agent.dialogue import neutralise
from dartrl.errors import ConfigError
from dartrl.policy.inputs import EncodedImage, Row, image_of_pixels, make_row
from dartrl.policy.model import IMAGE_TOKEN, Policy
from dartrl.types import Action, ActionKind

GRID = 4
"""Targets are box centres rounded to multiples of this many pixels: fewer tokens to tell apart."""

ADDED_TOKENS = (
    "Thought: ",
    "\nAction: ",
    "click(start_box='(",
    ")')",
    "drag(start_box='(",
    ")', end_box='(",
    "scroll(start_box='(",
    ")', direction='",
    "type(content='",
    "')",
    "finished(content='')",
    "user\n",
    "assistant\n",
)
"""Phrases of the reply grammar that are one token each, so that a click is a reply of nine tokens."""

MAX_LABEL = 20
"""Longer labels are not asked for."""

WORD_WEIGHT = 0.2
"""How often a plain word is asked for, against 1 for what can be used."""

READ_SHARE = 0.3
"""Share of the questions that ask for the words at a place."""

HISTORY_JITTER_SHARE = 0.5
"""Share of the lessons whose history is moved by a few pixels."""

NAME_SHARE = 0.3
"""Share of names among the strings to copy; the others are random."""

LONG_SHARE = 0.4
"""Share of the random strings that have up to 20 characters instead of 7."""

HELD_OUT_EVERY = 20
"""Seeds divisible by this are never trained on; accuracy is measured on them."""

CHARACTERS = np.array(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"))

Turn = tuple[str, str]
"""A question and its answer."""


@dataclass(frozen=True, slots=True)
class Collection:
    """Demonstrated states with their screens, in an order that does not depend on how they were collected."""

    states: tuple[DemonstratedState, ...]
    """Sorted by family, seed and step."""
    screens_NHWC: NDArray[np.uint8]
    """Memory-mapped, in the order of the file."""
    rows_N: NDArray[np.int64]
    """Row in the file of each state."""
    name: str
    """Makes the images' identities unique over collections."""

    def __len__(self) -> int:
        return len(self.states)

    def image(self, policy: Policy, index: int) -> EncodedImage:
        """Screen of one state as the policy sees it."""
        row = int(self.rows_N[index])
        return image_of_pixels(policy.settings, self.screens_NHWC[row], f"{self.name}/{row}")

    def subset(self, *, held_out: bool) -> NDArray[np.int64]:
        """Indices of the states to train on, or of those to measure on."""
        is_held_out = np.array([state.seed % HELD_OUT_EVERY == 0 for state in self.states], dtype=np.bool_)
        return np.flatnonzero(is_held_out == held_out)


def load_collection(folder: Path) -> Collection:
    """The complete collection in a folder. Raises ConfigError if there is none."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        lines = (folder / STATES_FILE).read_text(encoding="utf-8").splitlines()
        screens = np.memmap(folder / SCREENS_FILE, dtype=np.uint8, mode="r")
        screens_NHWC = screens.reshape(summary["states"], summary["height"], summary["width"], 3)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} holds no complete collection ({error}); delete it and collect again") from error
    if len(lines) != len(screens_NHWC):
        raise ConfigError(f"{folder} has {len(lines)} states for {len(screens_NHWC)} screens; delete it and collect again")
    states = [state_from_json(json.loads(line)) for line in lines]
    rows = sorted(range(len(states)), key=lambda row: states[row].order)
    return Collection(tuple(states[row] for row in rows), screens_NHWC, np.array(rows, dtype=np.int64), folder.name)


# --------------------------------------------------------------------------- turns


def task_text(instruction: str, history: Sequence[Action]) -> str:
    """The text part of the compact dialect's prompt."""
    lines = [history_line(action) for action in history[-HISTORY_LINES:]]
    return neutralise(instruction) + "".join("\n" + neutralise(line) for line in lines)


def expert_reply(expert: ExpertAction, screen: tuple[int, int]) -> str:
    """What the policy is taught to answer: the target first, then the action at its centre."""
    action = expert.at_centers(GRID)
    width, height = screen
    inside = replace(
        action,
        x=_clip(action.x, width),
        y=_clip(action.y, height),
        to_x=_clip(action.to_x, width),
        to_y=_clip(action.to_y, height),
    )
    return render_reply(expert.label, inside, screen=screen)


def element_turns(elements: Sequence[Element], count: int, random: Random, screen: tuple[int, int]) -> list[Turn]:
    """Up to `count` questions about elements whose label occurs once."""
    asked = askable(elements)
    weights = np.array([WORD_WEIGHT if element.kind == "word" else 1.0 for element in asked])
    if not len(asked):
        return []
    order = np.argsort(-(random.random(len(asked)) ** (1 / weights)))[:count]
    return [_element_turn(asked[int(index)], random, screen) for index in order]


def askable(elements: Sequence[Element]) -> list[Element]:
    """The elements that their label identifies; a word inside an element of the same label is the same thing."""
    used = {element.label: element for element in elements if element.kind != "word"}
    counts: dict[str, int] = {}
    kept: list[Element] = []
    for element in elements:
        owner = used.get(element.label)
        if element.kind == "word" and owner is not None and _contains(owner, element):
            continue
        counts[element.label] = counts.get(element.label, 0) + 1
        kept.append(element)
    return [element for element in kept if counts[element.label] == 1 and 0 < len(element.label) < MAX_LABEL]


def jittered(history: Sequence[Action], random: Random) -> tuple[Action, ...]:
    """The history with its clicks moved to neighbouring points of the grid."""
    if random.random() >= HISTORY_JITTER_SHARE:
        return tuple(history)
    return tuple(_moved(action, random) if action.kind is ActionKind.CLICK else action for action in history)


def screen_turns(state: DemonstratedState, questions: int, random: Random, screen: tuple[int, int]) -> list[Turn]:
    """All turns of one screen: the task if there is one, then questions."""
    if state.expert is None:
        return element_turns(state.elements, questions + 2, random, screen)
    history = jittered(state.history, random)
    task = (task_text(state.instruction, history), expert_reply(state.expert, screen))
    others = [element for element in state.elements if element.label != state.expert.label]
    return [task, *element_turns(others, questions, random, screen)]


# --------------------------------------------------------------------------- text to copy


class CopyLessons:
    """Typing steps of a collection, with other strings."""

    def __init__(self, states: Sequence[DemonstratedState]) -> None:
        """states: those to train on. Raises ConfigError if none of them types."""
        self._steps = [state for state in states if state.expert is not None and state.expert.kind is ActionKind.TYPE]
        if not self._steps:
            raise ConfigError("no demonstrated state types anything; add a typing family, such as enter-text, to the collection")
        quoted = {word for state in self._steps for word in re.findall(r'"(.*?)"', state.instruction)}
        self._names = sorted(word for word in quoted if word.isalpha() and word[1:].islower())

    def turn(self, random: Random) -> Turn:
        """A sentence with history, and the reply that copies the right string."""
        state = self._steps[int(random.integers(len(self._steps)))]
        assert state.expert is not None
        strings = {old: self._string(random) for old in re.findall(r'"(.*?)"', state.instruction)}
        instruction = re.sub(r'"(.*?)"', lambda match: f'"{strings[match[1]]}"', state.instruction)
        history = [replace(action, text=strings.get(action.text, action.text)) for action in state.history]
        expert = replace(state.expert, text=strings.get(state.expert.text, state.expert.text))
        return task_text(instruction, jittered(history, random)), expert_reply(expert, (0, 0))

    def _string(self, random: Random) -> str:
        if self._names and random.random() < NAME_SHARE:
            return self._names[int(random.integers(len(self._names)))]
        longest = 20 if random.random() < LONG_SHARE else 7
        return "".join(random.choice(CHARACTERS, size=int(random.integers(2, longest + 1))))


# --------------------------------------------------------------------------- rows


class LessonWriter:
    """Turns into rows: the ids that the chat template gives, the answers labelled."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._cache: dict[str, list[int]] = {}

    def row(self, turns: Sequence[Turn], image: EncodedImage | None = None) -> Row:
        """One row; the image comes before the first question."""
        ids: list[int] = []
        labels: list[bool] = []
        for index, (question, answer) in enumerate(turns):
            opening = "<|im_start|>user\n" if index == 0 else "\n<|im_start|>user\n"
            if index == 0 and image is not None:
                opening += f"<|vision_start|>{IMAGE_TOKEN * image.num_tokens}<|vision_end|>"
            asked = self._ids(opening) + self._ids(question) + self._ids("<|im_end|>\n<|im_start|>assistant\n")
            answered = self._ids(answer) + self._ids("<|im_end|>")
            ids += asked + answered
            labels += [False] * len(asked) + [True] * len(answered)
        images = () if image is None else (image,)
        return make_row(self._policy, np.array(ids, dtype=np.int32), np.array(labels, dtype=np.bool_), images)

    def _ids(self, text: str) -> list[int]:
        ids = self._cache.get(text)
        if ids is None:
            ids = self._policy.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 200_000:
                self._cache[text] = ids
        return ids


def tokenizer_corpus(states: Sequence[DemonstratedState], random: Random, *, num_states: int = 6000) -> list[str]:
    """Texts that a tokenizer for these lessons is trained on; numbers up to 255 are so frequent that each becomes one token."""
    texts = [str(number) for number in range(256)] * 400
    chosen = random.permutation(len(states))[:num_states]
    for state in (states[int(index)] for index in chosen):
        for question, answer in screen_turns(state, 4, random, (255, 255)):
            texts += [question, answer]
        texts += [element.label for element in state.elements]
    return texts


def _element_turn(element: Element, random: Random, screen: tuple[int, int]) -> Turn:
    expert = ExpertAction(ActionKind.CLICK, element.label, element.box)
    if random.random() < READ_SHARE:
        place = expert.at_centers(GRID)
        return f"Read ({place.x:.0f},{place.y:.0f}).", element.label
    return f'"{element.label}"', expert_reply(expert, screen)


def _contains(outer: Element, inner: Element) -> bool:
    left, top, width, height = outer.box
    x, y, inner_width, inner_height = inner.box
    return left <= x + 1 and top <= y + 2 and left + width >= x + inner_width - 1 and top + height >= y + inner_height - 1


def _moved(action: Action, random: Random) -> Action:
    dx, dy = (int(value) * GRID for value in random.integers(-1, 2, size=2))
    assert action.x is not None and action.y is not None
    return replace(action, x=max(0.0, action.x + dx), y=max(0.0, action.y + dy))


def _clip(value: float | None, size: int) -> float | None:
    return None if value is None else min(size - 1.0, max(0.0, value))

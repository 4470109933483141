"""Canonical key names: one spelling per key, whatever the model writes.

The canonical set is CANONICAL_KEYS: the named keys below, the letters and digits in lower case, and ASCII punctuation as
itself. Environments map exactly these names; an unknown name is an error to the model, never a silent no-op.
"""

from __future__ import annotations

import re
import string

MODIFIERS = ("ctrl", "alt", "shift", "meta")
"""In the order in which they are listed and held."""

NAMED_KEYS = (
    *MODIFIERS,
    *("enter", "escape", "tab", "space", "backspace", "delete", "insert", "home", "end", "pageup", "pagedown"),
    *("up", "down", "left", "right", "capslock", "numlock", "scrolllock", "printscreen", "pause", "menu"),
    *(f"f{number}" for number in range(1, 25)),
)

CANONICAL_KEYS = frozenset(NAMED_KEYS) | frozenset(string.ascii_lowercase + string.digits + string.punctuation)

MAX_CHORD = 6
"""Keys held at once; more is a garbled reply."""

_ALIASES = {
    **dict.fromkeys(("control", "ctl", "ctrlleft", "ctrlright", "controlleft", "controlright", "leftctrl", "rightctrl"), "ctrl"),
    **dict.fromkeys(("option", "opt", "altleft", "altright", "altgr", "optionleft", "optionright", "leftalt", "rightalt"), "alt"),
    **dict.fromkeys(("shiftleft", "shiftright", "leftshift", "rightshift"), "shift"),
    **dict.fromkeys(("win", "windows", "winleft", "winright", "super", "cmd", "command", "metaleft", "metaright", "os"), "meta"),
    **dict.fromkeys(("return", "ret", "numpadenter", "kpenter"), "enter"),
    **dict.fromkeys(("esc",), "escape"),
    **dict.fromkeys(("spacebar", "blank"), "space"),
    **dict.fromkeys(("bksp", "bs"), "backspace"),
    **dict.fromkeys(("del",), "delete"),
    **dict.fromkeys(("ins",), "insert"),
    **dict.fromkeys(("pgup", "prior"), "pageup"),
    **dict.fromkeys(("pgdn", "pgdown", "next"), "pagedown"),
    **dict.fromkeys(("caps",), "capslock"),
    **dict.fromkeys(("prtsc", "prtscr", "prntscrn", "print", "sysrq"), "printscreen"),
    **dict.fromkeys(("break", "pausebreak"), "pause"),
    **dict.fromkeys(("apps", "contextmenu"), "menu"),
    **{f"{side}": arrow for arrow in ("up", "down", "left", "right") for side in (f"arrow{arrow}", f"{arrow}arrow")},
    **{"plus": "+", "minus": "-", "equal": "=", "equals": "=", "comma": ",", "period": ".", "dot": ".", "slash": "/"},
    **{"backslash": "\\", "semicolon": ";", "quote": "'", "apostrophe": "'", "grave": "`", "backtick": "`"},
    **{"bracketleft": "[", "bracketright": "]", "asterisk": "*", "tilde": "~", "underscore": "_"},
}

_PAIRS = frozenset(
    ("page up", "page down", "arrow up", "arrow down", "arrow left", "arrow right", "caps lock", "num lock", "scroll lock")
    + ("up arrow", "down arrow", "left arrow", "right arrow", "print screen", "back space", "space bar", "context menu")
)
"""Keys that models write as two words."""

_LONGEST = 64  # characters of a whole chord; longer is a garbled reply


class UnknownKey(ValueError):
    """A name that is no key; `name` is the offending word."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def canonical_key(name: str) -> str | None:
    """The canonical name of one key, or None if there is no such key."""
    if len(name) == 1:
        name = name.lower()
        return name if name in CANONICAL_KEYS else None
    word = re.sub(r"(?<=\w)[\s_\-](?=[^\W_])", "", name).lower()
    if word in CANONICAL_KEYS:
        return word
    return _ALIASES.get(word)


def parse_chord(text: str) -> tuple[str, ...]:
    """Canonical keys of `ctrl c`, `Ctrl+C`, `ctrl-shift-t`, `page down`, `['ctrl', 'c']`, modifiers first.

    Returns an empty tuple for empty text. Raises UnknownKey.
    """
    if len(text) > _LONGEST:
        raise UnknownKey(text[:20])
    words = _join_pairs(re.sub(r"(?<=\S)\s+([+,-])\s+(?=\S)", r"\1", text).split())
    names = [key for word in words for key in _split_word(word)]
    ordered = [key for key in MODIFIERS if key in names] + [key for key in names if key not in MODIFIERS]
    keys = tuple(dict.fromkeys(ordered))
    if len(keys) > MAX_CHORD:
        raise UnknownKey(text)
    return keys


def _join_pairs(words: list[str]) -> list[str]:
    joined: list[str] = []
    for word in words:
        if joined and f"{joined[-1]} {word}".lower() in _PAIRS:
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _split_word(word: str) -> list[str]:
    """Keys of one word without blanks: a key, or keys joined by plus, minus, comma, or as a quoted list."""
    if word in CANONICAL_KEYS:
        return [word]
    keys: list[str] = []
    # In `ctrl++` and `ctrl+-` the last separator is a key itself, because it follows another one.
    for piece in re.findall(r"[^+]+|(?<=\+)\+$", word):
        for part in [piece] if canonical_key(piece) else re.findall(r"[^\-,\[\]'\"|&]+|(?<=-)-$", piece):
            key = canonical_key(part)
            if key is None:
                raise UnknownKey(part)
            keys.append(key)
    if not keys or (word[-1] in "+-" and keys[-1] != word[-1]):
        raise UnknownKey(word)
    return keys

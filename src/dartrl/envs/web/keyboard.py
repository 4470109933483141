"""The US keyboard as Chromium's input events want it: canonical key names and characters to key descriptions."""

from __future__ import annotations

import string
from dataclasses import dataclass

MODIFIER_BITS = {"alt": 1, "ctrl": 2, "meta": 4, "shift": 8}
"""Bits of the `modifiers` field of an input event."""

SHIFT = MODIFIER_BITS["shift"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the keyboard, as pressed."""

    key: str
    """`KeyboardEvent.key`."""
    code: str
    """`KeyboardEvent.code`: the physical key."""
    key_code: int
    """`KeyboardEvent.keyCode`."""
    text: str = ""
    """Text that the key produces; empty for keys that write nothing."""
    shifted: bool = False
    """True if shift is held to produce the text."""


def _named_keys() -> dict[str, Key]:
    plain = {
        "ctrl": ("Control", "ControlLeft", 17),
        "alt": ("Alt", "AltLeft", 18),
        "shift": ("Shift", "ShiftLeft", 16),
        "meta": ("Meta", "MetaLeft", 91),
        "escape": ("Escape", "Escape", 27),
        "tab": ("Tab", "Tab", 9),
        "backspace": ("Backspace", "Backspace", 8),
        "delete": ("Delete", "Delete", 46),
        "insert": ("Insert", "Insert", 45),
        "home": ("Home", "Home", 36),
        "end": ("End", "End", 35),
        "pageup": ("PageUp", "PageUp", 33),
        "pagedown": ("PageDown", "PageDown", 34),
        "up": ("ArrowUp", "ArrowUp", 38),
        "down": ("ArrowDown", "ArrowDown", 40),
        "left": ("ArrowLeft", "ArrowLeft", 37),
        "right": ("ArrowRight", "ArrowRight", 39),
        "capslock": ("CapsLock", "CapsLock", 20),
        "numlock": ("NumLock", "NumLock", 144),
        "scrolllock": ("ScrollLock", "ScrollLock", 145),
        "printscreen": ("PrintScreen", "PrintScreen", 44),
        "pause": ("Pause", "Pause", 19),
        "menu": ("ContextMenu", "ContextMenu", 93),
        **{f"f{number}": (f"F{number}", f"F{number}", 111 + number) for number in range(1, 25)},
    }
    keys = {name: Key(*description) for name, description in plain.items()}
    keys["enter"] = Key("Enter", "Enter", 13, text="\r")
    keys["space"] = Key(" ", "Space", 32, text=" ")
    return keys


def _character_keys() -> dict[str, Key]:
    keys = {" ": Key(" ", "Space", 32, text=" ")}
    for letter in string.ascii_lowercase:
        code = f"Key{letter.upper()}"
        keys[letter] = Key(letter, code, ord(letter.upper()), text=letter)
        keys[letter.upper()] = Key(letter.upper(), code, ord(letter.upper()), text=letter.upper(), shifted=True)
    for digit, symbol in zip("1234567890", "!@#$%^&*()", strict=True):
        keys[digit] = Key(digit, f"Digit{digit}", ord(digit), text=digit)
        keys[symbol] = Key(symbol, f"Digit{digit}", ord(digit), text=symbol, shifted=True)
    for plain, symbol, code, key_code in (
        ("`", "~", "Backquote", 192),
        ("-", "_", "Minus", 189),
        ("=", "+", "Equal", 187),
        ("[", "{", "BracketLeft", 219),
        ("]", "}", "BracketRight", 221),
        ("\\", "|", "Backslash", 220),
        (";", ":", "Semicolon", 186),
        ("'", '"', "Quote", 222),
        (",", "<", "Comma", 188),
        (".", ">", "Period", 190),
        ("/", "?", "Slash", 191),
    ):
        keys[plain] = Key(plain, code, key_code, text=plain)
        keys[symbol] = Key(symbol, code, key_code, text=symbol, shifted=True)
    return keys


NAMED_KEYS = _named_keys()
"""Keys by canonical name (`dartrl.agent.keys`)."""

CHARACTER_KEYS = _character_keys()
"""Keys by the one printable ASCII character that they write."""

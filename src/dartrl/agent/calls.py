"""From a reply's text to calls `verb(name='value', ...)`: the lexical half of the parser.

Every regular expression is possessive or bounded and every position is visited a bounded number of times, so the work is
linear in the length of the reply. Typed text inside quotes is found before anything else is looked for, so that text which
itself contains quotes, labels or blank lines stays text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

MAX_CALLS = 16
"""Calls in one reply, and arguments in one call; more is a garbled reply."""

POINT_NAMES = frozenset(
    (
        "start_box",
        "end_box",
        "box",
        "point",
        "start_point",
        "end_point",
        "coordinate",
        "coordinates",
        "position",
        "bbox",
        "start",
        "end",
    )
)
"""Arguments that hold a point or a box."""

TEXT_NAMES = frozenset(("content", "text", "message", "answer", "reason"))
"""Arguments that hold free text."""

_NAME = r"[^\W\d][\w.]{0,63}"
_OPEN = r"[ \t]*+[(（]"
_LABEL = r"(?<![\w])action[ \t]{0,3}\d{0,3}[ \t]{0,3}\*{0,2}[ \t]{0,3}[:：]"
_AFTER_LABEL = rf"[\s`*]*+(?:(?:python|text|plaintext)\n[\s`]*+)?(?P<name>{_NAME}){_OPEN}"
_LINE_START = r"^[ \t>*#`-]*+"

_LABEL_ALONE = re.compile(_LABEL, re.I)
_LABELLED_LINE = re.compile(_LINE_START + _LABEL + _AFTER_LABEL, re.I | re.M)
_LABELLED = re.compile(_LABEL + _AFTER_LABEL, re.I)
_LINE_CALL = re.compile(rf"{_LINE_START}(?P<name>{_NAME}){_OPEN}", re.M)
_LONE_CALL = re.compile(rf"[\s`]*+(?P<name>{_NAME}){_OPEN}")
_SAME_LINE_CALL = re.compile(rf"[ \t]*+(?:[;,&|]+[ \t]*+)?(?P<name>{_NAME}){_OPEN}")
_NEXT_CALL = re.compile(rf"{_LINE_START}(?:{_LABEL}[\s`*]*+)?(?P<name>{_NAME}){_OPEN}", re.I | re.M)
_THOUGHT_LABEL = re.compile(r"\s*+\*{0,2}thought\*{0,2}[ \t]{0,3}[:：]\*{0,2}", re.I)

_SEPARATORS = re.compile(r"[\s,，]*+")
_ARGUMENT_NAME = re.compile(r"([A-Za-z_]\w{0,31})\s*+[=:：]\s*+")
_STRUCTURE = re.compile(r"[\[\](){}（）,，]")
_TAGGED = re.compile(r"<[^<>()\n]{1,20}>[^<>]*+<[^<>()\n]{1,20}>")
_CLOSERS = {"'": "'", '"': '"', "“": "”", "‘": "’"}
_MARKS = {
    quote: re.compile(rf"\\.|{quote}|\n", re.S) for closer in _CLOSERS.values() for quote in (closer, closer * 3)
}  # what matters inside a quoted value: escapes, the quote, line ends

_NUMBER = r"[-+]?[0-9.]{1,24}"
_BOX = re.compile(
    rf"\s*+(?:<[^<>\n]{{1,20}}>)?[\[(（]\s*+{_NUMBER}(?:(?:\s*+[,，]\s*+|\s++){_NUMBER}){{1,3}}\s*+[\])）](?:<[^<>\n]{{1,20}}>)?"
)
_KNOWN_NAMES = "|".join(sorted(POINT_NAMES | TEXT_NAMES | {"key", "keys", "direction"}))
_CALL_END = rf"[)）](?=[ \t]*+(?:\Z|[\r\n;,&|`<]|{_LABEL}|{_NAME}{_OPEN}))"
_STRONG_TEXT_END = re.compile(rf"\s*+(?:{_CALL_END}|[,，]\s*+(?:{_KNOWN_NAMES})\s*+[=:：])", re.I)
_STRONG_END = re.compile(rf"\s*+(?:{_CALL_END}|[,，])", re.I)
_WEAK_END = re.compile(r"\s*+[)）]")
_REPLY_END = re.compile(r"\s*+\Z")
_ESCAPE = re.compile(r"\\([n'\"\\“”‘’])")


class Unreadable(Exception):
    """A reply that is no action; becomes a ParseError."""

    def __init__(self, kind: str, message: str, start: int, end: int) -> None:
        super().__init__(kind, message, start, end)
        self.kind = kind
        self.message = message
        self.start = start
        self.end = end


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call."""

    name: str
    """Lower-case name; empty if positional."""
    value: str
    """Text between the quotes without escapes, or the bare text without outer blanks."""
    start: int
    """First character of the argument in the reply."""
    end: int
    """One past its last character."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call as written."""

    verb: str
    """Lower-case name before the parenthesis."""
    arguments: tuple[Argument, ...]
    """In order."""
    start: int
    """First character of the verb in the reply."""
    end: int
    """One past the closing parenthesis."""
    is_closed: bool
    """False if the reply ends before the closing parenthesis."""


def find_calls(text: str, verbs: Collection[str]) -> tuple[Call, ...]:
    """All calls of a reply in order, at least one. Raises Unreadable.

    verbs: known lower-case verbs, needed to tell a call without an `Action:` label from prose.
    """
    found = _first_call(text, verbs)
    if found is None:
        label = _LABEL_ALONE.search(text)
        start, end = (label.start(), len(text)) if label else (0, len(text))
        raise Unreadable("no_action", "the reply holds no action", start, end)
    calls: list[Call] = []
    while found is not None:
        if len(calls) == MAX_CALLS:
            raise Unreadable("bad_arguments", f"the reply holds more than {MAX_CALLS} actions", found.start("name"), len(text))
        call = _read_call(text, found)
        calls.append(call)
        found = _next_call(text, call.end, verbs)
    return tuple(calls)


def thought_of(text: str, verbs: Collection[str]) -> str:
    """What the reply says before its first action, without the `Thought:` label."""
    found = _first_call(text, verbs)
    before = text[: found.start()] if found else text
    label = _THOUGHT_LABEL.match(before)
    return before[label.end() if label else 0 :].strip()


def escape(text: str) -> str:
    """Text as it stands between single quotes in a reply."""
    return text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")


def _unescape(text: str) -> str:
    """Backslash before n, a quote or a backslash is an escape; before anything else it is a backslash."""
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


def _first_call(text: str, verbs: Collection[str]) -> re.Match[str] | None:
    found = _LABELLED_LINE.search(text) or _LABELLED.search(text)
    if found is not None:
        return found
    known = next((match for match in _LINE_CALL.finditer(text) if match["name"].lower() in verbs), None)
    return known or _LONE_CALL.match(text)


def _next_call(text: str, position: int, verbs: Collection[str]) -> re.Match[str] | None:
    found = _SAME_LINE_CALL.match(text, position)
    if found is not None and found["name"].lower() in verbs:
        return found
    return _NEXT_CALL.search(text, position)


def _read_call(text: str, found: re.Match[str]) -> Call:
    verb, start = found["name"].lower(), found.start("name")
    arguments: list[Argument] = []
    position = found.end()
    while True:
        position = _end_of(_SEPARATORS, text, position)
        if position >= len(text):
            return Call(verb, tuple(arguments), start, len(text), False)
        if text[position] in ")）":
            return Call(verb, tuple(arguments), start, position + 1, True)
        if len(arguments) == MAX_CALLS:
            raise Unreadable("bad_arguments", f"{verb} has more than {MAX_CALLS} arguments", start, position)
        argument = _read_argument(text, position)
        arguments.append(argument)
        position = argument.end
        rest = _end_of(_SEPARATORS, text, position)
        if rest == position < len(text) and text[position] not in ")）":
            raise Unreadable("bad_arguments", f"{text[position : position + 20]!r} follows an argument", position, position + 1)


def _read_argument(text: str, position: int) -> Argument:
    start, name = position, ""
    label = _ARGUMENT_NAME.match(text, position)
    if label:
        name, position = label[1].lower(), label.end()
    if position < len(text) and text[position] in _CLOSERS:
        value, end = _read_quoted(text, position, name)
    else:
        end = _bare_end(text, position)
        value = text[position:end].strip()
        if end == position and not label:
            raise Unreadable("bad_arguments", f"{text[position]!r} is not an argument", position, position + 1)
    return Argument(name, value, start, end)


def _bare_end(text: str, position: int) -> int:
    """End of a value without quotes: a tagged box, or everything up to a comma or parenthesis outside brackets."""
    tagged = _TAGGED.match(text, position)
    if tagged:
        return tagged.end()
    depth = 0
    for mark in _STRUCTURE.finditer(text, position):
        if mark[0] in "([{（":
            depth += 1
        elif depth == 0:
            return mark.start()
        elif mark[0] not in ",，":
            depth -= 1
    return len(text)


def _read_quoted(text: str, position: int, name: str) -> tuple[str, int]:
    """(value, end) of a quoted value that starts at `position`."""
    box = _BOX.match(text, position + 1) if name in POINT_NAMES else None
    quote = _CLOSERS[text[position]]
    if box and text.startswith(quote, box.end()):
        return box[0], box.end() + 1
    if box and text[box.end() : box.end() + 1] in ("", ")", "）", ",", "\n"):
        return box[0], box.end()
    if text.startswith(quote * 3, position):
        end = _closing_quote(text, position + 3, quote * 3, name)
        if end is not None:
            return _unescape(text[position + 3 : end]), end + 3
    end = _closing_quote(text, position + 1, quote, name)
    if end is None:
        raise Unreadable("truncated", "a quote is opened and never closed", position, len(text))
    return _unescape(text[position + 1 : end]), end + 1


def _closing_quote(text: str, position: int, quote: str, name: str) -> int | None:
    """Where the value ends: the first unescaped quote that the end of the call or another argument follows.

    Other quotes belong to the text, since models forget to escape them. A quote followed by a parenthesis that something
    else follows ends the value only if nothing on its line does so better.
    """
    strong_end = _STRONG_END if name in POINT_NAMES or not name else _STRONG_TEXT_END
    weak: int | None = None
    for mark in _MARKS[quote].finditer(text, position):
        if mark[0] == "\n" and weak is not None:
            return weak
        if mark[0] != quote:
            continue
        if strong_end.match(text, mark.end()) or _REPLY_END.match(text, mark.end()):
            return mark.start()
        if weak is None and _WEAK_END.match(text, mark.end()):
            weak = mark.start()
    return weak


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position

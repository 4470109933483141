from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import sampled_from, sets, text

from dartrl.agent.keys import CANONICAL_KEYS, MAX_CHORD, MODIFIERS, UnknownKey, canonical_key, parse_chord


@pytest.mark.parametrize(
    ("written", "keys"),
    [
        ("ctrl c", ("ctrl", "c")),
        ("Ctrl+C", ("ctrl", "c")),
        ("ctrl + c", ("ctrl", "c")),
        ("ctrl, c", ("ctrl", "c")),
        ("ctrl-shift-t", ("ctrl", "shift", "t")),
        ("['ctrl', 'c']", ("ctrl", "c")),
        ("ctrl++", ("ctrl", "+")),
        ("ctrl+-", ("ctrl", "-")),
        ("ctrl -", ("ctrl", "-")),
        ("ctrl--", ("ctrl", "-")),
        ("+", ("+",)),
        ("_", ("_",)),
        ("page down", ("pagedown",)),
        ("ctrl page down", ("ctrl", "pagedown")),
        ("ctrl+page-down", ("ctrl", "pagedown")),
        ("Page_Down", ("pagedown",)),
        ("arrow left", ("left",)),
        ("shift left", ("shift", "left")),
        ("ShiftLeft", ("shift",)),
        ("cmd space", ("meta", "space")),
        ("control", ("ctrl",)),
        ("alt f4", ("alt", "f4")),
        ("c ctrl", ("ctrl", "c")),
        ("a a", ("a",)),
        ("A", ("a",)),
        ("", ()),
    ],
)
def test_every_spelling_of_a_chord_is_canonical(written, keys):
    assert parse_chord(written) == keys


@pytest.mark.parametrize("written", ["foo", "ctrl+foo", "é", "ctrl+", "a-", "f25", "x" * 65, "a b c d e f g", "你"])
def test_unknown_keys_are_refused(written):
    with pytest.raises(UnknownKey):
        parse_chord(written)


@given(keys=sets(sampled_from(sorted(CANONICAL_KEYS)), min_size=1, max_size=MAX_CHORD))
def test_canonical_chords_are_read_back(keys):
    modifiers = [key for key in MODIFIERS if key in keys]
    ordered = (*modifiers, *sorted(keys - set(modifiers)))
    if not {"-", "+", ","} & keys:  # these also separate keys, so their place matters
        assert parse_chord(" ".join(ordered)) == ordered


@given(written=text(max_size=70))
def test_any_text_is_canonical_keys_or_refused(written):
    try:
        keys = parse_chord(written)
    except UnknownKey:
        return
    assert set(keys) <= CANONICAL_KEYS
    assert len(set(keys)) == len(keys) <= MAX_CHORD


def test_every_canonical_key_is_its_own_name():
    assert {key: canonical_key(key) for key in CANONICAL_KEYS} == {key: key for key in CANONICAL_KEYS}

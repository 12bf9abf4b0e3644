from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.stops import StopStrings

letters = st.text("ab ", max_size=30)
stop_lists = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Look at every beginning of the text, shortest first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@given(text=letters, stops=stop_lists, include=st.booleans(), data=st.data())
def test_any_cut_gives_what_the_whole_text_gives(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    watcher = StopStrings(stops, include=include)
    shown = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += watcher.push(text[start:end])
        if watcher.matched is None:
            held = text[len(shown) : end]
            assert shown + held == text[:end]
            # Held back is exactly the longest suffix that may be the beginning of a stop string.
            starts = (text[i:end] for i in range(end + 1))
            longest = next(s for s in starts if s == "" or any(x != s and x.startswith(s) for x in stops))
            assert held == longest
    if watcher.matched is None:
        shown += watcher.finish()
    assert (shown, watcher.matched) == naive(text, stops, include)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["\n\n"], ["a\n", "\nb"], ["a", ""], "\n\n"),
        (["END"], ["the E", "N", "trance"], ["the ", "", "ENtrance"], None),
        (["abc", "b"], ["a", "bc"], ["", "a"], "b"),
        (["aab", "ab"], ["aab"], [""], "aab"),
        ([], ["x"], ["x"], None),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: list[str], matched: str | None) -> None:
    watcher = StopStrings(stops)
    assert [watcher.push(piece) for piece in pieces] == shown
    assert watcher.matched == matched


class CountedText(str):
    """A text that counts how often it is looked into, and how much of it is copied."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        item = super().__getitem__(key)
        CountedText.looks += len(item)
        return item


def test_hostile_stop_strings_cost_what_others_do() -> None:
    """Stop strings that nearly match everywhere: the work is linear in the text, not in text times length."""
    length, text = 2000, "a" * 4000
    stops = [CountedText("a" * (length // 2) + "b" * (length // 2)), CountedText("a" * (length - 1) + "b")]
    watcher = StopStrings(stops)
    CountedText.looks = 0
    shown = "".join(watcher.push(character) for character in text)
    assert shown + watcher.finish() == text
    assert CountedText.looks <= 8 * len(stops) * len(text)


def test_nothing_follows_a_match() -> None:
    watcher = StopStrings(["."], include=True)
    assert watcher.push("one. two") == "one."
    assert watcher.push(" three") == ""
    assert watcher.finish() == ""

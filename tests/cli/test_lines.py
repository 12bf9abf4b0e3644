"""Output of children as lines."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli.lines import LineSplitter


def test_progress_bars_keep_their_last_state() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"load 1%\rload 50%") == []
    assert splitter.feed(b"\rload 100%\r\nready\nhalf") == ["load 100%", "ready"]
    assert splitter.end() == ["half"]
    assert splitter.end() == []


def test_a_line_without_end_is_cut() -> None:
    splitter = LineSplitter()
    assert [len(line) for line in splitter.feed(b"x" * 70_000)] == [70_000]
    assert splitter.end() == []


@given(st.binary(max_size=200).map(lambda data: data.replace(b"\r", b"")), st.lists(st.integers(0, 200)))
def test_cuts_between_reads_do_not_show(data: bytes, cuts: list[int]) -> None:
    splitter = LineSplitter()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found = [line for a, b in itertools.pairwise(edges) for line in splitter.feed(data[a:b])]
    expected = [line.decode(errors="replace") for line in data.split(b"\n")]
    assert found + splitter.end() == (expected if expected[-1] else expected[:-1])

"""The page allocator and its free spans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.pages import InvariantError, PageAllocator, PageState, adjacent
from pdserve.engine.spans import FreeSpans


def states(allocator: PageAllocator, pages: list[int]) -> set[PageState]:
    return {allocator.state(page) for page in pages}


def test_scrap_is_never_allocated() -> None:
    allocator = PageAllocator(9)
    pages = allocator.allocate(8)
    assert sorted(pages) == list(range(1, 9))
    assert allocator.state(0) is PageState.SCRAP
    allocator.check()
    with pytest.raises(InvariantError, match="allocate 1 pages: only 0"):
        allocator.allocate(1)
    with pytest.raises(InvariantError, match="page 0 is SCRAP"):
        allocator.release([0], -1)


def test_release_waits_for_the_last_step_that_names_the_page() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(2)
    allocator.release(pages, last_step=1)
    assert states(allocator, pages) == {PageState.PENDING}
    assert allocator.available == 2
    allocator.step_ended(0)
    assert states(allocator, pages) == {PageState.PENDING}
    allocator.check()
    allocator.step_ended(1)
    assert states(allocator, pages) == {PageState.FREE}
    assert allocator.available == 4
    allocator.check()


def test_release_of_what_only_ended_steps_name_is_immediate() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(2)
    allocator.step_ended(0)
    allocator.release(pages, last_step=0)
    assert allocator.available == 4


def test_destination_pages_reach_freedom_by_proof_alone() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(2)
    allocator.expose(pages)
    with pytest.raises(InvariantError, match="DESTINATION, not HELD"):
        allocator.release(pages, -1)
    allocator.quarantine(pages)
    with pytest.raises(InvariantError, match="QUARANTINED, not HELD"):
        allocator.release(pages, -1)
    allocator.safe(pages)
    assert allocator.available == 4
    allocator.check()


def test_a_page_is_freed_once() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(1)
    allocator.release(pages, -1)
    with pytest.raises(InvariantError, match=f"page {pages[0]} is FREE, not HELD"):
        allocator.release(pages, -1)


def test_a_promise_is_kept() -> None:
    allocator = PageAllocator(5)
    (page,) = allocator.allocate(1)
    allocator.reserve(2)
    assert allocator.available == 1
    with pytest.raises(InvariantError, match="allocate 2 pages: only 1"):
        allocator.allocate(2)
    with pytest.raises(InvariantError, match="reserve 2 pages: only 1"):
        allocator.reserve(2)
    allocator.allocate(1)
    first = allocator.take_reserved(page)
    second = allocator.take_reserved(first)
    assert allocator.available == 0
    with pytest.raises(InvariantError, match="unreserve 1 pages: only 0"):
        allocator.take_reserved(second)
    allocator.check()


def test_steps_end_in_order() -> None:
    allocator = PageAllocator(5)
    with pytest.raises(InvariantError, match="step 1 ended after step -1"):
        allocator.step_ended(1)


@pytest.mark.parametrize("damage", ["state", "count", "span", "pending", "reserved"])
def test_check_finds_damage(damage: str) -> None:
    allocator = PageAllocator(9)
    pages = allocator.allocate(3)
    allocator.check()
    if damage == "state":
        allocator._state[pages[0]] = PageState.FREE
    elif damage == "count":
        allocator._count[PageState.FREE] += 1
    elif damage == "span":
        allocator._spans.insert(pages[0], 1)
    elif damage == "pending":
        allocator._pending[3] = [pages[0]]
    else:
        allocator.reserved = 7
    with pytest.raises(InvariantError):
        allocator.check()


def test_an_empty_arena_gives_one_run() -> None:
    allocator = PageAllocator(100)
    assert allocator.allocate(7) == list(range(1, 8))
    assert allocator.allocate(20) == list(range(8, 28))


def test_growth_continues_the_page_table_where_it_can() -> None:
    allocator = PageAllocator(100)
    allocator.allocate(5)
    pages = allocator.allocate(5)
    allocator.reserve(1)
    assert allocator.take_reserved(pages[-1]) == pages[-1] + 1


def test_a_hole_that_fits_is_taken_before_a_longer_span_is_cut() -> None:
    allocator = PageAllocator(100)
    first, second, _third = allocator.allocate(8), allocator.allocate(5), allocator.allocate(8)
    allocator.release(second, -1)
    assert allocator.allocate(5) == second
    allocator.release(first, -1)
    assert allocator.allocate(6) == first[:6]


def test_scattered_pages_are_all_usable() -> None:
    allocator = PageAllocator(21)
    pages = allocator.allocate(20)
    allocator.release(pages[::2], -1)
    assert sorted(allocator.allocate(10)) == pages[::2]


@given(st.lists(st.integers(1, 30), unique=True))
def test_adjacent_cuts_a_table_without_loss(pages: list[int]) -> None:
    runs = list(adjacent(pages))
    assert [page for first, count in runs for page in range(first, first + count)] == pages
    for (first, count), (after, _) in itertools.pairwise(runs):
        assert first + count != after


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 1 << 16)), max_size=60))
def test_spans_are_a_set_of_pages_merged_as_far_as_can_be(calls: list[tuple[bool, int, int]]) -> None:
    spans = FreeSpans()
    spans.insert(1, 40)
    free, taken = set(range(1, 41)), list[int]()
    for take, count, pick in calls:
        if take and count <= len(free):
            pages = spans.take(count, after=pick % 41)
            assert len(pages) == len(set(pages)) == count
            assert set(pages) <= free
            if any(pick % 41 + 1 == first for first, _ in adjacent(sorted(free))):
                assert pages[0] == pick % 41 + 1
            free -= set(pages)
            taken += pages
        elif not take and taken:
            page = taken.pop(pick % len(taken))
            spans.insert(page, 1)
            free.add(page)
        assert spans.total == len(free)
        assert spans.spans() == dict(adjacent(sorted(free)))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.data())
def test_a_run_that_is_twice_long_enough_is_never_split(sizes: list[int], data: st.DataObject) -> None:
    spans = FreeSpans()
    first = 1
    for size in sizes:
        spans.insert(first, size)
        first += size + 1
    count = data.draw(st.integers(1, max(1, max(sizes) // 2)))
    assert len(list(adjacent(spans.take(count)))) == 1


def test_taking_from_nothing_is_an_error() -> None:
    with pytest.raises(LookupError, match="1 pages wanted"):
        FreeSpans().take(1)

"""Any heads to any heads: every destination byte is written once, with the right byte, from an owner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.messenger.geometry import HEAD_MAJOR, SPLIT_KV, CacheGroup, Geometry, head_interval, replica_sets
from pdserve.messenger.imm import MAX_RUNS, base, unpack
from pdserve.messenger.runs import PageMove, TransferPlan, WriteTable, segment_pages, turns


def valid_tp(heads: int) -> st.SearchStrategy[int]:
    return st.sampled_from([tp for tp in range(1, 13) if tp <= heads or tp % heads == 0])


@given(st.integers(1, 64), st.data())
def test_ranks_own_all_heads_in_order(heads: int, data: st.DataObject) -> None:
    tp = data.draw(valid_tp(heads))
    sets = replica_sets(heads, tp)
    assert [head for (first, end), _ in sets for head in range(first, end)] == list(range(heads))
    assert sorted(rank for _, ranks in sets for rank in ranks) == list(range(tp))
    sizes = [end - first for (first, end), _ in sets]
    assert max(sizes) - min(sizes) <= 1
    assert len({len(ranks) for _, ranks in sets}) == 1


@pytest.mark.parametrize(
    ("heads", "tp", "intervals"),
    [
        (3, 2, [(0, 2), (2, 3)]),
        (3, 1, [(0, 3)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_head_intervals(heads: int, tp: int, intervals: list[tuple[int, int]]) -> None:
    assert [head_interval(heads, tp, rank) for rank in range(tp)] == intervals


@pytest.mark.parametrize(("heads", "tp"), [(3, 4), (2, 3), (4, 6), (8, 12)])
def test_more_ranks_than_heads_must_be_a_multiple(heads: int, tp: int) -> None:
    with pytest.raises(ConfigError, match=rf"{tp}.*{heads} KV heads"):
        Geometry((CacheGroup("model", 1, heads, 2),), tp, 2, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "nhd"},
        {"cache_groups": ()},
        {"tp": 0},
        {"page_size": 0},
        {"num_pages": 0},
        {"cache_groups": (CacheGroup("m", 0, 1, 2),)},
        {"cache_groups": (CacheGroup("m", 1, 2, 2, replicated=True),)},
        {"cache_groups": (CacheGroup("m", 1, 2, 3),), "layout": SPLIT_KV},
        {"cache_groups": (CacheGroup("m", 1, 2, 2, 1),), "layout": SPLIT_KV},
    ],
)
def test_impossible_geometry_is_refused(change: dict[str, object]) -> None:
    good: dict[str, object] = {
        "cache_groups": (CacheGroup("m", 1, 2, 2),),
        "tp": 1,
        "page_size": 2,
        "num_pages": 4,
    }
    Geometry(**good)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Geometry(**(good | change))  # type: ignore[arg-type]


def true_bytes(seed: int, group: int, layer: int, page: int, head: int, size: int) -> bytes:
    """A head's block of a logical page: never zero, different everywhere that matters."""
    start = seed + 101 * group + 37 * layer + 11 * page + 53 * head
    return bytes((start + 7 * at) % 251 + 1 for at in range(size))


def spans(
    geometry: Geometry, group: int, rank: int, layer: int, page: int, head: int
) -> list[tuple[int, int]]:
    """Where a head's block lies in a rank's arena, piece by piece, by arithmetic of its own."""
    shape = geometry.cache_groups[group]
    heads = [
        [h for h in range(g.heads) if h in range(*head_interval(g.heads, geometry.tp, rank))]
        for g in geometry.cache_groups
    ]
    start = 0
    for g, other in enumerate(geometry.cache_groups[:group]):
        block = geometry.page_size * other.token_bytes + other.scale_bytes
        start += other.layers * geometry.num_pages * len(heads[g]) * block
    block = geometry.page_size * shape.token_bytes + shape.scale_bytes
    page_start = start + (layer * geometry.num_pages + page) * len(heads[group]) * block
    index = heads[group].index(head)
    if geometry.layout == HEAD_MAJOR or shape.replicated:
        return [(page_start + index * block, block)]
    half = block // 2
    return [(page_start + (kv * len(heads[group]) + index) * half, half) for kv in range(2)]


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Geometry, Geometry]:
    layout = draw(st.sampled_from([HEAD_MAJOR, SPLIT_KV]))
    groups = []
    for number in range(draw(st.integers(1, 2))):
        replicated = draw(st.booleans()) if number else False
        heads = 1 if replicated else draw(st.integers(1, 8))
        scales = draw(st.sampled_from([0, 2]))
        groups.append(
            CacheGroup(
                f"g{number}",
                draw(st.integers(1, 2)),
                heads,
                draw(st.sampled_from([2, 4])),
                scales,
                replicated,
            )
        )
    fits = [tp for tp in range(1, 9) if all(tp <= g.heads or tp % g.heads == 0 for g in groups)]
    page_size = draw(st.integers(1, 3))
    source, destination = (
        Geometry(tuple(groups), draw(st.sampled_from(fits)), page_size, draw(st.integers(7, 9)), layout)
        for _ in range(2)
    )
    return source, destination


def check_transfer(
    source: Geometry,
    destination: Geometry,
    turn: int,
    src_pages: list[int],
    dst_pages: list[int],
    per_segment: int,
) -> None:
    plan = TransferPlan(source, destination, turn)
    memory = [bytearray(source.arena_bytes(rank)) for rank in range(source.tp)]
    wanted = [bytearray(destination.arena_bytes(rank)) for rank in range(destination.tp)]
    for geometry, arenas, table in ((source, memory, src_pages), (destination, wanted, dst_pages)):
        for g, group in enumerate(geometry.cache_groups):
            for rank, arena in enumerate(arenas):
                for head in range(*geometry.heads_of(g, rank)):
                    for layer in range(group.layers):
                        for index, page in enumerate(table):
                            data = true_bytes(5, g, layer, index, head, geometry.block_bytes(g))
                            for start, size in spans(geometry, g, rank, layer, page, head):
                                arena[start : start + size], data = data[:size], data[size:]
    landed = [bytearray(len(arena)) for arena in wanted]
    writes_of = [bytearray(len(arena)) for arena in wanted]
    counts: dict[int, int] = {}
    posted: dict[int, int] = {}
    moves = [
        PageMove(src, dst, base(i // per_segment, 9), i // per_segment)
        for i, (src, dst) in enumerate(zip(src_pages, dst_pages, strict=True))
    ]
    for tables, group in zip(plan.tables(moves), source.cache_groups, strict=True):
        for table in tables:
            assert table.src_rank < source.tp
            for layer in range(group.layers):
                for segment, runs in table.posted.items():
                    posted[segment] = posted.get(segment, 0) + runs
                for at in range(0, len(table.rows), 4):
                    src, dst, length, imm = table.rows[at : at + 4]
                    src += layer * table.src_stride
                    dst += layer * table.dst_stride
                    slot, generation, runs = unpack(imm)
                    assert generation == 9
                    counts[slot] = counts.get(slot, 0) + runs
                    assert src + length <= len(memory[table.src_rank])
                    assert dst + length <= len(landed[table.dst_rank])
                    landed[table.dst_rank][dst : dst + length] = memory[table.src_rank][src : src + length]
                    for byte in range(dst, dst + length):
                        writes_of[table.dst_rank][byte] += 1
    assert landed == wanted
    assert writes_of == [bytearray(1 if byte else 0 for byte in arena) for arena in wanted]
    expected = [pages * plan.runs_per_page for pages in segment_pages(len(dst_pages), per_segment)]
    assert [counts[slot] for slot in range(len(expected))] == expected
    assert posted == counts
    assert plan.bytes_per_page * len(dst_pages) == sum(byte > 0 for arena in wanted for byte in arena)


@settings(max_examples=150, deadline=None)
@given(transfers(), st.integers(0, 11), st.permutations(range(1, 7)), st.permutations(range(1, 7)), st.data())
def test_every_byte_once_from_an_owner(
    pair: tuple[Geometry, Geometry], turn: int, src: list[int], dst: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 6))
    if data.draw(st.booleans()):
        # Neighbours on both sides, so that writes merge.
        src, dst = sorted(src), sorted(dst)
    check_transfer(*pair, turn, src[:count], dst[:count], data.draw(st.integers(1, 4)))


@pytest.mark.parametrize("layout", [HEAD_MAJOR, SPLIT_KV])
@pytest.mark.parametrize(
    ("heads", "src_tp", "dst_tp"), [(12, 4, 3), (24, 3, 8), (3, 2, 1), (3, 1, 2), (2, 4, 8)]
)
def test_named_ratios(heads: int, src_tp: int, dst_tp: int, layout: str) -> None:
    groups = (CacheGroup("model", 2, heads, 2),)
    source, destination = Geometry(groups, src_tp, 2, 8, layout), Geometry(groups, dst_tp, 2, 9, layout)
    for turn in range(turns(source)):
        check_transfer(source, destination, turn, [1, 2, 3, 7], [4, 5, 6, 2], 2)


@given(st.integers(0, 40))
def test_replicas_serve_in_turn(start: int) -> None:
    """An MLA cache, 8 ranks to 8: whatever the turn, every source rank sends once."""
    mla = (CacheGroup("mla", 1, 1, 2, replicated=True),)
    geometry = Geometry(mla, 8, 2, 4)
    plan = TransferPlan(geometry, geometry, start)
    assert sorted(run.src_rank for run in plan.runs[0]) == list(range(8))
    assert turns(geometry) == 8
    assert TransferPlan(geometry, geometry, start + 8).runs == plan.runs
    assert TransferPlan(geometry, geometry, start + 1).runs != plan.runs


def test_counts_do_not_depend_on_the_turn() -> None:
    groups = (CacheGroup("model", 2, 4, 2),)
    source, destination = Geometry(groups, 8, 2, 4), Geometry(groups, 3, 2, 4)
    assert len({TransferPlan(source, destination, turn).runs_per_page for turn in range(8)}) == 1


@pytest.mark.parametrize(
    "other",
    [
        Geometry((CacheGroup("model", 1, 2, 4),), 1, 2, 4),
        Geometry((CacheGroup("model", 1, 2, 2),), 1, 4, 4),
        Geometry((CacheGroup("model", 1, 2, 2),), 1, 2, 4, SPLIT_KV),
    ],
)
def test_geometries_without_common_ground_are_refused(other: Geometry) -> None:
    mine = Geometry((CacheGroup("model", 1, 2, 2),), 1, 2, 4)
    with pytest.raises(ConfigError, match=r"the source has .*, the destination"):
        TransferPlan(mine, other)


def test_neighbours_merge_up_to_what_an_imm_can_say() -> None:
    geometry = Geometry((CacheGroup("model", 3, 2, 2),), 1, 2, 700)
    moves = [PageMove(1 + i, 51 + i, base(3, 1), 0) for i in range(600)]
    ((table,),) = TransferPlan(geometry, geometry).tables(moves)
    assert [unpack(imm).runs for imm in table.rows[3::4]] == [MAX_RUNS, MAX_RUNS, 600 - 2 * MAX_RUNS]
    assert table.runs == 600


def test_nothing_merges_across_segments_or_gaps() -> None:
    geometry = Geometry((CacheGroup("model", 1, 2, 2),), 1, 2, 40)
    slots = [base(0, 1), base(1, 1)]
    pages = [(1, 1, 0), (2, 2, 0), (3, 3, 1), (4, 4, 1), (6, 5, 1), (7, 7, 1)]
    moves = [PageMove(src, dst, slots[segment], segment) for src, dst, segment in pages]
    ((table,),) = TransferPlan(geometry, geometry).tables(moves)
    assert [unpack(imm).runs for imm in table.rows[3::4]] == [2, 2, 1, 1]


def test_a_table_of_writes_says_what_it_is() -> None:
    table = WriteTable(0, 1, 0, 2, 64, 64)
    table.add(0, 0, 8, base(0, 0), 0)
    assert len(table) == 1
    assert "1>0.2" in repr(table)

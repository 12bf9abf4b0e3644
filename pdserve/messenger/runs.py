"""Transfer plans: from two geometries to the runs of a page, and from pages to tables of writes.

A run is what one page of one layer contributes to one (source rank, destination rank) pair: one contiguous
interval on both sides. Heads are intervals, so runs are intersections of intervals, whatever the ratio:

    source, tp 4, 8 heads        | r0: h0 h1 | r1: h2 h3 | r2: h4 h5 | r3: h6 h7 |
    destination, tp 3            | d0: h0 h1   h2 | d1: h3   h4 h5 | d2: h6 h7   |
    runs                         |  r0>d0   |r1>d0|r1>d1|  r2>d1   |   r3>d2     |

Where the source has replicas of an interval, each destination rank is served by one of them, chosen in turn,
so that all devices and NICs send. The choice never changes a count: counts follow from geometry alone, and
both sides compute the same ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm

from pdserve.errors import ConfigError
from pdserve.messenger.geometry import SPLIT_KV, Geometry, replica_sets
from pdserve.messenger.imm import MAX_RUNS


@dataclass(frozen=True)
class Run:
    """One run of any page: offsets are within the page on each side."""

    src_rank: int
    dst_rank: int
    src_offset: int
    dst_offset: int
    length: int


class WriteTable:
    """The writes of one chunk from one source rank to one destination rank, for the first layer of a cache
    group: flat rows of (src_offset, dst_offset, length, imm). Layer i of the group is at the same offsets
    plus i times `src_stride` and `dst_stride`. Compared by identity.

    `posted[segment]`: runs these rows stand for, by segment of the request. `native`: the shell's place to
    keep what it made of the rows; it lives and dies with the table.
    """

    __slots__ = (
        "cache_group",
        "dst_group",
        "dst_rank",
        "dst_stride",
        "native",
        "posted",
        "rows",
        "runs",
        "src_rank",
        "src_stride",
    )

    def __init__(
        self, cache_group: int, src_rank: int, dst_group: int, dst_rank: int, src_stride: int, dst_stride: int
    ) -> None:
        self.cache_group = cache_group
        self.src_stride = src_stride
        self.dst_stride = dst_stride
        self.src_rank = src_rank
        self.dst_group = dst_group
        self.dst_rank = dst_rank
        self.rows: array[int] = array("Q")
        self.runs = 0
        self.posted: dict[int, int] = {}
        self.native: object | None = None

    def __len__(self) -> int:
        """Number of writes."""
        return len(self.rows) // 4

    def __repr__(self) -> str:
        pair = f"{self.src_rank}>{self.dst_group}.{self.dst_rank}"
        return f"WriteTable(group {self.cache_group}, {pair}, {len(self)} writes, {self.runs} runs)"

    def add(self, src: int, dst: int, length: int, imm_base: int, segment: int) -> None:
        """Append one run, merged into the last write where both sides adjoin and the slot is the same."""
        rows = self.rows
        if (
            rows
            and rows[-1] >> 8 == imm_base >> 8
            and rows[-1] & 0xFF < MAX_RUNS - 1
            and rows[-4] + rows[-2] == src
            and rows[-3] + rows[-2] == dst
        ):
            rows[-2] += length
            rows[-1] += 1
        else:
            rows.extend((src, dst, length, imm_base))
        self.runs += 1
        self.posted[segment] = self.posted.get(segment, 0) + 1


@dataclass(frozen=True)
class PageMove:
    """One page to move: where from, where to, and what it counts for."""

    src_page: int
    dst_page: int
    imm_base: int
    segment: int


@dataclass(frozen=True)
class TransferPlan:
    """How pages move from one group of ranks to another. Raises ConfigError where the two have no common
    ground (both sides must agree on cache groups, page size and layout; hello sees to it).

    `turn`: which of the source's replicas serve; plans of turns that differ by `turns(source)` are equal.
    """

    source: Geometry
    destination: Geometry
    turn: int = 0
    dst_group: int = 0
    runs: tuple[tuple[Run, ...], ...] = field(init=False)
    """By cache group: the runs of one page of one layer."""

    def __post_init__(self) -> None:
        for name in ("cache_groups", "page_size", "layout"):
            ours, theirs = getattr(self.source, name), getattr(self.destination, name)
            if ours != theirs:
                raise ConfigError(f"{name}: the source has {ours}, the destination {theirs}")
        runs = tuple(tuple(self._runs_of(group)) for group in range(len(self.source.cache_groups)))
        object.__setattr__(self, "runs", runs)

    def _runs_of(self, group: int) -> Iterable[Run]:
        heads = self.source.cache_groups[group].heads
        sources = replica_sets(heads, self.source.tp)
        for dst_rank in range(self.destination.tp):
            dst = self.destination.heads_of(group, dst_rank)
            for src, owners in sources:
                shared = (max(src[0], dst[0]), min(src[1], dst[1]))
                if shared[0] < shared[1]:
                    src_rank = owners[(self.turn + dst_rank) % len(owners)]
                    yield from self._pieces(group, src_rank, dst_rank, src, dst, shared)

    def _pieces(
        self,
        group: int,
        src_rank: int,
        dst_rank: int,
        src: tuple[int, int],
        dst: tuple[int, int],
        shared: tuple[int, int],
    ) -> Iterable[Run]:
        """The runs that move heads `shared`: one, or K and V apart where the layout splits them."""
        halves = 2 if self._split(group) else 1
        block = self.source.block_bytes(group) // halves
        for half in range(halves):
            yield Run(
                src_rank,
                dst_rank,
                (half * (src[1] - src[0]) + shared[0] - src[0]) * block,
                (half * (dst[1] - dst[0]) + shared[0] - dst[0]) * block,
                (shared[1] - shared[0]) * block,
            )

    def _split(self, group: int) -> bool:
        return self.source.layout == SPLIT_KV and not self.source.cache_groups[group].replicated

    @cached_property
    def runs_per_page(self) -> int:
        """Runs that one page makes in all layers: what the receiver counts."""
        return sum(
            len(runs) * group.layers for runs, group in zip(self.runs, self.source.cache_groups, strict=True)
        )

    @cached_property
    def bytes_per_page(self) -> int:
        """Bytes that one page moves in all layers, to all destination ranks."""
        return sum(
            sum(run.length for run in runs) * group.layers
            for runs, group in zip(self.runs, self.source.cache_groups, strict=True)
        )

    def tables(self, moves: Sequence[PageMove]) -> tuple[tuple[WriteTable, ...], ...]:
        """By cache group: the write tables of these pages, one for each pair of ranks."""
        return tuple(tuple(self._tables_of(group, moves)) for group in range(len(self.runs)))

    def _tables_of(self, group: int, moves: Sequence[PageMove]) -> Iterable[WriteTable]:
        pairs: dict[tuple[int, int], list[Run]] = {}
        for run in self.runs[group]:
            pairs.setdefault((run.src_rank, run.dst_rank), []).append(run)
        for (src_rank, dst_rank), runs in pairs.items():
            table = WriteTable(
                group,
                src_rank,
                self.dst_group,
                dst_rank,
                self.source.layer_bytes(group, src_rank),
                self.destination.layer_bytes(group, dst_rank),
            )
            src_base = self.source.group_offset(group, src_rank)
            dst_base = self.destination.group_offset(group, dst_rank)
            src_page = self.source.page_bytes(group, src_rank)
            dst_page = self.destination.page_bytes(group, dst_rank)
            for move in moves:
                src = src_base + move.src_page * src_page
                dst = dst_base + move.dst_page * dst_page
                for run in runs:
                    table.add(
                        src + run.src_offset, dst + run.dst_offset, run.length, move.imm_base, move.segment
                    )
            if table.runs:
                yield table


def turns(source: Geometry) -> int:
    """After how many turns the choice of replicas repeats."""
    return lcm(*(max(1, source.tp // group.heads) for group in source.cache_groups))


def segment_pages(pages: int, pages_per_segment: int) -> list[int]:
    """Pages in each segment of a request of `pages` pages."""
    full, rest = divmod(pages, pages_per_segment)
    return [pages_per_segment] * full + ([rest] if rest else [])

"""Where KV lies in each rank's arena, and which heads each rank owns.

An arena holds its cache groups one after another (the model's own layers, then those of draft heads):

    arena of a rank   | group 0: layer 0 | layer 1 | ... | group 1: layer 0 | ...
    layer             | page 0 | page 1 | page 2 | ... | page num_pages - 1 |
    page, head_major  | h0: K V scales | h1: K V scales | ...        one interval of heads = one run
    page, split_kv    | K: h0 h1 ... | V: h0 h1 ... |                one interval of heads = two runs

A rank owns one interval of whole KV heads. With tp <= heads the first heads % tp ranks own one head more
(3 heads on 2 ranks: 2 + 1). With tp > heads, tp must be a multiple of heads, and ranks [k*r, (k+1)*r) with
r = tp / heads are replicas that all own head k. A cache without heads (MLA latents) is one head that every
rank has a copy of. Nothing else is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from pdserve.errors import ConfigError

HEAD_MAJOR = "head_major"
SPLIT_KV = "split_kv"
LAYOUTS = (HEAD_MAJOR, SPLIT_KV)


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers that share a shape.

    `token_bytes`: bytes of one token of one head, K and V together. `scale_bytes`: bytes of scales of one
    head of one page, K's and V's together, stored behind the values they scale. `heads`: KV heads of the
    whole model; 1 with `replicated` for a cache that has none.
    """

    name: str
    layers: int
    heads: int
    token_bytes: int
    scale_bytes: int = 0
    replicated: bool = False


def head_interval(heads: int, tp: int, rank: int) -> tuple[int, int]:
    """[first, end) of the KV heads that `rank` of `tp` owns. Raises ConfigError where tp does not fit."""
    if not 0 <= rank < tp:
        raise ConfigError(f"rank {rank} is not in 0..{tp - 1}")
    if tp > heads:
        if tp % heads:
            raise ConfigError(
                f"tensor parallel size {tp} is larger than the {heads} KV heads and no multiple"
            )
        head = rank // (tp // heads)
        return head, head + 1
    share, extra = divmod(heads, tp)
    first = rank * share + min(rank, extra)
    return first, first + share + (rank < extra)


def replica_sets(heads: int, tp: int) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Head intervals of a group of ranks, in head order, each with the ranks that own it."""
    owners: dict[tuple[int, int], list[int]] = {}
    for rank in range(tp):
        owners.setdefault(head_interval(heads, tp, rank), []).append(rank)
    return [(interval, tuple(ranks)) for interval, ranks in sorted(owners.items())]


@dataclass(frozen=True)
class Geometry:
    """One group of ranks and the arenas they keep: everything an offset is computed from.

    `num_pages` counts the scrap page 0. Raises ConfigError on a combination that has no layout.
    """

    cache_groups: tuple[CacheGroup, ...]
    tp: int
    page_size: int
    num_pages: int
    layout: str = HEAD_MAJOR

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"KV layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        if not self.cache_groups:
            raise ConfigError("no cache groups: a model has at least one")
        for name, value in (("tp", self.tp), ("page_size", self.page_size), ("num_pages", self.num_pages)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for group in self.cache_groups:
            self._check_group(group)

    def _check_group(self, group: CacheGroup) -> None:
        if group.layers < 1 or group.heads < 1 or group.token_bytes < 1 or group.scale_bytes < 0:
            raise ConfigError(f"cache group {group.name!r} has an impossible shape: {group}")
        if group.replicated and group.heads != 1:
            raise ConfigError(f"cache group {group.name!r} is replicated but has {group.heads} heads")
        if (
            self.layout == SPLIT_KV
            and not group.replicated
            and (group.token_bytes % 2 or group.scale_bytes % 2)
        ):
            raise ConfigError(f"cache group {group.name!r}: layout {SPLIT_KV} needs even bytes for K and V")
        head_interval(group.heads, self.tp, 0)

    @property
    def layers(self) -> int:
        """Layers of all cache groups; layer numbers run through the groups in order."""
        return sum(group.layers for group in self.cache_groups)

    @cached_property
    def group_of_layer(self) -> tuple[tuple[int, int], ...]:
        """For each layer number: (cache group, layer within it)."""
        return tuple(
            (index, layer) for index, group in enumerate(self.cache_groups) for layer in range(group.layers)
        )

    def heads_of(self, group: int, rank: int) -> tuple[int, int]:
        """[first, end) of the heads of a cache group that a rank owns."""
        return head_interval(self.cache_groups[group].heads, self.tp, rank)

    def block_bytes(self, group: int) -> int:
        """Bytes of one head of one page of one layer."""
        shape = self.cache_groups[group]
        return self.page_size * shape.token_bytes + shape.scale_bytes

    def page_bytes(self, group: int, rank: int) -> int:
        """Bytes of one page of one layer of one rank."""
        first, end = self.heads_of(group, rank)
        return (end - first) * self.block_bytes(group)

    def layer_bytes(self, group: int, rank: int) -> int:
        """Bytes of one layer of one rank: the stride between layers of a group."""
        return self.num_pages * self.page_bytes(group, rank)

    def group_offset(self, group: int, rank: int) -> int:
        """Offset in the rank's arena of a cache group's first layer."""
        return sum(self.layer_bytes(g, rank) * self.cache_groups[g].layers for g in range(group))

    def arena_bytes(self, rank: int) -> int:
        """Bytes of a rank's whole arena."""
        return self.group_offset(len(self.cache_groups), rank)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

"""What a node says of itself when two nodes meet, and whether two nodes fit together.

`NodeFacts` are true of a node until it restarts. `HelloFacts` add what exists for one link only: the
endpoints it opened for this peer and the registrations the peer may write to.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.errors import ConfigError
from pdserve.messenger.geometry import HEAD_MAJOR, CacheGroup, Geometry
from pdserve.messenger.messages import PROTOCOL_VERSION

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
"""msgpack carries nothing larger."""


class GroupFacts(msgspec.Struct, frozen=True, array_like=True):
    """One tensor-parallel group of a node. `epoch`: changes whenever its arenas are allocated anew."""

    tp: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_pages: Positive
    epoch: Natural = 0


class NodeFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A node, as its peers need to know it. Units: bytes, tokens, pages (scrap page 0 included)."""

    version: Natural = PROTOCOL_VERSION
    node_id: Text
    incarnation: Natural
    """Drawn anew at each start: a peer with another incarnation has forgotten every link."""
    role: Text
    """"prefill", "decode" or "both"."""
    model: Text
    """Fingerprint of the weights and configuration."""
    cache_groups: Annotated[tuple[CacheGroup, ...], msgspec.Meta(min_length=1, max_length=16)]
    layout: Text = HEAD_MAJOR
    dtype: Text
    """Of the KV cache."""
    page_size: Positive
    segment_tokens: Positive = 512
    context_bytes: Natural = 0
    """Size of one context buffer; 0 where no context moves."""
    groups: Annotated[tuple[GroupFacts, ...], msgspec.Meta(min_length=1, max_length=64)]
    max_model_len: Positive
    handovers: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=8)] = ("token",)

    def geometry(self, group: int) -> Geometry:
        """The geometry of one of its groups. Raises ConfigError where the facts make none."""
        if not 0 <= group < len(self.groups):
            raise ConfigError(f"group {group} is not in 0..{len(self.groups) - 1}")
        facts = self.groups[group]
        return Geometry(self.cache_groups, facts.tp, self.page_size, facts.num_pages, self.layout)

    def check(self) -> None:
        """Raises ConfigError naming the field that is impossible, before any peer hears of it."""
        if self.segment_tokens % self.page_size:
            raise ConfigError(
                f"segment_tokens {self.segment_tokens} is not a multiple of page_size {self.page_size}"
            )
        if len({group.tp for group in self.groups}) > 1:
            raise ConfigError(f"groups of {[group.tp for group in self.groups]} ranks; all must have as many")
        for group in range(len(self.groups)):
            self.geometry(group)


class RankMemory(msgspec.Struct, frozen=True, array_like=True):
    """One registration of a rank's arena that the peer may write to: `addresses[endpoint]` reaches it.

    A rank with several NICs has one entry an endpoint.
    """

    group: Natural
    rank: Natural
    endpoint: Natural
    key: U64
    base: U64
    length: Natural


class HelloFacts(msgspec.Struct, frozen=True, array_like=True):
    """A node's side of one link. A node that is only ever the source offers no memory."""

    node: NodeFacts
    addresses: Annotated[tuple[bytes, ...], msgspec.Meta(min_length=1, max_length=64)]
    """Fabric addresses opened for this peer; messages go to the first."""
    memory: Annotated[tuple[RankMemory, ...], msgspec.Meta(max_length=4096)] = ()
    receive_bytes: Annotated[int, msgspec.Meta(ge=256, lt=1 << 31)] = 16384
    """Size of each of its receive buffers for messages."""
    receive_buffers: Annotated[int, msgspec.Meta(ge=8, le=1 << 16)] = 64
    """How many of them it keeps posted for this link."""


PARTNERS = {("decode", "prefill"), ("prefill", "decode")}


def agree_version(ours: int, theirs: int) -> int | None:
    """The version two nodes speak: the lower, if they are at most one apart; None if they share none."""
    return min(ours, theirs) if abs(ours - theirs) <= 1 else None


def refusal(ours: NodeFacts, theirs: NodeFacts) -> str | None:
    """Why two nodes do not fit together, naming both values; None if they do.

    Head counts per rank, page counts, lengths and group counts may differ: those are arithmetic.
    """
    if agree_version(ours.version, theirs.version) is None:
        return (
            f"protocol version: ours is {ours.version}, theirs is {theirs.version}; at most one apart works"
        )
    if ours.node_id == theirs.node_id:
        return f"node id: both are {ours.node_id!r}"
    if (ours.role, theirs.role) not in PARTNERS:
        return f"role: ours is {ours.role!r}, theirs is {theirs.role!r}; one decodes and the other prefills"
    for field, name in SAME.items():
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return f"{name}: ours is {_show(mine)}, theirs is {_show(other)}"
    if not set(ours.handovers) & set(theirs.handovers):
        return f"handover: ours are {_show(ours.handovers)}, theirs are {_show(theirs.handovers)}"
    try:
        theirs.check()
    except ConfigError as error:
        return f"shape: theirs is impossible: {error.message}"
    return None


def unfit(ours: NodeFacts, theirs: HelloFacts) -> str | None:
    """Why a peer's hello can't make a link: its node does not fit, or its memory is not what it must be."""
    reason = refusal(ours, theirs.node)
    if reason is not None:
        return reason
    covered = set()
    for memory in theirs.memory:
        name = f"memory of group {memory.group} rank {memory.rank}"
        if memory.group >= len(theirs.node.groups) or memory.rank >= theirs.node.groups[memory.group].tp:
            return f"{name}: there is no such rank"
        if memory.endpoint >= len(theirs.addresses):
            return f"{name}: endpoint {memory.endpoint}, but {len(theirs.addresses)} addresses"
        needed = theirs.node.geometry(memory.group).arena_bytes(memory.rank)
        if memory.length < needed:
            return f"{name}: {memory.length} bytes, but its pages take {needed}"
        if memory.base + memory.length >= 1 << 64:
            return f"{name}: {memory.length} bytes at {memory.base:#x} end beyond all addresses"
        covered.add((memory.group, memory.rank))
    if theirs.node.role == "decode":
        for group, facts in enumerate(theirs.node.groups):
            for rank in range(facts.tp):
                if (group, rank) not in covered:
                    return f"memory of group {group} rank {rank}: none is offered"
    return None


SAME = {
    "model": "model fingerprint",
    "cache_groups": "cache groups",
    "layout": "KV layout",
    "dtype": "KV dtype",
    "page_size": "page size",
    "segment_tokens": "segment size",
    "context_bytes": "context size",
}


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_show(item) for item in value)[:300] + "]"
    if isinstance(value, CacheGroup):
        heads = "replicated" if value.replicated else f"{value.heads} heads"
        return (
            f"{value.name[:64]!r} ({value.layers} layers, {heads}, "
            f"{value.token_bytes} bytes a token and head, {value.scale_bytes} of scales)"
        )
    return repr(value)[:128]

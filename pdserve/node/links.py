"""A link to one peer: its fabric port, its link layer, and what the peer said of itself.

    FabricLink.send(message) -> Link (number, MAC, credit) -> Port.send(datagram) ... peer
    peer ... Port -> FabricLink (check, order, reassemble) -> on_message(message)

A port is opened before the hello that names its address, so a peer's first datagrams may come before the
hello's reply has been read: `PeerPort` keeps them until the link is made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pdserve.errors import FabricError, PdserveError, PeerLost, ProtocolError
from pdserve.fabric import Fabric, ImmCounters, MemoryRegion, Port, RemoteRegion
from pdserve.messenger import messages
from pdserve.messenger.facts import HelloFacts, NodeFacts, RankMemory
from pdserve.messenger.hello import Session
from pdserve.messenger.link import Link, answer_unknown, open_link, read_header
from pdserve.messenger.messages import Message

_MAX_EARLY = 256


class PeerPort:
    """A fabric port opened for one peer, with the arena registered on it: everything a hello has to name."""

    def __init__(self) -> None:
        self.port: Port
        self.region: MemoryRegion
        self._early: deque[bytes] = deque(maxlen=_MAX_EARLY)
        self._link: FabricLink | None = None
        self._lost: FabricError | None = None

    @classmethod
    async def open(cls, fabric: Fabric, counters: ImmCounters, arena: memoryview, name: str) -> PeerPort:
        """Open a port and register `arena` on it, both owned by the result. Raises FabricError."""
        self = cls()
        self.port = await fabric.open_port(
            counters, name=name, on_message=self._received, on_lost=self._on_lost
        )
        try:
            self.region = self.port.register(arena)
        except BaseException:
            await self.port.close()
            raise
        return self

    def facts(self, node: NodeFacts, fabric: Fabric, *, offer_memory: bool) -> HelloFacts:
        """This node's side of a hello over this port. `offer_memory`: the peer may write to the arena."""
        memory: tuple[RankMemory, ...] = ()
        if offer_memory:
            region = self.region
            memory = (RankMemory(0, 0, 0, region.key, region.base, region.length),)
        return HelloFacts(
            node,
            (self.port.address,),
            memory,
            receive_bytes=fabric.config.recv_size,
            receive_buffers=fabric.config.recv_buffers,
        )

    def attach(self, link: FabricLink) -> None:
        """Deliver to this link from now on, what came early first."""
        self._link = link
        early, self._early = self._early, deque()
        for datagram in early:
            link.received(datagram)
        if self._lost is not None:
            link.lost(self._lost)

    def _received(self, datagram: bytes) -> None:
        if self._link is None:
            self._early.append(datagram)
        else:
            self._link.received(datagram)

    def _on_lost(self, error: FabricError) -> None:
        self._lost = error
        if self._link is not None:
            self._link.lost(error)

    async def close(self) -> None:
        """The fence: on return nothing the peer wrote can land any more. Idempotent."""
        await self.port.close()


class FabricLink:
    """One link, from hello until `close`. Called on the loop only."""

    def __init__(
        self,
        peer_port: PeerPort,
        session: Session,
        ours: HelloFacts,
        *,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, PdserveError], None],
    ) -> None:
        """`on_lost` is called at most once; after it nothing is delivered. Close it all the same."""
        self.id = session.link
        self.peer: HelloFacts = session.peer
        self.closed = asyncio.Event()
        self.stray_datagrams = 0
        self._peer_port = peer_port
        self._layer: Link = open_link(session, ours)
        self._on_message = on_message
        self._on_lost = on_lost
        self._ended = False
        memory = session.peer.memory
        self._remote = {(m.group, m.rank): RemoteRegion(m.key, m.base, m.length) for m in memory}

    def connect(self) -> None:
        """Name the peer to the port: messages may be sent. Raises FabricError, or ProtocolError for an
        address that can't be one."""
        try:
            self._peer_port.port.connect(self.peer.addresses[0])
        except ValueError as error:
            raise ProtocolError(f"{self.peer.node.node_id}: {error}") from error

    def deliver(self) -> None:
        """Whoever listens knows of this link: deliver from now on, what has come early first."""
        self._peer_port.attach(self)

    @property
    def port(self) -> Port:
        return self._peer_port.port

    @property
    def region(self) -> MemoryRegion:
        """Our arena, as registered on this link's port."""
        return self._peer_port.region

    def remote(self, group: int, rank: int) -> RemoteRegion:
        """The peer's arena of this rank. KeyError where it offered none."""
        return self._remote[group, rank]

    def send(self, message: Message) -> None:
        """Queue a message; what credit does not allow yet goes when the peer grants more."""
        if self._ended:
            return
        try:
            self._layer.send(messages.encode(message))
        except ProtocolError as error:
            self.lost(error)
            return
        self._transmit()

    def received(self, datagram: bytes) -> None:
        """A datagram came in on our port."""
        if self._ended:
            return
        try:
            bodies = self._layer.receive(datagram)
            decoded = [messages.decode(body) for body in bodies]
        except ProtocolError as error:
            self._refused(datagram, error)
            return
        self._transmit()
        for message in decoded:
            if self._ended:
                return
            self._on_message(self.id, message)

    def lost(self, error: PdserveError) -> None:
        """Nothing more is to be expected of this link."""
        if not self._ended:
            self._ended = True
            self._on_lost(self.id, error)

    def _refused(self, datagram: bytes, error: ProtocolError) -> None:
        if error.code not in ("malformed", "forged"):
            self.lost(PeerLost(error.message) if error.code == "rehello" else error)
            return
        self.stray_datagrams += 1
        try:
            stray = read_header(datagram).link != self.id
            answer = answer_unknown(datagram) if stray else None
        except ProtocolError:
            return
        if answer is not None:
            self._put(answer)

    def _transmit(self) -> None:
        for datagram in self._layer.transmit():
            self._put(datagram)

    def _put(self, datagram: bytes) -> None:
        try:
            self.port.send(datagram).add_done_callback(self._sent)
        except FabricError as error:
            self.lost(error)

    def _sent(self, future: asyncio.Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None and not self._ended:
            self.lost(error if isinstance(error, PdserveError) else FabricError(str(error)))

    async def close(self) -> None:
        """Close the port: the fence. On return `closed` is set. Idempotent."""
        self._ended = True
        await self._peer_port.close()
        self.closed.set()

    @property
    def said(self) -> int:
        """Datagrams that were sent or wait for credit."""
        layer = self._layer.statistics()
        return layer["sent"] + layer["queued"]

    def heard(self, number: int) -> bool:
        """Whether the peer has echoed as many datagrams, or never will."""
        layer = self._layer.statistics()
        return self._ended or layer["sent"] - layer["unechoed"] >= number

    def statistics(self) -> dict[str, object]:
        return {
            "peer": self.peer.node.node_id,
            "link": self._layer.statistics(),
            "port": self.port.statistics(),
            "stray_datagrams": self.stray_datagrams,
        }

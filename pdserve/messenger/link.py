"""The link layer: from messages to datagrams of a fabric that keeps no order, and back.

Pure: bytes in, bytes out. The fabric loses nothing while a link lives (an RDM endpoint is reliable), but it
may reorder and, at worst, repeat. Each direction numbers its datagrams from 1; a message is a row of
datagrams, the last of which is flagged; the receiver puts numbers back in order, so reassembly is a list.

    datagram  | magic | kind | flags | link id | number | echo | granted | body ... | MAC |
    bytes         1      1      2        8         8       8       8       0..N       16

`echo`: the last number received without a gap before it. `granted`: the highest number the peer may send.
A receiver has `window` buffers for numbered datagrams and grants as it delivers; a pure ack (kind ACK)
carries only these two fields, has no number and costs no credit, so two links can't starve each other. The
MAC is keyed BLAKE2b over a direction byte and everything before it: nothing can be altered, reflected, or
moved between links. What fails it changes nothing here.
"""

from __future__ import annotations

import hmac
from collections import deque
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from pdserve.errors import ProtocolError
from pdserve.messenger.facts import HelloFacts
from pdserve.messenger.hello import Session
from pdserve.messenger.messages import MAX_MESSAGE

MAGIC = 0xD5
DATA, ACK, REHELLO = 1, 2, 3
LAST = 1
MAC_BYTES = 16
ACK_RESERVE = 4
"""Receive buffers kept back from the window for pure acks: at most one for each half window under way."""

_header = Struct("<BBHQQQQ")
OVERHEAD = _header.size + MAC_BYTES
MIN_DATAGRAM = OVERHEAD + 64


class Header(NamedTuple):
    magic: int
    kind: int
    flags: int
    link: int
    number: int
    echo: int
    granted: int


def read_header(datagram: bytes) -> Header:
    """The header, unauthenticated: to find the link. Raises ProtocolError if there is none."""
    if len(datagram) < OVERHEAD:
        raise ProtocolError(f"datagram of {len(datagram)} bytes; the least is {OVERHEAD}", code="malformed")
    header = Header._make(_header.unpack_from(datagram))
    if header.magic != MAGIC or header.kind not in (DATA, ACK, REHELLO):
        raise ProtocolError(
            f"datagram of kind {header.kind} with magic {header.magic:#x}; unknown", code="malformed"
        )
    return header


def answer_unknown(datagram: bytes) -> bytes | None:
    """What to answer a datagram whose link this node does not have: "say hello again", or nothing (to an
    answer of that kind). It can't be authenticated; knowing the link id is what makes it count."""
    header = read_header(datagram)
    if header.kind == REHELLO:
        return None
    return _header.pack(MAGIC, REHELLO, 0, header.link, 0, 0, 0) + bytes(MAC_BYTES)


class Link:
    """One side of a link. The caller moves what `transmit` returns to the peer's `receive`.

    `window`: numbered datagrams we have receive buffers for; `peer_window`: the peer's (both from hello).
    `datagram_bytes`: the smaller of both sides' buffer sizes. `initiator`: whether we sent the hello.
    """

    def __init__(
        self,
        link: int,
        key: bytes,
        *,
        initiator: bool,
        datagram_bytes: int,
        window: int,
        peer_window: int,
        max_message: int = MAX_MESSAGE,
        max_queued: int = 4 * MAX_MESSAGE,
    ) -> None:
        if datagram_bytes < MIN_DATAGRAM or window < 1 or peer_window < 1:
            raise ProtocolError(
                f"datagrams of {datagram_bytes} bytes, windows {window} and {peer_window}: "
                f"at least {MIN_DATAGRAM}, 1 and 1 are needed"
            )
        self.link = link
        self._key = key
        self._ours, self._theirs = (b"\1", b"\2") if initiator else (b"\2", b"\1")
        self._body_bytes = datagram_bytes - OVERHEAD
        self._max_message = max_message
        self._max_queued = max_queued
        # Sending.
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._sent = 0
        self._limit = peer_window
        self._echoed = 0
        # Receiving.
        self._window = window
        self._received = 0
        self._granted = window
        self._early: dict[int, tuple[int, bytes]] = {}
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._duplicates = 0
        self._forged = 0

    def send(self, body: bytes) -> None:
        """Queue a message. Raises ProtocolError if it is too large, or if the peer has long taken nothing."""
        if len(body) > self._max_message:
            raise ProtocolError(f"message of {len(body)} bytes; the limit is {self._max_message}")
        if self._queued_bytes + len(body) > self._max_queued:
            raise ProtocolError(
                f"{self._queued_bytes} bytes wait for the peer's credit; the limit is {self._max_queued}",
                code="link_stalled",
            )
        step = self._body_bytes
        for start in range(0, max(1, len(body)), step):
            self._queue.append((LAST if start + step >= len(body) else 0, body[start : start + step]))
        self._queued_bytes += len(body)

    def transmit(self) -> list[bytes]:
        """The datagrams to send now: queued ones as far as credit goes, or an ack if the peer needs one."""
        out = []
        while self._queue and self._sent < self._limit:
            flags, part = self._queue.popleft()
            self._queued_bytes -= len(part)
            self._sent += 1
            out.append(self._seal(DATA, flags, self._sent, part))
        if not out and self._received + self._window - self._granted >= max(1, self._window // 2):
            out.append(self._seal(ACK, 0, 0, b""))
        return out

    def receive(self, datagram: bytes) -> list[bytes]:
        """The messages that this datagram completes, in order.

        Raises ProtocolError: `code` "malformed" or "forged" (drop it and count it: anyone may have sent it;
        the link is as before), "rehello" (the peer does not know this link), otherwise "protocol_error":
        the authenticated peer broke the rules, and the link is of no more use.
        """
        header = read_header(datagram)
        if header.link != self.link:
            raise ProtocolError(f"datagram of link {header.link:016x} on {self.link:016x}", code="malformed")
        if header.kind == REHELLO:
            raise ProtocolError("the peer does not know this link", code="rehello")
        mac = self._mac(self._theirs, datagram[:-MAC_BYTES])
        if not hmac.compare_digest(mac, datagram[-MAC_BYTES:]):
            self._forged += 1
            raise ProtocolError("datagram with a wrong MAC", code="forged")
        if header.echo > self._sent:
            raise ProtocolError(f"echo of number {header.echo}; the last one sent is {self._sent}")
        self._echoed = max(self._echoed, header.echo)
        self._limit = max(self._limit, header.granted)
        if header.kind == ACK:
            return []
        return self._accept(header, datagram[_header.size : -MAC_BYTES])

    def _accept(self, header: Header, body: bytes) -> list[bytes]:
        if header.number > self._granted:
            raise ProtocolError(f"datagram {header.number} beyond the {self._granted} granted")
        if header.number <= self._received or header.number in self._early:
            self._duplicates += 1
            return []
        self._early[header.number] = (header.flags, body)
        messages = []
        while (part := self._early.pop(self._received + 1, None)) is not None:
            self._received += 1
            self._parts.append(part[1])
            self._parts_bytes += len(part[1])
            if self._parts_bytes > self._max_message:
                raise ProtocolError(f"message of more than {self._max_message} bytes")
            if part[0] & LAST:
                messages.append(b"".join(self._parts))
                self._parts.clear()
                self._parts_bytes = 0
        return messages

    def _seal(self, kind: int, flags: int, number: int, body: bytes) -> bytes:
        self._granted = self._received + self._window
        head = _header.pack(MAGIC, kind, flags, self.link, number, self._received, self._granted)
        return head + body + self._mac(self._ours, head + body)

    def _mac(self, direction: bytes, data: bytes) -> bytes:
        return blake2b(direction + data, digest_size=MAC_BYTES, key=self._key).digest()

    def statistics(self) -> dict[str, int]:
        """Gauges (queued, unechoed, early) and counters, all in datagrams unless they say bytes."""
        return {
            "sent": self._sent,
            "received": self._received,
            "queued": len(self._queue),
            "queued_bytes": self._queued_bytes,
            "unechoed": self._sent - self._echoed,
            "early": len(self._early),
            "credit": self._limit - self._sent,
            "duplicates": self._duplicates,
            "forged": self._forged,
        }


def open_link(session: Session, ours: HelloFacts) -> Link:
    """This node's side of the link that a hello made. `ours`: the facts we sent in it."""
    peer = session.peer
    return Link(
        session.link,
        session.key,
        initiator=session.initiator,
        datagram_bytes=min(ours.receive_bytes, peer.receive_bytes),
        window=ours.receive_buffers - ACK_RESERVE,
        peer_window=peer.receive_buffers - ACK_RESERVE,
    )

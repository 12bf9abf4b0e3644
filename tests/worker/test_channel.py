"""The worker's end of the socket: whole messages, in order, and the news that the node has gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pdserve.engine.plan import Plan
from pdserve.worker.channel import Channel, NodeGone
from pdserve.worker.frames import FrameError
from pdserve.worker.protocol import LoadProgress, Shutdown, encode

PLANS = [Plan(step, [], [], [], []) for step in range(3)]


class Pair:
    def __init__(self) -> None:
        self.node, theirs = socket.socketpair()
        self.node.settimeout(60)
        self.channel = Channel(theirs)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.node.close()
        self.channel.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


def test_messages_come_one_by_one_then_the_end(pair: Pair) -> None:
    pair.node.sendall(b"".join(map(encode, PLANS)) + encode(Shutdown()))
    pair.node.close()
    assert [pair.channel.receive() for _ in range(5)] == [*PLANS, Shutdown(), None]


def test_the_end_inside_a_message_is_an_error(pair: Pair) -> None:
    pair.node.sendall(encode(PLANS[0])[:-1])
    pair.node.close()
    with pytest.raises(FrameError, match="inside a frame"):
        pair.channel.receive()


def test_check_is_quiet_while_the_node_lives_and_leaves_its_messages(pair: Pair) -> None:
    pair.channel.check()
    pair.node.sendall(encode(PLANS[0]))
    pair.channel.check()
    assert pair.channel.receive() == PLANS[0]


@pytest.mark.parametrize("unread", [b"", b"unread"])
def test_check_notices_that_the_node_has_gone(pair: Pair, unread: bytes) -> None:
    pair.node.sendall(unread)
    pair.node.close()
    with pytest.raises(NodeGone):
        pair.channel.check()


def test_sending_to_a_node_that_has_gone(pair: Pair) -> None:
    pair.node.close()
    with pytest.raises(NodeGone):
        pair.channel.send(LoadProgress(1, 2))


def test_a_node_that_dies_with_unread_messages_is_the_end_too(pair: Pair) -> None:
    pair.channel.send(LoadProgress(1, 2))
    pair.node.close()
    assert pair.channel.receive() is None


def test_descriptors_travel(pair: Pair) -> None:
    pair.channel.send(LoadProgress(1, 2), [pair.node.fileno()])
    data, fds, _, _ = socket.recv_fds(pair.node, 1 << 16, 3)
    assert data == encode(LoadProgress(1, 2))
    [fd] = fds
    socket.socket(fileno=fd).close()

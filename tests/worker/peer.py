"""A process in a worker's place that follows or breaks the protocol: `peer.py SCENARIO --fd N`.

It has a real socket, arena and counter. Where a scenario waits for the test, it waits for `hold_at` to become
0; nothing here depends on how long anything takes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from pdserve.engine.plan import Plan, StepResult
from pdserve.memory.arena import MemfdArena
from pdserve.memory.counter import LayerCounter
from pdserve.worker.channel import Channel
from pdserve.worker.frames import encode_frame
from pdserve.worker.protocol import Fatal, Init, LoadProgress, Ready, encode
from pdserve.worker.ticks import LayerTicks

READY = Ready(
    pid=0,
    num_pages=4,
    page_size=16,
    arena_bytes=2 * 4 * 4096,
    layers=2,
    kv_heads=1,
    head_dim=16,
    dtype="float32",
    page_bytes=4096,
    vocab_size=10,
)


class Peer:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.channel = Channel(sock)
        self.arena = MemfdArena.create(READY.arena_bytes, "peer")
        self.counter = LayerCounter.create()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        init = self.channel.receive()
        assert isinstance(init, Init)

    def ready(self, ready: Ready = READY, *, fds: int = 3) -> None:
        files = [self.arena.fileno(), self.counter.fileno(), self.event_fd, self.event_fd]
        self.channel.send(msgspec.structs.replace(ready, pid=os.getpid()), files[:fds])

    def wait_for_the_test(self) -> None:
        while self.counter.hold_at != 0:
            time.sleep(0.0005)

    def serve(self) -> None:
        while isinstance(message := self.channel.receive(), Plan):
            self.counter.tick()
            self.arena.buffer[0] = message.step % 256
            self.channel.send(StepResult(message.step, [], 1, 2))

    def for_ever(self) -> None:
        while True:
            signal.pause()


def serve(peer: Peer) -> None:
    peer.channel.send(LoadProgress(1, 2))
    peer.channel.send(LoadProgress(2, 2))
    peer.ready()
    peer.serve()


def gated(peer: Peer) -> None:
    """Two ticks a step, and the gate."""
    ticks = LayerTicks(peer.counter, peer.event_fd, 1, while_held=peer.channel.check)
    peer.ready()
    while isinstance(message := peer.channel.receive(), Plan):
        ticks.begin(message)
        ticks.layer_done(0)
        ticks.layer_done(1)
        peer.channel.send(StepResult(message.step, [], 1, 2))


def no_reader(peer: Peer) -> None:
    """Reads nothing until the test says so."""
    peer.ready()
    peer.wait_for_the_test()
    peer.serve()


def bytewise(peer: Peer) -> None:
    peer.ready()
    while isinstance(message := peer.channel.receive(), Plan):
        for byte in encode(StepResult(message.step, [], 1, 2)):
            peer.socket.sendall(bytes([byte]))


def talk_then_die(peer: Peer) -> None:
    peer.ready()
    message = peer.channel.receive()
    assert isinstance(message, Plan)
    for step in range(message.step, message.step + 3):
        peer.channel.send(StepResult(step, [], 1, 2))
    os.kill(os.getpid(), signal.SIGKILL)


def fatal(peer: Peer) -> None:
    peer.ready()
    peer.channel.receive()
    peer.channel.send(Fatal("step 0: the sums do not add up", "step_failed"))
    sys.exit(1)


def fatal_at_start(peer: Peer) -> None:
    peer.channel.send(Fatal("config.json is missing", "bad_model"))
    sys.exit(1)


def fatal_and_stay(peer: Peer) -> None:
    peer.ready()
    peer.channel.receive()
    peer.channel.send(Fatal("stuck in the driver"))
    peer.for_ever()


def exit_3(peer: Peer) -> None:
    os.write(1, b"on stdout\n")
    for number in range(30):
        sys.stderr.write(f"line {number}\n")
    sys.stderr.write("no newline")
    sys.stderr.flush()
    os._exit(3)


def abort(peer: Peer) -> None:
    peer.ready()
    peer.channel.receive()
    os.abort()


def garbage(peer: Peer) -> None:
    peer.ready()
    peer.channel.receive()
    peer.socket.sendall(encode_frame(b"\xc1garbage"))
    peer.for_ever()


def garbage_at_start(peer: Peer) -> None:
    peer.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    peer.for_ever()


def oversize(peer: Peer) -> None:
    peer.ready()
    peer.channel.receive()
    peer.socket.sendall(b"\xff\xff\xff\x7f")
    peer.for_ever()


def not_asked(peer: Peer) -> None:
    peer.ready()
    peer.channel.receive()
    peer.channel.send(StepResult(77, [], 1, 2))
    peer.for_ever()


def ready_twice(peer: Peer) -> None:
    peer.ready()
    peer.ready()
    peer.for_ever()


def ready_and_die(peer: Peer) -> None:
    peer.ready()
    os.kill(os.getpid(), signal.SIGKILL)


def two_descriptors(peer: Peer) -> None:
    peer.ready(fds=2)
    peer.for_ever()


def four_descriptors(peer: Peer) -> None:
    peer.ready(fds=4)
    peer.for_ever()


def wrong_size(peer: Peer) -> None:
    peer.ready(msgspec.structs.replace(READY, num_pages=8, arena_bytes=2 * 8 * 4096))
    peer.for_ever()


def wrong_sum(peer: Peer) -> None:
    peer.ready(msgspec.structs.replace(READY, num_pages=8))
    peer.for_ever()


def deaf(peer: Peer) -> None:
    """Ready, and then it neither reads nor ends."""
    peer.ready()
    peer.for_ever()


def deaf_at_start(peer: Peer) -> None:
    os.write(2, b"loading\n")
    peer.for_ever()


def hang_up(peer: Peer) -> None:
    """Closes its socket and stays."""
    peer.ready()
    peer.channel.receive()
    peer.channel.close()
    peer.for_ever()


SCENARIOS: dict[str, Callable[[Peer], None]] = {
    name: value for name, value in globals().items() if callable(value) and name[0].islower()
}

if __name__ == "__main__":
    scenario, _, fd = sys.argv[1:]
    SCENARIOS[scenario](Peer(socket.socket(fileno=int(fd))))

"""The rank process without a link: how it ends with its node, whatever it is doing."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from pdserve.engine.plan import Plan
from pdserve.worker.frames import FrameDecoder, encode_frame
from pdserve.worker.protocol import Fatal, Init, decode_from_worker, encode


@pytest.fixture
def bare() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.worker", "--fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        yield process, ours
        process.kill()
        process.wait()


def last_word(sock: socket.socket) -> Fatal:
    decoder = FrameDecoder()
    sock.settimeout(60)
    while data := sock.recv(1 << 16):
        decoder.feed(data)
    [message] = [decode_from_worker(payload) for payload in iter(decoder.pop, None)]
    assert isinstance(message, Fatal)
    return message


@pytest.mark.parametrize("half", [b"", b"\x10", b"\x10\x00\x00\x00abc"])
def test_the_end_of_the_stream_ends_it(
    bare: tuple[subprocess.Popen[bytes], socket.socket], half: bytes
) -> None:
    process, sock = bare
    sock.sendall(half)
    sock.close()
    assert process.wait(60) in (0, 1)  # a hang-up that is seen before the loop counts as the node's death


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (encode_frame(b"\xc1"), "not a message of a node"),
        (b"\xff\xff\xff\xff", "longer than the limit"),
        (encode(Plan(0, [], [], [], [])), "the first message must be Init"),
    ],
)
def test_what_is_no_message_is_fatal(
    bare: tuple[subprocess.Popen[bytes], socket.socket], sent: bytes, says: str
) -> None:
    process, sock = bare
    sock.sendall(sent)
    fatal = last_word(sock)
    assert says in fatal.message
    assert fatal.code == "worker_protocol"
    assert process.wait(60) == 1


NODE = """
import asyncio, sys, msgspec
from pdserve.engine.plan import Plan
from pdserve.worker.link import WorkerProcess
from pdserve.worker.protocol import Init

async def main():
    init = msgspec.json.decode(sys.argv[1], type=Init)
    link = await WorkerProcess.start(init, on_result=print, on_exit=print)
    link.counter.hold_at = 1
    link.submit(Plan(0, [], [], [], []))
    while link.counter.value < 1:
        await asyncio.sleep(0.001)
    print(link.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_node_leaves_no_orphan_even_one_that_holds(init: Init) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", NODE, msgspec.json.encode(init).decode()], stdout=subprocess.PIPE
    ) as node:
        assert node.stdout is not None
        pid = int(node.stdout.readline())
        worker = os.pidfd_open(pid)
        node.kill()
    gone, _, _ = select.select([worker], [], [], 60)
    os.close(worker)
    assert gone


PARENT = """
import signal, subprocess, sys
fd = int(sys.argv[1])
worker = subprocess.Popen([sys.executable, "-m", "pdserve.worker", "--fd", str(fd)], pass_fds=[fd])
print(worker.pid, flush=True)
signal.pause()
"""


def test_it_dies_with_its_parent_whoever_has_the_socket(init: Init) -> None:
    """This process keeps the other end open, so nothing but the parent's death can end it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with subprocess.Popen(
            [sys.executable, "-c", PARENT, str(theirs.fileno())],
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        ) as parent:
            assert parent.stdout is not None
            worker = os.pidfd_open(int(parent.stdout.readline()))
            ours.sendall(encode(init))
            ours.settimeout(60)
            assert ours.recv(1 << 16)  # it loads
            parent.kill()
        gone, _, _ = select.select([worker], [], [], 60)
        os.close(worker)
        assert gone


def test_the_nodes_side_is_light() -> None:
    """A node process starts fast: its side of the worker imports neither torch nor numba."""
    script = (
        "import sys, pdserve.worker.link, pdserve.memory.counter;"
        "print([m for m in ('torch', 'numba') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script]).strip() == b"[]"

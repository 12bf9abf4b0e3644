"""The worker's end of its socket: blocking, because a rank does one thing at a time.

The socket's buffer is what overlaps steps: the node's next plan lies there while this one is computed.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from pdserve.worker.frames import FrameDecoder
from pdserve.worker.protocol import FromWorker, ToWorker, decode_to_worker, encode

_READ_SIZE = 1 << 16


class NodeGone(Exception):
    """The node has closed the socket or died: there is nobody to tell, and nothing left to do."""


class Channel:
    """Messages of a node in, messages of this rank out. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._decoder = FrameDecoder()
        self._hang_up = select.poll()
        self._hang_up.register(sock, 0)  # POLLHUP and POLLERR are always reported

    def receive(self) -> ToWorker | None:
        """The next message; waits for it. None at the end of the stream.

        Raises FrameError for what is not a message, also where the stream ends inside one.
        """
        while (payload := self._decoder.pop()) is None:
            try:
                data = self._socket.recv(_READ_SIZE)
            except ConnectionResetError:
                data = b""
            if not data:
                self._decoder.finish()
                return None
            self._decoder.feed(data)
        return decode_to_worker(payload)

    def send(self, message: FromWorker, descriptors: Sequence[int] = ()) -> None:
        """Send one message whole; waits while the node doesn't read. Raises NodeGone."""
        frame = memoryview(encode(message))
        try:
            if descriptors:
                sent = socket.send_fds(self._socket, [frame], list(descriptors))
                frame = frame[sent:]
            self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise NodeGone from error

    def check(self) -> None:
        """Raises NodeGone when the node's end is closed. Does not wait; unread messages stay."""
        if self._hang_up.poll(0):
            raise NodeGone

    def close(self) -> None:
        self._socket.close()

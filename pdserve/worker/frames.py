"""Framing of the worker socket: a little-endian u32 length, then that many bytes.

    | length: u32 LE | payload: `length` bytes | length | payload | ...

A stream socket cuts anywhere; `FrameDecoder` puts the frames together again. It does no I/O.
"""

from __future__ import annotations

import struct

from pdserve.errors import WorkerError

_HEADER = struct.Struct("<I")
HEADER_SIZE = _HEADER.size
MAX_FRAME = 64 << 20
"""Largest payload in bytes. A plan with 64 new prompts of 131,072 tokens is 42 MB."""


class FrameError(WorkerError):
    """A frame is empty, longer than the limit, or was cut off by the end of the stream."""

    code = "worker_protocol"


def encode_frame(payload: bytes, *, limit: int = MAX_FRAME) -> bytes:
    """The payload with its length in front. Raises FrameError where it is empty or beyond `limit` bytes."""
    _check(len(payload), limit)
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder:
    """Frames out of a byte stream that arrives in pieces: `feed` what was read, `pop` until None.

    Memory is bounded by `limit` plus one read: a length beyond it raises before its payload is kept. Frames
    ahead of a bad one still come out; after a FrameError the stream is lost.
    """

    def __init__(self, *, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._start = 0

    @property
    def pending(self) -> int:
        """Bytes that were fed and have not come out as frames."""
        return len(self._buffer) - self._start

    def feed(self, data: bytes) -> None:
        """Keep what was read."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def pop(self) -> bytes | None:
        """The next complete payload, or None until more is fed. Raises FrameError at a bad length."""
        if self.pending < HEADER_SIZE:
            return None
        (length,) = _HEADER.unpack_from(self._buffer, self._start)
        _check(length, self._limit)
        begin = self._start + HEADER_SIZE
        if begin + length > len(self._buffer):
            return None
        self._start = begin + length
        return bytes(self._buffer[begin : self._start])

    def finish(self) -> None:
        """The stream has ended. Raises FrameError where it ended inside a frame."""
        if self.pending:
            raise FrameError(f"the stream ended inside a frame ({self.pending} bytes of it had come)")


def _check(length: int, limit: int) -> None:
    if length > limit:
        raise FrameError(f"a frame of {length} bytes is longer than the limit of {limit}")
    if length == 0:
        raise FrameError("an empty frame")

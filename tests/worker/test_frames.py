"""The framing: whatever the stream's cuts, the same frames come out; a bad length ends it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.worker.frames import HEADER_SIZE, FrameDecoder, FrameError, encode_frame

payloads = st.lists(st.binary(min_size=1, max_size=300), max_size=12)


def pieces_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in pairwise(at)]


def popped(decoder: FrameDecoder) -> list[bytes]:
    return list(iter(decoder.pop, None))


@given(payloads, st.lists(st.integers(0, 10_000), max_size=20))
def test_frames_survive_any_cut(sent: list[bytes], cuts: list[int]) -> None:
    decoder = FrameDecoder()
    received: list[bytes] = []
    for piece in pieces_of(b"".join(map(encode_frame, sent)), cuts):
        decoder.feed(piece)
        received += popped(decoder)
    assert received == sent
    assert decoder.pending == 0
    decoder.finish()


@given(payloads, st.lists(st.integers(0, 10_000), max_size=8), st.integers(1, 200))
def test_a_stream_that_ends_inside_a_frame_says_so(sent: list[bytes], cuts: list[int], missing: int) -> None:
    stream = b"".join(map(encode_frame, [*sent, b"the last frame"]))
    stream = stream[: max(len(stream) - missing, 0)]
    decoder = FrameDecoder()
    received: list[bytes] = []
    for piece in pieces_of(stream, cuts):
        decoder.feed(piece)
        received += popped(decoder)
    whole = sum(HEADER_SIZE + len(frame) for frame in received)
    assert received == sent[: len(received)]
    if whole == len(stream):
        decoder.finish()
    else:
        with pytest.raises(FrameError, match="inside a frame"):
            decoder.finish()


@given(st.binary(max_size=200), st.integers(1, 64))
def test_no_stream_makes_it_keep_more_than_a_frame(stream: bytes, limit: int) -> None:
    decoder = FrameDecoder(limit=limit)
    try:
        for byte in stream:
            decoder.feed(bytes([byte]))
            popped(decoder)
            assert decoder.pending < HEADER_SIZE + limit
    except FrameError:
        assert decoder.pending <= HEADER_SIZE


def test_frames_ahead_of_a_bad_one_come_out() -> None:
    decoder = FrameDecoder(limit=10)
    decoder.feed(encode_frame(b"good") + b"\xff\xff\xff\xff")
    assert decoder.pop() == b"good"
    with pytest.raises(FrameError, match="4294967295 bytes is longer than the limit of 10"):
        decoder.pop()


@pytest.mark.parametrize("payload", [b"", bytes(11)])
def test_the_sender_is_held_to_the_same_limits(payload: bytes) -> None:
    with pytest.raises(FrameError):
        encode_frame(payload, limit=10)
    assert encode_frame(bytes(10), limit=10)


def test_a_large_frame_in_small_pieces() -> None:
    payload = bytes(range(256)) * 4096
    stream = encode_frame(payload)
    decoder = FrameDecoder()
    for start in range(0, len(stream), 1 << 16):
        assert decoder.pop() is None
        decoder.feed(stream[start : start + (1 << 16)])
    assert decoder.pop() == payload

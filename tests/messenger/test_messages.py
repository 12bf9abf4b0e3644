"""The wire format: round trips, bounds, and a neighbour's version."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ProtocolError
from pdserve.messenger.messages import (
    MAX_MESSAGE,
    Accepted,
    Bye,
    Cancel,
    Failed,
    Heartbeat,
    Load,
    Message,
    Prefill,
    Quiet,
    Rejected,
    decode,
    encode,
)

PREFILL = Prefill(
    request="r", attempt=1, group=0, epoch=2, tokens=[1, 2], first_token=0, pages=[4], slots=[256]
)

names = st.text(min_size=1, max_size=20)
words = st.text(max_size=20)
counts = st.integers(0, (1 << 53) - 1)
u32s = st.integers(0, (1 << 32) - 1)
seconds = st.floats(0, 1e9)
maybe = st.none() | seconds
posted = st.lists(counts, max_size=5)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Prefill,
        request=names,
        attempt=counts,
        group=counts,
        epoch=counts,
        tokens=st.lists(u32s, min_size=1, max_size=9),
        first_token=counts,
        pages=st.lists(u32s, max_size=5),
        slots=st.lists(u32s, max_size=5),
        context_slot=st.none() | u32s,
        salt=words,
        priority=st.integers(-9, 9),
        remaining=maybe,
        trace=words,
    ),
    st.builds(Accepted, names, counts, counts),
    st.builds(Rejected, names, counts, words, words, maybe),
    st.builds(Cancel, names, counts),
    st.builds(Quiet, names, counts, posted),
    st.builds(Failed, names, counts, words, words, st.none() | posted, maybe),
    st.builds(Heartbeat, counts, counts, st.builds(Load, seconds, counts, counts, counts)),
    st.builds(Bye, words),
)


@given(messages)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError:
        pass


@given(messages, st.integers(0, 1 << 16))
def test_truncated_messages_are_protocol_errors(message: Message, cut: int) -> None:
    body = encode(message)
    with pytest.raises(ProtocolError):
        decode(body[: cut % len(body)])


@pytest.mark.parametrize(
    "fields",
    [
        ["nonsense", 1],
        [],
        ["accepted", 5, 1, 0],
        ["accepted", "", 1, 0],
        ["accepted", "r", -1, 0],
        ["accepted", "r"],
        ["accepted", "r" * 257, 1],
        ["quiet", "r", 1, [-1]],
        ["quiet", "r", 1, [0] * 5000],
        ["heartbeat", 1, 1, [-1.0, 0, 0, 0]],
        ["heartbeat", 1, 1, [float("inf"), 0, 0, 0]],
        ["heartbeat", 1, 1, [float("nan"), 0, 0, 0]],
        {"type": "accepted"},
    ],
)
def test_wrong_fields_are_protocol_errors(fields: object) -> None:
    with pytest.raises(ProtocolError, match="unreadable"):
        decode(msgspec.msgpack.encode(fields))


def test_oversize_is_refused_before_parsing() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        decode(bytes(MAX_MESSAGE + 1))


def test_fields_of_a_newer_peer_are_ignored_and_those_an_older_one_lacks_are_defaults() -> None:
    newer = [*msgspec.msgpack.decode(encode(PREFILL)), "a field of version 2"]
    assert decode(msgspec.msgpack.encode(newer)) == PREFILL
    fields = msgspec.msgpack.decode(encode(PREFILL))
    older = fields[: 1 + Prefill.__struct_fields__.index("context_slot")]
    assert decode(msgspec.msgpack.encode(older)) == PREFILL
    assert decode(msgspec.msgpack.encode(["heartbeat", 3, 2])) == Heartbeat(3, 2, Load())

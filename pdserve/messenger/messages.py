"""What two messengers say to each other once they have a link.

Each message is a msgpack array whose first element is its tag. Two rules keep version N talking to N - 1: a
field is only ever appended, with a default; and a decoder ignores elements past those it knows. So a message
of an older peer lacks the newest fields and reads as their defaults, and one of a newer peer loses them. A
change that cannot be made so takes a new tag, which is sent only where hello agreed on the newer version.

Sizes are bounded in the types, before anything is built from a body. Bodies are authenticated by the link
layer; here a peer is trusted to be who it is, not to be right.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.errors import ProtocolError

PROTOCOL_VERSION = 1
"""Raised with every change of meaning; see `pdserve.messenger.hello.agree_version`."""

MAX_MESSAGE = 8 << 20
MAX_TOKENS = 1 << 20
MAX_PAGES = 1 << 17
MAX_SLOTS = 4096

U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Reason = Annotated[str, msgspec.Meta(max_length=1024)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy a node is: seconds its oldest waiting request has waited, prompt tokens waiting, pages free,
    and requests active on the link that this is told to."""

    queue_age: Seconds = 0.0
    waiting_tokens: Count = 0
    free_pages: Count = 0
    active: Count = 0


class Prefill(msgspec.Struct, frozen=True, array_like=True, tag="prefill", kw_only=True):
    """Decode -> prefill: compute this prompt's KV and write it into these pages of mine.

    With n = len(tokens), handover "token" computes positions [0, n - 1) and moves ceil((n - 1) / page_size)
    pages; "hidden" computes all n. `pages[i]` is the destination page of page index
    first_token // page_size + i, the same id in every layer and rank of `group`. `slots[j]` is the imm base
    (slot and generation, runs field zero; `imm.py`) of segment j. `context_slot` is that of the context; None
    where no context moves. (request, attempt) names this attempt in every later message.
    """

    request: RequestId
    attempt: Count
    group: Count
    epoch: Count
    """Arena epoch of the destination group: page ids of another epoch mean other memory."""
    tokens: Annotated[list[U32], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)]
    first_token: Count
    """The first position whose KV the decode node lacks (0: it has none)."""
    pages: Annotated[list[U32], msgspec.Meta(max_length=MAX_PAGES)]
    slots: Annotated[list[U32], msgspec.Meta(max_length=MAX_SLOTS)]
    context_slot: U32 | None = None
    context_index: Count = 0
    """Which of the decode node's context buffers the context goes to (handover "hidden")."""
    handover: Annotated[str, msgspec.Meta(max_length=16)] = "token"
    salt: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Keeps prefix caches of different tenants apart."""
    priority: int = 0
    remaining: Seconds | None = None
    """Seconds the client will still wait, or None."""
    trace: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """W3C traceparent of the request."""
    adapter: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Reserved (LoRA): refused unless empty."""
    inputs: Annotated[list[bytes], msgspec.Meta(max_length=64)] = []
    """Reserved (multimodal inputs): refused unless empty."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """Prefill -> decode: queued, with `position` requests ahead of it."""

    request: RequestId
    attempt: Count
    position: Count = 0


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """Prefill -> decode, only instead of `Accepted`, and as good as quiet: nothing was or will be posted.

    `code`: a stable word ("overloaded", "draining", "epoch", "too_long", "bad_tokens", "bad_pages",
    "bad_slots", "unsupported"). `reason` names the field, the value and the limit.
    """

    request: RequestId
    attempt: Count
    code: Annotated[str, msgspec.Meta(max_length=64)]
    reason: Reason = ""
    retry_after: Seconds | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Decode -> prefill: post nothing more for this attempt and say `Quiet`."""

    request: RequestId
    attempt: Count


class Quiet(msgspec.Struct, frozen=True, array_like=True, tag="quiet"):
    """Prefill -> decode: nothing is posted for this attempt after this message.

    `posted[j]`: runs posted for segment j, then one more entry for the context where there is a context slot.
    Writes may still land after the message.
    """

    request: RequestId
    attempt: Count
    posted: Annotated[list[Count], msgspec.Meta(max_length=MAX_SLOTS + 1)]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Prefill -> decode: `Quiet`, and why. `posted` None: unknown (some write ended with an error)."""

    request: RequestId
    attempt: Count
    code: Annotated[str, msgspec.Meta(max_length=64)]
    reason: Reason = ""
    posted: Annotated[list[Count], msgspec.Meta(max_length=MAX_SLOTS + 1)] | None = None
    retry_after: Seconds | None = None


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Both ways. `beat` numbers the sender's heartbeats on this link from 1; `echo` is the last beat it has
    had from the other side, so a path that carries one direction only shows."""

    beat: Count
    echo: Count
    load: Load = Load()


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Both ways: send me no new work; what runs, ends. Not quiet."""

    reason: Reason = ""


Message = Prefill | Accepted | Rejected | Cancel | Quiet | Failed | Heartbeat | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The body of one message."""
    return _encoder.encode(message)


def decode(body: bytes) -> Message:
    """The message in a body. Raises ProtocolError on anything that is not exactly one known message."""
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(body)} bytes; the limit is {MAX_MESSAGE}")
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"unreadable message: {str(error)[:200]}") from None

"""Events and effects of both machines: all that passes between them and the shell that runs them.

`machine.handle(event, now) -> list[Effect]`. `now` is seconds on a monotonic clock. The shell performs
effects in order and reports each outcome as an event; an effect never raises into a machine. Performing an
effect may call `handle` again (a fabric that completes at once): machines are consistent whenever they
return, so the shell may recurse or queue, as long as one machine's effects are performed in order.

Links are named by their 64-bit id, decode requests by the server's request id, prefill work by `Key`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pdserve.errors import PdserveError
from pdserve.messenger.facts import NodeFacts
from pdserve.messenger.messages import Load, Message
from pdserve.messenger.runs import WriteTable


class Key(NamedTuple):
    """One attempt at one request of one decode node, on the prefill side."""

    link: int
    request: str
    attempt: int


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something that happened."""


class Effect(msgspec.Struct, frozen=True, tag=True):
    """Something the shell must do now."""


# ------------------------------------------------------------------ events of both machines


class LinkUp(Event, frozen=True):
    """Hello succeeded and both ways are connected. `node` is the peer's side of it.

    A link of the same peer that is still up is treated as lost: the newest hello wins. The shell fences
    the old one before it opens the new one's port.
    """

    link: int
    node: NodeFacts
    load: Load = Load()


class LinkLost(Event, frozen=True):
    """The fabric, the link layer or the peer ended this link; nothing more will be received on it."""

    link: int
    error: PdserveError


class Received(Event, frozen=True):
    """The link layer delivered a message."""

    link: int
    message: Message


class Timer(Event, frozen=True):
    """`next_deadline()` has come (or earlier, which is harmless). `load`: this node's load for heartbeats."""

    load: Load | None = None


class Drain(Event, frozen=True):
    """Take no new work from now on; what runs, ends."""

    reason: str = "draining"


# ------------------------------------------------------------------ events of the decode machine


class Submit(Event, frozen=True):
    """Fetch the KV of a prompt. `pages`: the page table of all pages to be filled, in order, exactly
    ceil((n - 1) / page_size) of them; the machine owns them until Ready or PagesSafe. n >= 2.

    `group`: which of this node's groups the pages belong to. `deadline_s`: seconds the client still waits.
    """

    request: str
    tokens: list[int]
    pages: list[int]
    priority: int = 0
    deadline_s: float | None = None
    trace: str = ""
    salt: str = ""
    group: int = 0


class CancelRequest(Event, frozen=True):
    """The client is gone. Harmless for a request the machine does not have (any more)."""

    request: str


class SlotCounted(Event, frozen=True):
    """An armed slot has counted all its runs."""

    slot: int
    generation: int


class SlotProgress(Event, frozen=True):
    """An armed slot has counted `count` runs so far (at most one event a slot and pump batch is needed)."""

    slot: int
    generation: int
    count: int


class SlotOvershoot(Event, frozen=True):
    """An armed slot has counted more runs than were expected."""

    slot: int
    generation: int
    count: int


class Fenced(Event, frozen=True):
    """The port of this link is closed: nothing of its peer can land any more."""

    link: int


# ------------------------------------------------------------------ events of the prefill machine


class Enqueued(Event, frozen=True):
    """The scheduler took the work; `position` requests are ahead of it."""

    key: Key
    position: int = 0


class Refused(Event, frozen=True):
    """The scheduler did not take the work and holds nothing for it."""

    key: Key
    code: str
    reason: str
    retry_after: float | None = None


class ChunkPlanned(Event, frozen=True):
    """Step `step` computes a part of this work that completes `pages` (source page ids), the first of which
    is page index `first_page`. Told before the step's plan goes to the workers. `last`: after this step the
    work is computed to its end; a partly filled last page is among `pages`.
    """

    key: Key
    step: int
    first_page: int
    pages: list[int]
    last: bool


class Ticked(Event, frozen=True):
    """The layer counter reads `value`. With L layers, step s makes ticks s*(L+1)+1 .. (s+1)*(L+1)."""

    value: int


class StepEnded(Event, frozen=True):
    """The step's result is in, so all its ticks have been made even if the counter was not read since."""

    step: int


class ComputeFailed(Event, frozen=True):
    """The scheduler ended this work without computing all of it (a worker died, a deadline passed)."""

    key: Key
    code: str
    reason: str
    retry_after: float | None = None


class BatchDone(Event, frozen=True):
    """All writes of a `PostWrites` have ended locally: their source may be overwritten. Once a batch."""

    batch: int
    error: PdserveError | None = None


class Closed(Event, frozen=True):
    """The endpoint of this link is closed: its outstanding writes have ended, whatever became of them."""

    link: int


# ------------------------------------------------------------------ effects of both machines


class Send(Effect, frozen=True):
    """Hand a message to the link layer. A link that is gone by now swallows it."""

    link: int
    message: Message


# ------------------------------------------------------------------ effects of the decode machine


class ArmSlot(Effect, frozen=True):
    """Count `runs` immediates of (slot, generation). Always before the `Send` that names the slot."""

    slot: int
    generation: int
    runs: int


class DisarmSlot(Effect, frozen=True):
    """Stop counting this slot; its generation is never used again."""

    slot: int
    generation: int


class Ready(Effect, frozen=True):
    """Every byte of the prompt's KV is in its pages; the request may join the decode batch and owns them."""

    request: str


class Failed(Effect, frozen=True):
    """The request ended without its KV. Its pages are quarantined until `PagesSafe`. `error.retryable` and
    `error.retry_after` say whether trying again makes sense."""

    request: str
    error: PdserveError


class PagesSafe(Effect, frozen=True):
    """Nobody can write to the request's pages any more. Exactly once for each Submit that does not end in
    Ready: after `Failed`, or after `CancelRequest`."""

    request: str


class Fence(Effect, frozen=True):
    """Close the port of this link, then report `Fenced`. At most once a link."""

    link: int
    reason: str


class Rehello(Effect, frozen=True):
    """The link to this node is gone and fenced: introduce yourself again."""

    node_id: str


# ------------------------------------------------------------------ effects of the prefill machine


class Enqueue(Effect, frozen=True):
    """Give work to the scheduler: compute KV of tokens[:target]. Answer with Enqueued or Refused."""

    key: Key
    tokens: list[int]
    target: int
    priority: int
    remaining: float | None
    trace: str
    salt: str


class CancelCompute(Effect, frozen=True):
    """Plan no further chunk of this work. Its source pages stay held until `Release`."""

    key: Key


class PostWrites(Effect, frozen=True):
    """Write one layer's runs from one source rank to one destination rank; answer with BatchDone(batch).

    `table` rows hold the offsets in the first layer of its cache group; `src_shift` and `dst_shift` are added
    to all of them. The same `table` object comes again for every layer of the step.
    """

    link: int
    key: Key
    batch: int
    layer: int
    table: WriteTable
    src_shift: int
    dst_shift: int


class Release(Effect, frozen=True):
    """The messenger is done with this work's source pages. Exactly once for each Enqueued."""

    key: Key


class CloseLink(Effect, frozen=True):
    """Close the endpoint of this link, then report `Closed`. At most once a link."""

    link: int
    reason: str

"""One request as the batch scheduler sees it, and the one table of its phases.

There are two kinds. A *generate* request is sampled (roles decode and both). A *prefill-only* request
(`sampling` None, role prefill) computes exactly the tokens it is given, for a peer to decode.

A generate request waits without owning anything. Admission gives it the pages of its whole prompt and a
promise of the pages it can grow into, all at once or not at all, so a running request can never be stuck for
a page. On a mixed node it then runs. On a decode node its KV comes from elsewhere: it is RECEIVING while a
peer writes to its pages, READY when they are complete but no row of the batch is free, RUNNING from then on.
A one-token prompt has nothing to receive and goes to READY at once. EOS, the token limit or a cancel end it.

Cancellation cannot stop a peer's writes. A request that ends while RECEIVING leaves its destination pages
QUARANTINED: nobody waits for it any more, but its pages are not free until the messenger has proof that
nothing can land in them: `pages_safe`, or `received` where the cancel crossed with it (every write that was
expected has been counted). Other late news change nothing.

A prefill-only request is RUNNING while chunks are left, and SENDING from the end of its last chunk's step
until the messenger has seen every write complete. A cancel while RUNNING moves it to SENDING too: no more
chunks, but what was computed may be under way to the peer. `release` alone ends it. It may overtake the
result of the last step (the writes follow the layers, not the step), so it is legal in RUNNING.

A finished request is known to nobody: later calls that name it are ignored. Its pages may outlive it for as
long as a published step that names them has not ended; they belong to the page allocator then.

    phase        collection              owns
    WAITING      waiting queue           nothing
    RECEIVING    receiving               destination pages, held pages, growth promise
    READY        ready                   held pages, growth promise
    RUNNING      prefilling or decoding  a row of the batch, held pages, growth promise
    SENDING      sending                 held pages
    QUARANTINED  quarantined             quarantined pages
    FINISHED     none                    nothing
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from pdserve.engine.sampling import SamplingParams
from pdserve.errors import PdserveError


class TransitionError(PdserveError):
    """An event that has no meaning in a request's phase: a fault of the caller, not of a client."""

    code = "illegal_transition"


class Phase(enum.Enum):
    WAITING = "waiting"
    RECEIVING = "receiving"
    READY = "ready"
    RUNNING = "running"
    SENDING = "sending"
    QUARANTINED = "quarantined"
    FINISHED = "finished"


# `cancel` is a generate request's, `cancel_compute` a prefill-only one's.
TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    (Phase.WAITING, "admit"): Phase.RUNNING,
    (Phase.WAITING, "admit_remote"): Phase.RECEIVING,
    (Phase.WAITING, "admit_ready"): Phase.READY,
    (Phase.WAITING, "expire"): Phase.FINISHED,
    (Phase.WAITING, "cancel"): Phase.FINISHED,
    (Phase.WAITING, "cancel_compute"): Phase.FINISHED,
    (Phase.WAITING, "release"): Phase.FINISHED,
    (Phase.RECEIVING, "received"): Phase.READY,
    (Phase.RECEIVING, "receive_ended"): Phase.QUARANTINED,
    (Phase.RECEIVING, "cancel"): Phase.QUARANTINED,
    (Phase.READY, "row"): Phase.RUNNING,
    (Phase.READY, "cancel"): Phase.FINISHED,
    (Phase.RUNNING, "finish"): Phase.FINISHED,
    (Phase.RUNNING, "cancel"): Phase.FINISHED,
    (Phase.RUNNING, "computed"): Phase.SENDING,
    (Phase.RUNNING, "cancel_compute"): Phase.SENDING,
    (Phase.RUNNING, "release"): Phase.FINISHED,
    (Phase.SENDING, "cancel_compute"): Phase.SENDING,
    (Phase.SENDING, "release"): Phase.FINISHED,
    (Phase.QUARANTINED, "pages_safe"): Phase.FINISHED,
    (Phase.QUARANTINED, "received"): Phase.FINISHED,
    (Phase.QUARANTINED, "receive_ended"): Phase.QUARANTINED,
    (Phase.QUARANTINED, "cancel"): Phase.QUARANTINED,
}


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Owned by the scheduler; everyone else reads.

    `id`: the request's name everywhere. `seq`: its number towards the workers, never reused, and its place
    in the order of arrival. `prompt`: token ids, not copied: the caller must not change them. `max_tokens`: 0
    for a prefill-only request. `priority`: lower goes first. `arrival` and `deadline`: seconds of the
    scheduler's `now`.
    `pages`: the page table so far. `reserved`: pages promised for growth and not taken yet.
    `scheduled`: positions whose KV is computed by published steps (or was received); `computed`: by steps
    that have ended. `output`: tokens that have come back. `last_step`: the last published step that names its
    pages.
    """

    id: str
    seq: int
    prompt: Sequence[int]
    sampling: SamplingParams | None
    max_tokens: int
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    phase: Phase = Phase.WAITING
    pages: list[int] = dataclasses.field(default_factory=list)
    destination_count: int = 0
    reserved: int = 0
    scheduled: int = 0
    computed: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    announced: bool = False
    """The worker holds it: a plan said `new`, none has said `finished`."""
    cancelled: bool = False
    last_step: int = -1
    admitted_at: float | None = None
    """When it left the waiting queue."""
    stop_ids: frozenset[int] = frozenset()

    @property
    def prefill_only(self) -> bool:
        return self.sampling is None

    @property
    def destination(self) -> list[int]:
        """The pages a peer writes to: those of the first n-1 prompt tokens. Empty where no peer does."""
        return self.pages[: self.destination_count]

    @property
    def samples_planned(self) -> int:
        """Tokens that published steps sample, those that have come back among them."""
        return 0 if self.sampling is None else max(0, self.scheduled - len(self.prompt) + 1)

    def advance(self, event: str) -> Phase:
        """Move along the table. Raises `TransitionError`, changing nothing, where it has no such edge."""
        target = TRANSITIONS.get((self.phase, event))
        if target is None:
            raise TransitionError(f"request {self.id}: {event} is not possible in phase {self.phase.value}")
        self.phase = target
        return target

"""The batch scheduler: which requests run, and what each step computes.

Pure: no clock, no I/O. The node calls it from its one loop, sends every `Plan` to the workers in the order
given, and feeds every `StepResult` back in the same order. `now` is seconds of any monotonic clock.

A step takes one decode token of each running sequence first, then prompt chunks, first come first served,
until the token budget is spent. Up to `steps_in_flight` steps are published without a result: a decode step
is planned before the token it continues from has come back (the worker knows it). What such a step computes
for a sequence that turns out to have ended is thrown away, and its pages are not reused before that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pdserve.engine.batch import Batch
from pdserve.engine.events import Event, Expired, FinishReason, PrefillComputed, Scheduled, TokenEvent
from pdserve.engine.invariants import check_bounds, check_collections, check_pages, check_request
from pdserve.engine.limits import Role, SchedulerConfig
from pdserve.engine.pages import PageAllocator, PageState
from pdserve.engine.plan import SequenceOutput, StepResult
from pdserve.engine.request import Phase, Request, TransitionError
from pdserve.engine.sampling import SamplingParams
from pdserve.engine.statistics import Counters, Statistics
from pdserve.engine.step import PublishedStep, StepBuilder
from pdserve.engine.waiting import WaitingQueue
from pdserve.errors import ClientError, Overloaded, WorkerError


class Scheduler:
    """Owns every request from `submit` until it is FINISHED, and every page of one group of ranks.

    Calls that name a request which is not known (any more) are ignored, since the node's tasks and peers hear
    of its end later than the scheduler; an event that a known request's phase does not allow raises
    `TransitionError` and changes nothing.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pages = PageAllocator(config.num_pages)
        self._requests: dict[str, Request] = {}
        self._queue = WaitingQueue()
        # A request is in the collection of its phase. Dicts by id keep the order of entry and remove in O(1).
        self._receiving: dict[str, Request] = {}
        self._ready: dict[str, Request] = {}
        self._batch = Batch()
        self._sending: dict[str, Request] = {}
        self._quarantined: dict[str, Request] = {}
        self._published: deque[PublishedStep] = deque()
        self._next_step = 0
        self._next_seq = 0
        self._counters = Counters()

    # --- questions

    @property
    def idle(self) -> bool:
        """Nothing is known, nothing is published, and the worker holds no sequence."""
        return not self._requests and not self._published and not self._batch.untold

    @property
    def waiting(self) -> int:
        """Length of the waiting queue: right after `submit`, the new request's position among equals."""
        return self._queue.count

    def get(self, id: str) -> Request | None:
        """The request, while it is known. Read only."""
        return self._requests.get(id)

    def next_deadline(self) -> float | None:
        """When `expire` next has something to do."""
        return self._queue.next_deadline()

    def room(self, prompt_tokens: int) -> int:
        """The largest `max_tokens` that `validate` accepts with this prompt; below 1: it accepts none."""
        return self.config.room(prompt_tokens)

    def validate(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise `ClientError` or `ContextLengthExceeded` for a request that this node can never serve.

        `max_tokens` is 0 in the prefill role. The message names field, value and limit.
        """
        self.config.validate(prompt_tokens, max_tokens)

    # --- the life of a request

    def submit(
        self,
        id: str,
        prompt: Sequence[int],
        sampling: SamplingParams | None,
        max_tokens: int,
        *,
        priority: int = 0,
        deadline: float | None = None,
        now: float,
    ) -> Request:
        """Put a request into the waiting queue. It owns nothing yet.

        `sampling` None and `max_tokens` 0: prefill-only, all of `prompt` is computed. Raises what `validate`
        raises, `ClientError` for an id in use, `Overloaded` (with `retry_after`) when the queue is full.
        """
        self.validate(len(prompt), max_tokens)
        if (sampling is None) != (self.config.role is Role.PREFILL):
            raise ClientError(
                f"a {self.config.role.value} node takes no such request: sampling is "
                + ("missing" if sampling is None else "not done here"),
                param="sampling",
            )
        if id in self._requests:
            phase = self._requests[id].phase.value
            raise ClientError(f"request id {id} is in use (phase {phase})", param="request_id")
        if self._queue.count >= self.config.max_waiting:
            self._counters.rejected += 1
            raise Overloaded(
                f"{self._queue.count} requests are waiting; max_waiting is {self.config.max_waiting}",
                retry_after=self._queue.retry_after(now),
            )
        request = Request(
            id=id,
            seq=self._next_seq,
            prompt=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            priority=priority,
            arrival=now,
            deadline=deadline,
            stop_ids=frozenset(sampling.stop_token_ids) if sampling else frozenset(),
        )
        self._next_seq += 1
        self._counters.submitted += 1
        self._requests[id] = request
        self._queue.push(request)
        return request

    def admit(self, now: float) -> list[Request]:
        """Move requests out of the queue while rows (or places to receive) and pages last.

        Returns those that are RECEIVING now: the messenger must fetch the KV of all but their last prompt
        token into `request.destination`. The head of the queue blocks the rest: small requests never overtake
        a large one for ever.
        """
        self._fill_rows()
        receiving: list[Request] = []
        while (request := self._queue.head()) is not None and self._has_place():
            pages = self.config.pages_for(len(request.prompt))
            growth = self.config.pages_for_request(len(request.prompt), request.max_tokens) - pages
            if pages + growth > self._pages.available:
                break
            request.pages = self._pages.allocate(pages)
            request.reserved = growth
            self._pages.reserve(growth)
            self._enter(request)
            self._queue.left(request)
            self._queue.admitted(now)
            request.admitted_at = now
            if request.phase is Phase.RECEIVING:
                receiving.append(request)
        return receiving

    def received(self, id: str, now: float) -> bool:
        """All of the request's KV has arrived. False where nobody waits for it any more.

        After a cancel it proves that the quarantined pages are safe: the peer has nothing left to write.
        """
        request = self._requests.get(id)
        if request is None:
            return False
        if request.advance("received") is Phase.FINISHED:
            self._end_quarantine(request)
            return False
        del self._receiving[id]
        self._pages.received(request.destination)
        request.scheduled = request.computed = len(request.prompt) - 1
        self._ready[id] = request
        self._fill_rows()
        return True

    def end_receiving(self, id: str, now: float) -> bool:
        """The messenger gave up: the request is gone, its destination pages quarantined until `pages_safe`.

        False where it was not being received any more: it had been cancelled.
        """
        request = self._requests.get(id)
        if request is None:
            return False
        was_receiving = request.phase is Phase.RECEIVING
        request.advance("receive_ended")
        if was_receiving:
            self._counters.receive_failed += 1
            self._quarantine(request)
        return was_receiving

    def pages_safe(self, id: str) -> None:
        """The messenger has proof that nobody can write to the quarantined pages any more."""
        request = self._requests.get(id)
        if request is None:
            return
        request.advance("pages_safe")
        self._end_quarantine(request)

    def cancel(self, id: str, now: float) -> Phase:
        """End a request in any phase; idempotent. Returns its phase afterwards.

        FINISHED: gone, also where it was not known. QUARANTINED: a peer may be writing, so the messenger must
        be told, and answers with `pages_safe`. SENDING (prefill-only): nothing more is computed, the
        messenger still has to `release` it. No event is reported for it any more.
        """
        request = self._requests.get(id)
        if request is None:
            return Phase.FINISHED
        before = request.phase
        after = request.advance("cancel_compute" if request.prefill_only else "cancel")
        if before is not Phase.SENDING and before is not Phase.QUARANTINED:
            self._note_cancelled(request)
        if before is Phase.WAITING:
            self._queue.left(request)
            del self._requests[id]
        elif before is Phase.RECEIVING:
            self._quarantine(request)
        elif before is Phase.READY:
            del self._ready[id]
            self._give_back(request)
        elif before is Phase.RUNNING:
            self._batch.leave(request)
            if after is Phase.SENDING:
                self._sending[id] = request
            else:
                self._give_back(request)
        return after

    def release(self, id: str, now: float) -> None:
        """The messenger will not touch the pages of this prefill-only request again: all writes are done.

        A request that is not computed to its end is cancelled by it.
        """
        request = self._requests.get(id)
        if request is None:
            return
        if not request.prefill_only:
            raise TransitionError(f"request {id}: release is for prefill-only requests")
        before = request.phase
        request.advance("release")
        if before is not Phase.SENDING and request.scheduled < len(request.prompt):
            self._note_cancelled(request)
        if before is Phase.WAITING:
            self._queue.left(request)
            del self._requests[id]
            return
        if before is Phase.RUNNING:
            self._batch.leave(request)
        else:
            del self._sending[id]
        self._give_back(request)

    def expire(self, now: float) -> list[Event]:
        """End the waiting requests whose deadline has come."""
        events: list[Event] = []
        while (request := self._queue.expired(now)) is not None:
            request.advance("expire")
            self._queue.left(request)
            del self._requests[request.id]
            self._counters.expired += 1
            events.append(Expired(request.id, now - request.arrival))
        return events

    # --- steps

    def schedule(self, now: float) -> Scheduled | None:
        """Publish the next step, or None: nothing to compute, or `steps_in_flight` steps await their results.

        The caller must run every plan it is given. A plan without work is made only when the batch would
        otherwise stand still with ended sequences in it.
        """
        if len(self._published) >= self.config.steps_in_flight:
            return None
        self._fill_rows()
        step = StepBuilder(self._next_step, self.config, self._pages)
        self._batch.fill(step)
        if not step.work and (self._published or not self._batch.untold):
            return None
        self._next_step += 1
        self._published.append(step.published)
        self._counters.prompt_tokens += step.prompt_tokens
        self._counters.decode_tokens += step.decode_tokens
        return step.build(self._batch.tell())

    def complete(self, result: StepResult, now: float) -> list[Event]:
        """A step has ended. Returns what it brought, in the order of its work.

        Outputs of requests that ended in the meantime are dropped. Raises `WorkerError` for a result out of
        order or without the output of a live request.
        """
        if not self._published or self._published[0].step != result.step:
            expected = self._published[0].step if self._published else "none"
            raise WorkerError(f"result of step {result.step} arrived; expected: {expected}")
        published = self._published.popleft()
        self._pages.step_ended(result.step)
        outputs = {output.seq: output for output in result.outputs}
        events: list[Event] = []
        for request, work in published.work:
            request.computed += work.count
            if request.prefill_only:
                if request.computed == len(request.prompt) and not request.cancelled:
                    events.append(self._computed(request))
            elif work.sample and request.phase is Phase.RUNNING:
                output = outputs.get(request.seq)
                if output is None:
                    raise WorkerError(f"step {result.step} returned no token for sequence {request.seq}")
                events.append(self._sampled(request, output))
        return events

    # --- observation

    def statistics(self) -> Statistics:
        head = self._queue.head()
        count, totals = self._pages.count, self._counters
        return Statistics(
            waiting=self._queue.count,
            waiting_tokens=self._queue.tokens,
            unplanned_tokens=self._batch.unplanned_tokens,
            receiving=len(self._receiving),
            ready=len(self._ready),
            running=len(self._batch),
            sending=len(self._sending),
            quarantined=len(self._quarantined),
            untold=self._batch.untold,
            steps_in_flight=len(self._published),
            pages_free=count(PageState.FREE),
            pages_held=count(PageState.HELD),
            pages_destination=count(PageState.DESTINATION),
            pages_quarantined=count(PageState.QUARANTINED),
            pages_pending=count(PageState.PENDING),
            pages_reserved=self._pages.reserved,
            head_arrival=None if head is None else head.arrival,
            submitted_total=totals.submitted,
            rejected_total=totals.rejected,
            finished_stop_total=totals.stop,
            finished_length_total=totals.length,
            computed_total=totals.computed,
            receive_failed_total=totals.receive_failed,
            cancelled_total=totals.cancelled,
            expired_total=totals.expired,
            steps_total=self._next_step,
            prompt_tokens_total=totals.prompt_tokens,
            decode_tokens_total=totals.decode_tokens,
        )

    def check(self) -> None:
        """Raise `InvariantError` unless pages, phases, collections and limits agree. Linear in all."""
        waiting = self._queue.live()
        members: dict[Phase, Iterable[Request]] = {
            Phase.WAITING: waiting,
            Phase.RECEIVING: self._receiving.values(),
            Phase.READY: self._ready.values(),
            Phase.RUNNING: self._batch,
            Phase.SENDING: self._sending.values(),
            Phase.QUARANTINED: self._quarantined.values(),
        }
        check_collections(self._requests, members)
        for request in self._requests.values():
            check_request(request, self.config)
        self._pages.check()
        check_pages(self._requests.values(), self._published, self._pages)
        self._queue.check()
        receiving = len(self._receiving) + len(self._ready)
        check_bounds(self.config, len(waiting), receiving, len(self._batch), list(self._published))

    # --- inside

    def _has_place(self) -> bool:
        if self.config.role is Role.DECODE:
            return len(self._receiving) + len(self._ready) < self.config.receiving_limit
        return len(self._batch) < self.config.max_num_seqs

    def _enter(self, request: Request) -> None:
        """Move an admitted request to the phase where it gets its KV."""
        if self.config.role is not Role.DECODE:
            request.advance("admit")
            self._batch.prefill(request)
        elif len(request.prompt) == 1:
            request.advance("admit_ready")
            self._ready[request.id] = request
            self._fill_rows()
        else:
            request.advance("admit_remote")
            request.destination_count = self.config.pages_for(len(request.prompt) - 1)
            self._pages.expose(request.destination)
            self._receiving[request.id] = request

    def _fill_rows(self) -> None:
        """READY → RUNNING, in the order in which the KV arrived, while rows last."""
        while self._ready and len(self._batch) < self.config.max_num_seqs:
            id, request = next(iter(self._ready.items()))
            request.advance("row")
            del self._ready[id]
            self._batch.decode(request)

    def _note_cancelled(self, request: Request) -> None:
        request.cancelled = True
        self._counters.cancelled += 1

    def _computed(self, request: Request) -> PrefillComputed:
        self._counters.computed += 1
        if request.phase is Phase.RUNNING:  # else `release` came first
            self._batch.leave(request)
            request.advance("computed")
            self._sending[request.id] = request
        return PrefillComputed(request.id)

    def _sampled(self, request: Request, output: SequenceOutput) -> TokenEvent:
        assert request.sampling is not None
        reason: FinishReason | None = None
        # A token is free to end the sequence once min_tokens others precede it: the sampler's own rule.
        if output.token in request.stop_ids and len(request.output) >= request.sampling.min_tokens:
            reason = "stop"
        elif len(request.output) + 1 == request.max_tokens:
            reason = "length"
        request.output.append(output.token)
        if reason is not None:
            self._counters.finished(reason)
            request.advance("finish")
            self._batch.leave(request)
            self._give_back(request)
        return TokenEvent(request.id, output.token, output.logprob, output.top, reason)

    def _give_back(self, request: Request) -> None:
        """The request is FINISHED: its pages go back, once no published step names them."""
        del self._requests[request.id]
        self._pages.unreserve(request.reserved)
        request.reserved = 0
        self._pages.release(request.pages, request.last_step)

    def _quarantine(self, request: Request) -> None:
        """RECEIVING → QUARANTINED: only pages that a peer knows of stay away, the others are free at once."""
        del self._receiving[request.id]
        self._quarantined[request.id] = request
        self._pages.quarantine(request.destination)
        self._pages.unreserve(request.reserved)
        request.reserved = 0
        rest = request.pages[request.destination_count :]
        del request.pages[request.destination_count :]
        self._pages.release(rest, request.last_step)

    def _end_quarantine(self, request: Request) -> None:
        del self._quarantined[request.id], self._requests[request.id]
        self._pages.safe(request.destination, request.last_step)

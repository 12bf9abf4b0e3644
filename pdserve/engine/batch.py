"""The rows of the worker's batch: who is in it, and what the worker has yet to be told."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.engine.request import Request
from pdserve.engine.step import StepBuilder


class Batch:
    """RUNNING requests, in the order in which they got their row.

    *Prefilling* while prompt tokens are left (if prefill-only: until its last step has ended), *decoding*
    from the step after. An ended sequence frees its row at once, since the plan that could bring a successor
    names it as finished first: the worker never holds more sequences than there are rows.
    """

    def __init__(self) -> None:
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._untold: list[int] = []

    def __len__(self) -> int:
        """Rows that are taken."""
        return len(self._prefilling) + len(self._decoding)

    def __iter__(self) -> Iterator[Request]:
        yield from self._prefilling.values()
        yield from self._decoding.values()

    @property
    def untold(self) -> int:
        """Sequences that have ended and that no plan has named as finished yet."""
        return len(self._untold)

    @property
    def unplanned_tokens(self) -> int:
        """Prompt tokens that no step has been published for."""
        return sum(len(request.prompt) - request.scheduled for request in self._prefilling.values())

    def prefill(self, request: Request) -> None:
        """Give a row to a request whose prompt is to be computed here."""
        self._prefilling[request.id] = request

    def decode(self, request: Request) -> None:
        """Give a row to a request whose KV lacks nothing but its last prompt token's."""
        self._decoding[request.id] = request

    def leave(self, request: Request) -> None:
        """Take the row back."""
        if self._decoding.pop(request.id, None) is None:
            del self._prefilling[request.id]
        if request.announced:
            request.announced = False
            self._untold.append(request.seq)

    def fill(self, step: StepBuilder) -> None:
        """Plan a step: a decode token of each sequence first, then prompt chunks in order of admission.

        The first prompt that does not fit to its end is the last: nobody overtakes.
        """
        for request in self._decoding.values():
            if request.samples_planned < request.max_tokens:
                step.decode(request)
        done: list[str] = []
        for id, request in self._prefilling.items():
            if request.scheduled == len(request.prompt):  # prefill-only, waits for its last step to end
                continue
            step.chunk(request)
            if request.scheduled < len(request.prompt):
                break
            if not request.prefill_only:
                done.append(id)
        for id in done:
            self._decoding[id] = self._prefilling.pop(id)

    def tell(self) -> list[int]:
        """The sequences that the plan being published names as finished."""
        untold, self._untold = self._untold, []
        return untold

"""Building one step: work under a token budget, and the changes that bring the worker's batch up to date."""

from __future__ import annotations

import dataclasses

from pdserve.engine.events import Chunk, Scheduled
from pdserve.engine.limits import SchedulerConfig
from pdserve.engine.pages import PageAllocator
from pdserve.engine.plan import MorePages, NewSequence, Plan, Work
from pdserve.engine.request import Request


@dataclasses.dataclass(slots=True)
class PublishedStep:
    """A step whose result has not come back, with the requests it names."""

    step: int
    work: list[tuple[Request, Work]] = dataclasses.field(default_factory=list)


class StepBuilder:
    """Collects the work of one step. Each request may be added once."""

    def __init__(self, step: int, config: SchedulerConfig, pages: PageAllocator) -> None:
        self.published = PublishedStep(step)
        self.work: list[Work] = []
        self.prompt_tokens = 0
        self.decode_tokens = 0
        self._config = config
        self._pages = pages
        self._budget = config.max_num_batched_tokens
        self._new: list[NewSequence] = []
        self._more: list[MorePages] = []
        self._chunks: list[Chunk] = []

    def decode(self, request: Request) -> None:
        """The next token of a sequence whose prompt is done but for its last token at most.

        The budget has room for it: it is at least the number of rows.
        """
        more: list[int] = []
        if request.scheduled // self._config.page_size == len(request.pages):
            request.reserved -= 1
            more.append(self._pages.take_reserved(request.pages[-1]))
            request.pages.extend(more)
        self.decode_tokens += 1
        self._add(request, 1, True, more)

    def chunk(self, request: Request) -> None:
        """As much of the prompt as the budget allows, which may be nothing.

        A prefill-only chunk ends at a page boundary or with the prompt, so that a page leaves once, complete.
        """
        page_size = self._config.page_size
        start = request.scheduled
        left = len(request.prompt) - start
        count = min(left, self._budget)
        last = count == left
        if request.prefill_only and not last:
            count = self.whole_pages(start + count) - start
        if count <= 0:
            return
        if request.prefill_only:
            first = start // page_size
            end = self._config.pages_for(start + count)
            self._chunks.append(Chunk(request.id, first, request.pages[first:end], last))
        self.prompt_tokens += count
        self._add(request, count, last and not request.prefill_only, [])

    def whole_pages(self, end: int) -> int:
        """The last page boundary that is not after position `end`."""
        return end - end % self._config.page_size

    def build(self, finished: list[int]) -> Scheduled:
        plan = Plan(
            step=self.published.step,
            new=self._new,
            pages=self._more,
            finished=finished,
            work=self.work,
            send=bool(self._chunks),
        )
        return Scheduled(plan, self._chunks, self.prompt_tokens, self.decode_tokens)

    def _add(self, request: Request, count: int, sample: bool, more: list[int]) -> None:
        work = Work(request.seq, request.scheduled, count, sample)
        if not request.announced:
            request.announced = True
            tokens = [*request.prompt, *request.output]
            self._new.append(
                NewSequence(request.seq, tokens, len(request.prompt), request.pages.copy(), request.sampling)
            )
        elif more:
            self._more.append(MorePages(request.seq, more))
        request.scheduled += count
        request.last_step = self.published.step
        self._budget -= count
        self.work.append(work)
        self.published.work.append((request, work))

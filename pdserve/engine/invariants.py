"""What must hold between two calls of the scheduler. Linear in everything: for tests, and on an idle node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.engine.limits import Role, SchedulerConfig
from pdserve.engine.pages import InvariantError, PageAllocator, PageState
from pdserve.engine.request import Phase, Request
from pdserve.engine.step import PublishedStep


def require(condition: bool, message: str) -> None:
    """Like `assert`, but not switched off by -O."""
    if not condition:
        raise InvariantError(message)


def check_collections(requests: Mapping[str, Request], members: Mapping[Phase, Iterable[Request]]) -> None:
    """Each known request is in the collection of its phase, once, and nothing else is."""
    seen: set[str] = set()
    for phase, collection in members.items():
        for request in collection:
            require(request.phase is phase, f"{request.id} is {request.phase.value}, kept as {phase.value}")
            require(requests.get(request.id) is request, f"{request.id} is {phase.value} but not known")
            require(request.id not in seen, f"{request.id} is kept twice")
            seen.add(request.id)
    require(len(seen) == len(requests), f"{len(requests)} requests are known, {len(seen)} are kept")


def check_request(request: Request, config: SchedulerConfig) -> None:
    """A request's own numbers fit together."""
    prompt, phase = len(request.prompt), request.phase
    require(0 <= request.computed <= request.scheduled, f"{request.id}: computed beyond scheduled")
    most = prompt + max(request.max_tokens - 1, 0)
    require(request.scheduled <= most, f"{request.id}: {request.scheduled} of {most} positions scheduled")
    require(len(request.output) <= request.samples_planned, f"{request.id}: more tokens than were planned")
    owned = len(request.pages) + request.reserved
    if phase is Phase.WAITING:
        require(owned == 0 and request.scheduled == 0, f"{request.id} owns something while it waits")
    elif phase is Phase.QUARANTINED:
        require(len(request.pages) == request.destination_count, f"{request.id} kept pages of its own")
        require(request.reserved == 0, f"{request.id} kept its growth promise in quarantine")
    else:
        full = config.pages_for_request(prompt, request.max_tokens)
        require(owned == full, f"{request.id} owns {owned} pages, its life takes {full}")
    held = config.pages_for(request.scheduled)
    require(held <= len(request.pages), f"{request.id}: {request.scheduled} positions, too few pages")
    require(not request.announced or phase is Phase.RUNNING, f"{request.id} is announced, not running")


def check_pages(
    requests: Iterable[Request], published: Iterable[PublishedStep], allocator: PageAllocator
) -> None:
    """Every page that is not free has one owner, in the right state; nothing published names a free page."""
    owner: dict[int, Request] = {}
    reserved = 0
    for request in requests:
        reserved += request.reserved
        for index, page in enumerate(request.pages):
            expected = PageState.HELD
            if request.phase is Phase.QUARANTINED:
                expected = PageState.QUARANTINED
            elif request.phase is Phase.RECEIVING and index < request.destination_count:
                expected = PageState.DESTINATION
            state = allocator.state(page)
            require(state is expected, f"page {page} of {request.id} is {state.name}, not {expected.name}")
            require(page not in owner, f"page {page} belongs to two requests")
            owner[page] = request
    owned = sum(
        allocator.count(state) for state in (PageState.HELD, PageState.DESTINATION, PageState.QUARANTINED)
    )
    require(owned == len(owner), f"{owned} pages are out, the requests own {len(owner)}")
    require(reserved == allocator.reserved, f"{allocator.reserved} pages reserved, {reserved} promised")
    for step in published:
        for request, _ in step.work:
            for page in request.pages:
                state = allocator.state(page)
                named = f"page {page}, named by step {step.step} for {request.id},"
                require(state in (PageState.HELD, PageState.PENDING), f"{named} is {state.name}")
                require(owner.get(page, request) is request, f"{named} belongs to {owner.get(page)}")


def check_bounds(
    config: SchedulerConfig, waiting: int, receiving: int, rows: int, published: list[PublishedStep]
) -> None:
    """The configured limits hold; a step's own limits too."""
    require(waiting <= config.max_waiting, f"{waiting} waiting, limit {config.max_waiting}")
    require(rows <= config.max_num_seqs, f"{rows} rows, limit {config.max_num_seqs}")
    limit = config.receiving_limit if config.role is Role.DECODE else 0
    require(receiving <= limit, f"{receiving} receiving or ready, limit {limit}")
    require(len(published) <= config.steps_in_flight, f"{len(published)} steps in flight")
    for step in published:
        tokens = sum(work.count for _, work in step.work)
        budget = config.max_num_batched_tokens
        require(tokens <= budget, f"step {step.step} computes {tokens} tokens, the budget is {budget}")

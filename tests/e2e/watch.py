"""Requests followed through a prefill node, a decode node and a single node, with the KV that each held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from pdserve.engine.events import Event, Scheduled, TokenEvent
from pdserve.engine.request import Request
from pdserve.engine.sampling import SamplingParams
from pdserve.http.frontend import TokenOutput
from pdserve.messenger.events import Effect, Release
from pdserve.node.node import Node
from tests.e2e.cluster import Cluster, idle, wrapped
from tests.e2e.exactness import Pages, check_outputs, check_runs, check_tokens_kv, read_pages

GREEDY = SamplingParams(temperature=0.0, seed=0, logprobs=5)
"""Never stops before `max_tokens`: no token id ends it."""


async def generate(node: Node, id: str, prompt: Sequence[int], max_tokens: int) -> list[TokenOutput]:
    """Tokens of one greedy request, past HTTP: with ids, and log-probabilities as they were computed."""
    generation = await node.frontend.generate(id, prompt, GREEDY, max_tokens)
    try:
        return [output async for output in generation]
    finally:
        await generation.aclose()


@dataclass
class Outcome:
    """One prompt, served by both nodes of the pair and by the single node."""

    prompt: list[int]
    outputs: list[TokenOutput]
    expected: list[TokenOutput]
    """The single node's."""
    source: Pages | None
    """The prefill node's pages at Release; None where no peer was needed."""
    ready: Pages | None
    """The decode node's, when the request became ready."""
    final: Pages
    """The decode node's after the last token."""
    single: Pages
    """The single node's after the last token."""

    @property
    def sent(self) -> int:
        return len(self.prompt) - 1

    def check_runs(self) -> None:
        if self.sent == 0:
            assert self.source is None
            assert self.ready is None
            return
        assert self.source is not None
        assert self.ready is not None
        assert self.ready.shape[1] == -(-self.sent // self.ready.shape[4]), "pages of the prompt"
        check_runs(self.source, self.ready)

    def check_kv_at_readiness(self) -> None:
        if self.ready is not None:
            check_tokens_kv(self.ready, self.single, self.sent)

    def check_kv_at_the_end(self) -> None:
        """The last token's KV is never computed."""
        check_tokens_kv(self.final, self.single, len(self.prompt) + len(self.expected) - 1)

    def check_outputs(self) -> None:
        check_outputs(self.outputs, self.expected)

    def checks(self) -> dict[str, Callable[[], None]]:
        return {
            "runs": self.check_runs,
            "kv at readiness": self.check_kv_at_readiness,
            "kv at the end": self.check_kv_at_the_end,
            "outputs": self.check_outputs,
        }

    def check(self) -> None:
        """All of DESIGN 12.1 and 12.2. Raises Different."""
        for check in self.checks().values():
            check()


class Watch:
    """Copies KV where it is complete: at Release on the prefill node, at readiness and at the last token."""

    def __init__(self) -> None:
        self.pages: dict[str, list[int]] = {}
        """The prefill node's page table of each request, as far as chunks of it were planned."""
        self.source: dict[str, Pages] = {}
        self.ready: dict[str, Pages] = {}
        self.final: dict[tuple[str, str], Pages] = {}
        """By node name and request."""

    @contextmanager
    def follow(self, *nodes: Node) -> Iterator[None]:
        with ExitStack() as stack:
            for node in nodes:
                if node.prefill is not None:
                    self._follow_source(stack, node)
                else:
                    self._follow_tokens(stack, node)
                if node.decode is not None:
                    self._follow_readiness(stack, node)
            yield

    def _follow_source(self, stack: ExitStack, node: Node) -> None:
        def scheduled(original: Callable[[Scheduled], None]) -> Callable[[Scheduled], None]:
            def note(step: Scheduled) -> None:
                for chunk in step.chunks:
                    table = self.pages.setdefault(chunk.id.split("/", 2)[2], [])
                    assert len(table) == chunk.first_page, "a page was planned twice, or left out"
                    table.extend(chunk.pages)
                original(step)

            return note

        def perform(original: Callable[[Effect], None]) -> Callable[[Effect], None]:
            def copy(effect: Effect) -> None:
                if isinstance(effect, Release) and effect.key.request in self.pages:
                    request = effect.key.request
                    self.source[request] = read_pages(node, self.pages[request])
                original(effect)

            return copy

        stack.enter_context(wrapped(node.prefill, "scheduled", scheduled))
        stack.enter_context(wrapped(node.prefill, "perform", perform))

    def _follow_readiness(self, stack: ExitStack, node: Node) -> None:
        def on_ready(original: Callable[[Request], None]) -> Callable[[Request], None]:
            def copy(request: Request) -> None:
                assert request.id not in self.ready, "ready twice"
                self.ready[request.id] = read_pages(node, request.destination)
                original(request)

            return copy

        stack.enter_context(wrapped(node.decode, "on_ready", on_ready))

    def _follow_tokens(self, stack: ExitStack, node: Node) -> None:
        def engine_event(original: Callable[[Event], None]) -> Callable[[Event], None]:
            def copy(event: Event) -> None:
                if isinstance(event, TokenEvent) and event.finish_reason is not None:
                    # The pages have just been released; nobody is given them before this call returns.
                    table = node.frontend.generations[event.id].request.pages
                    self.final[node.name, event.id] = read_pages(node, table)
                original(event)

            return copy

        stack.enter_context(wrapped(node.frontend, "engine_event", engine_event))


async def compare(
    cluster: Cluster,
    prompts: dict[str, list[int]],
    max_tokens: int,
    *,
    pair: tuple[Node, Node] | None = None,
    plant: AbstractContextManager[None] | None = None,
    check: bool = True,
) -> dict[str, Outcome]:
    """Serve these prompts, all at once, through a linked pair (the cluster's first) and the single node.

    `plant`: entered once everything is followed, so what it does to a node comes before the copies. On return
    all gauges of all three nodes are zero. `check`: prove their invariants then.
    """
    source, target = pair or (cluster.prefill[0], cluster.decode[0])
    (single,) = cluster.both
    watch = Watch()

    async def serve(node: Node) -> dict[str, list[TokenOutput]]:
        outputs = await asyncio.gather(*(generate(node, id, prompts[id], max_tokens) for id in prompts))
        return dict(zip(prompts, outputs, strict=True))

    with watch.follow(source, target, single), plant or nullcontext():
        ours, expected = await asyncio.gather(serve(target), serve(single))
        await idle(source, target, single, check=check)
    return {
        id: Outcome(
            prompt=prompt,
            outputs=ours[id],
            expected=expected[id],
            source=watch.source.get(id),
            ready=watch.ready.get(id),
            final=watch.final[target.name, id],
            single=watch.final[single.name, id],
        )
        for id, prompt in prompts.items()
    }


def differing(outcome: Outcome) -> set[str]:
    """The names of the checks that raise."""
    found: set[str] = set()
    for name, check in outcome.checks().items():
        try:
            check()
        except AssertionError:
            found.add(name)
    return found

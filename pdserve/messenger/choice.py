"""Which prefill node a fetch asks, and what it comes to when there is none, or when it failed."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.errors import ContextLengthExceeded, NoPeer, Overloaded, PdserveError, PeerError
from pdserve.messenger.facts import NodeFacts
from pdserve.messenger.fetch import DecodeLink, Fetch
from pdserve.messenger.messages import Failed, Rejected


def choose(fetch: Fetch, all_links: Iterable[DecodeLink], retry_after: float) -> DecodeLink | PdserveError:
    """The open link not asked yet with the fewest waiting tokens (of equals the longest unused); or why none.

    What was asked since a peer last told its load is added to it, so that a burst spreads.
    """
    tokens = len(fetch.submit.tokens)
    links = [link for link in all_links if link.up and not link.leaving]
    fitting = [link for link in links if tokens <= longest_prompt(link.node)]
    fresh = [link for link in fitting if link.node.node_id not in fetch.tried]
    if fresh:
        return min(fresh, key=lambda link: (link.load.waiting_tokens + link.asked_tokens, link.turn))
    if fetch.rejections:
        return _sum_up(fetch.rejections, retry_after)
    if not links:
        return NoPeer("no prefill node is reachable", retry_after=retry_after)
    limit = max(longest_prompt(link.node) for link in links)
    return ContextLengthExceeded(
        f"the prompt has {tokens} tokens; no prefill node takes it (the longest takes {limit})"
    )


def longest_prompt(node: NodeFacts) -> int:
    """Tokens of the longest prompt that a prefill node takes: its last one is never computed there."""
    pages = max(group.num_pages for group in node.groups) - 1
    return min(node.max_model_len, pages * node.page_size + 1)


def too_late(fetch: Fetch) -> PdserveError:
    return Overloaded(
        f"the prompt was not prefilled within {fetch.submit.deadline_s:.1f} s", code="deadline_exceeded"
    )


def failure(message: Failed) -> PdserveError:
    error = PeerError(f"the prefill node failed the request: {message.code}: {message.reason}")
    error.retry_after = message.retry_after
    return error


def _sum_up(rejections: list[Rejected], retry_after: float) -> PdserveError:
    """What all peers' refusals come to: the most hopeful of them."""
    busy = [r for r in rejections if r.code in ("overloaded", "draining")]
    if busy:
        waits = [r.retry_after for r in busy if r.retry_after is not None]
        text = "; ".join(f"{r.code}: {r.reason}" for r in busy)
        return Overloaded(
            f"no prefill node takes the request: {text}", retry_after=min(waits, default=retry_after)
        )
    last = rejections[-1]
    if last.code == "too_long":
        return ContextLengthExceeded(f"the prefill node refused the prompt: {last.reason}")
    return PeerError(f"the prefill node refused the request: {last.code}: {last.reason}")

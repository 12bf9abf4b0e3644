"""A node's state at one scrape of /metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdserve.fabric import native_handles
from pdserve.observe.metrics import Snapshot

if TYPE_CHECKING:
    from pdserve.node.node import Node


def snapshot(node: Node) -> Snapshot:
    """What `observe.metrics` exports as gauges and totals; zero while the model is loading."""
    if not node.ready.is_set():
        return Snapshot()
    stats = node.scheduler.statistics()
    pages = {
        "free": stats.pages_free,
        "held": stats.pages_held,
        "destination": stats.pages_destination,
        "quarantined": stats.pages_quarantined,
        "pending": stats.pages_pending,
    }
    total = sum(pages.values())
    hellos: Counter[str] = Counter()
    for peer in node.peers:
        hellos.update(peer.hellos)
    if node.hello_server is not None:
        hellos.update(node.hello_server.hellos)
    messenger = node.decode or node.prefill
    machine = {} if messenger is None else messenger.machine.statistics()
    return Snapshot(
        requests_running=stats.running,
        requests_waiting=stats.waiting,
        requests_receiving=None if node.decode is None else stats.receiving,
        requests_sending=None if node.prefill is None else stats.sending,
        waiting_tokens=stats.waiting_tokens,
        kv_cache_usage=1 - stats.pages_free / total if total else 0.0,
        pages=pages,
        slots={k.removeprefix("slots_"): v for k, v in machine.items() if k.startswith("slots_")},
        links={k.removeprefix("links_"): v for k, v in machine.items() if k.startswith("links_")},
        writes_in_flight=None if node.prefill is None else int(machine["batches_outstanding"]),
        transfer_bytes={} if node.prefill is None else {"sent": node.prefill.bytes_sent},
        transfer_runs=_runs(node),
        stale_immediates=None if node.decode is None else node.counters.stale,
        hellos=hellos,
        native_handles={} if node.fabric is None else native_handles(),
    )


def _runs(node: Node) -> dict[str, float]:
    if node.prefill is not None:
        return {"sent": node.prefill.runs_sent}
    if node.decode is not None:
        return {"received": node.decode.runs_received}
    return {}

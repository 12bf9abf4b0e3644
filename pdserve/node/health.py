"""What a node's /health and /live answer: recent progress, not that a process exists."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdserve.http.frontend import Health

if TYPE_CHECKING:
    from pdserve.node.node import Node

STALLED_S = 60.0
"""A published step without a result for so long: the worker is wedged, and /live says so."""


def health_of(node: Node) -> Health:
    """Ready: would serve a request now. Live: the worker makes progress on what it was given."""
    detail = {"role": node.role.value, "node": node.name}
    if node.fabric is not None:
        detail["provider"] = node.fabric.info.provider

    def unready(reason: str, *, live: bool = True) -> Health:
        return Health(ready=False, live=live, reason=reason, detail=detail)

    if node.cause is not None or node.worker_error is not None:
        return unready(str(node.worker_error or node.cause), live=False)
    if not node.ready.is_set():
        return unready("the model is loading")
    stalled = time.monotonic() - node.engine.progress_at
    if node.engine.steps_in_flight and stalled > STALLED_S:
        return unready(f"the worker has not finished a step for {stalled:.0f} s", live=False)
    if node.stopping.is_set():
        return unready("the server is shutting down")
    if node.peers and not any(peer.up for peer in node.peers):
        problems = "; ".join(f"{peer.url}: {peer.problem or 'not linked yet'}" for peer in node.peers)
        return unready(f"no prefill node is reachable ({problems})")
    return Health(ready=True, live=True, detail=detail)

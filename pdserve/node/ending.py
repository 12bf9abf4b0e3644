"""How a node ends: what runs finishes or hears why not, and peers hear it before their links close."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pdserve.errors import Draining, InternalError, PdserveError
from pdserve.messenger.events import Drain
from pdserve.node.prefill_messenger import PrefillMessenger

if TYPE_CHECKING:
    from pdserve.node.node import Node

log = logging.getLogger(__name__)

QUIET_S = 5.0
"""How long a node that stops waits for its peers to be quiet before it fences them."""

FAREWELL_S = 1.0
"""How long a prefill node that ends waits for its peers to have heard how their requests ended."""


async def drain(node: Node) -> None:
    """Take no new work, let what runs finish until the deadline, cancel the rest, wait for quiet."""
    node.frontend.draining = True
    if node.hello_server is not None:
        node.hello_server.stop()
    messenger = node.decode or node.prefill
    if messenger is not None:
        messenger.feed(Drain())
    await node.until(lambda: _all_done(node), node.config.server.shutdown_timeout)
    if not _all_done(node):
        log.warning("not all requests ended in time; the rest is cancelled: %s", _unfinished(node))
    late = Draining("the server is shutting down", retry_after=1.0)
    node.frontend.fail_all(late)
    if node.prefill is not None:
        node.prefill.fail_all(late)
    await node.until(lambda: node.quiet, QUIET_S)


def give_up(node: Node) -> None:
    """Whatever still waits for a token hears why it gets none."""
    node.engine.close()
    cause = node.cause
    error = cause if isinstance(cause, PdserveError) else InternalError("the server ended unexpectedly")
    if node.hello_server is not None:
        node.hello_server.stop()
    if cause is not None and node.prefill is not None:
        node.prefill.fail_all(error)
    node.frontend.draining = True
    node.frontend.fail_all(error if cause is not None else Draining("the server is shutting down"))


async def farewell(node: Node, prefill: PrefillMessenger) -> None:
    """Peers hear how their requests ended before their links close: else all they know is that a link broke,
    and a request whose KV has just been sent is lost with it."""
    deadline = time.monotonic() + FAREWELL_S
    while not prefill.machine.idle and time.monotonic() < deadline:
        await node.changed()
    said = {link: link.said for link in prefill.links.values()}
    while time.monotonic() < deadline and not all(link.heard(number) for link, number in said.items()):
        await node.changed()


def _all_done(node: Node) -> bool:
    return not node.frontend.generations and (node.prefill is None or node.prefill.machine.idle)


def _unfinished(node: Node) -> str:
    """What keeps a node that drains: generations here, work for peers."""
    machine = {} if node.prefill is None else node.prefill.machine.statistics()
    gauges = {name: count for name, count in machine.items() if count and name.startswith("works_")}
    return f"{len(node.frontend.generations)} generations, {gauges or 'no work'} for peers"

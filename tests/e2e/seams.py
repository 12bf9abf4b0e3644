"""Where a test takes hold of a running node: its worker's gate, its messages, its writes, its counts.

Nothing here makes anything happen: it only keeps what happens anyway from happening yet. Each hold is a
context manager that lets everything go, in order, when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pdserve.memory.counter import NO_GATE
from pdserve.messenger.events import PostWrites, SlotCounted, SlotProgress
from pdserve.node.decode_messenger import DecodeMessenger
from pdserve.node.messenger import MessengerShell
from pdserve.node.node import Node
from pdserve.node.prefill_messenger import PrefillMessenger

PATIENCE_S = 60.0
"""After this long a test that waits for a condition has failed; no verdict depends on it otherwise."""


async def until(condition: Callable[[], bool], node: Node) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await node.changed()


class Hold:
    """A worker held after a layer of one of its next steps. The node must have been made with `gate`."""

    def __init__(self, node: Node, layer: int, step: int) -> None:
        ticks = node.worker.ready.layers + 1
        self._node = node
        self.at = node.worker.counter.value + step * ticks + layer + 1

    @property
    def reached(self) -> bool:
        return self._node.worker.counter.value == self.at


@contextmanager
def held_worker(node: Node, *, layer: int = 0, step: int = 0) -> Iterator[Hold]:
    """Hold an idle node's worker after `layer` of the step after `step` others. The layer count stands for
    the final norm: the step is computed to its end, and the next one has not begun."""
    hold = Hold(node, layer, step)
    node.worker.counter.hold_at = hold.at
    try:
        yield hold
    finally:
        with suppress(ValueError):  # the node has ended meanwhile, and its counter is closed
            node.worker.counter.hold_at = NO_GATE


@contextmanager
def held_messages(messenger: MessengerShell, *kinds: type[Any]) -> Iterator[list[Any]]:
    """Keep messages of these kinds from leaving a node; yields those that wait."""
    send = messenger.send
    waiting: list[tuple[int, Any]] = []
    shown: list[Any] = []

    def hold(link: int, message: Any) -> None:
        if isinstance(message, kinds):
            waiting.append((link, message))
            shown.append(message)
        else:
            send(link, message)

    messenger.send = hold  # type: ignore[method-assign]
    try:
        yield shown
    finally:
        del messenger.send
        for link, message in waiting:
            send(link, message)


@contextmanager
def held_writes(prefill: PrefillMessenger, *, from_layer: int) -> Iterator[list[PostWrites]]:
    """Keep the writes of a layer and those behind it from reaching the fabric."""
    perform = prefill.perform
    waiting: list[PostWrites] = []

    def hold(effect: Any) -> None:
        if isinstance(effect, PostWrites) and effect.layer >= from_layer:
            waiting.append(effect)
        else:
            perform(effect)

    prefill.perform = hold  # type: ignore[method-assign]
    try:
        yield waiting
    finally:
        del prefill.perform
        for effect in waiting:
            perform(effect)


@contextmanager
def held_counts(decode: DecodeMessenger) -> Iterator[list[Any]]:
    """Keep a decode node's machine from hearing what its slots have counted."""
    feed = decode.feed
    waiting: list[Any] = []

    def hold(event: Any) -> None:
        if isinstance(event, SlotCounted | SlotProgress):
            waiting.append(event)
        else:
            feed(event)

    decode.feed = hold  # type: ignore[method-assign]
    try:
        yield waiting
    finally:
        del decode.feed
        for event in waiting:
            feed(event)

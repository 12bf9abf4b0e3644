"""A node as a process: signals in, the service manager's notifications out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from pdserve.config import NodeConfig
from pdserve.node.node import Node
from pdserve.node.notify import Notifier
from pdserve.observe.log import configure

_MORE_S = 60.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve_until_signalled(node: Node, on_ready: Callable[[Node], None] | None = None) -> None:
    """Run a node until SIGTERM or SIGINT; a second one ends it at once. Raises what ended it otherwise."""
    loop = asyncio.get_running_loop()
    with Notifier.from_environment() as notifier:

        def stop() -> None:
            notifier.stopping("draining")
            notifier.extend_timeout(node.config.server.shutdown_timeout + 30)
            node.stop()

        def ready(node: Node) -> None:
            notifier.ready(f"{node.role.value} node {node.name} on {node.url}")
            if on_ready is not None:
                on_ready(node)

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, stop)
        try:
            notifier.status("loading the model")
            async with asyncio.TaskGroup() as group:
                signs = [
                    group.create_task(notifier.keep_alive(lambda: node.health().live), name="watchdog"),
                    group.create_task(_prolong_start(node, notifier), name="start"),
                ]
                try:
                    await node.run(ready)
                finally:
                    for task in signs:
                        task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)


async def _prolong_start(node: Node, notifier: Notifier) -> None:
    """While the model loads, however long it takes, the service manager is asked for more time."""
    while notifier.listening and not node.ready.is_set():
        notifier.extend_timeout(_MORE_S)
        try:
            async with asyncio.timeout(_MORE_S / 3):
                await node.ready.wait()
        except TimeoutError:
            pass


async def run_node(config: NodeConfig, *, on_ready: Callable[[Node], None] | None = None) -> None:
    """Run a node until SIGTERM or SIGINT (a second one ends it at once). Raises what ended it otherwise."""
    configure(config.observe.log_level, config.observe.log_format)
    await serve_until_signalled(Node(config), on_ready)

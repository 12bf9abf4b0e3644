"""What holds for every test: both event loops, no blocking call in a loop, and nothing left behind.

Each asynchronous test runs on asyncio and on uvloop (those marked `e2e` on uvloop alone). While it runs, a
blocking call made by `pdserve` inside the loop is an error. After each test the open native handles, the
arenas, the child processes and the tasks must be what they were before it: fixtures of a wider scope may
hold some, a test may not.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hypothesis
import psutil
import pytest
import uvloop
from blockbuster import BlockBuster

from pdserve.config import environment

hypothesis.settings.register_profile(
    "pdserve",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.load_profile("pdserve")

for _name in environment.variables():
    del os.environ[_name]

_COUNTERS = (
    ("pdserve.fabric", "native_handles"),
    ("pdserve.memory", "open_arenas"),
    ("pdserve.worker.link", "open_links"),
)
"""Counters of live native objects, as (module, function). Looked at only where a test has imported the
module.
"""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("e2e") is not None:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts real nodes comes last, whatever the order of the rest: a broken part is found by its own
    tests.
    """
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


@pytest.fixture(scope="session")
def _blockbuster() -> BlockBuster:
    """Watches calls with a pdserve frame below them; a test's own blocking calls are its own affair."""
    buster = BlockBuster("pdserve")
    # Starting a process waits for its exec, in asyncio's own way of doing it too.
    buster.functions["os.read"].can_block_in("/subprocess.py", {"_execute_child"})
    return buster


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    if not _is_asynchronous(request) or request.node.get_closest_marker("may_block") is not None:
        yield
        return
    buster: BlockBuster = request.getfixturevalue("_blockbuster")
    buster.activate()
    try:
        yield
    finally:
        buster.deactivate()


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    # Asking for the loop's runner first makes the check run after every fixture of the test was torn down,
    # and before the runner cancels what is left.
    runner = request.getfixturevalue("_function_scoped_runner") if _is_asynchronous(request) else None
    # Nodes that outlive the test send heartbeats: operations come and go meanwhile.
    moving = not _is_asynchronous(request)
    counters, children = _counters(moving), set(psutil.Process().children())
    yield
    left = [f"{count} {name}" for name, count in _counters(moving).items() if count > counters.get(name, 0)]
    left += [_described(child) for child in psutil.Process().children() if child not in children]
    if runner is not None:
        left += _unfinished_tasks(runner)
    if left:
        pytest.fail("left behind: " + ", ".join(left))


def _is_asynchronous(request: pytest.FixtureRequest) -> bool:
    """Whether the test runs in a loop of its own (one of wider scope outlives the test, and so do its
    tasks).
    """
    marker = request.node.get_closest_marker("asyncio")
    return marker is not None and marker.kwargs.get("loop_scope", "function") == "function"


def _counters(moving: bool) -> dict[str, int]:
    counts: dict[str, int] = {}
    for module_name, function in _COUNTERS:
        count = getattr(sys.modules.get(module_name), function, None)
        if count is not None:
            total: Any = count()
            named = total if isinstance(total, Mapping) else {function: total}
            counts |= {
                f"{module_name} {name}": number
                for name, number in named.items()
                if number and not (moving and name == "operations")
            }
    return counts


def _described(child: psutil.Process) -> str:
    try:
        zombie = child.status() == psutil.STATUS_ZOMBIE
        command = "ended, not waited for" if zombie else " ".join(child.cmdline())
    except psutil.NoSuchProcess:
        command = "gone meanwhile"
    return f"child process {child.pid} ({command})"


def _unfinished_tasks(runner: asyncio.Runner) -> list[str]:
    async def settle() -> list[str]:
        # A task that was told to end needs a few turns of the loop to do so; no time passes in them.
        for _ in range(10):
            await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        return [f"task {task.get_name()} in {task.get_coro()}" for task in others]

    return runner.run(settle())

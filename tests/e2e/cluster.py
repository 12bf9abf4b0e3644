"""Real nodes for tests: in this process and on this loop, with real workers, a real fabric and real HTTP.

What makes it a test's cluster is only that the test can look inside: at arenas, gauges and machines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from pdserve.config import NodeConfig, check
from pdserve.config.schema import ClusterConfig, EngineConfig, FabricConfig, ModelConfig, ServerConfig
from pdserve.node.decode_messenger import DecodeMessenger
from pdserve.node.node import Node
from pdserve.node.prefill_messenger import PrefillMessenger

SECRET = "a secret of the test cluster"
NOBODY = "http://127.0.0.1:1"
"""A URL where nobody listens: the peer of a decode node that `running_cluster` gives others."""


def node_config(
    role: str, model: Path | str, *, peers: tuple[str, ...] = (), mode: str = "auto", **engine: Any
) -> NodeConfig:
    """A node of the tests: batch-invariant, on free ports of the loopback interface."""
    options: dict[str, Any] = {
        "batch_invariant": True,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 256 << 20,
    }
    options.update(engine)
    max_model_len = options.pop("max_model_len", 2048)
    cluster = options.pop("cluster", {})
    server = options.pop("server", {})
    return check(
        NodeConfig(
            server=ServerConfig(port=0, served_model_name=("m",), shutdown_timeout=5.0, **server),
            model=ModelConfig(model=str(model), max_model_len=max_model_len),
            engine=EngineConfig(role=role, **options),  # type: ignore[arg-type]
            cluster=ClusterConfig(prefill_peers=peers, secret=SECRET, **cluster),
            fabric=FabricConfig(mode=mode, self_test=False),  # type: ignore[arg-type]
        )
    )


@dataclass
class Cluster:
    """Running nodes by role, and a client session."""

    http: aiohttp.ClientSession
    prefill: list[Node] = field(default_factory=list)
    decode: list[Node] = field(default_factory=list)
    both: list[Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefill, *self.decode, *self.both]

    async def completion(self, node: Node, prompt: Any, **options: Any) -> dict[str, Any]:
        """POST /v1/completions; the decoded body. Raises on any other status than 200."""
        body = {"model": "m", "prompt": prompt, "temperature": 0, **options}
        async with self.http.post(node.url + "/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    """A node from ready to stopped. A fault of the node is raised here."""
    task = asyncio.ensure_future(node.run())
    ready = asyncio.ensure_future(node.ready.wait())
    try:
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield node
        node.stop()
        await task
    finally:
        ready.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


@asynccontextmanager
async def running_cluster(
    *,
    prefill: Sequence[NodeConfig] = (),
    decode: Sequence[NodeConfig] = (),
    both: Sequence[NodeConfig] = (),
    peers: Sequence[Sequence[int]] = (),
    gate: bool = False,
    fault: str = "",
    key: str | None = None,
) -> AsyncIterator[Cluster]:
    """Nodes that start side by side, linked, and a client session that sends `key`; decode nodes stop first.

    `peers[i]`: which prefill nodes decode node i asks; by default all. `fault`: of prefill workers.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http, AsyncExitStack() as stack:
        cluster = Cluster(http)
        cluster.prefill = [Node(config, gate=gate, fault=fault) for config in prefill]
        contexts = [running(node) for node in cluster.prefill]
        starting = [asyncio.ensure_future(context.__aenter__()) for context in contexts]
        for node, start in zip(cluster.prefill, starting, strict=True):
            while not node.url and not start.done():
                await node.changed()
        for i, config in enumerate(decode):
            asked = peers[i] if peers else range(len(prefill))
            urls = tuple(cluster.prefill[k].url for k in asked)
            cluster.decode.append(Node(merge(config, cluster={"prefill_peers": urls}), gate=gate))
        cluster.both = [Node(config, gate=gate) for config in both]
        contexts += [running(node) for node in [*cluster.decode, *cluster.both]]
        starting += [asyncio.ensure_future(context.__aenter__()) for context in contexts[len(starting) :]]
        try:
            await asyncio.wait(starting)
        finally:
            for context, start in zip(contexts, starting, strict=True):
                if start.done() and not start.cancelled() and start.exception() is None:
                    stack.push_async_exit(context.__aexit__)
                else:
                    start.cancel()
                    await asyncio.wait([start])
        for start in starting:
            start.result()
        for node in cluster.decode:
            await linked(node)
        yield cluster


@asynccontextmanager
async def serving(
    model: Path | str,
    *,
    mode: str = "auto",
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    both: dict[str, Any] | None = None,
    gate: bool = False,
    fault: str = "",
    **engine: Any,
) -> AsyncIterator[Cluster]:
    """One prefill node and one decode node that are linked, and with `both` (options of its own) a node that
    does all. `gate`, `fault`: as for `running_cluster`. `engine`: options of all nodes."""

    def config(role: str, options: dict[str, Any] | None) -> NodeConfig:
        peers = (NOBODY,) if role == "decode" else ()
        return node_config(role, model, peers=peers, mode=mode, **{**engine, **(options or {})})

    async with running_cluster(
        prefill=[config("prefill", prefill)],
        decode=[config("decode", decode)],
        both=[] if both is None else [config("both", both)],
        gate=gate,
        fault=fault,
    ) as cluster:
        yield cluster


def sender(node: Node) -> PrefillMessenger:
    """A prefill node's messenger."""
    assert node.prefill is not None
    return node.prefill


def receiver(node: Node) -> DecodeMessenger:
    """A decode node's messenger."""
    assert node.decode is not None
    return node.decode


@contextmanager
def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put `make(what was there)` in the place of an attribute of this one object, and undo it.

    The seam of tests that look at what a node tells its parts, hold it back or change it.
    """
    own = vars(owner)
    before, had = getattr(owner, name), name in own
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


async def linked(node: Node) -> None:
    """Wait until a decode node has a link to each of its peers."""
    while not all(peer.up for peer in node.peers):
        await node.changed()


async def idle(*nodes: Node, check: bool = True) -> None:
    """Wait until every gauge of these nodes is zero, of all at once (one may still hand work to another), and
    with `check` prove their invariants."""
    while busy := [node for node in nodes if not node.idle]:
        await busy[0].changed()
    if check:
        for node in nodes:
            node.check()


def merge(config: NodeConfig, **sections: dict[str, Any]) -> NodeConfig:
    """A configuration with some fields replaced, by section."""
    changed = {
        name: msgspec.structs.replace(getattr(config, name), **fields) for name, fields in sections.items()
    }
    return check(msgspec.structs.replace(config, **changed))

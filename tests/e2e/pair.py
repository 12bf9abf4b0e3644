"""One prefill node and one decode node of a tiny model, shared by the tests of a session.

They are small on purpose: a few prompts fill the decode node, a chunk is four pages, a segment is one chunk.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pdserve.fabric import native_handles
from pdserve.node.node import Node
from tests.e2e.cluster import NOBODY, Cluster, idle, node_config
from tests.e2e.seams import until

KEY = "sesame"
PAGE = 16
CHUNK = 64
DECODE_PAGES = 40
"""Usable ones; the pool has one more, scrap."""
PREFILL_MAX_LEN = 500

Body = dict[str, Any]


def pair_configs(model: Path) -> tuple[Any, Any]:
    """The prefill node's and the decode node's configuration."""
    common: dict[str, Any] = {"server": {"api_key": KEY}, "cluster": {"segment_tokens": CHUNK}}
    prefill = node_config(
        "prefill",
        model,
        num_pages=65,
        max_num_batched_tokens=CHUNK,
        max_model_len=PREFILL_MAX_LEN,
        **common,
    )
    decode = node_config(
        "decode",
        model,
        peers=(NOBODY,),
        num_pages=DECODE_PAGES + 1,
        max_num_seqs=2,
        max_model_len=DECODE_PAGES * PAGE,
        **common,
    )
    return prefill, decode


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of random token ids, none of them special."""
    source = random.Random(seed)
    return [source.randrange(100, 40_000) for _ in range(count)]


def completion_body(prompt: Sequence[int] | str, **options: Any) -> Body:
    return {"model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True, **options}


class Pair(Cluster):
    """The two nodes, and what they answer when nobody disturbs them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.http, cluster.prefill, cluster.decode, cluster.both)
        self._undisturbed: dict[str, list[str]] = {}

    @property
    def source(self) -> Node:
        return self.prefill[0]

    @property
    def sink(self) -> Node:
        return self.decode[0]

    async def ask(self, path: str, body: Body) -> list[str]:
        """The texts of all choices of an answer that is not streamed."""
        async with self.http.post(self.sink.url + path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return texts_of(answer)

    async def undisturbed(self, path: str, body: Body) -> list[str]:
        """What a request is answered on idle nodes, asked once."""
        body = {name: value for name, value in body.items() if name != "stream"}
        known = repr((path, body))
        if known not in self._undisturbed:
            self._undisturbed[known] = await self.ask(path, body)
            await idle(*self.nodes)
        return self._undisturbed[known]

    async def nothing_left(self) -> None:
        """Wait until both nodes are idle; then prove that no gauge, table or slot remembers anything."""
        await idle(*self.nodes)
        for node in self.nodes:
            nothing_remembered(node)
            async with self.http.get(node.url + "/metrics") as response:
                assert busy_gauges(await response.text()) == {}


def texts_of(answer: dict[str, Any]) -> list[str]:
    """The text of each choice of a completion or a chat completion."""
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]
    ]


def opened() -> dict[str, int]:
    """What this process holds of libfabric. Not operations: heartbeats come and go meanwhile."""
    return {kind: count for kind, count in native_handles().items() if kind != "operations"}


def nothing_remembered(node: Node) -> None:
    """An idle node's shells keep no request, slot or write: also what no gauge shows."""
    stats = node.scheduler.statistics()
    assert stats.pages_free == node.scheduler.config.usable_pages
    assert stats.pages_reserved == 0
    if node.decode is not None:
        shell = node.decode
        kept = [shell._requested, shell._records, shell._generations, shell._counted]
        assert not any(kept), kept
    if node.prefill is not None:
        assert not node.prefill._keys
        assert not node.prefill._sending
        assert node.prefill.machine.statistics()["batches_outstanding"] == 0


RESTING = {
    "pdserve:kv_pages": {"free"},
    "pdserve:imm_slots": {"free"},
    "pdserve:links": {"up"},
}
GAUGES = (
    "pdserve:num_requests_running",
    "pdserve:num_requests_waiting",
    "pdserve:num_requests_receiving",
    "pdserve:num_requests_sending",
    "pdserve:waiting_tokens",
    "pdserve:kv_cache_usage_perc",
    "pdserve:writes_in_flight",
    *RESTING,
)


def busy_gauges(exposition: str) -> dict[str, float]:
    """The gauges of a /metrics text that are not what they are on an idle node."""
    busy = {}
    for family in text_string_to_metric_families(exposition):
        if family.name not in GAUGES:
            continue
        for sample in family.samples:
            state = sample.labels.get("state")
            if sample.value and state not in RESTING.get(family.name, ()):
                busy[f"{sample.name} {state}"] = sample.value
    return busy


async def statistics_reach(node: Node, **wanted: int) -> None:
    """Wait until the scheduler's gauges read this."""
    await until(
        lambda: all(getattr(node.scheduler.statistics(), name) == value for name, value in wanted.items()),
        node,
    )


async def machine_reaches(node: Node, **wanted: int) -> None:
    """Wait until the messenger's gauges read this."""
    messenger = node.decode or node.prefill
    assert messenger is not None
    machine = messenger.machine
    await until(lambda: all(machine.statistics()[name] == value for name, value in wanted.items()), node)

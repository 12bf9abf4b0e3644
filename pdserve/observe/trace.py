"""When each of the nine steps of a request happened, and each layer of its cache.

A node keeps one `TraceRecord` a request in a bounded `TraceStore`. The decode node's record and the prefill
node's are joined by `merge`, and `summarise` turns the result into the numbers of a benchmark table. Those
two are pure functions of JSON-able dicts, so a record may come over HTTP.

A record as JSON (times are unix seconds, null or absent where it did not happen on that node)::

    {"request_id": str, "node": str, "role": str, "peer": str | null, "attempt": int,
     "finish_reason": str | null, "error": str | null,
     "steps": {"1_parsed": t, "2_reserved": t, "3_requested": t, "4_accepted": t, "5_scheduled": t,
               "6_posted": t, "7_quiet": t, "8_ready": t, "9_finished": t},
     "marks": {"received": t, "first_token": t, "last_token": t},
     "layers": [{"chunk": int, "layer": int, "ready": t, "posted": t, "runs": int, "counted": t}, ...],
     "progress": [[t, runs counted so far over all slots of the request], ...],
     "prompt_tokens": int, "cached_tokens": int, "output_tokens": int,
     "kv_bytes": int, "kv_pages": int, "runs": int, "truncated": bool}

`ready` is when the node saw the layer's tick, `posted` when the layer's writes were handed to the fabric,
`counted` when the receiver had counted as many runs as had been posted up to and including that layer. A
receiver counts runs by slot, not by layer, so `counted` is exact where the fabric keeps the order of writes
(`tcp`) and otherwise the best that can be known; it exists only in a merged trace.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any


class Step(enum.StrEnum):
    """The nine steps of a request (docs/life-of-a-request.md), each stamped when it is complete.

    1, 2, 3, 8 and 9 are the decode node's; 4 to 7 the prefill node's. A `both` node stamps 1, 2, 5, 8, 9.
    """

    PARSED = "1_parsed"
    RESERVED = "2_reserved"
    REQUESTED = "3_requested"
    ACCEPTED = "4_accepted"
    SCHEDULED = "5_scheduled"
    """The first chunk is in a plan."""
    POSTED = "6_posted"
    """The last write has been handed to the fabric."""
    QUIET = "7_quiet"
    READY = "8_ready"
    FINISHED = "9_finished"


class Mark(enum.StrEnum):
    RECEIVED = "received"
    FIRST_TOKEN = "first_token"
    LAST_TOKEN = "last_token"


_PREFILL_STEPS = frozenset({Step.ACCEPTED, Step.SCHEDULED, Step.POSTED, Step.QUIET})
_FACTS = ("kv_bytes", "kv_pages", "runs", "prompt_tokens", "cached_tokens", "output_tokens")


class TraceRecord:
    """One request on one node. Times given to it are CLOCK_MONOTONIC seconds (`time.monotonic()`; uvloop's
    `loop.time()` is rounded to milliseconds and would blur the layers).

    The plain attributes are facts that whoever knows them sets. Memory is bounded by `max_rows` layers and as
    many progress samples; what does not fit is dropped and `truncated` says so.
    """

    def __init__(
        self, request_id: str, node: str, role: str, *, attempt: int = 0, max_rows: int = 4096
    ) -> None:
        self.request_id = request_id
        self.node = node
        self.role = role
        self.attempt = attempt
        self.peer: str | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.kv_bytes: int | None = None
        self.kv_pages: int | None = None
        self.runs: int | None = None
        self.truncated = False
        self._max_rows = max_rows
        self._times: dict[str, float] = {}
        self._layers: dict[tuple[int, int], _LayerRow] = {}
        self._slots: dict[int, int] = {}
        self._counted = 0
        self._progress: list[tuple[float, int]] = []

    def mark(self, what: Step | Mark, now: float) -> None:
        """Stamp a step or mark; the first stamp stays."""
        self._times.setdefault(what, now)

    def token(self, now: float) -> None:
        """An output token became known: first and last token times, and `output_tokens`."""
        self._times.setdefault(Mark.FIRST_TOKEN, now)
        self._times[Mark.LAST_TOKEN] = now
        self.output_tokens = (self.output_tokens or 0) + 1

    def layer_ready(self, chunk: int, layer: int, now: float) -> None:
        """The layer's tick was seen. `chunk` numbers this request's chunks from 0."""
        row = self._row(chunk, layer)
        if row is not None and row.ready is None:
            row.ready = now

    def layer_posted(self, chunk: int, layer: int, now: float, *, runs: int, length: int = 0) -> None:
        """The layer's writes were handed to the fabric: `runs` of them, `length` bytes in all.

        Adds to `runs` and `kv_bytes`, so a sender need not set those two.
        """
        self.runs = (self.runs or 0) + runs
        self.kv_bytes = (self.kv_bytes or 0) + length
        row = self._row(chunk, layer)
        if row is not None:
            row.posted = now
            row.runs += runs

    def progress(self, slot: int, count: int, now: float) -> None:
        """The receiver's running count of `slot` is now `count` runs (not a difference)."""
        self._counted += count - self._slots.get(slot, 0)
        self._slots[slot] = count
        if len(self._progress) >= self._max_rows:
            # Keep every other sample: resolution halves, the first and the newest stay.
            del self._progress[1::2]
            self.truncated = True
        self._progress.append((now, self._counted))

    def _row(self, chunk: int, layer: int) -> _LayerRow | None:
        row = self._layers.get((chunk, layer))
        if row is None:
            if len(self._layers) >= self._max_rows:
                self.truncated = True
                return None
            row = self._layers[(chunk, layer)] = _LayerRow()
        return row

    def export(self, wall_offset: float) -> dict[str, Any]:
        """The record as JSON-able dict; `wall_offset` is unix time minus monotonic time."""

        def wall(t: float | None) -> float | None:
            return None if t is None else t + wall_offset

        return {
            "request_id": self.request_id,
            "node": self.node,
            "role": self.role,
            "peer": self.peer,
            "attempt": self.attempt,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "steps": {s.value: wall(self._times[s]) for s in Step if s in self._times},
            "marks": {m.value: wall(self._times[m]) for m in Mark if m in self._times},
            "layers": [
                {"chunk": c, "layer": n, "ready": wall(r.ready), "posted": wall(r.posted), "runs": r.runs}
                for (c, n), r in sorted(self._layers.items())
            ],
            "progress": [[t + wall_offset, count] for t, count in self._progress],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "kv_bytes": self.kv_bytes,
            "kv_pages": self.kv_pages,
            "runs": self.runs,
            "truncated": self.truncated,
        }


class _LayerRow:
    __slots__ = ("posted", "ready", "runs")

    def __init__(self) -> None:
        self.ready: float | None = None
        self.posted: float | None = None
        self.runs = 0


class TraceStore:
    """The last `capacity` records of a node, oldest forgotten first."""

    def __init__(
        self, node: str, role: str, *, capacity: int = 512, wall_offset: float | None = None
    ) -> None:
        self.node = node
        self.role = role
        self.capacity = capacity
        # Taken once a process: later steps of the wall clock do not bend the intervals of a trace.
        self.wall_offset = time.time() - time.monotonic() if wall_offset is None else wall_offset
        self._records: OrderedDict[str, TraceRecord] = OrderedDict()

    def begin(self, request_id: str, *, attempt: int = 0) -> TraceRecord:
        """A fresh record, replacing an earlier one of the same id."""
        record = TraceRecord(request_id, self.node, self.role, attempt=attempt)
        self._records[request_id] = record
        self._records.move_to_end(request_id)
        while len(self._records) > self.capacity:
            self._records.popitem(last=False)
        return record

    def get(self, request_id: str) -> TraceRecord | None:
        return self._records.get(request_id)

    def export(self, request_id: str) -> dict[str, Any] | None:
        record = self._records.get(request_id)
        return None if record is None else record.export(self.wall_offset)

    def __len__(self) -> int:
        return len(self._records)


def merge(decode: Mapping[str, Any], prefill: Mapping[str, Any] | None) -> dict[str, Any]:
    """One trace of a request from its decode node's record and its prefill node's (None: single node).

    Steps 4 to 7 and the layers come from the prefill side, everything else from the decode side; each layer
    gets its `counted` time. Neither argument is changed.
    """
    merged = dict(decode)
    layers: list[dict[str, Any]] = [dict(row) for row in decode.get("layers", ())]
    if prefill is not None:
        steps = {k: v for k, v in decode.get("steps", {}).items() if k not in _PREFILL_STEPS}
        steps |= {k: v for k, v in prefill.get("steps", {}).items() if k in _PREFILL_STEPS}
        for key, value in decode.get("steps", {}).items():
            steps.setdefault(key, value)
        merged["steps"] = dict(sorted(steps.items()))
        merged["peer"] = prefill.get("node")
        merged["truncated"] = bool(decode.get("truncated")) or bool(prefill.get("truncated"))
        for fact in _FACTS:
            if merged.get(fact) is None:
                merged[fact] = prefill.get(fact)
        layers = [dict(row) for row in prefill.get("layers", ())]
    _stamp_counted(layers, decode.get("progress", ()))
    merged["layers"] = layers
    return merged


def _stamp_counted(layers: list[dict[str, Any]], progress: Any) -> None:
    """Give each row the first time at which the receiver had counted all runs posted up to that row."""
    counts = [count for _, count in progress]
    posted = 0
    order = [row for row in layers if row.get("posted") is not None and row.get("runs")]
    for row in layers:
        row["counted"] = None
    for row in sorted(order, key=lambda r: (r["posted"], r["chunk"], r["layer"])):
        posted += row["runs"]
        at = bisect_left(counts, posted)
        if at < len(counts):
            row["counted"] = progress[at][0]


def summarise(trace: Mapping[str, Any]) -> dict[str, float | int | None]:
    """The numbers of one request, from a merged trace. None where the trace does not tell.

    `ttft_ms`: request received to first token. `itl_ms`: mean time between tokens. `transfer_gbps`: KV bytes
    over the time in which some layer was under way (seen ready on one node, not yet counted on the other), in
    1e9 bytes a second: the wire's own speed, without the waits for the next layer. `hidden_share`: the share
    of the runs (all of one size, so of the bytes) that the receiver had counted when the prefill node saw the
    last layer of the last chunk tick, 0 to 1: what the transfer did not add to the first token.
    """
    marks, steps = trace.get("marks", {}), trace.get("steps", {})
    first, last = marks.get("first_token"), marks.get("last_token")
    start = marks.get("received", steps.get(Step.PARSED))
    tokens = trace.get("output_tokens")
    ready = [row["ready"] for row in trace.get("layers", ()) if row.get("ready") is not None]
    progress = trace.get("progress", ())
    kv_bytes, runs = trace.get("kv_bytes"), trace.get("runs")
    gbps = hidden = None
    if progress and runs:
        busy = _time_under_way(trace.get("layers", ()))
        if kv_bytes and busy > 0:
            gbps = kv_bytes / busy / 1e9
        if ready:
            at = bisect_right([t for t, _ in progress], max(ready))
            hidden = (progress[at - 1][1] if at else 0) / runs
    return {
        "ttft_ms": (first - start) * 1e3 if first is not None and start is not None else None,
        "itl_ms": (last - first) / (tokens - 1) * 1e3 if tokens and tokens > 1 and first and last else None,
        "prompt_tokens": trace.get("prompt_tokens"),
        "output_tokens": tokens,
        "kv_bytes": kv_bytes,
        "kv_pages": trace.get("kv_pages"),
        "transfer_gbps": gbps,
        "hidden_share": hidden,
    }


def _time_under_way(layers: Sequence[Mapping[str, Any]]) -> float:
    """Seconds covered by at least one layer's interval from ready to counted."""
    intervals = sorted(
        (row["ready"], row["counted"])
        for row in layers
        if row.get("ready") is not None and row.get("counted") is not None
    )
    covered, end = 0.0, float("-inf")
    for start, stop in intervals:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered

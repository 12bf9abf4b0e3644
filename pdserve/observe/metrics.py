"""Prometheus metrics of one node, with the names vLLM users know under the prefix `pdserve:`.

Two sources. What happens to requests is pushed as it happens: `http/` calls `prompt`, `token`, `finished` and
`error`, the node calls `queued`, `transferred` and `step`. What a node *is* right now (queues, pages, slots,
totals kept by native code) is pulled at scrape time from a `Snapshot`, so the hot path sets no gauges.

Each node owns a registry of its own: several nodes in one process (tests, a local cluster) do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_LATENCY = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TRANSFER = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKENS = tuple(d * 10**e for e in range(6) for d in (1, 2, 5))
_STEP_TOKENS = tuple(2**e for e in range(15))


def _no_values() -> Mapping[str, float]:
    return {}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a node at one scrape. Fields left at None or empty are not exported.

    Mappings are label value → number; totals (`*_total` below) only ever grow while the process lives.
    """

    requests_running: int = 0
    requests_waiting: int = 0
    requests_receiving: int | None = None
    """Requests whose cache is on its way (decode side)."""
    requests_sending: int | None = None
    """Requests that are prefilled for peers (prefill side)."""
    waiting_tokens: int | None = None
    kv_cache_usage: float = 0.0
    """0 to 1: pages that are not free, over all pages."""
    pages: Mapping[str, float] = msgspec.field(default_factory=_no_values)
    """state → pages: free, held, destination, quarantined, pending, ..."""
    slots: Mapping[str, float] = msgspec.field(default_factory=_no_values)
    """state → imm slots: free, armed, quarantined."""
    links: Mapping[str, float] = msgspec.field(default_factory=_no_values)
    """state → links to peers: up, fenced, ..."""
    writes_in_flight: int | None = None
    """Layers of requests whose writes were posted and have not all completed (prefill side)."""
    transfer_bytes: Mapping[str, float] = msgspec.field(default_factory=_no_values)
    """"sent" and "received", total."""
    transfer_runs: Mapping[str, float] = msgspec.field(default_factory=_no_values)
    """"sent" and "received", total."""
    stale_immediates: int | None = None
    hellos: Mapping[str, float] = msgspec.field(default_factory=_no_values)
    """outcome → hellos, total: accepted, refused, ..."""
    native_handles: Mapping[str, float] = msgspec.field(default_factory=_no_values)
    """kind → live libfabric objects."""
    worker_restarts: int | None = None


# (field, metric name without prefix, help, label or None, is a total)
_FAMILIES: tuple[tuple[str, str, str, str | None, bool], ...] = (
    ("requests_running", "num_requests_running", "Requests in the batch.", None, False),
    ("requests_waiting", "num_requests_waiting", "Requests waiting to be admitted.", None, False),
    ("requests_receiving", "num_requests_receiving", "Requests whose KV cache is arriving.", None, False),
    ("requests_sending", "num_requests_sending", "Requests prefilled for decode nodes.", None, False),
    ("waiting_tokens", "waiting_tokens", "Prompt tokens waiting to be computed.", None, False),
    ("kv_cache_usage", "kv_cache_usage_perc", "KV pages in use. 1 means all of them.", None, False),
    ("pages", "kv_pages", "KV pages by state.", "state", False),
    ("slots", "imm_slots", "Immediate slots by state.", "state", False),
    ("links", "links", "Links to peers by state.", "state", False),
    ("writes_in_flight", "writes_in_flight", "Layers posted and not completed.", None, False),
    ("transfer_bytes", "transfer_bytes", "KV bytes moved.", "direction", True),
    ("transfer_runs", "transfer_runs", "Runs moved.", "direction", True),
    ("stale_immediates", "stale_immediates", "Immediates of no armed slot.", None, True),
    ("hellos", "hellos", "Hellos by outcome.", "outcome", True),
    ("native_handles", "native_handles", "Live libfabric objects.", "kind", False),
    ("worker_restarts", "worker_restarts", "Worker groups started again.", None, True),
)


class _SnapshotCollector(Collector):
    def __init__(self, model_name: str) -> None:
        self.source: Callable[[], Snapshot] = Snapshot
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        snapshot = self.source()
        for field, name, text, label, total in _FAMILIES:
            value = getattr(snapshot, field)
            if value is None or (label is not None and not value):
                continue
            labels = ["model_name"] if label is None else ["model_name", label]
            kind = CounterMetricFamily if total else GaugeMetricFamily
            family = kind(f"pdserve:{name}", text, labels=labels)
            if label is None:
                family.add_metric([self._model], value)
            else:
                for key, number in value.items():
                    family.add_metric([self._model, key], number)
            yield family


class NodeMetrics:
    """All metrics of one node. Seconds are seconds, tokens are tokens. Event loop only; nothing blocks."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._snapshot = _SnapshotCollector(model_name)
        self.registry.register(self._snapshot)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in a cache.")
        self._output_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._labelled("request_success", "Requests ended, by reason.", "finished_reason")
        self._errors = self._labelled("request_errors", "Requests failed, by error code.", "code")
        self._http = self._labelled("http_responses", "HTTP responses by status code.", "status")
        self._ttft = self._histogram("time_to_first_token_seconds", "Received to first token.", _TTFT)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between tokens.", _ITL)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Received to last token.", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "Time waiting to be admitted.", _LATENCY)
        self._transfer = self._histogram(
            "kv_transfer_seconds", "Prefill asked for to cache ready.", _TRANSFER
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self._request_output = self._histogram("request_generation_tokens", "Tokens a request.", _TOKENS)
        self._step_tokens = self._histogram("iteration_tokens", "Tokens computed in a step.", _STEP_TOKENS)
        self._step_seconds = self._histogram("iteration_seconds", "Duration of a step.", _ITL)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(name, text).labels(self.model_name)

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdserve:{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"pdserve:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self.model_name)

    def attach(self, source: Callable[[], Snapshot]) -> None:
        """Ask `source` for the node's state at each scrape. It must not block or raise."""
        self._snapshot.source = source

    def render(self) -> bytes:
        """The text exposition, in `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    # Pushed by http/.

    def prompt(self, tokens: int, cached: int = 0) -> None:
        """A sequence was admitted with `tokens` prompt tokens, `cached` of them found in a cache."""
        self._prompt_tokens.inc(tokens)
        self._cached_tokens.inc(cached)
        self._request_prompt.observe(tokens)

    def first_token(self, seconds: float) -> None:
        """The first token of a sequence, `seconds` after its request was received."""
        self._output_tokens.inc()
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A further token, `seconds` after the one before it."""
        self._output_tokens.inc()
        self._itl.observe(seconds)

    def finished(self, reason: str, output_tokens: int, seconds: float) -> None:
        """A sequence ended: "stop", "length" or "abort", `seconds` after its request was received."""
        self._success.labels(self.model_name, reason).inc()
        self._request_output.observe(output_tokens)
        self._e2e.observe(seconds)

    def error(self, code: str) -> None:
        """A request failed with the code of a `PdserveError`."""
        self._errors.labels(self.model_name, code).inc()

    def response(self, status: int) -> None:
        self._http.labels(self.model_name, str(status)).inc()

    # Pushed by the node.

    def queued(self, seconds: float) -> None:
        """A request left the queue after `seconds`."""
        self._queue.observe(seconds)

    def transferred(self, seconds: float) -> None:
        """A request's cache was complete, `seconds` after it was asked for."""
        self._transfer.observe(seconds)

    def step(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` tokens in `seconds`."""
        self._step_tokens.observe(tokens)
        self._step_seconds.observe(seconds)


def sample(metrics: NodeMetrics, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """One value by its exposed name (with `_total`, `_count`, ...), for tests and consoles."""
    wanted: dict[str, Any] = {"model_name": metrics.model_name, **(labels or {})}
    return metrics.registry.get_sample_value(name, wanted)

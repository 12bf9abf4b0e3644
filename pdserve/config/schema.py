"""The schema of a node's configuration: one frozen struct a section, every field with its type, range and
meaning.

A field's annotation is the only place that says what it may hold: the loader checks against it, the command
line takes its help from it, and an error names the limit from it. Three facts travel in a `Meta`'s `extra`:
`secret` (never printed), `unit = "bytes"` (a string such as "512MiB" is read as a number) and `form = "cpus"`
(a string such as "0-3,6" is read as a list). Nothing here reads a file or the environment: `load.py` does.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Role = Literal["prefill", "decode", "both"]

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a section. Values are final once loaded; a change is a new struct."""


class ServerConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side: where a node listens and what it accepts."""

    host: Annotated[str, Meta(min_length=1, max_length=255, description="address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65_535, description="port to listen on; 0 takes a free one and reports it")
    ] = 8000
    api_key: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(
            description="clients must send this as a bearer token; none: no check",
            extra={"secret": True},
        ),
    ] = None
    served_model_name: Annotated[
        tuple[_Name, ...],
        Meta(description="names clients may ask for; empty: the model's directory name", max_length=64),
    ] = ()
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 30, description="largest request body", extra={"unit": "bytes"})
    ] = 16 << 20
    shutdown_timeout: Annotated[
        float,
        Meta(ge=0, le=3600, description="seconds that running requests get to finish after SIGTERM"),
    ] = 30.0


class ModelConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is served. Every node of a cluster must name the same model: hello compares fingerprints."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=4096,
            description='a Hugging Face model directory, or "default" (SmolLM2-135M-Instruct)',
        ),
    ] = "default"
    dtype: Annotated[
        Literal["auto", "float32", "float16"],
        Meta(description="weights as computed with; auto keeps the checkpoint's precision"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16"], Meta(description="KV cache elements; auto is float32 on a CPU")
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2, le=10_000_000)] | None,
        Meta(description="prompt plus output tokens of one sequence; none: what the model was trained for"),
    ] = None
    seed: Annotated[
        int, Meta(ge=0, le=(1 << 63) - 1, description="seed of the random streams of requests without one")
    ] = 0


class EngineConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The batch scheduler, the KV cache and the cores of one node."""

    role: Annotated[
        Role, Meta(description="prefill makes KV cache, decode makes tokens, both does all on one node")
    ] = "both"
    page_size: Annotated[int, Meta(ge=1, le=1024, description="tokens of KV cache a page")] = 16
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="sequences of one step at most")] = 64
    max_num_batched_tokens: Annotated[
        int,
        Meta(ge=1, le=1 << 20, description="tokens of one step at most: prompts are cut into chunks of it"),
    ] = 512
    max_waiting: Annotated[
        int, Meta(ge=1, le=1_000_000, description="requests that wait at most; more are answered 503")
    ] = 1024
    kv_cache_memory_bytes: Annotated[
        int, Meta(ge=1 << 16, le=1 << 46, description="size of the KV cache", extra={"unit": "bytes"})
    ] = 1 << 30
    num_pages: Annotated[
        Annotated[int, Meta(ge=2, le=1 << 31)] | None,
        Meta(description="pages of the KV cache, one of them scrap; overrides kv_cache_memory_bytes"),
    ] = None
    batch_invariant: Annotated[
        bool, Meta(description="the same bits for a sequence whatever else its step computes; slower")
    ] = False
    threads: Annotated[int, Meta(ge=1, le=1024, description="compute threads of a worker process")] = 1
    cpus: Annotated[
        Annotated[tuple[Annotated[int, Meta(ge=0, le=65_535)], ...], Meta(min_length=1)] | None,
        Meta(
            description="CPUs the worker process is bound to; none: not bound",
            extra={"form": "cpus"},
        ),
    ] = None
    steps_in_flight: Annotated[
        int, Meta(ge=1, le=2, description="2 prepares a step while the one before it computes")
    ] = 2


class ClusterConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes find, trust and watch each other."""

    prefill_peers: Annotated[
        tuple[_Name, ...],
        Meta(description="URLs of the prefill nodes a decode node asks", max_length=1024),
    ] = ()
    secret: Annotated[
        Annotated[str, Meta(min_length=16, max_length=4096)] | None,
        Meta(
            description="shared by all nodes of a cluster; without it only loopback peers are allowed",
            extra={"secret": True},
        ),
    ] = None
    secret_file: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(description="file that holds the secret (first line)"),
    ] = None
    node_id: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}$")] | None,
        Meta(description="name in peers' logs and metrics; none: role, host and port"),
    ] = None
    handover: Annotated[
        Literal["token"],
        Meta(
            description="what reaches the decode node beside pages: with token the last prompt token is its"
        ),
    ] = "token"
    segment_tokens: Annotated[
        int,
        Meta(ge=1, le=1 << 20, description="tokens whose pages are counted together; multiple of page_size"),
    ] = 512
    heartbeat_s: Annotated[_Seconds, Meta(description="seconds between heartbeats of a link")] = 0.25
    dead_s: Annotated[
        _Seconds, Meta(description="seconds a peer may be silent beyond a heartbeat; then it is dead")
    ] = 2.0


class FabricConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The libfabric side. The package `pdserve.fabric` has a config of its own; the node translates."""

    provider: Annotated[Literal["auto", "tcp"], Meta(description="libfabric provider")] = "tcp"
    host: Annotated[
        str, Meta(min_length=1, max_length=255, description="address the fabric's ports are bound to")
    ] = "127.0.0.1"
    mode: Annotated[
        Literal["auto", "thread", "inline"],
        Meta(description="who moves data: a native thread, or the event loop"),
    ] = "auto"
    library: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(description="path of libfabric.so.1; none: looked up"),
    ] = None
    self_test: Annotated[
        bool, Meta(description="measure the fabric for 0.1 s when the node starts, and log its speed")
    ] = True


class ObserveConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severity that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="one line a record, for people or programs")
    ] = "text"


class NodeConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of one node's configuration. Made by `pdserve.config.load_config`, or directly in tests."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    fabric: FabricConfig = FabricConfig()
    observe: ObserveConfig = ObserveConfig()

"""What single fields cannot say: values that must go together, URLs, and who may talk to whom without a
secret.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from pdserve.config.schema import NodeConfig
from pdserve.errors import ConfigError

_ROLE_IN_WORDS = {"prefill": "a prefill node", "decode": "a decode node", "both": "a node of role both"}


def check(config: NodeConfig, sources: Mapping[str, str] | None = None) -> NodeConfig:
    """The same configuration with its peer URLs normalised, or a `ConfigError`.

    `sources`: where each value that is not a default came from, for the message; keys as `section.field`.
    For a configuration built in code, call this (without `sources`) to have it checked as a loaded one is.
    """
    named = _Sources(sources or {})
    peers = tuple(_peer(url, named("cluster.prefill_peers")) for url in config.cluster.prefill_peers)
    if len(set(peers)) != len(peers):
        twice = next(url for url in peers if peers.count(url) > 1)
        raise ConfigError(
            f"{named('cluster.prefill_peers')}: {twice} is named twice", param="cluster.prefill_peers"
        )
    config = msgspec.structs.replace(
        config, cluster=msgspec.structs.replace(config.cluster, prefill_peers=peers)
    )
    _check_engine(config, named)
    _check_cluster(config, named)
    return config


def warnings(config: NodeConfig) -> list[str]:
    """What is allowed but should be known, one sentence each."""
    found = []
    if config.engine.role != "both" and config.cluster.secret is None:
        found.append("no cluster.secret: any process of this host may join; nodes on other hosts are refused")
    if (
        not is_loopback(config.server.host)
        and config.server.api_key is None
        and config.engine.role != "prefill"
    ):
        found.append(
            f"server.host = {config.server.host} without server.api_key: anyone who reaches it may use it"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether a host names this machine alone: `localhost`, 127.0.0.0/8 or ::1. Other names are not looked
    up.
    """
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Sources:
    """How a key is called in a message: the place its value came from, or the key itself."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def __call__(self, key: str) -> str:
        return self._sources.get(key, key)


def _check_engine(config: NodeConfig, named: _Sources) -> None:
    engine, length = config.engine, config.model.max_model_len
    budget = f"{named('engine.max_num_batched_tokens')} = {engine.max_num_batched_tokens}"
    if engine.max_num_batched_tokens < engine.page_size:
        raise ConfigError(
            f"{budget}: expected at least engine.page_size = {engine.page_size} (chunks end with pages)",
            param="engine.max_num_batched_tokens",
        )
    if engine.role != "prefill" and engine.max_num_batched_tokens < engine.max_num_seqs:
        raise ConfigError(
            f"{budget}: expected at least engine.max_num_seqs = {engine.max_num_seqs}, one token a sequence",
            param="engine.max_num_batched_tokens",
        )
    if engine.num_pages is not None and length is not None:
        tokens = (engine.num_pages - 1) * engine.page_size
        if tokens < length:
            raise ConfigError(
                f"{named('model.max_model_len')} = {length}: engine.num_pages = {engine.num_pages} hold only "
                f"{tokens} tokens",
                param="model.max_model_len",
            )
    if engine.cpus is not None and len(engine.cpus) < engine.threads:
        raise ConfigError(
            f"{named('engine.threads')} = {engine.threads}: more than engine.cpus has",
            param="engine.threads",
        )


def _check_cluster(config: NodeConfig, named: _Sources) -> None:
    cluster, role = config.cluster, config.engine.role
    if cluster.segment_tokens % config.engine.page_size:
        raise ConfigError(
            f"{named('cluster.segment_tokens')} = {cluster.segment_tokens}: expected a multiple of "
            f"engine.page_size = {config.engine.page_size}",
            param="cluster.segment_tokens",
        )
    if cluster.dead_s < 2 * cluster.heartbeat_s:
        raise ConfigError(
            f"{named('cluster.dead_s')} = {cluster.dead_s}: expected at least two heartbeats "
            f"(cluster.heartbeat_s = {cluster.heartbeat_s})",
            param="cluster.dead_s",
        )
    if role == "decode" and not cluster.prefill_peers:
        raise ConfigError(
            "cluster.prefill_peers (--prefill-peer) is empty: a decode node needs at least one prefill node",
            param="cluster.prefill_peers",
        )
    if role != "decode" and cluster.prefill_peers:
        raise ConfigError(
            f"{named('cluster.prefill_peers')}: only a decode node has them, this is {_ROLE_IN_WORDS[role]}",
            param="cluster.prefill_peers",
        )
    if role != "both" and cluster.secret is None:
        _check_without_secret(config, named)


def _check_without_secret(config: NodeConfig, named: _Sources) -> None:
    """Without a secret a node cannot tell a peer from a stranger, so nothing may come from or go to another
    host.
    """
    hosts = [
        (named("server.host"), config.server.host, "server.host"),
        (named("fabric.host"), config.fabric.host, "fabric.host"),
    ]
    hosts += [
        (named("cluster.prefill_peers"), urlsplit(url).hostname or "", "cluster.prefill_peers")
        for url in config.cluster.prefill_peers
    ]
    for source, host, key in hosts:
        if not is_loopback(host):
            raise ConfigError(
                f"{source}: {host} is not a loopback address; without cluster.secret (or "
                "cluster.secret_file) only those are allowed",
                param=key,
            )


def _peer(url: str, source: str) -> str:
    """A peer's URL as `scheme://host:port`, or a `ConfigError`."""

    def bad(why: str) -> ConfigError:
        return ConfigError(f"{source}: {url!r}: {why}", param="cluster.prefill_peers")

    if any(character.isspace() or not character.isprintable() for character in url):
        raise bad("a URL has no blanks")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise bad(f"not a URL: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise bad("expected http://HOST:PORT or https://HOST:PORT")
    if not parts.hostname:
        raise bad("the host is missing")
    if port is None or port == 0:
        raise bad("the port is missing (nodes listen on 8000 by default)")
    if parts.username is not None or parts.password is not None:
        raise bad("user and password have no place here; peers trust each other by cluster.secret")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise bad("expected nothing after the port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"

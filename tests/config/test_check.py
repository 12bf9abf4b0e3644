"""Values that must go together, peers' URLs, and what is allowed without a secret."""

from __future__ import annotations

import pytest

from pdserve.config import Setting, load_config, warnings
from pdserve.errors import ConfigError

SECRET = "s" * 32


def load(**values: object):  # type: ignore[no-untyped-def]
    return load_config(flags=[Setting(key.replace("__", "."), value, key) for key, value in values.items()])


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**values)
    return caught.value.message


def decode(**values: object):  # type: ignore[no-untyped-def]
    return load(engine__role="decode", **values)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:8001", "expected http://HOST:PORT"),
        ("ftp://127.0.0.1:8001", "expected http://HOST:PORT"),
        ("http://:8001", "the host is missing"),
        ("http://127.0.0.1", "the port is missing"),
        ("http://127.0.0.1:0", "the port is missing"),
        ("http://127.0.0.1:99999", "not a URL"),
        ("http://127.0.0.1:port", "not a URL"),
        ("http://me:pw@127.0.0.1:8001", "user and password"),
        ("http://127.0.0.1:8001/v1", "nothing after the port"),
        ("http://127.0.0.1:8001?x", "nothing after the port"),
        ("http://127.0.0.1 :8001", "no blanks"),
        ("http://[::1:8001", "not a URL"),
    ],
)
def test_bad_peer_urls_are_refused(url: str, why: str) -> None:
    message = refusal(engine__role="decode", cluster__prefill_peers=[url])
    assert url in message
    assert why in message


def test_peer_urls_are_normalised_and_may_not_repeat() -> None:
    config = decode(
        cluster__prefill_peers=["http://127.0.0.1:8001/", "HTTP://LocalHost:8002", "http://[::1]:8003"]
    )
    assert config.cluster.prefill_peers == (
        "http://127.0.0.1:8001",
        "http://localhost:8002",
        "http://[::1]:8003",
    )
    assert "named twice" in refusal(
        engine__role="decode", cluster__prefill_peers=["http://localhost:1", "http://localhost:1/"]
    )


def test_roles_and_peers_go_together() -> None:
    assert "needs at least one prefill node" in refusal(engine__role="decode")
    for role in ("prefill", "both"):
        assert "only a decode node has them" in refusal(
            engine__role=role, cluster__prefill_peers=["http://127.0.0.1:8001"]
        )


def test_without_a_secret_only_loopback_is_allowed() -> None:
    assert "10.0.0.1 is not a loopback address" in refusal(
        engine__role="decode", cluster__prefill_peers=["http://10.0.0.1:8001"]
    )
    assert "0.0.0.0 is not a loopback" in refusal(engine__role="prefill", server__host="0.0.0.0")
    assert "fabric" in refusal(engine__role="prefill", fabric__host="192.168.0.1")
    assert "prefill.example is not a loopback" in refusal(
        engine__role="decode", cluster__prefill_peers=["http://prefill.example:8001"]
    )
    load(engine__role="prefill", server__host="0.0.0.0", cluster__secret=SECRET)
    decode(cluster__prefill_peers=["http://10.0.0.1:8001"], cluster__secret=SECRET)


def test_warnings() -> None:
    local = decode(cluster__prefill_peers=["http://127.0.0.1:8001"])
    assert len(warnings(local)) == 1
    assert "no cluster.secret" in warnings(local)[0]
    assert warnings(load()) == []
    assert "api_key" in warnings(load(server__host="0.0.0.0"))[0]
    assert warnings(load(server__host="0.0.0.0", server__api_key="key")) == []


def test_budgets_and_sizes_go_together() -> None:
    assert "at least engine.page_size = 64" in refusal(
        engine__page_size=64, engine__max_num_batched_tokens=32, engine__max_num_seqs=1
    )
    assert "at least engine.max_num_seqs = 600" in refusal(engine__max_num_seqs=600)
    assert "multiple of engine.page_size = 48" in refusal(engine__page_size=48)
    assert "two heartbeats" in refusal(cluster__dead_s=0.3)
    assert "hold only 144 tokens" in refusal(engine__num_pages=10, model__max_model_len=145)
    load(engine__num_pages=10, model__max_model_len=144)
    assert "more than engine.cpus has" in refusal(engine__cpus=[0, 1], engine__threads=3)

"""Asking prefill nodes whether they are there: three requests a peer, none of which opens or changes
anything."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from pdserve.errors import ProtocolError
from pdserve.messenger.hello import NONCE_BYTES, Challenge, ChallengeReply
from pdserve.messenger.messages import PROTOCOL_VERSION
from pdserve.node.peers import CHALLENGE_PATH, CONTENT_TYPE, read_body

TIMEOUT = aiohttp.ClientTimeout(total=5)


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """One prefill node. live, ready: what /live and /health answered, None where they did not; reason: why
    not ready. role, provider: as it says. hello: it answers challenges in our protocol. hello_error: why not.
    error: why it can't be reached at all."""

    url: str
    live: bool | None = None
    ready: bool | None = None
    reason: str = ""
    role: str = ""
    provider: str = ""
    hello: bool = False
    hello_error: str = ""
    error: str = ""


class _Health(msgspec.Struct):
    """The part of /health that is looked at."""

    ready: bool
    live: bool
    reason: str | None = None
    detail: dict[str, object] = {}


async def ask(urls: Sequence[str]) -> list[PeerFacts]:
    """Ask all at once, in the order given. Never raises for what a peer is or says."""
    if not urls:
        return []
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http, asyncio.TaskGroup() as group:
        tasks = [group.create_task(_ask(http, url), name=f"ask {url}") for url in urls]
    return [task.result() for task in tasks]


async def _ask(http: aiohttp.ClientSession, url: str) -> PeerFacts:
    try:
        live, _ = await _get(http, url + "/live")
        ready, health = await _get(http, url + "/health")
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return PeerFacts(url, error=_cause(error))
    except (msgspec.DecodeError, ProtocolError):
        return PeerFacts(url, error="what listens there is no pdserve node")
    detail = {name: str(value) for name, value in health.detail.items()}
    problem = await _challenge(http, url)
    return PeerFacts(
        url,
        live,
        ready,
        "" if ready else (health.reason or "")[:300],
        detail.get("role", ""),
        detail.get("provider", ""),
        not problem,
        problem,
    )


def _cause(error: Exception) -> str:
    """In the system's words where it has some."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or "no answer in time"


async def _get(http: aiohttp.ClientSession, url: str) -> tuple[bool, _Health]:
    async with http.get(url) as response:
        body = msgspec.json.decode(await read_body(response.content), type=_Health)
        return response.status == 200, body


async def _challenge(http: aiohttp.ClientSession, url: str) -> str:
    """Why it can't be said hello to; "" if it can. No secret is proved by a challenge, on either side."""
    body = msgspec.msgpack.encode(Challenge(secrets.token_bytes(NONCE_BYTES)))
    headers = {"Content-Type": CONTENT_TYPE}
    try:
        async with http.post(url + CHALLENGE_PATH, data=body, headers=headers) as response:
            answer = await read_body(response.content)
            if response.status == 404:
                return "it takes no hello: it is no prefill node"
            if response.status != 200:
                text = answer[:200].decode(errors="replace")
                return f"its answer to a challenge was {response.status}: {text}"
        reply = msgspec.msgpack.decode(answer, type=ChallengeReply)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return _cause(error)
    except (msgspec.DecodeError, UnicodeDecodeError, ProtocolError):
        return "its answer to a challenge can't be read"
    if reply.version != PROTOCOL_VERSION:
        return f"it speaks protocol version {reply.version}, this node {PROTOCOL_VERSION}"
    return ""

"""One trace of a request from the two nodes that served it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from pdserve.observe.trace import TraceStore, merge

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=5)
_MAX_TRACE = 16 << 20


async def fetch_merged(
    traces: TraceStore,
    request_id: str,
    url_of: Callable[[str], str | None],
    http: aiohttp.ClientSession,
    api_key: str | None,
) -> dict[str, Any] | None:
    """This node's record of a request, with that of the prefill node that served it where it can be had.

    `url_of(node_id)`: where a peer listens. None where this node does not know the request.
    """
    own = traces.export(request_id)
    if own is None or traces.role == "prefill":
        return own
    peer = own.get("peer")
    url = None if peer is None else url_of(peer)
    theirs = (
        None
        if url is None
        else await _fetch(f"{url}/pd/v1/trace/{quote(request_id, safe='')}", http, api_key)
    )
    return merge(own, theirs)


async def _fetch(url: str, http: aiohttp.ClientSession, api_key: str | None) -> dict[str, Any] | None:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        async with http.get(url, headers=headers, timeout=_TIMEOUT) as response:
            if response.status != 200:
                return None
            body = await response.read()
            record = orjson.loads(body) if len(body) <= _MAX_TRACE else None
    except (aiohttp.ClientError, OSError, TimeoutError, orjson.JSONDecodeError) as error:
        log.warning("no trace from %s: %s", url, error)
        return None
    return record if isinstance(record, dict) else None

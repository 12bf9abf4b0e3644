"""Who a request is: its id, and the key it came with.

A client may name its request (`X-Request-Id`, or `request_id` in the body); the answer's `id` is that name
with the API's prefix, as vLLM does, and is also the id in logs, traces and wire messages. Two running
requests never share an id, whatever clients send.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from pdserve.errors import ClientError, Unauthorized
from pdserve.http.errors import show

HEADER = "X-Request-Id"
REQUEST = web.RequestKey("pdserve.request_id", str)
"""The value a request's answer will have as X-Request-Id."""

ANSWER = web.RequestKey("pdserve.response_id", str)
"""The `id` of a request's answer, once it has one."""

_NAME = re.compile(r"[!-~]{1,128}")


def given_id(request: web.Request) -> str | None:
    """The client's X-Request-Id; `ClientError` if it is not one that can travel in headers and logs."""
    name = request.headers.get(HEADER)
    return None if name is None else checked_id(HEADER, name)


def checked_id(field: str, name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ClientError(
            f"{field} must be 1 to 128 printable ASCII characters without spaces, got {show(name)}",
            param=field,
        )
    return name


class RequestIds:
    """The ids of running requests."""

    def __init__(self) -> None:
        self._running: set[str] = set()

    @contextmanager
    def claim(self, prefix: str, request: web.Request, in_body: str | None) -> Iterator[str]:
        """The id of one request for as long as it runs; sets what the answer's X-Request-Id will be."""
        name = request.get(REQUEST) or (None if in_body is None else checked_id("request_id", in_body))
        with self.unique(f"{prefix}-{name or uuid.uuid4().hex}") as response_id:
            request[REQUEST] = name or response_id
            request[ANSWER] = response_id
            yield response_id

    @contextmanager
    def unique(self, wanted: str) -> Iterator[str]:
        """`wanted`, or something like it that no running request has."""
        name = wanted
        while name in self._running:
            name = f"{wanted}-{uuid.uuid4().hex[:8]}"
        self._running.add(name)
        try:
            yield name
        finally:
            self._running.discard(name)


class ApiKeys:
    """Checks `Authorization: Bearer KEY`. Without keys everyone may come in."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests are of one length, so comparing them takes the same time for every key.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, request: web.Request) -> None:
        """Raises `Unauthorized`."""
        if not self._digests:
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, whichever fits.
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(fits):
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")

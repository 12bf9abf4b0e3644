"""Reading a request body: declared as JSON, no larger than allowed, within a time."""

from __future__ import annotations

import asyncio

from aiohttp import web

from pdserve.errors import BodyTimeout, RequestTooLarge, UnsupportedMediaType
from pdserve.http.config import HttpConfig
from pdserve.http.errors import show


async def read_body(request: web.Request, config: HttpConfig) -> bytes:
    """The whole body. Raises `UnsupportedMediaType`, `RequestTooLarge` or `BodyTimeout`.

    JSON must be declared (or nothing at all): a web page on another site can make a browser post a form to a
    server on this machine, but not `application/json`.
    """
    kind = request.content_type
    if "Content-Type" in request.headers and kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {show(kind)}")
    limit = config.max_body_bytes
    too_large = RequestTooLarge(f"the body is larger than {limit} bytes")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    try:
        async with asyncio.timeout(config.read_timeout):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {config.read_timeout:g} s") from error

"""From an exception to an OpenAI error body.

The text of an error names field, value and limit, and is bounded whatever the client sent: an answer is never
larger for the size of the question.
"""

from __future__ import annotations

import math
from typing import Any

import orjson
from aiohttp import web

from pdserve.errors import Overloaded, PdserveError

MAX_MESSAGE = 1024
MAX_PARAM = 128
MAX_VALUE = 80


def clip(text: str, limit: int) -> str:
    """`text`, or its beginning and how long it was."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text)} characters)"


def show(value: Any) -> str:
    """A client's value for an error text: short, whatever it is, and cheap to make."""
    if isinstance(value, str):
        return clip(repr(value[: MAX_VALUE + 1]), MAX_VALUE) if len(value) > MAX_VALUE else repr(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >> 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return clip(repr(value), MAX_VALUE)


def error_object(error: PdserveError) -> dict[str, Any]:
    """The `error` member of an OpenAI error body."""
    return {
        "message": clip(error.message, MAX_MESSAGE),
        "type": error.kind,
        "param": None if error.param is None else clip(error.param, MAX_PARAM),
        "code": error.code,
    }


def error_body(error: PdserveError) -> bytes:
    """{"error": {"message", "type", "param", "code"}} as JSON."""
    return orjson.dumps({"error": error_object(error)})


def error_response(error: PdserveError) -> web.Response:
    """The answer to a request that failed before anything of its answer was sent."""
    headers = {}
    retry_after = error.retry_after
    if retry_after is None and isinstance(error, Overloaded):
        retry_after = 1.0
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.status, body=error_body(error), content_type="application/json", headers=headers
    )

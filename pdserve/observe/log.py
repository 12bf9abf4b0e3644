"""Logging of a node: lines of text for people or of JSON for machines, each with the request it is about.

Code logs through the standard library under the logger `pdserve`. The id of the request that a task works on
is in `request_id` and reaches every record made by that task and the tasks it starts. Further fields go with
`extra={"fields": {...}}`. A record is one line, whatever text a client got into it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

import orjson

request_id: ContextVar[str | None] = ContextVar("pdserve_request_id", default=None)
"""The request that the running task works on."""

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_MAX_MESSAGE = 8192


@contextmanager
def logged(name: str) -> Iterator[None]:
    """What the running task logs inside is about request `name`."""
    token = request_id.set(name)
    try:
        yield
    finally:
        request_id.reset(token)


def configure(
    level: str = "info", form: str = "text", *, node: str = "", stream: TextIO | None = None
) -> None:
    """Send all logging of this process to `stream` (stderr), replacing what was configured before.

    `level` is for pdserve's own loggers; libraries are heard from "warning" up. `node` is put into every
    line. Raises `ValueError` for an unknown level or format.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r}: expected one of {', '.join(LEVELS)}")
    if form not in FORMATS:
        raise ValueError(f"log format {form!r}: expected one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(node) if form == "json" else TextFormatter(node))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("pdserve").setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", None) or {})
    if fields.get("request_id") is None:
        fields.pop("request_id", None)
        current = request_id.get()
        if current is not None:
            fields["request_id"] = current
    return fields


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}… ({len(text)} characters)"


def _one_line(text: str) -> str:
    """Control characters escaped: a client cannot forge a line or move the cursor of a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO  pdserve.http.app [node] message key=value`, tracebacks below."""

    def __init__(self, node: str = "") -> None:
        super().__init__()
        self._node = f" [{node}]" if node else ""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={_one_line(str(value))}" for key, value in _fields(record).items())
        line = (
            f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} {record.name}{self._node} "
            f"{_one_line(_message(record))}{fields}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (unix seconds), level, logger, node, message, the fields, exception."""

    def __init__(self, node: str = "") -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if self._node:
            entry["node"] = self._node
        entry.update((k, v) for k, v in _fields(record).items() if k not in entry)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode()

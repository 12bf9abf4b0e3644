"""A server-sent event stream that begins late and cannot be held up for ever.

The status line goes out with the first event, so whatever fails before the first token is still answered
with its own status. Events are written straight to the connection: when the socket takes no more, the writer
waits, and with it the handler, so a client that does not read holds a few buffers and never a whole answer;
after `write_timeout` seconds it is cut off.

Format: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import web

# Writes below this size never wait when the socket's buffer is empty, and need no timer.
_SMALL = 16384


class ClientTooSlow(ConnectionError):
    """The client read nothing for too long; its connection is gone."""


class EventStream:
    """One response of events. Events of several tasks may be sent at once; each arrives whole."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], write_timeout: float) -> None:
        self._request = request
        self._timeout = write_timeout
        self._prepare = asyncio.Lock()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    @property
    def started(self) -> bool:
        """True once the status has been sent: an error can only be an event from here on."""
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Write framed events; returns when the connection has room for more.

        Raises `ConnectionError` when the client is gone, `ClientTooSlow` when it was cut off.
        """
        if not self.response.prepared:
            async with self._prepare:
                if not self.response.prepared:
                    await self.response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has closed the connection")
        if len(events) < _SMALL and transport.get_write_buffer_size() == 0:
            await self.response.write(events)
            return
        try:
            async with asyncio.timeout(self._timeout):
                await self.response.write(events)
        except TimeoutError as error:
            transport.abort()
            raise ClientTooSlow(f"the client read nothing for {self._timeout:g} s") from error

    async def end(self) -> None:
        """Finish the response; also waits at most `write_timeout`."""
        try:
            async with asyncio.timeout(self._timeout):
                await self.response.write_eof()
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientTooSlow(f"the client read nothing for {self._timeout:g} s") from error

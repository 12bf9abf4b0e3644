"""One sequence on its way to a client: the node's side of `http.frontend.Generation`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from pdserve.engine.request import Request
from pdserve.errors import PdserveError
from pdserve.http.frontend import TokenOutput


class NodeGeneration:
    """Tokens of one sequence, between the scheduler that makes them and the handler that reads them.

    The buffer is bounded by `max_tokens`, which the scheduler never exceeds.
    """

    def __init__(self, request: Request, abandon: Callable[[str, str], None]) -> None:
        """`abandon(request_id, reason)` ends it in the node; called at most once, by `aclose`."""
        self.request = request
        self.request_id = request.id
        self.prompt_tokens = len(request.prompt)
        self.cached_tokens = 0
        self._abandon = abandon
        self._outputs: deque[TokenOutput] = deque()
        self._error: PdserveError | None = None
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, output: TokenOutput) -> None:
        """A token was sampled. The last one carries a finish reason."""
        self._outputs.append(output)
        self._ended = self._ended or output.finish_reason is not None
        self._changed.set()

    def fail(self, error: PdserveError) -> None:
        """Nothing more comes, for this reason; tokens before it are still read."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._changed.set()

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        while True:
            while self._outputs:
                yield self._outputs.popleft()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self, reason: str = "abort") -> None:
        if not self._ended:
            self._ended = True
            self._abandon(self.request_id, reason)

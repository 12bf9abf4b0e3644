"""One choice of an answer: a generation on its way to text.

Tokens come from the node; a `Choice` detokenises them, watches for stop strings, counts, measures, and hands
each step on as a `Delta`. Streamed and whole answers differ only in who takes the deltas.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec

from pdserve.errors import InternalError, PdserveError
from pdserve.http.frontend import Generation, TokenOutput
from pdserve.http.sampling import OutputRules
from pdserve.observe.metrics import NodeMetrics
from pdserve.text.detokenizer import incremental_detokenizer
from pdserve.text.stops import StopStrings
from pdserve.text.tokenizer import Tokenizer


class Delta(msgspec.Struct, frozen=True):
    """What one token added to a choice. `shown` is None for a stop token, which has no text of its own."""

    text: str
    shown: TokenOutput | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Choice:
    """One running choice. Owned by the handler, which closes the generation whatever happens."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        tokenizer: Tokenizer,
        rules: OutputRules,
        metrics: NodeMetrics,
        arrival: float,
    ) -> None:
        self.index = index
        self.generation = generation
        self.tokens = 0
        """Sampled so far, a stop token included: `completion_tokens`."""
        self._rules = rules
        self._metrics = metrics
        self._arrival = arrival
        self._last = arrival
        self._ended = False
        self._detokenizer = incremental_detokenizer(tokenizer, skip_special_tokens=rules.skip_special_tokens)
        self._stops = StopStrings(rules.stops, include=rules.include_stop)

    async def run(self, emit: Callable[[Choice, Delta], Awaitable[None]]) -> None:
        """Give every delta to `emit`, in order; the last one has a finish reason.

        Waits for `emit`, so a reader that is slow slows the loop down and not the node. Raises what the
        generation raises; cancelled, it counts an abort.
        """
        outputs = aiter(self.generation)
        try:
            async for output in outputs:
                self._measure(output)
                delta = self._digest(output)
                if delta.finish_reason is not None:
                    self._meter_end(delta.finish_reason)
                    if output.finish_reason is None:  # A stop string: the node does not know yet.
                        await self.generation.aclose("stop")
                await emit(self, delta)
                if delta.finish_reason is not None:
                    return
            raise InternalError("the generation ended without a finish reason")
        except (asyncio.CancelledError, ConnectionError, TimeoutError):
            self._meter_end("abort")
            raise
        finally:
            # An asynchronous generator that is left half-way would else be closed by a task of nobody.
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()

    def _digest(self, output: TokenOutput) -> Delta:
        rules, reason = self._rules, output.finish_reason
        stopped_by_token = reason == "stop" and not rules.include_stop
        piece = "" if stopped_by_token else self._detokenizer.push(output.token_id)
        # Stop strings count from the first token that may be the last one.
        text = piece if self.tokens < rules.min_tokens else self._stops.push(piece)
        if reason is not None and self._stops.matched is None:
            text += self._stops.push(self._detokenizer.finish())
            if self._stops.matched is None:
                text += self._stops.finish()
        shown = None if stopped_by_token else output
        if self._stops.matched is not None:
            return Delta(text, shown, "stop", self._stops.matched)
        own = reason == "stop" and output.token_id in rules.own_stop_ids
        return Delta(text, shown, reason, output.token_id if own else None)

    def _measure(self, output: TokenOutput) -> None:
        now = time.monotonic()
        if self.tokens == 0:
            self._metrics.prompt(self.generation.prompt_tokens, self.generation.cached_tokens)
            self._metrics.first_token(now - self._arrival)
        else:
            self._metrics.next_token(now - self._last)
        self._last = now
        self.tokens += 1

    def _meter_end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.finished(reason, self.tokens, time.monotonic() - self._arrival)


async def run_all(choices: Sequence[Choice], emit: Callable[[Choice, Delta], Awaitable[None]]) -> None:
    """Run all choices at once; their deltas interleave as tokens come. The first failure ends the others and
    is raised as it is; cancelling this cancels all."""
    if len(choices) == 1:
        await choices[0].run(emit)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(choice.run(emit), name=f"choice {choice.generation.request_id}")
    except BaseExceptionGroup as failures:
        raise _worst(failures) from failures


def _worst(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to report: a bug before an error that was raised on purpose, then the first."""
    known = (PdserveError, ConnectionError, TimeoutError)
    return next((e for e in failures.exceptions if not isinstance(e, known)), failures.exceptions[0])

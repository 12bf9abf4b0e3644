"""A node that says what a test has written down, for tests of the HTTP edge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from pdserve.engine.sampling import SamplingParams
from pdserve.http.frontend import Health, ServedModel, TokenOutput
from pdserve.observe.metrics import NodeMetrics
from pdserve.text.tokenizer import Tokenizer

# What a script may hold: a token, an event to wait for, or an error to raise.
Line = TokenOutput | asyncio.Event | Exception
Script = Callable[[Sequence[int], SamplingParams], Sequence[Line]]


class ScriptedGeneration:
    def __init__(self, request_id: str, prompt_ids: Sequence[int], lines: Sequence[Line]) -> None:
        self.request_id = request_id
        self.prompt_tokens = len(prompt_ids)
        self.cached_tokens = 0
        self.lines = lines
        self.given = 0
        """Tokens handed out."""
        self.waiting = asyncio.Event()
        """Set while it waits for an event of its script."""
        self.reasons: list[str] = []
        """Of every `aclose`."""
        self.closed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        for line in self.lines:
            if isinstance(line, asyncio.Event):
                self.waiting.set()
                await line.wait()
                self.waiting.clear()
            elif isinstance(line, Exception):
                raise line
            else:
                self.given += 1
                yield line

    async def aclose(self, reason: str = "abort") -> None:
        self.reasons.append(reason)
        self.closed.set()


class Asked(msgspec.Struct):
    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    priority: int
    trace_parent: str | None


class ScriptedFrontend:
    """Implements `http.frontend.Frontend`. `script` and the other plain attributes are the test's to set."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.card = ServedModel(
            names=("small", "alias/small"),
            max_model_len=512,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=(tokenizer.rust.token_to_id("<|im_end|>"),),
            created=1700000000,
        )
        self.script: Script = lambda prompt, sampling: self.says("hello world")
        self.refuses: list[Exception | None] = []
        """For each call of `generate` in turn: what it raises."""
        self.asked: list[Asked] = []
        self.generations: list[ScriptedGeneration] = []
        self._asked = asyncio.Condition()
        self.state = Health(ready=True, live=True)
        self.traces: dict[str, dict[str, Any]] = {}
        self.registry = NodeMetrics("small")

    def says(self, text: str, *, end: str = "stop") -> list[TokenOutput]:
        """The tokens of a text, ended by EOS or by the limit."""
        outputs = [TokenOutput(i) for i in self.tokenizer.encode(text)]
        if end == "length":
            return [*outputs[:-1], TokenOutput(outputs[-1].token_id, finish_reason="length")]
        return [*outputs, TokenOutput(self.card.eos_token_ids[0], finish_reason="stop")]

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        priority: int = 0,
        trace_parent: str | None = None,
        arrival: float | None = None,
    ) -> ScriptedGeneration:
        refusal = self.refuses.pop(0) if self.refuses else None
        if refusal is not None:
            raise refusal
        self.asked.append(Asked(request_id, list(prompt_ids), sampling, max_tokens, priority, trace_parent))
        generation = ScriptedGeneration(request_id, prompt_ids, self.script(prompt_ids, sampling))
        self.generations.append(generation)
        async with self._asked:
            self._asked.notify_all()
        return generation

    async def until_asked(self, times: int) -> None:
        """Wait until `generate` has begun that many generations."""
        async with self._asked:
            await self._asked.wait_for(lambda: len(self.generations) >= times)

    def health(self) -> Health:
        return self.state

    def metrics(self) -> bytes:
        return self.registry.render()

    async def trace(self, request_id: str) -> dict[str, Any] | None:
        return self.traces.get(request_id)

"""POST /v1/chat/completions and /v1/completions, GET /v1/models: steps 1 and 9 of a request.

Everything about a request is checked before the node hears of it; then each choice is one generation. The
handler owns all of them, and closes all of them on every way out: an answer that is complete, an error, a
client that has gone (aiohttp cancels the handler), a client that does not read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from aiohttp import web

from pdserve.engine.sampling import SamplingParams
from pdserve.errors import (
    ClientError,
    ContextLengthExceeded,
    InternalError,
    ModelNotFound,
    PdserveError,
    WrongRole,
)
from pdserve.http.bodies import DONE, ChatFormat, ChunkWriter, CompletionFormat, Format, Head, usage
from pdserve.http.choice import Choice, Delta, run_all
from pdserve.http.config import HttpConfig
from pdserve.http.errors import error_body, show
from pdserve.http.frontend import Frontend, ServedModel, TokenOutput
from pdserve.http.identity import REQUEST, RequestIds
from pdserve.http.prompts import Prompt, PromptReader
from pdserve.http.reading import read_body
from pdserve.http.sampling import OutputRules, choices_asked, output_rules, sampling_params, token_limit
from pdserve.http.schema import (
    MARKS_A_TOKEN,
    MAX_MARKS,
    ChatRequest,
    CompletionRequest,
    decode_chat,
    decode_completion,
)
from pdserve.http.sse import EventStream
from pdserve.observe.log import logged
from pdserve.observe.metrics import NodeMetrics
from pdserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Body = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has been checked: all that is needed to answer it."""

    request: Body
    api: Format
    response_id: str
    model: str
    prompts: list[Prompt]
    limits: list[int]
    n: int
    sampling: SamplingParams
    rules: OutputRules
    arrival: float
    created: int

    @property
    def echo(self) -> bool:
        return isinstance(self.request, CompletionRequest) and bool(self.request.echo)


class OpenAIRoutes:
    """The handlers. One an application; requests share nothing but the ids in use."""

    def __init__(
        self, frontend: Frontend, tokenizer: Tokenizer | None, config: HttpConfig, metrics: NodeMetrics
    ) -> None:
        self._frontend = frontend
        self._tokenizer = tokenizer
        self._config = config
        self._metrics = metrics
        self._ids = RequestIds()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{name:.+}", self.model)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completion)

    async def models(self, request: web.Request) -> web.Response:
        card = self._frontend.card
        return _json({"object": "list", "data": [_model_object(card, name) for name in card.names]})

    async def model(self, request: web.Request) -> web.Response:
        card, name = self._frontend.card, request.match_info["name"]
        if name not in card.names:
            raise _unknown_model(name, card)
        return _json(_model_object(card, name))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, decode_chat, ChatFormat)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, decode_completion, CompletionFormat)

    async def _serve(
        self,
        request: web.Request,
        decode: Callable[[bytes, int], Body],
        make_format: Callable[[Tokenizer], Format],
    ) -> web.StreamResponse:
        """Parse, check, tokenise, answer. The cheap checks come first."""
        arrival, card, tokenizer = time.monotonic(), self._frontend.card, self._tokenizer
        if tokenizer is None or card.role == "prefill":
            raise WrongRole("this is a prefill node, which generates nothing; ask a decode node")
        marks = max(MAX_MARKS, MARKS_A_TOKEN * card.max_model_len)
        body = decode(await read_body(request, self._config), marks)
        api = make_format(tokenizer)
        with self._ids.claim(api.id_prefix, request, body.request_id) as response_id, logged(response_id):
            _check_model(body, card)
            sampling = sampling_params(body, card, self._config)
            rules = output_rules(body, sampling, self._config)
            choices_asked(body, 1, self._config)
            prompts = await PromptReader(tokenizer, card, self._config).read(body)
            asked = Asked(
                request=body,
                api=api,
                response_id=response_id,
                model=body.model or card.names[0],
                prompts=prompts,
                limits=[token_limit(body, len(prompt.ids), card) for prompt in prompts],
                n=choices_asked(body, len(prompts), self._config),
                sampling=sampling,
                rules=rules,
                arrival=arrival,
                created=int(time.time()),
            )
            async with AsyncExitStack() as stack:
                choices = await self._admit(request, asked, tokenizer, stack)
                if body.stream:
                    return await self._stream(request, asked, choices)
                return await self._whole(asked, choices)

    async def _admit(
        self, request: web.Request, asked: Asked, tokenizer: Tokenizer, stack: AsyncExitStack
    ) -> list[Choice]:
        """Start one generation a choice; whatever was started is closed with `stack`."""
        total = len(asked.prompts) * asked.n
        choices: list[Choice] = []
        for prompt, limit in zip(asked.prompts, asked.limits, strict=True):
            for k in range(asked.n):
                index, own = len(choices), asked.response_id
                if total > 1:
                    own = stack.enter_context(self._ids.unique(f"{own}-{index}"))
                try:
                    generation = await self._frontend.generate(
                        own,
                        prompt.ids,
                        msgspec.structs.replace(asked.sampling, choice=k) if k else asked.sampling,
                        limit,
                        priority=asked.request.priority or 0,
                        trace_parent=request.headers.get("traceparent"),
                        arrival=asked.arrival,
                    )
                except ContextLengthExceeded as error:
                    # The node knows a prompt; the client may have sent messages.
                    if isinstance(asked.request, ChatRequest) and error.param == "prompt":
                        error.param = "messages"
                    raise
                stack.push_async_callback(generation.aclose)
                choices.append(
                    Choice(index, generation, tokenizer, asked.rules, self._metrics, asked.arrival)
                )
        return choices

    async def _whole(self, asked: Asked, choices: Sequence[Choice]) -> web.Response:
        """Collect all choices, answer once."""
        texts: list[list[str]] = [[] for _ in choices]
        shown: list[list[TokenOutput]] = [[] for _ in choices]
        last: dict[int, Delta] = {}

        async def emit(choice: Choice, delta: Delta) -> None:
            texts[choice.index].append(delta.text)
            if asked.rules.logprobs is not None and delta.shown is not None:
                shown[choice.index].append(delta.shown)
            last[choice.index] = delta

        await run_all(choices, emit)
        body = Head(asked.response_id, asked.api.kind, asked.created, asked.model).fields
        body["choices"] = [
            asked.api.whole(
                choice.index,
                self._echo(asked, choice.index) + "".join(texts[choice.index]),
                None if asked.rules.logprobs is None else asked.api.logprobs(shown[choice.index], 0),
                last[choice.index],
            )
            for choice in choices
        ]
        body["usage"] = _total_usage(asked, choices)
        return _json(body)

    async def _stream(
        self, request: web.Request, asked: Asked, choices: Sequence[Choice]
    ) -> web.StreamResponse:
        """Send every delta as it comes."""
        options = asked.request.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = include_usage and options is not None and bool(options.continuous_usage_stats)
        stream = EventStream(request, {"X-Request-Id": request[REQUEST]}, self._config.write_timeout)
        head = Head(asked.response_id, asked.api.chunk_kind, asked.created, asked.model)
        writer = ChunkWriter(
            head, asked.api, logprobs=asked.rules.logprobs is not None, include_usage=include_usage
        )
        opened: set[int] = set()

        async def emit(choice: Choice, delta: Delta) -> None:
            used = _choice_usage(choice) if continuous else None
            events = b""
            if choice.index not in opened:
                opened.add(choice.index)
                events = writer.opening(choice, used)
                if asked.echo:
                    events += writer.text(choice.index, self._echo(asked, choice.index))
            events += writer.delta(choice, delta, used)
            if events:
                await stream.send(events)

        try:
            await run_all(choices, emit)
            total = writer.last(_total_usage(asked, choices)) if include_usage else b""
            await stream.send(total + DONE)
        except ConnectionError:
            raise
        except Exception as error:
            if not stream.started:
                raise
            await stream.send(b"data: " + error_body(self._told(error)) + b"\n\n" + DONE)
        await stream.end()
        return stream.response

    def _told(self, error: Exception) -> PdserveError:
        """The error for a stream that has begun, logged and counted as the middleware would have."""
        if not isinstance(error, PdserveError):
            _log.error("a stream failed", exc_info=error)
            error = InternalError("internal error; the server's log has the details")
        else:
            _log.warning("a stream ended with an error: %s", error)
        self._metrics.error(error.code)
        return error

    def _echo(self, asked: Asked, index: int) -> str:
        """The prompt's text, in front of every choice made from it."""
        if not asked.echo or self._tokenizer is None:
            return ""
        prompt = asked.prompts[index // asked.n]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids, skip_special_tokens=asked.rules.skip_special_tokens)


def _check_model(body: Body, card: ServedModel) -> None:
    if body.model is not None and body.model not in card.names:
        raise _unknown_model(body.model, card)
    if body.stream_options is not None and not body.stream:
        raise ClientError("stream_options needs stream to be true", param="stream_options")


def _total_usage(asked: Asked, choices: Sequence[Choice]) -> dict[str, Any]:
    """Prompts count once each, however many choices are made from them."""
    firsts = choices[:: asked.n]
    return usage(
        sum(choice.generation.prompt_tokens for choice in firsts),
        sum(choice.generation.cached_tokens for choice in firsts),
        sum(choice.tokens for choice in choices),
    )


def _choice_usage(choice: Choice) -> dict[str, Any]:
    return usage(choice.generation.prompt_tokens, choice.generation.cached_tokens, choice.tokens)


def _model_object(card: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "pdserve",
        "root": card.root or card.names[0],
        "parent": None,
        "max_model_len": card.max_model_len,
    }


def _unknown_model(name: str, card: ServedModel) -> ModelNotFound:
    return ModelNotFound(
        f"the model {show(name)} does not exist; this server has {', '.join(card.names)}", param="model"
    )


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")

"""The aiohttp application of a node: OpenAI routes, health, metrics, traces, and one middleware around all.

    GET  /v1/models, /v1/models/{id}       POST /v1/completions, /v1/chat/completions
    GET  /health, /live, /metrics, /version
    GET  /pd/v1/trace/{request_id}

/v1 and the trace route ask for an API key where keys are configured; the rest is open, as in vLLM. The node
adds its own routes under /pd/v1 to the same application; they authenticate themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from pdserve import __version__
from pdserve.errors import (
    ClientError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    PdserveError,
    RequestTooLarge,
)
from pdserve.http.config import HttpConfig
from pdserve.http.errors import error_response, show
from pdserve.http.frontend import Frontend, Health
from pdserve.http.identity import ANSWER, HEADER, REQUEST, ApiKeys, given_id
from pdserve.http.openai import OpenAIRoutes
from pdserve.http.sse import ClientTooSlow
from pdserve.observe.metrics import CONTENT_TYPE, NodeMetrics
from pdserve.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_GUARDED = ("/v1/", "/pd/v1/trace/")
_QUIET = frozenset({"/health", "/live", "/metrics"})
_CLIENT_CLOSED = 499
_LARGE = 65536


def build_app(
    frontend: Frontend,
    tokenizer: Tokenizer | None,
    config: HttpConfig | None = None,
    metrics: NodeMetrics | None = None,
) -> web.Application:
    """The application of one node.

    `tokenizer` may be None on a prefill node. `metrics`: where requests are counted, the same object whose
    `render` the frontend's `metrics` returns; None: counted for nobody. Run it with `make_runner`: without
    `handler_cancellation` a client that leaves during prefill would not be noticed.
    """
    config = config or HttpConfig()
    metrics = metrics or NodeMetrics(frontend.card.names[0])
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_middleware(config, metrics)])
    OpenAIRoutes(frontend, tokenizer, config, metrics).add_to(app)

    async def health(request: web.Request) -> web.Response:
        state = frontend.health()
        return _health(state, state.ready)

    async def live(request: web.Request) -> web.Response:
        state = frontend.health()
        return _health(state, state.live)

    async def exposition(request: web.Request) -> web.Response:
        return web.Response(body=frontend.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def version(request: web.Request) -> web.Response:
        return _json({"version": __version__})

    async def trace(request: web.Request) -> web.Response:
        name = request.match_info["request_id"]
        found = await frontend.trace(name)
        if found is None:
            raise NotFound(f"no trace of a request {show(name)}: unknown, or forgotten", param="request_id")
        return _json(found)

    app.router.add_get("/health", health)
    app.router.add_get("/live", live)
    app.router.add_get("/metrics", exposition)
    app.router.add_get("/version", version)
    app.router.add_get("/pd/v1/trace/{request_id:.+}", trace)
    return app


def make_runner(app: web.Application, config: HttpConfig | None = None) -> web.AppRunner:
    """A runner that cancels a handler when its client disconnects. The caller sets it up, adds sites to it,
    and cleans it up."""
    config = config or HttpConfig()
    return web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=config.shutdown_timeout
    )


def _middleware(config: HttpConfig, metrics: NodeMetrics) -> Callable[..., Awaitable[web.StreamResponse]]:
    keys = ApiKeys(config.api_keys)

    @web.middleware
    async def edge(request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Ids, keys, errors as JSON, the access log."""
        began = time.monotonic()
        response: web.StreamResponse | None = None
        try:
            response = await _guarded(request, handler, keys)
        except PdserveError as error:
            metrics.error(error.code)
            response = error_response(error)
        except web.HTTPException as error:
            known = _of_http(error, request)
            metrics.error(known.code)
            response = error_response(known)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError as gone:
            if isinstance(gone, ClientTooSlow):
                _cut_off(request, metrics, config)
            # Nobody is there to be answered; aiohttp drops this with the connection.
            response = web.Response(status=_CLIENT_CLOSED)
        except Exception:
            _log.exception("%s %s failed", request.method, request.path[:200])
            bug = InternalError("internal error; the server's log has the details")
            metrics.error(bug.code)
            response = error_response(bug)
        finally:
            status = _CLIENT_CLOSED if response is None else response.status
            metrics.response(status)
            _log_access(request, status, time.monotonic() - began)
        if not response.prepared and request.get(REQUEST):
            response.headers[HEADER] = request[REQUEST]
        if not await _delivered(request, response, config.write_timeout):
            _cut_off(request, metrics, config)
        return response

    return edge


async def _guarded(request: web.Request, handler: _Handler, keys: ApiKeys) -> web.StreamResponse:
    name = given_id(request)
    if name is not None:
        request[REQUEST] = name
    if request.path.startswith(_GUARDED):
        keys.check(request)
    return await handler(request)


async def _delivered(request: web.Request, response: web.StreamResponse, write_timeout: float) -> bool:
    """Send a large answer here, where a client that does not read it can be cut off; False: it was. aiohttp
    sends the others, and finds nothing left to do for those sent here."""
    if response.prepared or not isinstance(response, web.Response):
        return True
    if not isinstance(response.body, bytes) or len(response.body) < _LARGE:
        return True
    try:
        async with asyncio.timeout(write_timeout):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return False
    except ConnectionError:
        pass  # The client has gone.
    return True


def _cut_off(request: web.Request, metrics: NodeMetrics, config: HttpConfig) -> None:
    metrics.error("client_too_slow")
    _log.warning(
        "%s: the client read nothing for %g s and was cut off",
        request.path[:200],
        config.write_timeout,
        extra={"fields": {"request_id": request.get(ANSWER)}},
    )


def _log_access(request: web.Request, status: int, seconds: float) -> None:
    level = logging.DEBUG if request.path in _QUIET else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(
            level,
            "%s %s %d in %.1f ms",
            request.method,
            request.path[:200],
            status,
            seconds * 1e3,
            extra={"fields": {"request_id": request.get(ANSWER) or request.get(REQUEST)}},
        )


def _of_http(error: web.HTTPException, request: web.Request) -> PdserveError:
    """aiohttp's own errors in the one tree."""
    if error.status == 404:
        return NotFound(f"no route {request.method} {show(request.path)}")
    if error.status == 405:
        return MethodNotAllowed(f"{show(request.path)} does not take {show(request.method)}")
    if error.status == 413:
        return RequestTooLarge(f"the body is larger than {request.client_max_size} bytes")
    known = ClientError(error.reason) if error.status < 500 else InternalError(error.reason)
    known.status = error.status
    return known


def _health(state: Health, good: bool) -> web.Response:
    body = {"status": "ok" if good else "unavailable", "ready": state.ready, "live": state.live}
    return web.Response(
        status=200 if good else 503,
        body=orjson.dumps({**body, "reason": state.reason, "detail": dict(state.detail)}),
        content_type="application/json",
    )


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")

"""What is wrong with a request is said before any work: status, field, value and limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import (
    ClientError,
    ContextLengthExceeded,
    Draining,
    NoPeer,
    Overloaded,
    PdserveError,
    PeerLost,
    WorkerError,
)
from pdserve.http.config import HttpConfig
from pdserve.http.errors import MAX_MESSAGE, MAX_PARAM, clip, error_body, show
from pdserve.http.frontend import Health
from pdserve.http.schema import decode_chat, decode_completion
from tests.http.conftest import Serve, Server

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello", **fields}


# (path, body, param, words of the message)
WRONG: list[tuple[str, Any, str | None, str]] = [
    (CHAT, {}, "messages", "messages is required"),
    (CHAT, [], None, "the body: expected object, got array"),
    (CHAT, {"messages": []}, "messages", "must not be empty"),
    (CHAT, {"messages": "hello"}, "messages", "expected array, got str: 'hello'"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "role is required"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "got 'wizard'"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "one of system, developer"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "content is required"),
    (CHAT, {"messages": [*USER, {"role": "user", "content": 3}]}, "messages[1].content", "got int: 3"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "must be 'text', got 'image_url'",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "not supported",
    ),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "needs logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "at most 20, got 21"),
    (CHAT, chat(logprobs=3), "logprobs", "expected bool | null, got int: 3"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "at least 1, got 0"),
    (CHAT, chat(continue_final_message=True), "continue_final_message", "role 'assistant'"),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
        "exclude each other",
    ),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "may not set"),
    (COMPLETION, {}, "prompt", "prompt is required"),
    (COMPLETION, {"prompt": None}, "prompt", "got null"),
    (COMPLETION, {"prompt": 3}, "prompt", "a list of strings"),
    (COMPLETION, {"prompt": ""}, "prompt", "must not be empty"),
    (COMPLETION, {"prompt": []}, "prompt", "must not be empty"),
    (COMPLETION, {"prompt": ["a", ""]}, "prompt[1]", "must not be empty"),
    (COMPLETION, {"prompt": [[]]}, "prompt[0]", "must not be empty"),
    (COMPLETION, {"prompt": ["a", [1]]}, "prompt[1]", "must be a string"),
    (COMPLETION, {"prompt": [1, "a"]}, "prompt[1]", "must be a token id, got 'a'"),
    (COMPLETION, {"prompt": [True]}, "prompt[0]", "got true"),
    (COMPLETION, {"prompt": [1, -1]}, "prompt[1]", "token id -1 is not in the vocabulary (0 to"),
    (COMPLETION, {"prompt": [[1], [10**9]]}, "prompt[1][0]", "not in the vocabulary"),
    (COMPLETION, {"prompt": [10**30]}, "prompt[0]", "an integer of 100 bits"),
    (COMPLETION, {"prompt": ["x"] * 129}, "prompt", "has 129 entries, the limit is 128"),
    (COMPLETION, {"prompt": ["x"] * 20, "n": 7}, "n", "140 choices, the limit is 128"),
    (COMPLETION, completion(best_of=2), "best_of", "not supported"),
    (COMPLETION, completion(echo=True, logprobs=1), "logprobs", "echo with logprobs"),
    (COMPLETION, completion(logprobs=True), "logprobs", "got bool: true"),
    (COMPLETION, completion(logprobs=-1), "logprobs", "at least 0"),
    (COMPLETION, completion(suffix="x"), "suffix", "not supported"),
    (COMPLETION, completion(max_tokens=0), "max_tokens", "at least 1, got 0"),
    (COMPLETION, completion(max_tokens=-5), "max_tokens", "at least 1, got -5"),
    (COMPLETION, completion(max_tokens=1.5), "max_tokens", "got float: 1.5"),
    (COMPLETION, completion(max_tokens="9"), "max_tokens", "got str: '9'"),
    (COMPLETION, completion(max_tokens=10**40), "max_tokens", "an integer of"),
    (COMPLETION, completion(temperature=-0.1), "temperature", "at least 0 and at most 1000, got -0.1"),
    (COMPLETION, completion(temperature="hot"), "temperature", "got str: 'hot'"),
    (COMPLETION, completion(top_p=0), "top_p", "greater than 0 and at most 1, got 0"),
    (COMPLETION, completion(top_p=1.1), "top_p", "at most 1"),
    (COMPLETION, completion(top_k=-2), "top_k", "at least -1, got -2"),
    (COMPLETION, completion(min_p=2), "min_p", "at most 1"),
    (COMPLETION, completion(n=0), "n", "at least 1"),
    (COMPLETION, completion(n=129), "n", "at most 128"),
    (COMPLETION, completion(presence_penalty=2.1), "presence_penalty", "at most 2"),
    (COMPLETION, completion(frequency_penalty=-3), "frequency_penalty", "at least -2"),
    (COMPLETION, completion(temperature=1e39), "temperature", "at most 1000, got 1e+39"),
    (COMPLETION, completion(repetition_penalty=0), "repetition_penalty", "at least 0.01"),
    (COMPLETION, completion(repetition_penalty=1e-40), "repetition_penalty", "at least 0.01"),
    (COMPLETION, completion(seed=2**64), "seed", "at most"),
    (COMPLETION, completion(priority=2**40), "priority", "at most"),
    (COMPLETION, completion(min_tokens=-1), "min_tokens", "at least 0"),
    (COMPLETION, completion(min_tokens=9, max_tokens=8), "min_tokens", "at most 8"),
    (COMPLETION, completion(stop=""), "stop", "empty string"),
    (COMPLETION, completion(stop=["a", 1]), "stop[1]", "expected str, got int: 1"),
    (COMPLETION, completion(stop=["a"] * 65), "stop", "at most 64 strings, got a list of 65"),
    (COMPLETION, completion(stop="x" * 5000), "stop", "at most 4096 characters"),
    (COMPLETION, completion(stop_token_ids=[10**9]), "stop_token_ids", "not in the vocabulary"),
    (COMPLETION, completion(logit_bias={"a": 1}), "logit_bias", "expected int, got str"),
    (COMPLETION, completion(logit_bias={"99999999": 1}), "logit_bias", "not in the vocabulary"),
    (COMPLETION, completion(logit_bias={"5": 101}), "logit_bias[5]", "at most 100, got 101"),
    (COMPLETION, completion(stream_options={"include_usage": True}), "stream_options", "needs stream"),
    (COMPLETION, completion(request_id="a b"), "request_id", "printable ASCII"),
]
WRONG += [
    (CHAT, chat(**{field: value}), field, f"{field} is not supported yet")
    for field, value in {
        "tools": [{"type": "function"}],
        "tool_choice": "required",
        "functions": [{}],
        "response_format": {"type": "json_object"},
        "guided_json": {},
        "guided_choice": ["a"],
        "guided_regex": "a+",
        "structured_outputs": {"json": {}},
        "prompt_logprobs": 0,
        "use_beam_search": True,
        "bad_words": ["x"],
        "allowed_token_ids": [1],
        "truncate_prompt_tokens": 5,
        "modalities": ["audio"],
        "chat_template": "x",
        "return_token_ids": True,
    }.items()
    if field != "guided_json"
]
WRONG.append((CHAT, chat(guided_json={"type": "object"}), "guided_json", "an object of 1 fields"))


async def test_wrong_fields(server: Server) -> None:
    """All against one server: it goes on serving, and none of them reaches the node."""
    failures = []
    for path, body, param, words in WRONG:
        status, answer = await server.post(path, body)
        error = answer.get("error", {})
        good = (
            status == 400
            and set(answer) == {"error"}
            and set(error) == {"message", "type", "param", "code"}
            and words in error["message"]
            and error["param"] == param
            and error["type"] == "invalid_request_error"
        )
        if not good:
            failures.append((path, body, status, answer))
    assert failures == []
    assert server.node.asked == []


async def test_values_that_change_nothing_are_accepted(server: Server) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "functions": None,
        "response_format": {"type": "text"},
        "guided_json": None,
        "best_of": 1,
        "logit_bias": {},
        "stop": [],
        "modalities": ["text"],
        "use_beam_search": False,
        "unheard_of": {"a": [1]},
        "store": False,
        "temperature": None,
        "max_tokens": None,
        "user": "someone",
        "top_k": -1,
    }
    status, answer = await server.post(CHAT, chat(**neutral))
    assert status == 200, answer
    assert server.node.asked[0].sampling.top_k == 0


async def test_every_sampling_field_reaches_the_node(server: Server) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "min_tokens": 2,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "max_tokens": 20,
        "priority": 3,
    }
    headers = {"traceparent": "00-1-2-01"}
    status, answer = await server.post(COMPLETION, completion(**fields), headers=headers)
    assert status == 200, answer
    (asked,) = server.node.asked
    sampling = asked.sampling
    for field in fields.keys() & set(sampling.__struct_fields__):
        if field not in ("logit_bias", "stop_token_ids"):
            assert getattr(sampling, field) == fields[field], field
    assert sampling.logit_bias == {5: -100}
    assert sampling.stop_token_ids == (7,)
    assert (asked.max_tokens, asked.priority, asked.trace_parent) == (20, 3, "00-1-2-01")


async def test_a_tiny_temperature_is_greedy(server: Server) -> None:
    await server.post(COMPLETION, completion(temperature=1e-9))
    assert server.node.asked[0].sampling.temperature == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"x":' + b"[" * 100_000,
        b"{} {}",
    ],
)
async def test_what_is_not_json(server: Server, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with server.session.post(server.url + COMPLETION, data=body, headers=headers) as response:
        answer = json.loads(await response.read())
        assert response.status == 400
        assert answer["error"]["code"] in ("invalid_json", "invalid_request")
    assert server.node.asked == []


async def test_a_form_is_not_json(server: Server) -> None:
    async with server.session.post(server.url + COMPLETION, data={"prompt": "x"}) as response:
        assert response.status == 415
        assert json.loads(await response.read())["error"]["code"] == "unsupported_media_type"


async def test_unknown_models_and_routes(server: Server) -> None:
    for path, body in ((CHAT, chat(model="other")), (COMPLETION, completion(model="other"))):
        status, answer = await server.post(path, body)
        assert status == 404
        assert answer["error"] == {
            "message": "the model 'other' does not exist; this server has small, alias/small",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    status, answer = await server.get("/v1/models/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = await server.get("/v2/nothing")
    assert (status, answer["error"]["message"]) == (404, "no route GET '/v2/nothing'")
    async with server.session.get(server.url + CHAT) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert json.loads(await response.read())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_prompt_that_is_too_long(server: Server, path: str) -> None:
    text = "hello é " * 300
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    status, answer = await server.post(path, body)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "512" in answer["error"]["message"]
    body = (
        {"prompt": [1] * 512}
        if path == COMPLETION
        else {"messages": [{"role": "user", "content": "x" * 9**6}]}
    )
    status, answer = await server.post(path, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_prompt_and_output_must_fit_together(server: Server) -> None:
    status, answer = await server.post(COMPLETION, {"prompt": [1] * 500, "max_tokens": 13})
    assert status == 400
    assert answer["error"]["param"] == "max_tokens"
    assert "at most 12" in answer["error"]["message"]
    status, _ = await server.post(COMPLETION, {"prompt": [1] * 500, "max_tokens": 12})
    assert status == 200
    status, _ = await server.post(COMPLETION, {"prompt": [1] * 511})
    assert status == 200
    assert [asked.max_tokens for asked in server.node.asked] == [12, 1]


async def test_a_body_that_is_too_large(serve: Serve) -> None:
    server = await serve(HttpConfig(max_body_bytes=1000))

    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100

    for data in (b"x" * 2000, chunks()):
        headers = {"Content-Type": "application/json"}
        async with server.session.post(server.url + COMPLETION, data=data, headers=headers) as response:
            assert response.status == 413
            answer = json.loads(await response.read())
            assert answer["error"]["message"] == "the body is larger than 1000 bytes"


async def test_a_body_that_does_not_come(serve: Serve) -> None:
    server = await serve(HttpConfig(read_timeout=0.05))
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 10\r\n\r\n{"
    )
    assert b" 408 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_an_error_is_no_larger_than_its_question_deserves(server: Server) -> None:
    long = "x" * 400_000
    bodies: list[tuple[str, Any]] = [
        (COMPLETION, completion(model=long)),
        (COMPLETION, completion(max_tokens=long)),
        (COMPLETION, completion(stop=[long])),
        (COMPLETION, completion(suffix=long)),
        (COMPLETION, completion(request_id=long)),
        (COMPLETION, completion(logit_bias={long: 1})),
        (CHAT, {"messages": [{"role": long, "content": "x"}]}),
        (CHAT, chat(response_format={"type": long})),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": long}]}]}),
        (CHAT, chat(chat_template_kwargs={long: 1, "messages": long})),
    ]
    for path, body in bodies:
        async with server.session.post(server.url + path, json=body) as response:
            raw = await response.read()
            assert response.status in (400, 404)
            assert len(raw) < 1000, raw[:300]
    async with server.session.get(server.url + "/" + "y" * 5000) as response:
        assert response.status == 404
        assert len(await response.read()) < 1000


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=9
    )
)
def test_any_value_is_shown_in_short(value: Any) -> None:
    assert len(show(value)) <= 120
    assert len(clip(show(value) * 100, 50)) <= 90


@given(message=st.text(), param=st.none() | st.text())
def test_any_error_has_a_bounded_body(message: str, param: str | None) -> None:
    message = message.encode("utf-8", "replace").decode() * 200
    body = json.loads(
        error_body(PdserveError(message, param=param and param.encode("utf-8", "replace").decode()))
    )
    assert len(body["error"]["message"]) < MAX_MESSAGE + 30
    assert len(body["error"]["param"] or "") < MAX_PARAM + 30


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from(
    [*decode_completion(b'{"prompt":1}').__struct_fields__, "messages", "role", "content", "text"]
)
bodies = st.dictionaries(fields, json_values, max_size=8)


@given(body=bodies | json_values)
def test_any_json_is_parsed_or_refused_with_a_reason(body: Any) -> None:
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    for decode in (decode_chat, decode_completion):
        with contextlib.suppress(ClientError):
            decode(raw)


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with pytest.raises(PdserveError):
        decode_chat(raw)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (Overloaded("the queue is full", retry_after=2.2), 503, "overloaded", "3"),
        (NoPeer("no prefill node"), 503, "no_prefill_peer", "1"),
        (Draining("shutting down", retry_after=0.1), 503, "draining", "1"),
        (ContextLengthExceeded("too long for the peer"), 400, "context_length_exceeded", None),
        (RuntimeError("a secret of the house"), 500, "internal_error", None),
    ],
)
async def test_a_refusal_of_the_node_keeps_its_status(
    server: Server, streamed: bool, error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    server.node.refuses = [error]
    async with server.session.post(server.url + COMPLETION, json=completion(stream=streamed)) as response:
        answer = json.loads(await response.read())
        assert response.status == status
        assert response.headers.get("Retry-After") == retry_after
        assert response.content_type == "application/json"
        assert answer["error"]["code"] == code
        assert "secret" not in answer["error"]["message"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_failure_before_the_first_token_keeps_its_status(server: Server, streamed: bool) -> None:
    server.node.script = lambda prompt, sampling: [PeerLost("the prefill node died")]
    status, answer = await server.post(CHAT, chat(stream=streamed))
    assert (status, answer["error"]["code"]) == (502, "prefill_peer_lost")
    assert server.node.generations[0].reasons


async def test_a_refusal_closes_the_choices_that_had_started(server: Server) -> None:
    server.node.refuses = [None, None, Overloaded("full")]
    status, _ = await server.post(COMPLETION, completion(n=4))
    assert status == 503
    assert [g.reasons for g in server.node.generations] == [["abort"], ["abort"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [(WorkerError("rank 0 died"), "worker_failed"), (RuntimeError("secret"), "internal_error")],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_failure_after_the_first_token_is_an_event(
    server: Server, error: Exception, code: str, n: int
) -> None:
    one = server.node.says("hello")[0]
    held = asyncio.Event()
    # With two choices, the second one fails while the first still waits for a token.
    server.node.script = lambda prompt, sampling: [one, held if sampling.choice == 0 and n == 2 else error]
    events = await server.stream(CHAT, chat(n=n))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == code
    assert "secret" not in events[-2]["error"]["message"]
    assert len([e for e in events if e != "[DONE]" and "choices" in e]) >= 2
    assert all(g.reasons for g in server.node.generations)


async def test_a_generation_that_just_stops_is_an_error(server: Server) -> None:
    server.node.script = lambda prompt, sampling: server.node.says("hello")[:1]
    status, answer = await server.post(CHAT, chat())
    assert (status, answer["error"]["code"]) == (500, "internal_error")


async def test_api_keys(serve: Serve) -> None:
    server = await serve(HttpConfig(api_keys=("first", "sécond")))
    for value in (None, "Bearer wrong", "Bearer ", "first", "Basic first", "Bearer first x"):
        headers = {} if value is None else {"Authorization": value}
        async with server.session.post(server.url + CHAT, json=chat(), headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert json.loads(await response.read())["error"]["code"] == "invalid_api_key"
    for key in ("first", "sécond"):
        status, _ = await server.post(CHAT, chat(), headers={"Authorization": f"Bearer {key}"})
        assert status == 200
    assert (await server.get("/v1/models"))[0] == 401
    assert (await server.get("/pd/v1/trace/x"))[0] == 401
    for path in ("/health", "/live", "/version"):
        assert (await server.get(path))[0] == 200
    async with server.session.get(server.url + "/metrics") as response:
        assert response.status == 200


async def test_a_prefill_node_generates_nothing(serve: Serve) -> None:
    server = await serve(role="prefill")
    status, answer = await server.post(CHAT, chat())
    assert (status, answer["error"]["code"]) == (404, "wrong_role")
    assert (await server.get("/v1/models"))[0] == 200


async def test_health_says_why(server: Server) -> None:
    assert (await server.get("/health"))[0] == 200
    server.node.state = Health(ready=False, live=True, reason="no prefill peer", detail={"peers": 0})
    assert await server.get("/health") == (
        503,
        {
            "status": "unavailable",
            "ready": False,
            "live": True,
            "reason": "no prefill peer",
            "detail": {"peers": 0},
        },
    )
    assert (await server.get("/live"))[0] == 200
    server.node.state = Health(ready=False, live=False, reason="no step for 60 s")
    assert (await server.get("/live"))[0] == 503


async def test_models_and_version(server: Server) -> None:
    status, listed = await server.get("/v1/models")
    assert status == 200
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["small", "alias/small"]
    status, one = await server.get("/v1/models/alias/small")
    assert one == {
        "id": "alias/small",
        "object": "model",
        "created": 1700000000,
        "owned_by": "pdserve",
        "root": "small",
        "parent": None,
        "max_model_len": 512,
    }
    assert set((await server.get("/version"))[1]) == {"version"}


async def test_traces(server: Server) -> None:
    server.node.traces["chatcmpl-a/b"] = {"request_id": "chatcmpl-a/b"}
    assert await server.get("/pd/v1/trace/chatcmpl-a/b") == (200, {"request_id": "chatcmpl-a/b"})
    status, answer = await server.get("/pd/v1/trace/other")
    assert (status, answer["error"]["code"]) == (404, "not_found")


async def test_request_ids(server: Server) -> None:
    async def ask(body: dict[str, Any], **headers: str) -> tuple[str, str]:
        async with server.session.post(server.url + CHAT, json=body, headers=headers) as response:
            answer = json.loads(await response.read())
            return response.headers["X-Request-Id"], answer.get("id") or answer["error"]["param"]

    given, named = await ask(chat())
    assert given == named
    assert await ask(chat(), **{"X-Request-Id": "mine"}) == ("mine", "chatcmpl-mine")
    assert await ask(chat(request_id="body")) == ("body", "chatcmpl-body")
    # An error has the id too.
    given, _ = await ask(chat(n=0), **{"X-Request-Id": "mine"})
    assert given == "mine"
    async with server.session.get(server.url + "/health", headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["X-Request-Id"] == "mine"
    status, answer = await server.post(CHAT, chat(), headers={"X-Request-Id": "a b"})
    assert (status, answer["error"]["param"]) == (400, "X-Request-Id")


async def test_two_running_requests_never_share_an_id(server: Server) -> None:
    gate = asyncio.Event()
    server.node.script = lambda prompt, sampling: [gate, *server.node.says("x")]
    headers = {"X-Request-Id": "same"}
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(server.post(CHAT, chat(), headers=headers)) for _ in range(3)]
        await server.node.until_asked(3)
        gate.set()
    ids = {task.result()[1]["id"] for task in tasks}
    assert len(ids) == 3
    assert all(name.startswith("chatcmpl-same") for name in ids)


async def test_metrics_count_what_happened(server: Server) -> None:
    await server.post(CHAT, chat())
    await server.post(CHAT, chat(n=0))
    async with server.session.get(server.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    tokens = len(server.node.says("hello world"))
    assert f'pdserve:generation_tokens_total{{model_name="small"}} {tokens}.0' in text
    assert 'pdserve:request_success_total{finished_reason="stop",model_name="small"} 1.0' in text
    assert 'pdserve:request_errors_total{code="invalid_request",model_name="small"} 1.0' in text
    assert f'pdserve:inter_token_latency_seconds_count{{model_name="small"}} {tokens - 1}.0' in text


@pytest.mark.parametrize(
    ("field", "number"), [("temperature", "1e999"), ("seed", "9" * 5000), ("stop", "-1e999"), ("n", "1e999")]
)
async def test_a_number_out_of_all_range_is_the_clients_mistake(
    server: Server, field: str, number: str
) -> None:
    status, answer = await server.post_raw(COMPLETION, f'{{"prompt": "x", "{field}": {number}}}'.encode())
    assert status == 400, answer
    assert answer["error"]["message"].startswith(field)


@pytest.mark.parametrize(
    "many",
    [
        '"tools": [' + "[]," * 300_000 + "0]",
        '"chat_template_kwargs": {' + ",".join(f'"{i:x}" : 1' for i in range(150_000)) + "}",
        '"messages": [' + '{"role": "user", "content": ""},' * 40_000 + "0]",
        '"unknown": [' + "{}," * 300_000 + "0]",
    ],
    ids=lambda many: many[:20],
)
async def test_a_body_of_countless_parts_is_refused_unparsed(server: Server, many: str) -> None:
    """Each part becomes an object: building millions of them would hold up everybody else's tokens."""
    status, answer = await server.post_raw(CHAT, f"{{{many}}}".encode())
    assert status == 413, answer
    assert "quotation marks and opening brackets" in answer["error"]["message"]


async def test_more_messages_than_tokens_fit_no_prompt(server: Server) -> None:
    status, answer = await server.post(CHAT, {"messages": USER * 513})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "513 entries" in answer["error"]["message"]

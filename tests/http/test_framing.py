"""The bytes of answers: streams frame by frame, whole answers field by field."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdserve.http.frontend import TokenOutput
from tests.http.conftest import Server

USER = {"messages": [{"role": "user", "content": "hello"}]}


async def raw_exchange(server: Server, path: str, body: dict[str, object]) -> tuple[bytes, bytes]:
    """Head and body of an answer as they are on the wire (HTTP/1.0: no chunked coding in between)."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    payload = json.dumps(body).encode()
    writer.write(
        b"POST %b HTTP/1.0\r\nHost: x\r\nX-Request-Id: one\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(payload), payload)
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head, rest


def pieces(server: Server, text: str) -> list[str]:
    return [server.node.tokenizer.token_text(i) for i in server.node.tokenizer.encode(text)]


async def test_a_chat_stream_byte_for_byte(server: Server) -> None:
    server.node.script = lambda prompt, sampling: server.node.says('say "é"\n')
    head, body = await raw_exchange(server, "/v1/chat/completions", {**USER, "stream": True})
    assert head.startswith(b"HTTP/1.0 200")
    assert b"\r\nContent-Type: text/event-stream; charset=utf-8\r\n" in head
    assert b"\r\nCache-Control: no-cache\r\n" in head
    assert b"\r\nX-Request-Id: one" in head
    created = json.loads(body.split(b"\n\n")[0][6:])["created"]
    start = (
        f'data: {{"id":"chatcmpl-one","object":"chat.completion.chunk","created":{created},"model":"small",'
        '"choices":[{"index":0,"delta":'
    )
    expected = start + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
    for piece in pieces(server, 'say "é"\n'):
        if piece != "\ufffd":
            text = json.dumps(piece, ensure_ascii=False)
            expected += start + f'{{"content":{text}}},"logprobs":null,"finish_reason":null}}]}}\n\n'
    expected += start + '{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
    expected += "data: [DONE]\n\n"
    assert body.decode() == expected


async def test_a_completion_stream_with_usage_byte_for_byte(server: Server) -> None:
    server.node.script = lambda prompt, sampling: server.node.says("ab", end="length")
    tokens = server.node.tokenizer.encode("ab")
    prompt = [1, 2, 3]
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    _, answer = await raw_exchange(server, "/v1/completions", body)
    created = json.loads(answer.split(b"\n\n")[0][6:])["created"]
    start = (
        f'data: {{"id":"cmpl-one","object":"text_completion","created":{created},"model":"small","choices":['
    )
    expected = ""
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        expected += start + (
            f'{{"index":0,"text":"{server.node.tokenizer.token_text(token)}","logprobs":null,"finish_reason":'
            + ('"length","stop_reason":null' if last else "null")
            + '}],"usage":null}\n\n'
        )
    expected += start + (
        f'],"usage":{{"prompt_tokens":3,"total_tokens":{3 + len(tokens)},"completion_tokens":{len(tokens)},'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
    )
    expected += "data: [DONE]\n\n"
    assert answer.decode() == expected


async def test_a_whole_chat(server: Server) -> None:
    status, body = await server.post("/v1/chat/completions", {**USER, "model": "alias/small"})
    prompt = server.node.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    tokens = len(pieces(server, "hello world")) + 1
    assert status == 200
    assert body == {
        "id": body["id"],
        "object": "chat.completion",
        "created": body["created"],
        "model": "alias/small",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert body["id"].startswith("chatcmpl-")
    assert server.node.asked[0].prompt_ids == prompt
    assert server.node.asked[0].request_id == body["id"]
    assert server.node.asked[0].max_tokens == 512 - len(prompt)


async def test_several_prompts_and_choices_are_indexed(server: Server) -> None:
    texts = {1: "one", 2: "two"}
    server.node.script = lambda prompt, sampling: server.node.says(f"{texts[prompt[0]]} {sampling.choice}")
    status, body = await server.post(
        "/v1/completions", {"prompt": [[1], [2]], "n": 2, "max_tokens": 9, "seed": 7}
    )
    assert status == 200
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == ["one 0", "one 1", "two 0", "two 1"]
    assert body["usage"]["prompt_tokens"] == 2
    assert [a.request_id for a in server.node.asked] == [f"{body['id']}-{i}" for i in range(4)]
    assert {a.sampling.seed for a in server.node.asked} == {7}


async def test_choices_of_a_stream_interleave_as_their_tokens_come(server: Server) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    say = server.node.says

    def script(prompt: object, sampling: object) -> list[object]:
        i = len(server.node.generations)
        first, *rest = say(f"choice {i}")
        return [first, gates[i], *rest]

    server.node.script = script  # type: ignore[assignment]
    body = {**USER, "n": 2, "stream": True}
    async with server.session.post(server.url + "/v1/chat/completions", json=body) as response:
        order = []
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            order.append(choice["index"])
            if order.count(0) >= 2 and order.count(1) >= 2:
                gates[1].set()
            if choice["index"] == 1 and choice["finish_reason"]:
                gates[0].set()
    # Choice 0 spoke first and ended last.
    assert order[0] == 0
    assert order[-1] == 0
    assert order.index(1) < order.index(0, 2)


async def test_choices_of_a_stream_add_up(server: Server) -> None:
    server.node.script = lambda prompt, sampling: server.node.says(f"choice {sampling.choice} é🙂")
    events = await server.stream("/v1/chat/completions", {**USER, "n": 3})
    assert events.pop() == "[DONE]"
    texts = ["", "", ""]
    roles = [0, 0, 0]
    finished = []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
        roles[choice["index"]] += "role" in choice["delta"]
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert texts == [f"choice {i} é🙂" for i in range(3)]
    assert roles == [1, 1, 1]
    assert sorted(finished) == [0, 1, 2]


async def test_continuous_usage_counts_every_token(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.stream("/v1/chat/completions", {**USER, "stream_options": options})
    counts = [e["usage"]["completion_tokens"] for e in events if e != "[DONE]"]
    tokens = len(server.node.generations[0].lines)
    assert counts == [1, *range(1, tokens + 1), tokens]
    assert events[-2]["choices"] == []


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("include", [True, False])
async def test_a_stop_string_across_tokens_ends_the_generation(
    server: Server, streamed: bool, include: bool
) -> None:
    server.node.script = lambda prompt, sampling: server.node.says("one two\n\nthree")
    body = {"prompt": "x", "stop": ["o\n\nth"], "include_stop_str_in_output": include}
    if streamed:
        events = await server.stream("/v1/completions", body)
        choices = [e["choices"][0] for e in events if e != "[DONE]"]
        text, last = "".join(c["text"] for c in choices), choices[-1]
    else:
        _, answer = await server.post("/v1/completions", body)
        last = answer["choices"][0]
        text = last["text"]
    assert text == ("one two\n\nth" if include else "one tw")
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "o\n\nth")
    (generation,) = server.node.generations
    assert generation.reasons[0] == "stop"
    assert generation.given < len(generation.lines)


async def test_a_stop_string_does_not_count_before_min_tokens(server: Server) -> None:
    server.node.script = lambda prompt, sampling: server.node.says("a b a b a", end="length")
    body = {"prompt": "x", "stop": "b", "min_tokens": len(pieces(server, "a b a")), "max_tokens": 16}
    _, answer = await server.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == "a b a "


async def test_text_held_for_a_stop_string_is_shown_at_the_end(server: Server) -> None:
    server.node.script = lambda prompt, sampling: server.node.says("one two", end="length")
    _, answer = await server.post("/v1/completions", {"prompt": "x", "stop": "two three"})
    assert answer["choices"][0]["text"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stop_token_of_the_request_is_its_stop_reason(server: Server) -> None:
    (token,) = server.node.tokenizer.encode("z")
    hello = server.node.says("hello", end="length")
    server.node.script = lambda prompt, sampling: [
        *(TokenOutput(o.token_id) for o in hello),
        TokenOutput(token, finish_reason="stop"),
    ]
    _, answer = await server.post("/v1/completions", {"prompt": "x", "stop_token_ids": [token]})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", token)
    assert answer["usage"]["completion_tokens"] == len(hello) + 1
    assert server.node.asked[0].sampling.stop_token_ids == (*server.node.card.eos_token_ids, token)


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_first_token_may_be_the_end(server: Server, streamed: bool) -> None:
    server.node.script = lambda prompt, sampling: server.node.says("")
    if streamed:
        events = await server.stream("/v1/chat/completions", USER)
        assert [e["choices"][0]["delta"] for e in events[:-1]] == [
            {"role": "assistant", "content": ""},
            {"content": ""},
        ]
    else:
        _, answer = await server.post("/v1/chat/completions", USER)
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["usage"]["completion_tokens"] == 1


async def test_logprobs_of_a_chat(server: Server) -> None:
    a, b = server.node.tokenizer.encode("ab")[0], server.node.tokenizer.encode("é")[0]
    server.node.script = lambda prompt, sampling: [
        TokenOutput(a, -0.5, [(a, -0.5), (b, float("-inf"))]),
        TokenOutput(server.node.card.eos_token_ids[0], -0.1, [], finish_reason="stop"),
    ]
    text, known = server.node.tokenizer.token_text, server.node.tokenizer.token_bytes
    entry = {
        "token": text(a),
        "logprob": -0.5,
        "bytes": list(known(a)),
        "top_logprobs": [
            {"token": text(a), "logprob": -0.5, "bytes": list(known(a))},
            {"token": text(b), "logprob": -9999.0, "bytes": list(known(b))},
        ],
    }
    body = {**USER, "logprobs": True, "top_logprobs": 2}
    _, answer = await server.post("/v1/chat/completions", body)
    assert answer["choices"][0]["logprobs"] == {"content": [entry]}
    events = await server.stream("/v1/chat/completions", body)
    assert [e["choices"][0]["logprobs"] for e in events[:-1]] == [None, {"content": [entry]}, None]
    assert [a.sampling.logprobs for a in server.node.asked] == [2, 2]


async def test_logprobs_of_a_completion(server: Server) -> None:
    first, second = server.node.tokenizer.encode("a b")[:2]
    server.node.script = lambda prompt, sampling: [
        TokenOutput(first, -1.0, [(second, -0.5)]),
        TokenOutput(second, -2.0, [(second, -2.0)], finish_reason="length"),
    ]
    text = server.node.tokenizer.token_text
    expected = {
        "text_offset": [0, len(text(first))],
        "token_logprobs": [-1.0, -2.0],
        "tokens": [text(first), text(second)],
        "top_logprobs": [{text(second): -0.5, text(first): -1.0}, {text(second): -2.0}],
    }
    _, answer = await server.post("/v1/completions", {"prompt": "x", "logprobs": 1})
    assert answer["choices"][0]["logprobs"] == expected
    events = await server.stream("/v1/completions", {"prompt": "x", "logprobs": 1})
    streamed: dict[str, list[object]] = {key: [] for key in expected}
    for event in events[:-1]:
        for key, values in event["choices"][0]["logprobs"].items():
            streamed[key] += values
    assert streamed == expected


@pytest.mark.parametrize("prompt", ["the prompt", [5, 6, 7]])
async def test_echo_comes_before_the_output(server: Server, prompt: object) -> None:
    shown = prompt if isinstance(prompt, str) else server.node.tokenizer.decode([5, 6, 7])
    body = {"prompt": prompt, "echo": True}
    _, answer = await server.post("/v1/completions", body)
    assert answer["choices"][0]["text"] == f"{shown}hello world"
    events = await server.stream("/v1/completions", body)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == f"{shown}hello world"


async def test_characters_cut_by_tokens_arrive_whole(server: Server) -> None:
    server.node.script = lambda prompt, sampling: server.node.says("🙂☂é")
    events = await server.stream("/v1/completions", {"prompt": "x"})
    texts = [e["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == "🙂☂é"
    assert not any("\ufffd" in text for text in texts)

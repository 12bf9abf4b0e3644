"""The request bodies of the OpenAI routes, as structs, with the extensions vLLM's users rely on.

Types are checked here; ranges in `sampling.py`. Fields nobody knows are ignored, as vLLM does. Fields that
are known, not supported yet, and would change the answer are refused by name (`UNSUPPORTED`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from pdserve.errors import ClientError, RequestTooLarge
from pdserve.http.errors import MAX_PARAM, clip, show


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class _Unsupported(msgspec.Struct, kw_only=True):
    """What is known, not supported, and refused when set to anything but a neutral value."""

    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    best_of: Any = None
    chat_template: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    prediction: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    suffix: Any = None
    tool_choice: Any = None
    tools: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


class CommonRequest(_Unsupported, kw_only=True):
    """What chat and text completions share. None means left out, or null."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None


class ChatRequest(CommonRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    """POST /v1/completions. `prompt`: str, list[str], list[int] or list[list[int]]."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")


# field → is this value one that changes nothing?
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "best_of": lambda v: v is None or v == 1,
    "length_penalty": lambda v: v is None or v == 1,
    "modalities": lambda v: v is None or v == ["text"],
    "response_format": lambda v: v is None or (isinstance(v, dict) and v.get("type") == "text"),
    "tool_choice": lambda v: v in (None, "none", "auto"),
    "function_call": lambda v: v in (None, "none", "auto"),
    # 0 asks for the prompt's own log-probabilities; only null asks for nothing.
    "prompt_logprobs": lambda v: v is None,
    "guided_choice": lambda v: v is None,
}
UNSUPPORTED = _Unsupported.__struct_fields__

MAX_MARKS = 1 << 18
"""Quotation marks and opening brackets of a body at most, unless the caller says otherwise. Parsing holds
up the event loop, and what it costs is what is built: each text, key, list and object of a body has a mark,
and a body of 16 MB could make millions of them."""
MARKS_A_TOKEN = 4
"""More marks than any text has that is worth a prompt."""

_R = TypeVar("_R", bound=CommonRequest)
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def decode_chat(body: bytes, max_marks: int = MAX_MARKS) -> ChatRequest:
    """Parse a body; `ClientError` names the field that is wrong. `max_marks`: see `MAX_MARKS`."""
    return _decode(_chat, body, max_marks)


def decode_completion(body: bytes, max_marks: int = MAX_MARKS) -> CompletionRequest:
    return _decode(_completion, body, max_marks)


def _decode(decoder: msgspec.json.Decoder[_R], body: bytes, max_marks: int) -> _R:
    marks = sum(map(body.count, (b'"', b"[", b"{")))
    if marks > max_marks:
        raise RequestTooLarge(
            f"the body has {marks} quotation marks and opening brackets, texts included; "
            f"the limit is {max_marks}"
        )
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), body) from error
    except msgspec.DecodeError as error:
        raise ClientError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ClientError("the body is nested too deeply", code="invalid_json") from error
    for field in UNSUPPORTED:
        value = getattr(request, field)
        if value is not None and not _NEUTRAL.get(field, _empty)(value):
            raise ClientError(
                f"{field} is not supported yet (got {show(value)})", param=field, code="unsupported_parameter"
            )
    return request


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$\.?(?P<path>.*)`)?$", re.DOTALL)


def _type_error(text: str, body: bytes) -> ClientError:
    """msgspec's "Expected `int`, got `str` - at `$.a[0].b`" with the field first and the value in it."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    missing = re.search(r"missing required field `(.*)`", what)
    if missing:
        field = f"{path}.{missing[1]}" if path else missing[1]
        return ClientError(f"{field} is required", param=field)
    found = _look_up(body, path)
    value = "" if found is None else f": {found}"
    field = clip(path, MAX_PARAM) or "the body"
    return ClientError(f"{field}: {what[:1].lower()}{what[1:].replace('`', '')}{value}", param=path or None)


def _look_up(body: bytes, path: str) -> str | None:
    """The value at msgspec's path, shown; None when the path goes through an unnamed key."""
    if not path or "[...]" in path:
        return None
    try:
        value = msgspec.json.decode(body)
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[name]
    except (KeyError, IndexError, TypeError, msgspec.MsgspecError):
        # A number out of all range can't be read here either.
        return None
    return show(value)

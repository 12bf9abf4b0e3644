"""The JSON of answers, whole and as chunks of a stream.

A chunk is put together from bytes that were encoded once a request or a choice and the few that change with
the token; the result is what encoding the whole object would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from pdserve.http.choice import Choice, Delta
from pdserve.http.frontend import TokenOutput
from pdserve.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
# JSON has no -inf; clients of vLLM know this number for "never".
_NEVER = -9999.0


class Head:
    """What every chunk and the whole answer of one request have in common."""

    def __init__(self, response_id: str, kind: str, created: int, model: str) -> None:
        self.fields: dict[str, Any] = {
            "id": response_id,
            "object": kind,
            "created": created,
            "model": model,
        }

    def prefix(self) -> bytes:
        """`data: ` and the object up to where `choices` begins."""
        return b"data: " + orjson.dumps(self.fields)[:-1] + b',"choices":['


class Format(Protocol):
    """One of the two APIs: how its choices look."""

    id_prefix: str
    kind: str
    chunk_kind: str

    def opening(self, index: int) -> bytes | None:
        """The choice object that opens a choice's stream, None if the API has none."""
        ...

    def before_text(self, index: int) -> bytes: ...

    def after_text(self) -> bytes: ...

    def logprobs(self, outputs: Sequence[TokenOutput], offset: int) -> Any: ...

    def whole(self, index: int, text: str, logprobs: Any, last: Delta) -> dict[str, Any]: ...


class ChatFormat:
    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> bytes:
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % index
        )

    def before_text(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def after_text(self) -> bytes:
        return b"}"

    def logprobs(self, outputs: Sequence[TokenOutput], offset: int) -> dict[str, Any]:
        content = []
        for output in outputs:
            entry = self._entry(output.token_id, output.logprob)
            entry["top_logprobs"] = [self._entry(token, value) for token, value in output.top or ()]
            content.append(entry)
        return {"content": content}

    def whole(self, index: int, text: str, logprobs: Any, last: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class CompletionFormat:
    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> None:
        return None

    def before_text(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def after_text(self) -> bytes:
        return b""

    def logprobs(self, outputs: Sequence[TokenOutput], offset: int) -> dict[str, Any]:
        texts = [self._tokenizer.token_text(output.token_id) for output in outputs]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(output.logprob) for output in outputs],
            "tokens": texts,
            "top_logprobs": [self._alternatives(output) for output in outputs],
        }

    def whole(self, index: int, text: str, logprobs: Any, last: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _alternatives(self, output: TokenOutput) -> dict[str, float | None]:
        """text → logprob of the most likely tokens and of the chosen one."""
        found: dict[str, float | None] = {}
        for token, value in [*(output.top or ()), (output.token_id, output.logprob)]:
            found.setdefault(self._tokenizer.token_text(token), _finite(value))
        return found


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _NEVER)


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class ChunkWriter:
    """Frames the chunks of one stream: `data: {json}` and an empty line each.

    `include_usage`: every chunk has a `usage`, null until the last one, which has no choices. `continuous`:
    every chunk tells the usage so far.
    """

    def __init__(self, head: Head, api: Format, *, logprobs: bool, include_usage: bool) -> None:
        self._prefix = head.prefix()
        self._api = api
        self._logprobs = logprobs
        self._no_usage = b',"usage":null' if include_usage else b""
        self._offsets: dict[int, int] = {}

    def opening(self, choice: Choice, used: dict[str, Any] | None) -> bytes:
        """The chunk before a choice's first text; empty if the API has none."""
        opening = self._api.opening(choice.index)
        return b"" if opening is None else self._frame(opening, used)

    def delta(self, choice: Choice, delta: Delta, used: dict[str, Any] | None) -> bytes:
        """The chunk of a delta; empty when it has nothing to tell (text held back)."""
        entries = b"null"
        if self._logprobs and delta.shown is not None:
            entries = orjson.dumps(self._entries(choice.index, delta.shown))
        elif not delta.text and delta.finish_reason is None and used is None:
            return b""
        finish = b"null"
        if delta.finish_reason is not None:
            finish = b'"%b","stop_reason":%b' % (
                delta.finish_reason.encode(),
                orjson.dumps(delta.stop_reason),
            )
        return self._frame(
            b'%b%b%b,"logprobs":%b,"finish_reason":%b}'
            % (
                self._api.before_text(choice.index),
                orjson.dumps(delta.text),
                self._api.after_text(),
                entries,
                finish,
            ),
            used,
        )

    def text(self, index: int, text: str) -> bytes:
        """A chunk of text that no token stands for: the prompt, for `echo`."""
        self._offsets[index] = len(text)
        return self._frame(
            b'%b%b%b,"logprobs":null,"finish_reason":null}'
            % (self._api.before_text(index), orjson.dumps(text), self._api.after_text()),
            None,
        )

    def last(self, used: dict[str, Any]) -> bytes:
        """The chunk after all choices, with the usage of the whole request."""
        return self._frame(b"", used)

    def _entries(self, index: int, output: TokenOutput) -> Any:
        offset = self._offsets.get(index, 0)
        entries = self._api.logprobs([output], offset)
        if isinstance(entries, dict) and "tokens" in entries:
            self._offsets[index] = offset + len(entries["tokens"][0])
        return entries

    def _frame(self, choice: bytes, used: dict[str, Any] | None) -> bytes:
        tail = self._no_usage if used is None else b',"usage":' + orjson.dumps(used)
        return b"%b%b]%b}\n\n" % (self._prefix, choice, tail)

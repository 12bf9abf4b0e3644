"""What the HTTP edge is told at start."""

from __future__ import annotations

import msgspec


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and keys of one server; `config/` fills it from [server].

    `api_keys`: any of them opens /v1 and the trace route; empty: no key is asked for. `max_body_bytes`: a
    larger request body is answered 413. `max_choices`: prompts times `n` of one request. `max_logprobs`: the
    most alternatives a token. `write_timeout`: seconds a client may leave its stream unread before it is cut
    off and its generations are cancelled. `read_timeout`: seconds a client may take to send its body.
    `tokenize_inline_chars`: longer texts are tokenised off the loop.
    `shutdown_timeout`: seconds the server waits for handlers when it stops.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_choices: int = 128
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_stop_strings: int = 64
    max_stop_chars: int = 4096
    write_timeout: float = 60.0
    read_timeout: float = 60.0
    tokenize_inline_chars: int = 4096
    shutdown_timeout: float = 30.0

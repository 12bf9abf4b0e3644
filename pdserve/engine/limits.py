"""What a scheduler is built with: its role and its bounds, checked once."""

from __future__ import annotations

import enum

import msgspec

from pdserve.errors import ClientError, ConfigError, ContextLengthExceeded


class Role(enum.Enum):
    """What a node does with a request."""

    PREFILL = "prefill"
    """Computes prompts for other nodes, never samples."""
    DECODE = "decode"
    """Receives the KV of a prompt from a prefill node, then samples."""
    BOTH = "both"
    """Computes prompts and samples, in the same steps."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one scheduler. Raises `ConfigError` naming field, value and limit.

    `page_size`: tokens a page. `num_pages`: pages of the arena, the scrap page 0 among them.
    `max_num_seqs`: rows of the worker's batch. `max_num_batched_tokens`: tokens of one step; at least one
    page in the prefill role (chunks end on page boundaries) and at least `max_num_seqs` elsewhere (each
    running sequence gets its decode token in each step, so no row can starve).
    `max_model_len`: prompt and output tokens of one request. `max_waiting`: the bound of the waiting queue;
    beyond it `submit` raises `Overloaded`. `steps_in_flight`: published steps without a result.
    `max_receiving` (decode role): requests admitted but not yet in a row, be it that their KV is under way or
    that it has arrived and every row is taken. They do not count as rows, so that a full batch overlaps with
    the transfers that will refill it; bounded, since each pins its pages. None: `max_num_seqs`.
    """

    role: Role
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int = 1024
    steps_in_flight: int = 2
    max_receiving: int | None = None

    def __post_init__(self) -> None:
        for field, least in (
            ("page_size", 1),
            ("num_pages", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 1 if self.role is Role.PREFILL else 2),
            ("max_waiting", 1),
            ("steps_in_flight", 1),
            ("max_receiving", 1),
        ):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ConfigError(f"{field} is {value}; it must be at least {least}", param=field)
        budget = self.max_num_batched_tokens
        if self.role is Role.PREFILL and budget < self.page_size:
            raise ConfigError(
                f"max_num_batched_tokens is {budget}; a prefill node computes whole pages, "
                f"so it must be at least page_size ({self.page_size})",
                param="max_num_batched_tokens",
            )
        if self.role is not Role.PREFILL and budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {budget}; each running sequence takes one token a step, "
                f"so it must be at least max_num_seqs ({self.max_num_seqs})",
                param="max_num_batched_tokens",
            )

    @property
    def receiving_limit(self) -> int:
        """Requests that may be RECEIVING or READY at once."""
        return self.max_num_seqs if self.max_receiving is None else self.max_receiving

    @property
    def usable_pages(self) -> int:
        """Pages that can be allocated: all but the scrap page."""
        return self.num_pages - 1

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the KV of `tokens` tokens."""
        return -(-tokens // self.page_size)

    def pages_for_request(self, prompt_tokens: int, max_tokens: int) -> int:
        """Pages that a request can ever fill: the KV of the last sampled token is never computed."""
        return self.pages_for(prompt_tokens + max(max_tokens - 1, 0))

    def room(self, prompt_tokens: int) -> int:
        """The largest `max_tokens` that `validate` accepts with this prompt; below 1: it accepts none."""
        capacity = self.usable_pages * self.page_size
        return min(self.max_model_len - prompt_tokens, capacity - prompt_tokens + 1)

    def validate(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise `ClientError` or `ContextLengthExceeded` for a request that this node can never serve.

        `max_tokens` is 0 in the prefill role. The message names field, value and limit.
        """
        least = 0 if self.role is Role.PREFILL else 1
        if prompt_tokens < 1:
            raise ClientError(f"prompt has {prompt_tokens} tokens; it needs at least 1", param="prompt")
        if max_tokens < least or (least == 0 and max_tokens):
            limit = "at least 1" if least else "0 on a prefill node"
            raise ClientError(f"max_tokens is {max_tokens}; it must be {limit}", param="max_tokens")
        if prompt_tokens + least > self.max_model_len:
            raise ContextLengthExceeded(
                f"prompt has {prompt_tokens} tokens; the model length is {self.max_model_len} tokens"
                + (", one of them for the output" if least else ""),
                param="prompt",
            )
        if prompt_tokens + max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}; together they exceed the "
                f"model length of {self.max_model_len} tokens",
                param="max_tokens",
            )
        pages = self.pages_for_request(prompt_tokens, max_tokens)
        if pages > self.usable_pages:
            raise ContextLengthExceeded(
                f"prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}; they take "
                f"{pages} pages of {self.page_size} tokens, and this node has {self.usable_pages}",
                param="prompt" if self.pages_for(prompt_tokens) > self.usable_pages else "max_tokens",
            )

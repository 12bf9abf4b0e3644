"""Configuration and validation: refused before any work, by name, with both numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.limits import Role, SchedulerConfig
from pdserve.errors import ClientError, ConfigError, ContextLengthExceeded


def config(role: Role = Role.BOTH, **change: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "role": role,
        "page_size": 4,
        "num_pages": 11,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 32,
    }
    return SchedulerConfig(**(values | change))


@pytest.mark.parametrize(
    ("field", "value", "role"),
    [
        ("page_size", 0, Role.BOTH),
        ("num_pages", 1, Role.BOTH),
        ("max_num_seqs", 0, Role.BOTH),
        ("max_num_batched_tokens", 0, Role.PREFILL),
        ("max_num_batched_tokens", 3, Role.PREFILL),  # smaller than a page
        ("max_num_batched_tokens", 3, Role.BOTH),  # fewer than the rows
        ("max_num_batched_tokens", 3, Role.DECODE),
        ("max_model_len", 1, Role.BOTH),
        ("max_waiting", 0, Role.BOTH),
        ("steps_in_flight", 0, Role.BOTH),
        ("max_receiving", 0, Role.DECODE),
    ],
)
def test_bad_configuration_names_field_and_value(field: str, value: int, role: Role) -> None:
    with pytest.raises(ConfigError, match=rf"{field} is {value}; .*at least") as caught:
        config(role, **{field: value})
    assert caught.value.param == field


def test_receiving_is_bounded_by_the_rows_unless_told_otherwise() -> None:
    assert config().receiving_limit == 4
    assert config(max_receiving=9).receiving_limit == 9


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "param", "says"),
    [
        (0, 1, ClientError, "prompt", "prompt has 0 tokens; it needs at least 1"),
        (3, 0, ClientError, "max_tokens", "max_tokens is 0; it must be at least 1"),
        (3, -5, ClientError, "max_tokens", "max_tokens is -5; it must be at least 1"),
        (32, 1, ContextLengthExceeded, "prompt", "prompt has 32 tokens; the model length is 32"),
        (30, 3, ContextLengthExceeded, "max_tokens", "max_tokens is 3; .* model length of 32 tokens"),
    ],
)
def test_a_request_that_never_fits_is_refused(
    prompt: int, max_tokens: int, error: type[ClientError], param: str, says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        config().validate(prompt, max_tokens)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(("prompt", "max_tokens", "param"), [(15, 1, "prompt"), (8, 6, "max_tokens")])
def test_a_request_beyond_the_pages_is_refused(prompt: int, max_tokens: int, param: str) -> None:
    small = config(num_pages=4)  # 12 tokens
    with pytest.raises(
        ContextLengthExceeded, match="take 4 pages of 4 tokens, and this node has 3"
    ) as caught:
        small.validate(prompt, max_tokens)
    assert caught.value.param == param


def test_the_last_token_needs_no_page() -> None:
    config(num_pages=4).validate(8, 5)


@pytest.mark.parametrize("max_tokens", [1, -1])
def test_a_prefill_node_generates_nothing(max_tokens: int) -> None:
    with pytest.raises(ClientError, match=f"max_tokens is {max_tokens}; it must be 0 on a prefill node"):
        config(Role.PREFILL).validate(3, max_tokens)


def test_a_prefill_node_takes_a_prompt_of_the_whole_model_length() -> None:
    config(Role.PREFILL).validate(32, 0)
    with pytest.raises(ContextLengthExceeded, match="prompt has 33 tokens; the model length is 32 tokens"):
        config(Role.PREFILL).validate(33, 0)


@given(
    page_size=st.integers(1, 9),
    num_pages=st.integers(2, 9),
    model=st.integers(2, 60),
    prompt=st.integers(1, 70),
)
def test_room_is_the_largest_output_that_is_accepted(
    page_size: int, num_pages: int, model: int, prompt: int
) -> None:
    limits = config(page_size=page_size, num_pages=num_pages, max_model_len=model)
    room = limits.room(prompt)
    if room >= 1:
        limits.validate(prompt, room)
    with pytest.raises(ContextLengthExceeded):
        limits.validate(prompt, max(room, 0) + 1)

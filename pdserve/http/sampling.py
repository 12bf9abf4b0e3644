"""From the fields of a request to `SamplingParams`, with every range checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.engine.sampling import SamplingParams
from pdserve.errors import ClientError, ContextLengthExceeded
from pdserve.http.config import HttpConfig
from pdserve.http.errors import show
from pdserve.http.frontend import ServedModel
from pdserve.http.schema import ChatRequest, CommonRequest, CompletionRequest

DEFAULT_COMPLETION_TOKENS = 16
_MIN_TEMPERATURE = 1e-5
# Logits are 32-bit floats: beyond these an adjusted one would overflow, or none would matter.
_MAX_TEMPERATURE = 1000
_MIN_REPETITION_PENALTY = 0.01


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How the text of an output is made from its tokens, the same for every choice of a request."""

    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int
    logprobs: int | None
    own_stop_ids: frozenset[int]
    """The request's `stop_token_ids`, reported as `stop_reason` (the model's EOS is not)."""


def refuse(field: str, value: object, limit: str) -> ClientError:
    return ClientError(f"{field} must be {limit}, got {show(value)}", param=field)


def check_range(
    field: str, value: float, low: float = -math.inf, high: float = math.inf, *, above: bool = False
) -> None:
    """low <= value <= high, or low < value with `above`; the error names field, value and limit."""
    if value < low or value > high or (above and value == low):
        bounds = []
        if low > -math.inf:
            bounds.append(f"{'greater than' if above else 'at least'} {low:g}")
        if high < math.inf:
            bounds.append(f"at most {high:g}")
        raise refuse(field, value, " and ".join(bounds))


def choices_asked(request: CommonRequest, prompts: int, config: HttpConfig) -> int:
    """`n`, checked together with the number of prompts."""
    n = 1 if request.n is None else request.n
    check_range("n", n, 1, config.max_choices)
    if n * prompts > config.max_choices:
        raise ClientError(
            f"{prompts} prompts with n={n} make {n * prompts} choices, the limit is {config.max_choices}",
            param="n",
        )
    return n


def sampling_params(request: CommonRequest, model: ServedModel, config: HttpConfig) -> SamplingParams:
    """The sampling of choice 0; `max_tokens` is not part of it. Raises `ClientError`."""
    defaults = model.defaults

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    temperature = given(request.temperature, defaults.temperature)
    check_range("temperature", temperature, 0, _MAX_TEMPERATURE)
    top_p = given(request.top_p, defaults.top_p)
    check_range("top_p", top_p, 0, 1, above=True)
    top_k = defaults.top_k if request.top_k is None else request.top_k
    check_range("top_k", top_k, -1)
    min_p = given(request.min_p, defaults.min_p)
    check_range("min_p", min_p, 0, 1)
    presence, frequency = given(request.presence_penalty, 0), given(request.frequency_penalty, 0)
    check_range("presence_penalty", presence, -2, 2)
    check_range("frequency_penalty", frequency, -2, 2)
    repetition = given(request.repetition_penalty, defaults.repetition_penalty)
    check_range("repetition_penalty", repetition, _MIN_REPETITION_PENALTY, 10)
    if request.seed is not None:
        check_range("seed", request.seed, -(2**63), 2**63 - 1)
    if request.priority is not None:
        check_range("priority", request.priority, -(2**31), 2**31 - 1)
    stop_ids = _stop_token_ids(request, model)
    return SamplingParams(
        temperature=0.0 if temperature < _MIN_TEMPERATURE else temperature,
        top_k=min(max(top_k, 0), model.vocab_size),
        top_p=top_p,
        min_p=min_p,
        seed=request.seed,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=_logit_bias(request, model, config),
        logprobs=_logprobs(request, config),
        min_tokens=_min_tokens(request),
        stop_token_ids=stop_ids
        if request.ignore_eos
        else tuple(dict.fromkeys(model.eos_token_ids + stop_ids)),
    )


def output_rules(request: CommonRequest, sampling: SamplingParams, config: HttpConfig) -> OutputRules:
    stop = request.stop
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > config.max_stop_strings:
        raise refuse("stop", stops, f"at most {config.max_stop_strings} strings")
    for text in stops:
        if not text:
            raise ClientError("stop must not contain an empty string", param="stop")
        if len(text) > config.max_stop_chars:
            raise refuse("stop", text, f"strings of at most {config.max_stop_chars} characters")
    return OutputRules(
        stops=stops,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        own_stop_ids=frozenset(request.stop_token_ids or ()),
    )


def token_limit(request: ChatRequest | CompletionRequest, prompt_tokens: int, model: ServedModel) -> int:
    """How many tokens one choice may have, for a prompt of that length.

    Raises `ContextLengthExceeded` when prompt and output cannot fit.
    """
    room = model.max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens; prompt and output together may have "
            f"{model.max_model_len}, so the prompt at most {model.max_model_len - 1}",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
        )
    field, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        field, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is None:
        limit = room if isinstance(request, ChatRequest) else min(room, DEFAULT_COMPLETION_TOKENS)
    else:
        check_range(field, asked, 1)
        if asked > room:
            raise ContextLengthExceeded(
                f"{field} is {show(asked)} and the prompt has {prompt_tokens} tokens; together they may have "
                f"{model.max_model_len}, so {field} at most {room}",
                param=field,
            )
        limit = asked
    if (request.min_tokens or 0) > limit:
        raise refuse("min_tokens", request.min_tokens, f"at most {limit}, the limit of output tokens")
    return limit


def _min_tokens(request: CommonRequest) -> int:
    value = 0 if request.min_tokens is None else request.min_tokens
    check_range("min_tokens", value, 0)
    return value


def _logprobs(request: CommonRequest, config: HttpConfig) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.logprobs is not None:
            check_range("logprobs", request.logprobs, 0, config.max_logprobs)
            if request.echo:
                raise ClientError(
                    "echo with logprobs is not supported yet: it needs the prompt's log-probabilities",
                    param="logprobs",
                    code="unsupported_parameter",
                )
        return request.logprobs
    if not isinstance(request, ChatRequest):
        return None
    if request.top_logprobs is not None:
        check_range("top_logprobs", request.top_logprobs, 0, config.max_logprobs)
        if request.top_logprobs and not request.logprobs:
            raise ClientError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _logit_bias(request: CommonRequest, model: ServedModel, config: HttpConfig) -> dict[int, float]:
    bias = request.logit_bias or {}
    if len(bias) > config.max_logit_bias:
        raise refuse("logit_bias", bias, f"an object of at most {config.max_logit_bias} entries")
    for token, value in bias.items():
        _check_token("logit_bias", token, model)
        check_range(f"logit_bias[{token}]", value, -100, 100)
    return bias


def _stop_token_ids(request: CommonRequest, model: ServedModel) -> tuple[int, ...]:
    ids = tuple(request.stop_token_ids or ())
    if len(ids) > model.vocab_size:
        raise refuse("stop_token_ids", ids, f"at most {model.vocab_size} ids")
    for token in ids:
        _check_token("stop_token_ids", token, model)
    return ids


def _check_token(field: str, token: int, model: ServedModel) -> None:
    if not 0 <= token < model.vocab_size:
        raise ClientError(
            f"{field}: token id {show(token)} is not in the vocabulary (0 to {model.vocab_size - 1})",
            param=field,
        )

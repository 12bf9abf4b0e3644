"""Chat templates: the jinja2 program a model brings along to turn messages into its prompt.

A template is code from a model directory, so it runs in jinja2's immutable sandbox: it can reach no attribute
of Python's insides and change nothing it is given. The names it may use beyond jinja2's own are those Hugging
Face documents for chat templates: `raise_exception`, `strftime_now`, the `tojson` filter, `break` and
`continue`, and the `generation` block (which only marks text for training).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pdserve.errors import ClientError, ModelError

_END = "\ue000end of the final message\ue001"
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class TemplateRefused(Exception):
    """The template itself called `raise_exception`."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` renders what is inside it."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateRefused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. Compiling takes milliseconds and is done once; rendering takes tens of
    microseconds and is done on the loop."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `ModelError` if the source is not a jinja2 template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        `messages`: {"role", "content", ...} with string contents. `continue_final_message`: the prompt ends
        where the last message's content ends, so that the model goes on with it. `kwargs`: further variables
        for the template. Raises `ClientError` when the template refuses the messages, naming its reason.
        """
        clash = _GIVEN.intersection(kwargs or ())
        if clash:
            raise ClientError(
                f"chat_template_kwargs may not set {sorted(clash)[0]!r}", param="chat_template_kwargs"
            )
        given = [dict(m) for m in messages]
        if continue_final_message:
            given[-1]["content"] = f"{given[-1]['content']}{_END}"
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(kwargs or {}),
        }
        try:
            text = self._template.render(
                messages=given, add_generation_prompt=add_generation_prompt, **variables
            )
        except TemplateRefused as error:
            raise ClientError(f"the chat template refused the messages: {error}", param="messages") from error
        except Exception as error:
            # Whatever a template does with odd messages (a missing key, a bad index) is the messages' fault:
            # the same template works for others.
            raise ClientError(
                f"the chat template failed on the messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        if not continue_final_message:
            return text
        end = text.rfind(_END)
        if end < 0:
            raise ClientError(
                "continue_final_message: the chat template does not keep the final message as it is",
                param="continue_final_message",
            )
        return text[:end]

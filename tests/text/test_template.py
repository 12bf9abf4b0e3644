from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import ClientError
from pdserve.text.template import ChatTemplate
from tests import small_tokenizer

USER = {"role": "user", "content": "hello"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or [USER], **options)


def test_chatml() -> None:
    assert render(small_tokenizer.CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (
        render(small_tokenizer.CHATML, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
    )


def test_the_final_message_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "hello, I "}]
    text = render(small_tokenizer.CHATML, messages, continue_final_message=True, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello, I "
    assert messages[-1]["content"] == "hello, I "


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hello"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ thinking }}", "yes"),
    ],
)
def test_what_templates_may_use(source: str, text: str) -> None:
    assert render(source, kwargs={"thinking": "yes"}) == text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}{{ messages[5].content.x }}", "failed on the messages"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str, says: str) -> None:
    with pytest.raises(ClientError, match=says) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_variables_the_server_sets_cannot_be_overridden() -> None:
    with pytest.raises(ClientError, match="may not set 'messages'"):
        render("x", kwargs={"messages": []})


def test_a_template_that_hides_the_final_message_cannot_be_continued() -> None:
    with pytest.raises(ClientError, match="does not keep the final message"):
        render("{{ messages | length }}", continue_final_message=True)

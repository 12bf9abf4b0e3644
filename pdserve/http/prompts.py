"""From messages or `prompt` to the token ids of each prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.errors import ClientError, ContextLengthExceeded
from pdserve.http.config import HttpConfig
from pdserve.http.errors import show
from pdserve.http.frontend import ServedModel
from pdserve.http.schema import ChatRequest, CompletionRequest, Message
from pdserve.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `text`: as the client gave it, for `echo`; None where it gave token ids."""

    ids: list[int]
    text: str | None


class PromptReader:
    """Reads the prompts of requests to one model. Long texts are tokenised off the loop."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, config: HttpConfig) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._config = config

    async def read(self, request: ChatRequest | CompletionRequest) -> list[Prompt]:
        """The prompts of a request, one or more, none empty, all ids in the vocabulary.

        Raises `ClientError` or `ContextLengthExceeded`, naming the field.
        """
        if isinstance(request, ChatRequest):
            return [await self.chat(request)]
        return await self.completion(request)

    async def chat(self, request: ChatRequest) -> Prompt:
        """The one prompt of a conversation, through the model's chat template."""
        template = self._tokenizer.template
        if template is None:
            raise ClientError(
                "the model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if not request.messages:
            raise ClientError("messages must not be empty", param="messages")
        if len(request.messages) > self._model.max_model_len:
            # Each makes a token at the least; rendering so many would hold up the event loop.
            raise ContextLengthExceeded(
                f"messages has {len(request.messages)} entries, too many for the {self._model.max_model_len} "
                "tokens that prompt and output together may have",
                param="messages",
            )
        continued = bool(request.continue_final_message)
        generation = request.add_generation_prompt
        if continued and generation:
            raise ClientError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        if continued and request.messages[-1].role != "assistant":
            raise ClientError(
                "continue_final_message needs a final message of the role 'assistant'",
                param="continue_final_message",
            )
        messages = [_plain(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
        text = template.render(
            messages,
            add_generation_prompt=not continued and generation is not False,
            continue_final_message=continued,
            kwargs=request.chat_template_kwargs,
        )
        # The template writes the special tokens itself.
        ids = await self._encode(text, "messages", add_special_tokens=bool(request.add_special_tokens))
        return Prompt(ids, None)

    async def completion(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts of a text completion: text or token ids, one or several."""
        prompt = request.prompt
        if isinstance(prompt, str):
            return [await self._text(prompt, "prompt", request)]
        if not isinstance(prompt, list):
            raise ClientError(
                "prompt must be a string, a list of strings, a list of token ids or a list of lists of them, "
                f"got {show(prompt)}",
                param="prompt",
            )
        if not prompt:
            raise ClientError("prompt must not be empty", param="prompt")
        if isinstance(prompt[0], int):
            return [Prompt(self._ids(prompt, "prompt"), None)]
        if len(prompt) > self._config.max_choices:
            raise ClientError(
                f"prompt has {len(prompt)} entries, the limit is {self._config.max_choices}", param="prompt"
            )
        read = []
        for i, one in enumerate(prompt):
            field = f"prompt[{i}]"
            if type(one) is not type(prompt[0]) or not isinstance(one, str | list):
                raise ClientError(
                    f"{field} must be {'a string' if isinstance(prompt[0], str) else 'a list of token ids'} "
                    f"like the others, got {show(one)}",
                    param=field,
                )
            if isinstance(one, str):
                read.append(await self._text(one, field, request))
            else:
                read.append(Prompt(self._ids(one, field), None))
        return read

    async def _text(self, text: str, field: str, request: CompletionRequest) -> Prompt:
        special = request.add_special_tokens is not False
        return Prompt(await self._encode(text, field, add_special_tokens=special), text)

    def _ids(self, ids: list[Any], field: str) -> list[int]:
        if not ids:
            raise ClientError(f"{field} must not be empty", param=field)
        if len(ids) >= self._model.max_model_len:
            raise ContextLengthExceeded(
                f"{field} has {len(ids)} tokens; prompt and output together may have "
                f"{self._model.max_model_len}",
                param=field,
            )
        limit = self._model.vocab_size
        for i, token in enumerate(ids):
            if type(token) is not int:
                raise ClientError(
                    f"{field}[{i}] must be a token id, got {show(token)}", param=f"{field}[{i}]"
                )
            if not 0 <= token < limit:
                raise ClientError(
                    f"{field}[{i}]: token id {show(token)} is not in the vocabulary (0 to {limit - 1})",
                    param=f"{field}[{i}]",
                )
        return ids

    async def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        longest = self._model.max_model_len
        if self._tokenizer.surely_longer_than(text, longest):
            raise ContextLengthExceeded(
                f"{field} has {len(text)} characters, too many for the {longest} tokens that prompt and "
                "output together may have",
                param=field,
            )
        if len(text) <= self._config.tokenize_inline_chars:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = await self._tokenizer.encode_off_loop(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise ClientError(f"{field} must not be empty", param=field)
        if max(ids) >= self._model.vocab_size:
            raise ClientError(
                f"{field} contains a token the model has no embedding for (vocabulary 0 to "
                f"{self._model.vocab_size - 1})",
                param=field,
            )
        return ids


def _plain(message: Message, field: str) -> dict[str, str]:
    """A message as templates expect it: `content` a string (text parts are joined by line breaks)."""
    if message.role not in ROLES:
        raise ClientError(
            f"{field}.role must be one of {', '.join(ROLES)}, got {show(message.role)}", param=f"{field}.role"
        )
    for unsupported in ("tool_calls", "function_call"):
        value = getattr(message, unsupported)
        if value not in (None, []):
            raise ClientError(
                f"{field}.{unsupported} is not supported yet",
                param=f"{field}.{unsupported}",
                code="unsupported_parameter",
            )
    if message.content is None:
        raise ClientError(f"{field}.content is required", param=f"{field}.content")
    plain = {"role": message.role, "content": _joined(message, f"{field}.content")}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _joined(message: Message, field: str) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content or ()):
        if part.type != "text":
            raise ClientError(
                f"{field}[{i}].type must be 'text', got {show(part.type)}",
                param=f"{field}[{i}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            raise ClientError(f"{field}[{i}].text is required", param=f"{field}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)

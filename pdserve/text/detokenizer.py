"""Text of a growing token sequence, piece by piece.

A token may end in the middle of a character (byte-level and byte-fallback vocabularies), so a piece is only
given out once it can no longer change. The pieces, joined, are the text of the whole sequence; U+FFFD appears
where the *sequence* is not UTF-8, never where a *piece* happened to be cut.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from pdserve.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Add a token; the text that became certain by it, often one word, perhaps empty."""
        ...

    def finish(self) -> str:
        """The rest: what was held back, with U+FFFD for characters that never got complete."""
        ...


def incremental_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    """A fresh detokeniser for one output sequence. One user, no I/O, no cancellation points."""
    if tokenizer.byte_level:
        return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)


class ByteDetokenizer:
    """For byte-level vocabularies: the bytes of the tokens through an incremental UTF-8 decoder.

    Constant work a token, and at most three bytes are held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For vocabularies whose tokens depend on their neighbours: decode a window, give out what it grew by.

    The window starts at the last token boundary at which text was given out, so that the decoder sees the
    token before it (a leading space is part of the text only after the first token). Text that ends in U+FFFD
    waits for more bytes. A byte-fallback decoder turns a run of byte tokens that is invalid *as a whole* into
    one U+FFFD a byte; where such a run started out valid, what was given out stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._shown = 0  # ids[:shown] are given out
        self._text = ""  # their text, as the window decodes it

    def push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._ids)) if self._shown < len(self._ids) else ""

    def _advance(self, text: str) -> str:
        piece = text[len(self._text) :]
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        self._text = self._decode(self._ids)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

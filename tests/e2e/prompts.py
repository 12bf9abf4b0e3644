"""The forty prompts of the exactness test, by what could go wrong with them.

With n tokens n - 1 are prefilled remotely, so a prompt of a page and one token fills exactly one page.
"""

from __future__ import annotations

from collections.abc import Callable

PAGE = 16
PREFILL_CHUNK = 128
"""Token budget of a step of the prefill node: prompts beyond it take several chunks."""
SINGLE_CHUNK = 100
"""That of the single node: no multiple of the page, so its chunks end in the middle of pages."""

Encode = Callable[[str], list[int]]

_TOPICS = (
    "the tide table of a small harbour",
    "how bread rises",
    "a letter that came back",
    "the second law of thermodynamics",
    "which mushrooms not to eat",
    "a bridge of rope and planks",
    "the price of salt in winter",
    "what the lighthouse keeper saw",
)
TEXT = " ".join(
    f"Page {number} is about {topic}. It was written in {1700 + 7 * number}, on {number % 28 + 1} May, "
    f"and {number * 37 % 100} people have read it since; most of them liked it."
    for number in range(1, 60)
    for topic in (_TOPICS[number % len(_TOPICS)],)
)

UNICODE = {
    "galician": "Fálame do tempo en Compostela: chove, pero moi amodo.",
    "japanese": "東京の天気を三行で教えてください。明日は雨ですか？",
    "emoji": "👩‍👩‍👧‍👦 + 🏳️‍🌈 = ? Explain 🤷🏽‍♂️ in one word.",
    "combining": "Z͑ͫa̴l̶g̷o and café versus cafe\u0301: are they equal?",
    "mixed": "Ωmega ≠ ωmega, 1.5 × 10³ км/ч, שלום, नमस्ते, \u200bzero\u200bwidth\ttab\r\nline",
}

LENGTHS = {
    "one token": 1,
    "two tokens": 2,
    "a page less one": PAGE - 1,
    "a page, one token short of it sent": PAGE,
    "a page sent": PAGE + 1,
    "a page and one token sent": PAGE + 2,
    "two pages less one": 2 * PAGE,
    "two pages sent": 2 * PAGE + 1,
    "two pages and one token sent": 2 * PAGE + 2,
    "seven pages": 7 * PAGE + 1,
    "a chunk less one": PREFILL_CHUNK,
    "a chunk sent": PREFILL_CHUNK + 1,
    "a chunk and one token sent": PREFILL_CHUNK + 2,
    "two chunks sent": 2 * PREFILL_CHUNK + 1,
    "three chunks, the last of one token": 2 * PREFILL_CHUNK + 2,
    "1,500 tokens": 1500,
}
BATCH = 16


def single_prompts(encode: Encode) -> dict[str, list[int]]:
    """24 prompts, to be served one after another."""
    long = encode(TEXT)
    prompts = {
        name: long[start : start + count]
        for start, (name, count) in zip(range(0, 800, 50), LENGTHS.items(), strict=True)
    }
    prompts |= {name: encode(text) for name, text in UNICODE.items()}
    prompts["repeated"] = list(prompts["two pages and one token sent"])
    prompts["repeated, and again"] = list(prompts["two pages and one token sent"])
    prompts["one token over and over"] = [long[5]] * 70
    return prompts


def batch_prompts(encode: Encode) -> dict[str, list[int]]:
    """16 prompts, to be served at once: more tokens than a step takes, some of them the same."""
    long = encode(TEXT)
    lengths = [1, 2, 15, 16, 17, 18, 32, 33, 34, 40, 40, 47, 48, 49, 65, 90]
    assert len(lengths) == BATCH
    starts = [0 if count == 40 else 11 * index for index, count in enumerate(lengths)]
    return {
        f"batch {index:02}": long[start : start + count]
        for index, (start, count) in enumerate(zip(starts, lengths, strict=True))
    }


SINGLE_NAMES = [*LENGTHS, *UNICODE, "repeated", "repeated, and again", "one token over and over"]

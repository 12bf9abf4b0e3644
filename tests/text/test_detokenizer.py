from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.text.detokenizer import incremental_detokenizer
from pdserve.text.tokenizer import Tokenizer

# The vocabulary of the fixture has 420 entries and two added tokens; ids beyond stand for nothing.
ids_lists = st.lists(st.integers(0, 430), max_size=60)


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = incremental_detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@given(ids=ids_lists, skip=st.booleans())
def test_pieces_of_any_tokens_join_to_the_whole(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(tokenizer, ids, skip=skip)) == whole


@given(text=st.text())
@example(text="👩‍👩‍👧 🇬🇱")
def test_pieces_of_a_text_are_never_broken(tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer, tokenizer.encode(text), skip=False)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert pieces[-1] == ""


@given(text=st.text(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), min_size=1))
def test_every_character_leaves_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    """One token a byte: nothing is held back longer than it must be."""
    ids = {tokenizer.token_bytes(i): i for i in range(430)}
    expected, got = [], []
    detokenizer = incremental_detokenizer(tokenizer)
    for character in text:
        got += [detokenizer.push(ids[bytes([byte])]) for byte in character.encode()]
        expected += [""] * (len(character.encode()) - 1) + [character]
    assert got == expected
    assert detokenizer.finish() == ""


def test_a_character_that_never_got_complete_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    ids = {tokenizer.token_bytes(i): i for i in range(430)}
    pieces = pieces_of(tokenizer, [ids[b"a"], ids[b"\xf0"], ids[b"\x9f"]])
    assert pieces == ["a", "", "", "\ufffd"]


fallback_texts = st.text(st.sampled_from("ab. é€🙂日"))


@given(
    words=st.lists(st.sampled_from(["\u2581hello", "\u2581world", "\u2581the", ".", "a"])),
    text=fallback_texts,
)
def test_pieces_of_a_neighbour_dependent_vocabulary(
    fallback_tokenizer: Tokenizer, words: list[str], text: str
) -> None:
    ids = [fallback_tokenizer.rust.token_to_id(word) for word in words]
    ids += [3 + byte for byte in text.encode()] + ids
    pieces = pieces_of(fallback_tokenizer, ids)
    assert "".join(pieces) == fallback_tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 270), max_size=40))
def test_a_neighbour_dependent_vocabulary_keeps_what_it_gave_out(
    fallback_tokenizer: Tokenizer, ids: list[int]
) -> None:
    pieces = pieces_of(fallback_tokenizer, ids)
    assert len("".join(pieces)) <= len(ids) * 5 + 1

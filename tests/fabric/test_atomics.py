"""Shared 64-bit words: values, bounds, alignment, ownership."""

import mmap

import pytest

from pdserve.fabric.atomics import SharedCounter, load_acquire, store_release


@pytest.mark.parametrize("value", [0, 1, 2**32, 2**64 - 1])
def test_a_word_holds_what_was_stored(value: int) -> None:
    page = mmap.mmap(-1, 4096)
    store_release(page, 64, value)
    assert load_acquire(page, 64) == value
    assert int.from_bytes(page[64:72], "little") == value
    page.close()  # nothing holds the mapping


@pytest.mark.parametrize("offset", [-8, 4089, 4096, 2**63])
def test_a_word_outside_the_buffer_is_refused(offset: int) -> None:
    page = mmap.mmap(-1, 4096)
    with pytest.raises(ValueError, match="offset"):
        store_release(page, offset, 1)
    with pytest.raises(ValueError, match="offset"):
        load_acquire(page, offset)
    page.close()


def test_a_misaligned_word_is_refused() -> None:
    page = mmap.mmap(-1, 4096)
    with pytest.raises(ValueError, match="multiple of 8"):
        load_acquire(page, 3)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_value_outside_64_bits_is_refused(value: int) -> None:
    page = mmap.mmap(-1, 4096)
    with pytest.raises(ValueError, match="value"):
        store_release(page, 0, value)
    with SharedCounter(page) as counter, pytest.raises(ValueError, match="value"):
        counter.store(value)


def test_a_buffer_shorter_than_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="offset"):
        load_acquire(b"1234567", 0)


def test_a_counter_pins_its_buffer_until_closed() -> None:
    page = mmap.mmap(-1, 4096)
    counter = SharedCounter(page, 8)
    counter.store(7)
    assert counter.load() == 7 == load_acquire(page, 8)
    with pytest.raises(BufferError):
        page.close()
    counter.close()
    counter.close()
    page.close()
    with pytest.raises(ValueError, match="closed"):
        counter.load()


def test_a_read_only_buffer_can_be_loaded_but_not_stored() -> None:
    data = (5).to_bytes(8, "little")
    with SharedCounter(data, writable=False) as counter:
        assert counter.load() == 5
        with pytest.raises(ValueError, match="reading only"):
            counter.store(1)

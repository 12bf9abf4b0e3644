from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.observe.trace import Mark, Step, TraceRecord, TraceStore, merge, summarise


def decode_record() -> TraceRecord:
    """A request received at 10, asked for at 10.3, with 8 runs of two slots counted, and 3 tokens."""
    record = TraceRecord("r", "decode-1", "decode")
    record.mark(Mark.RECEIVED, 10.0)
    record.mark(Step.PARSED, 10.1)
    record.mark(Step.RESERVED, 10.2)
    record.mark(Step.REQUESTED, 10.3)
    record.prompt_tokens, record.cached_tokens, record.kv_pages, record.runs = 33, 0, 2, 8
    record.progress(4, 2, 11.05)
    record.progress(4, 4, 11.15)
    record.progress(9, 1, 11.25)
    record.progress(9, 4, 11.45)
    record.mark(Step.READY, 11.5)
    for now in (11.6, 11.7, 11.9):
        record.token(now)
    record.mark(Step.FINISHED, 12.0)
    return record


def prefill_record() -> TraceRecord:
    """Two chunks of two layers, 2 runs of 1,000 bytes each."""
    record = TraceRecord("r", "prefill-1", "prefill")
    record.mark(Step.ACCEPTED, 10.4)
    record.mark(Step.SCHEDULED, 10.5)
    for i, (chunk, layer) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        record.layer_ready(chunk, layer, 11.0 + i / 10)
        record.layer_posted(chunk, layer, 11.01 + i / 10, runs=2, length=2000)
    record.mark(Step.POSTED, 11.31)
    record.mark(Step.QUIET, 11.4)
    return record


def exported(record: TraceRecord) -> dict[str, Any]:
    """Through JSON, as it would come from a peer."""
    loaded: dict[str, Any] = json.loads(json.dumps(record.export(1000.0)))
    return loaded


def test_a_merged_trace_has_all_nine_steps_in_order() -> None:
    merged = merge(exported(decode_record()), exported(prefill_record()))
    assert list(merged["steps"]) == [step.value for step in Step]
    assert list(merged["steps"].values()) == sorted(merged["steps"].values())
    assert merged["steps"]["1_parsed"] == 1010.1
    assert (merged["node"], merged["peer"]) == ("decode-1", "prefill-1")
    assert (merged["kv_bytes"], merged["kv_pages"], merged["runs"]) == (8000, 2, 8)


def test_a_layer_is_counted_when_all_posted_up_to_it_is() -> None:
    layers = merge(exported(decode_record()), exported(prefill_record()))["layers"]
    assert [(row["chunk"], row["layer"]) for row in layers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row["ready"] for row in layers] == [1011.0, 1011.1, 1011.2, 1011.3]
    assert [row["counted"] for row in layers] == [1011.05, 1011.15, 1011.45, 1011.45]


def test_what_has_not_arrived_is_not_counted() -> None:
    decode = exported(decode_record())
    decode["progress"] = decode["progress"][:2]
    assert [row["counted"] for row in merge(decode, exported(prefill_record()))["layers"]] == [
        1011.05,
        1011.15,
        None,
        None,
    ]


def test_a_summary_is_the_table_of_a_benchmark() -> None:
    numbers = summarise(merge(exported(decode_record()), exported(prefill_record())))
    assert numbers.pop("ttft_ms") == pytest.approx(1600)
    assert numbers.pop("itl_ms") == pytest.approx(150)
    # Under way from 11.0 to 11.05, 11.1 to 11.15 and 11.2 to 11.45; the waits for a layer are not the wire's.
    assert numbers.pop("transfer_gbps") == pytest.approx(8000 / 0.35 / 1e9)
    # Five of eight runs were in when the last layer of the last chunk was seen to be ready, at 11.3.
    assert numbers.pop("hidden_share") == 5 / 8
    assert numbers == {"prompt_tokens": 33, "output_tokens": 3, "kv_bytes": 8000, "kv_pages": 2}


def test_a_single_node_has_no_transfer() -> None:
    record = TraceRecord("r", "both", "both")
    record.mark(Mark.RECEIVED, 1.0)
    record.token(2.0)
    numbers = summarise(merge(exported(record), None))
    assert numbers["ttft_ms"] == pytest.approx(1000)
    assert numbers["itl_ms"] is None
    assert numbers["transfer_gbps"] is None
    assert numbers["hidden_share"] is None


def test_an_empty_record_is_a_summary_of_nothing() -> None:
    assert set(summarise(merge(exported(TraceRecord("r", "n", "both")), None)).values()) == {None}
    assert set(summarise({}).values()) == {None}


def test_merging_changes_neither_record() -> None:
    decode, prefill = exported(decode_record()), exported(prefill_record())
    before = json.dumps([decode, prefill])
    merge(decode, prefill)
    assert json.dumps([decode, prefill]) == before


def test_the_first_stamp_stays() -> None:
    record = TraceRecord("r", "n", "both")
    record.mark(Step.READY, 1.0)
    record.mark(Step.READY, 2.0)
    record.layer_ready(0, 0, 1.0)
    record.layer_ready(0, 0, 2.0)
    assert record.export(0)["steps"] == {"8_ready": 1.0}
    assert record.export(0)["layers"][0]["ready"] == 1.0


@given(counts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=200))
def test_memory_of_a_record_is_bounded_and_its_last_count_is_right(counts: list[tuple[int, int]]) -> None:
    record = TraceRecord("r", "n", "decode", max_rows=16)
    slots: dict[int, int] = {}
    for now, (slot, more) in enumerate(counts):
        slots[slot] = slots.get(slot, 0) + more
        record.progress(slot, slots[slot], float(now))
        record.layer_ready(0, now, float(now))
    trace = record.export(0)
    assert len(trace["progress"]) <= 16
    assert len(trace["layers"]) <= 16
    assert trace["truncated"] == (len(counts) > 16)
    if counts:
        assert trace["progress"][-1] == [float(len(counts) - 1), sum(slots.values())]
        assert trace["progress"] == sorted(trace["progress"])


def test_a_store_forgets_the_oldest() -> None:
    store = TraceStore("n", "both", capacity=2, wall_offset=0.0)
    for name in "abc":
        store.begin(name)
    assert store.get("a") is None
    assert store.export("a") is None
    exported_c = store.export("c")
    assert exported_c is not None
    assert exported_c["request_id"] == "c"
    store.begin("b", attempt=2)
    store.begin("d")
    assert store.get("c") is None
    again = store.get("b")
    assert again is not None
    assert again.attempt == 2
    assert len(store) == 2

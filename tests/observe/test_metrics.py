from __future__ import annotations

from pdserve.observe.metrics import NodeMetrics, Snapshot, sample


def test_names_are_those_of_vllm_under_our_prefix() -> None:
    metrics = NodeMetrics("small")
    metrics.prompt(7, cached=2)
    metrics.first_token(0.2)
    metrics.next_token(0.01)
    metrics.finished("length", 2, 0.3)
    metrics.error("overloaded")
    text = metrics.render().decode()
    for line in (
        'pdserve:num_requests_running{model_name="small"} 0.0',
        'pdserve:num_requests_waiting{model_name="small"} 0.0',
        'pdserve:kv_cache_usage_perc{model_name="small"} 0.0',
        'pdserve:prompt_tokens_total{model_name="small"} 7.0',
        'pdserve:generation_tokens_total{model_name="small"} 2.0',
        'pdserve:time_to_first_token_seconds_count{model_name="small"} 1.0',
        'pdserve:inter_token_latency_seconds_count{model_name="small"} 1.0',
        'pdserve:e2e_request_latency_seconds_sum{model_name="small"} 0.3',
        'pdserve:request_success_total{finished_reason="length",model_name="small"} 1.0',
        'pdserve:request_errors_total{code="overloaded",model_name="small"} 1.0',
    ):
        assert line in text.splitlines()
    assert "_created" not in text


def test_state_is_asked_for_at_each_scrape() -> None:
    metrics = NodeMetrics("small")
    running = 0
    metrics.attach(
        lambda: Snapshot(
            requests_running=running,
            pages={"free": 3, "quarantined": 1},
            transfer_bytes={"received": 4096},
            stale_immediates=0,
        )
    )
    running = 5
    assert sample(metrics, "pdserve:num_requests_running") == 5
    assert sample(metrics, "pdserve:kv_pages", {"state": "quarantined"}) == 1
    assert sample(metrics, "pdserve:transfer_bytes_total", {"direction": "received"}) == 4096
    assert sample(metrics, "pdserve:stale_immediates_total") == 0
    # What a node does not have, it does not export.
    assert "writes_in_flight" not in metrics.render().decode()


def test_nodes_of_one_process_do_not_mix() -> None:
    one, two = NodeMetrics("small"), NodeMetrics("small")
    one.first_token(0.1)
    assert sample(two, "pdserve:generation_tokens_total") == 0


def test_what_the_node_pushes() -> None:
    metrics = NodeMetrics("small")
    metrics.queued(0.1)
    metrics.transferred(0.02)
    metrics.step(128, 0.05)
    metrics.response(404)
    assert sample(metrics, "pdserve:request_queue_time_seconds_count") == 1
    assert sample(metrics, "pdserve:kv_transfer_seconds_count") == 1
    assert sample(metrics, "pdserve:iteration_tokens_sum") == 128
    assert sample(metrics, "pdserve:http_responses_total", {"status": "404"}) == 1

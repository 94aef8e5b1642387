"""Metrics as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.v1 import generation_pb2 as pb
from headrace_router.metrics import DURATIONS, Gauges, Histogram, Metrics

GAUGES = Gauges(lambda: 3, lambda: 500, lambda: 2, lambda: 40, 1000)


def test_names_and_values() -> None:
    metrics = Metrics(100, 200)
    metrics.request_count = 5
    metrics.request_failure["overloaded"] = 1
    metrics.request_duration.observe(0.01)
    text = metrics.render(GAUGES)
    lines = text.splitlines()
    assert {"tgi_request_count 5", 'tgi_request_failure{err="overloaded"} 1', "tgi_queue_size 3"} <= set(lines)
    assert {"tgi_batch_current_size 2", "tgi_batch_current_max_tokens 40"} <= set(lines)
    helps = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))
    samples = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))
    assert sum(1 for _ in text_string_to_metric_families(text)) == len(helps)


# What the dashboard that TGI brings asks for, beside _bucket, _sum and _count of histograms.
DASHBOARD = (
    "tgi_request_count", "tgi_request_success", "tgi_request_failure", "tgi_request_duration",
    "tgi_request_validation_duration", "tgi_request_queue_duration", "tgi_request_inference_duration",
    "tgi_request_mean_time_per_token_duration", "tgi_request_generated_tokens", "tgi_request_max_new_tokens",
    "tgi_request_input_length", "tgi_request_skipped_tokens", "tgi_queue_size", "tgi_batch_current_size",
    "tgi_batch_current_max_tokens", "tgi_batch_next_size", "tgi_batch_concat", "tgi_batch_inference_count",
    "tgi_batch_inference_success", "tgi_batch_inference_failure", "tgi_batch_inference_duration",
    "tgi_batch_forward_duration", "tgi_batch_decode_duration", "tgi_batch_filter_duration", "tgi_batch_concat_duration",
)


def test_every_name_of_tgi_is_there() -> None:
    kinds = dict(line.split()[2:4] for line in Metrics(100, 200).render(GAUGES).splitlines() if line.startswith("# TYPE"))
    assert set(DASHBOARD) <= kinds.keys()
    assert kinds["tgi_request_skipped_tokens"] == "histogram"


def test_buckets_are_cumulative_and_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(histogram.lines("h", 'm="x"')) == [
        'h_bucket{m="x",le="1"} 2', 'h_bucket{m="x",le="2"} 3', 'h_bucket{m="x",le="+Inf"} 4', 'h_sum{m="x"} 12',
        'h_count{m="x"} 4',
    ]


def test_duration_buckets_are_tgis() -> None:
    assert len(DURATIONS) == 35
    assert abs(DURATIONS[0] - 0.00015) < 1e-12
    assert 145 < DURATIONS[-1] < 147


def test_draft_tokens_by_kind() -> None:
    metrics = Metrics(100, 200)
    for _ in range(2):
        metrics.drafted(pb.Timings(draft_tokens=9, accepted_tokens=6, model_draft_tokens=4, model_accepted_tokens=3))
    text = metrics.render(GAUGES)
    assert 'headrace_draft_tokens{kind="lookup"} 10' in text
    assert 'headrace_draft_tokens{kind="model"} 8' in text
    assert 'headrace_accepted_draft_tokens{kind="lookup"} 6' in text
    assert 'headrace_accepted_draft_tokens{kind="model"} 6' in text

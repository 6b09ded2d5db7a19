"""GET /metrics as Prometheus reads it, under the names that vLLM's dashboards and the Gateway API inference extension ask for."""
import math

import pytest

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")

# name -> type, as the parser names them: a counter without its _total.
VLLM = {
    "vllm:num_requests_running": "gauge", "vllm:num_requests_waiting": "gauge", "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge", "vllm:prompt_tokens": "counter", "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter", "vllm:prefix_cache_queries": "counter", "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter", "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram", "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram", "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}


def families(http):
    r = http.get("/metrics")
    assert r.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for f in parser.text_string_to_metric_families(r.text):
        assert f.name not in found, f"{f.name} occurs twice"
        found[f.name] = f
    return found


def test_every_name_is_there_with_its_type_and_help(http):
    found = families(http)
    for name, kind in VLLM.items():
        assert name in found, name
        assert found[name].type == kind, name
    assert all(f.documentation and f.samples for f in found.values())


def test_series_are_labelled_and_finite(http):
    for f in families(http).values():
        for s in f.samples:
            assert s.labels.get("model_name"), s
            assert math.isfinite(s.value), s
    info = families(http)["vllm:cache_config_info"].samples[0]
    assert int(info.labels["block_size"]) > 0 and int(info.labels["num_gpu_blocks"]) > 0 and info.value == 1


def test_histograms_hold_together(http):
    http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
    for f in families(http).values():
        if f.type != "histogram":
            continue
        buckets = [s for s in f.samples if s.name.endswith("_bucket")]
        values = [s.value for s in buckets]
        assert values == sorted(values) and buckets[-1].labels["le"] == "+Inf"
        assert values[-1] == next(s.value for s in f.samples if s.name.endswith("_count"))


def test_a_request_is_counted(http):
    def value(found, family, sample):
        return sum(s.value for s in found[family].samples if s.name == sample)
    before = families(http)
    usage = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}).json()["usage"]
    after = families(http)
    for family, sample, n in (("vllm:prompt_tokens", "vllm:prompt_tokens_total", usage["prompt_tokens"]),
                              ("vllm:generation_tokens", "vllm:generation_tokens_total", 3),
                              ("vllm:request_success", "vllm:request_success_total", 1),
                              ("vllm:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds_count", 1)):
        assert value(after, family, sample) - value(before, family, sample) == n, family


def test_context_policies_have_a_series_each(http):
    found = families(http)
    for name in ("requests", "evicted_tokens", "merged_tokens", "fallback_pages"):
        policies = {s.labels["policy"] for s in found[f"kvasir:context_{name}"].samples}
        assert {"full", "streaming", "evict"} <= policies, name
    when = {(s.labels["when"], s.labels["outcome"]) for s in found["kvasir:context_compactions"].samples}
    assert when == {(w, o) for w in ("inline", "background") for o in ("done", "failed")}

"""A GPU that fails, as the execution model of cuda/host_cuda makes it fail: at the n-th of all calls of the CUDA runtime, in each of the
ways in which calls fail. Whenever it happens, the daemon stays up, requests end with an answer or a reason, readiness tells the truth,
and nothing is left behind. (tests/unit/cuda/test_failures.c has this for every n, with an engine in place of a daemon.)
"""
import json
import math
import threading

import httpx
import pytest

from daemon import DEVICE, SLOW, Daemon, eventually

pytestmark = pytest.mark.skipif(DEVICE != "cuda-host", reason="KVASIR_TEST_DEVICE is not cuda-host, the device that fails on demand")

# What is left when a call fails: memory ran short, one call could not be done, or the device is gone for good.
NO_MEMORY, REFUSED, LOST = "cudaErrorMemoryAllocation", "cudaErrorLaunchOutOfResources", "cudaErrorECCUncorrectable"
TEXT = {NO_MEMORY: "out of memory", REFUSED: "too many resources", LOST: "uncorrectable ECC"}


def failing(nth, error, *args, function="*"):
    return Daemon("--kv-memory", "1M", *args, wait=False, env={"KVASIR_HOST_CUDA_FAIL": f"{function}:{nth}:{error}"})


def ready(d):
    return httpx.get(d.url + "/health/ready", timeout=30 * SLOW)


def settled(d):
    """What /health/ready says once loading is over; None if the process has ended."""
    def look():
        if d.process.poll() is not None:
            return True
        try:
            r = ready(d)
        except httpx.TransportError:
            return False
        return r if r.status_code == 200 or r.json()["status"] != "loading" else False
    r = eventually(look, 30, "loading is over")
    return None if r is True else r


def complete(d, prompt, **more):
    return httpx.post(d.url + "/v1/completions", timeout=60 * SLOW,
                      json={"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **more})


def stream(d, prompt, results):
    """Adds what a streamed answer came to: "done", or the message of the error that ended it."""
    with httpx.stream("POST", d.url + "/v1/completions", timeout=60 * SLOW,
                      json={"prompt": prompt, "max_tokens": 6, "stream": True, "ignore_eos": True}) as r:
        if r.status_code != 200:
            results.append(json.loads(r.read())["error"]["message"])
            return
        lines = [line for line in r.iter_lines() if line]
    errors = [json.loads(line[6:])["error"]["message"] for line in lines if '"error"' in line]
    assert errors or lines[-1] == "data: [DONE]"
    results.append(errors[0] if errors else "done")


def work(d):
    """Two answers beside each other, then one alone; what they came to."""
    results = []
    jobs = [threading.Thread(target=stream, args=(d, prompt, results)) for prompt in ("One and", "Another one, which is longer, and")]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(90 * SLOW)
    r = complete(d, "A third")
    results.append("done" if r.status_code == 200 else r.json()["error"]["message"])
    assert len(results) == 3, "a request did not end"
    return results


def check(nth, error):
    d = failing(nth, error)
    try:
        state = settled(d)
        if state is None:  # there is nothing at all that could be used: the start ends, as it does without a GPU
            assert d.wait() == 1
            assert len([line for line in d.stderr().splitlines() if not line.startswith("host_cuda")]) == 1, d.stderr()
            return "ended"
        files = d.n_files()
        results = work(d) if state.status_code == 200 else []
        for text in results:
            assert text == "done" or TEXT[error] in text or error == LOST, (nth, error, text)
        assert sum(text != "done" for text in results) <= 2 or error == LOST
        assert httpx.get(d.url + "/health/live").status_code == 200
        after = ready(d)
        if error == LOST and results and "done" != results[-1]:
            after = eventually(lambda: (lambda r: r if r.status_code == 503 else None)(ready(d)), 10, "the device is known to be lost")
        if after.status_code == 200:
            assert complete(d, "And now?").status_code == 200
            eventually(lambda: d.idle() and d.pages() == d.metrics()["kvasir:kv_pages_total"], 5, "all pages are back")
            assert d.kv()["drift_pages"] == 0
        else:
            why = after.json()["error"]["message"]
            assert after.json()["status"] == "failed" and (TEXT[error] in why or "memory" in why), (nth, error, why)
            assert complete(d, "And now?").status_code == 503
        eventually(lambda: d.n_files() <= files, 5, "all sockets are closed")
        assert d.stop() == 0
        return "ready" if after.status_code == 200 else "failed"
    finally:
        if d.process.poll() is None:
            d.process.kill()
            d.process.wait()


@pytest.mark.parametrize("error", [NO_MEMORY, REFUSED, LOST])
def test_whatever_call_fails_the_daemon_tells_and_stays(error):
    """From the first call of the start to those of steps that graphs launch; later ones only repeat."""
    seen = {check(nth, error) for nth in [1, 2, 3, 4, *range(5, 260, 19)]}
    assert seen >= {"failed"} if error == LOST else {"ready", "failed"}


def test_a_device_lost_in_the_middle_of_streams_ends_them_with_the_reason():
    d = failing(4, LOST, function="cudaGraphLaunch")
    try:
        assert settled(d).status_code == 200
        assert any(TEXT[LOST] in text for text in work(d))
        r = eventually(lambda: (lambda r: r if r.status_code == 503 else None)(ready(d)), 10, "the device is known to be lost")
        assert r.json()["status"] == "failed" and "the device is lost" in r.text
        assert httpx.get(d.url + "/health/live").status_code == 200
        assert d.stop() == 0
    finally:
        if d.process.poll() is None:
            d.process.kill()
            d.process.wait()


def test_pages_that_left_the_device_come_back_with_the_same_answer():
    """Through host memory; prompts are token ids, so that any model will do."""
    with Daemon("--kv-memory", "1M") as d:
        page = d.kv()["pool"]["page_bytes"]

    def ask(d, seed):
        tokens = [(seed * 31 + i * 7919) % 251 for i in range(700)]
        r = httpx.post(d.url + "/v1/completions", timeout=60 * SLOW, json={"prompt": tokens, "max_tokens": 6, "temperature": 0, "ignore_eos": True})
        assert r.status_code == 200, r.text
        usage = r.json()["usage"]
        return r.json()["choices"][0]["text"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def tier(d):
        return httpx.get(d.url + "/v1/kv", timeout=30 * SLOW).json()["tiers"][0]
    with Daemon("--kv-memory", 64 * max(page, 4096), "--context", 900, "--kv-ram", "64M") as d:
        first, _ = ask(d, 1)
        for seed in (2, 3):
            ask(d, seed)
        eventually(lambda: tier(d)["stored"] > 0 and tier(d)["writing"] == 0, 20, "the pages that had to go are in the tier")
        again, cached = ask(d, 1)
        assert again == first
        assert cached > 0 and tier(d)["fetched"] > 0, tier(d)
        assert d.kv()["drift_pages"] == 0


def test_context_policies_are_taken_and_told():
    """Each one acts on the device; the same request has the same answer, and what is read of a choice of everything is everything."""
    tokens = [(i * 7919) % 251 for i in range(240)]

    def ask(d, kv):
        r = httpx.post(d.url + "/v1/completions", timeout=60 * SLOW,
                       json={"prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "kv_cache": kv})
        assert r.status_code == 200, r.text
        return r.json()
    with Daemon("--kv-memory", "2M", "--context", 400, "--kv-bounds") as d:
        full = ask(d, {"diagnostics": True})
        told = full["kv_cache"]["diagnostics"]
        assert 0 < told["attention_entropy"] < math.log(252) and 1 / 252 < told["largest_weight"] < 1 and told["drift_samples"] == 0
        for aggregation in ("norm_ratio", "attention_mass", "recency"):
            evict = {"policy": "evict", "max_cache_size": 128, "recent_size": 32, "aggregation": aggregation}
            one, two = ask(d, evict), ask(d, evict)
            assert one["kv_cache"]["evicted_tokens"] >= 112 and one["choices"][0]["text"] == two["choices"][0]["text"]
        assert ask(d, {"policy": "quest", "max_cache_size": 400})["choices"][0]["text"] == full["choices"][0]["text"]
        quest = {"policy": "quest", "max_cache_size": 96, "diagnostics": True}
        one, two = ask(d, quest), ask(d, quest)
        assert one["kv_cache"]["tokens_read"] == 96 and one["choices"][0]["text"] == two["choices"][0]["text"]
        assert one["kv_cache"]["diagnostics"] == two["kv_cache"]["diagnostics"] and one["kv_cache"]["diagnostics"]["drift_samples"] >= 1
        assert d.kv()["drift_pages"] == 0

"""Context policies: how a conversation goes on that is longer than what is kept of it, asked for in kv_cache and told in the answer."""
import json
import math
import os

import httpx
import pytest

from daemon import LONG, SLOW, Daemon
from faults import tiny_model

PAGE = 368640  # of SmolLM2-135M in f16: 30 layers, 3 KV heads of 64
STREAMING = {"policy": "streaming", "start_size": 4, "max_cache_size": 256}


def words(n, seed=""):
    return " ".join(f"{seed}{i} is followed by {i * 7919 % 1000}." for i in range(n))


def post(d, path, body, status=200):
    r = httpx.post(d.url + path, json=body, timeout=120 * SLOW)
    assert r.status_code == status, r.text
    return r.json()


def complete(d, text, kv=None, n=8, **more):
    body = {"prompt": text, "max_tokens": n, "temperature": 0, "return_token_ids": True, "ignore_eos": True, **more}
    if kv is not None:
        body["kv_cache"] = kv
    return post(d, "/v1/completions", body)


def metric(d, name, **labels):
    want = [f'{k}="{v}"' for k, v in labels.items()]
    for line in httpx.get(d.url + "/metrics").text.splitlines():
        if line.startswith(name + "{") and all(w in line for w in want):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name} {labels}")


@pytest.fixture(scope="module")
def daemon():
    with Daemon("--kv-memory", 140 * PAGE, "--context", 2000) as d:
        yield d


def test_whoever_does_not_ask_is_not_told(daemon):
    j = complete(daemon, words(5))
    assert "kv_cache" not in j
    j = complete(daemon, words(5), {})
    kept = j["kv_cache"]
    assert kept["policy"] == "full" and kept["evicted_tokens"] == 0 and kept["shrink_ratio"] == 0
    assert kept["tokens_logical"] == kept["tokens_resident"] == j["usage"]["total_tokens"] - 1
    assert set(kept) == {"policy", "tokens_logical", "tokens_resident", "evicted_tokens", "merged_tokens", "shrink_ratio", "bytes", "fallback_pages", "pages_by_tier"}
    pages = (kept["tokens_resident"] + 15) // 16
    assert kept["pages_by_tier"] == {"device": pages, "ram": 0, "disk": 0, "remote": 0, "lost": 0}
    assert kept["merged_tokens"] == kept["fallback_pages"] == 0


def test_a_window_as_long_as_the_conversation_gives_the_same_answer(daemon):
    text = words(20)
    full, same = complete(daemon, text, n=24), complete(daemon, text, {"policy": "streaming", "max_cache_size": 1024}, n=24)
    assert same["choices"][0]["token_ids"] == full["choices"][0]["token_ids"]
    assert same["kv_cache"]["policy"] == "streaming" and same["kv_cache"]["evicted_tokens"] == 0


def test_what_is_kept_has_a_bound_in_bytes(daemon):
    j = complete(daemon, words(60), STREAMING, n=40)
    kept, n = j["kv_cache"], j["usage"]["total_tokens"]
    assert n > 600
    assert kept["tokens_logical"] == n - 1 == kept["tokens_resident"] + kept["evicted_tokens"]
    assert 224 < kept["tokens_resident"] <= 256
    assert kept["bytes"] == kept["pages_by_tier"]["device"] * PAGE <= 16 * PAGE
    assert kept["shrink_ratio"] == pytest.approx(kept["evicted_tokens"] / kept["tokens_logical"], rel=1e-5)
    assert metric(daemon, "kvasir:context_evicted_tokens_total", policy="streaming") >= kept["evicted_tokens"]
    assert daemon.kv()["drift_pages"] == 0


def test_the_answer_is_the_same_whatever_was_known_before(daemon):
    text = words(50, "again ")
    first, second = complete(daemon, text, STREAMING, n=24), complete(daemon, text, STREAMING, n=24)
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    # What is exact is shared: the window's length, and not a token more.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    # An exact conversation takes nothing else of it.
    assert complete(daemon, text, {})["usage"]["prompt_tokens_details"]["cached_tokens"] == 256


def test_a_conversation_goes_on_where_it_ended(daemon):
    sid = post(daemon, "/v1/sessions", {})["id"]
    text, cold = words(50, "turns "), None
    for turn in range(4):
        j = complete(daemon, text, STREAMING, n=16, session_id=sid)
        cached = j["usage"]["prompt_tokens_details"]["cached_tokens"]
        # All of the last turn but for the token that was not computed, and those that are cut otherwise where the texts meet.
        assert turn == 0 or cached >= length - 4, (turn, cached, length)
        length = j["usage"]["total_tokens"]
        assert j["kv_cache"]["bytes"] <= 16 * PAGE
        if turn == 3:
            cold = complete(daemon, text, STREAMING, n=16)
            assert cold["choices"][0]["token_ids"] == j["choices"][0]["token_ids"]
        text += j["choices"][0]["text"] + f" And turn {turn + 2}: " + words(6, f"t{turn} ")
    s = httpx.get(daemon.url + f"/v1/sessions/{sid}").json()
    assert s["kv_cache"]["policy"] == "streaming" and s["kv_cache"]["tokens_logical"] > 700 > 256 >= s["kv_cache"]["tokens_resident"]
    assert daemon.kv()["parked"]["pages"] > 0
    assert httpx.delete(daemon.url + f"/v1/sessions/{sid}").status_code < 300
    assert daemon.kv()["parked"]["pages"] == 0 and daemon.kv()["drift_pages"] == 0


def test_evict_removes_a_share_and_keeps_a_bound(daemon):
    text = words(60, "share ")
    j = complete(daemon, text, {"policy": "evict", "cache_length_shrink_ratio": 0.5}, n=24)
    kept = j["kv_cache"]
    assert kept["policy"] == "evict" and 0.4 < kept["shrink_ratio"] < 0.52
    assert kept["tokens_resident"] + kept["evicted_tokens"] == kept["tokens_logical"] == j["usage"]["total_tokens"] - 1
    both = complete(daemon, text, {"policy": "evict", "cache_length_shrink_ratio": 0.3, "max_cache_size": 256}, n=24)
    assert both["kv_cache"]["bytes"] <= 16 * PAGE
    none = complete(daemon, text, {"policy": "evict", "cache_length_shrink_ratio": 0}, n=24)
    assert none["kv_cache"]["evicted_tokens"] == 0
    assert none["choices"][0]["token_ids"] == complete(daemon, text, n=24)["choices"][0]["token_ids"]
    # By age it keeps what a window of the same size does.
    age = complete(daemon, text, {"policy": "evict", "max_cache_size": 272, "aggregation": "recency"}, n=24)
    window = complete(daemon, text, {"policy": "streaming", "max_cache_size": 272}, n=24)
    assert age["choices"][0]["token_ids"] == window["choices"][0]["token_ids"]
    chat = post(daemon, "/v1/chat/completions", {"messages": [{"role": "system", "content": "You know."}, {"role": "user", "content": words(60)}],
                                                 "max_tokens": 8, "kv_cache": {"policy": "evict", "max_cache_size": 256}})
    assert chat["kv_cache"]["evicted_tokens"] > 0


def test_evict_by_the_attention_that_pages_got(daemon):
    text, kv = words(60, "mass "), {"policy": "evict", "max_cache_size": 256, "aggregation": "attention_mass"}
    first, second = complete(daemon, text, kv, n=24), complete(daemon, text, kv, n=24)
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert first["kv_cache"]["evicted_tokens"] > 0 and first["kv_cache"]["bytes"] <= 16 * PAGE
    # The rows whose attention counts are computed, however well they are known.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 256 - 32
    sid = post(daemon, "/v1/sessions", {})["id"]
    turn = complete(daemon, text, kv, n=16, session_id=sid)
    more = complete(daemon, text + turn["choices"][0]["text"] + " Go on, please.", kv, n=16, session_id=sid)
    cold = complete(daemon, text + turn["choices"][0]["text"] + " Go on, please.", kv, n=16)
    assert more["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
    assert httpx.delete(daemon.url + f"/v1/sessions/{sid}").status_code < 300


@pytest.fixture(scope="module")
def bounded():
    with Daemon("--kv-bounds", "--kv-memory", 100 * (PAGE + PAGE // 16), "--context", 1500) as d:
        yield d


def test_quest_keeps_everything_and_reads_what_it_is_told_to(bounded):
    pool = bounded.kv()["pool"]
    assert (pool["pages"], pool["bounds_bytes"], pool["bounded_pages"]) == (100, 100 * PAGE // 16, 0)
    text = words(60, "quest ")
    full = complete(bounded, text, n=40)
    n = full["usage"]["total_tokens"]
    all_of_it = complete(bounded, text, {"policy": "quest", "max_cache_size": 1024}, n=40)
    assert all_of_it["choices"][0]["token_ids"] == full["choices"][0]["token_ids"] and all_of_it["kv_cache"]["tokens_read"] == n - 1
    assert bounded.kv()["pool"]["bounded_pages"] == 0, "nothing had to be chosen"
    quest = {"policy": "quest", "max_cache_size": 160}
    first, second = complete(bounded, text, quest, n=40), complete(bounded, text, quest, n=40)
    kept = first["kv_cache"]
    assert kept["policy"] == "quest" and kept["tokens_read"] == 160 and kept["evicted_tokens"] == 0
    assert kept["tokens_resident"] == kept["tokens_logical"] == n - 1
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    # The prompt's pages have their bounds once, whoever asks.
    once = bounded.kv()["pool"]["bounded_pages"]
    complete(bounded, text, quest, n=4)
    assert bounded.kv()["pool"]["bounded_pages"] <= once + 1
    assert bounded.kv()["drift_pages"] == 0


def test_what_an_answer_left_that_chose_is_not_found_again(bounded):
    sid = post(bounded, "/v1/sessions", {})["id"]
    quest = {"policy": "quest", "max_cache_size": 160}
    one = complete(bounded, words(50, "left "), quest, n=64, session_id=sid)
    two = complete(bounded, words(50, "left ") + one["choices"][0]["text"] + " And then?", n=4)
    prompt = one["usage"]["prompt_tokens"]
    assert prompt - 2 <= two["usage"]["prompt_tokens_details"]["cached_tokens"] <= prompt
    assert bounded.kv()["parked"]["pages"] == 0


def test_diagnostics_say_how_far_an_answer_is_from_exact(bounded):
    quest = {"policy": "quest", "max_cache_size": 160}
    plain = complete(bounded, words(60, "told "), quest, n=40)
    assert "diagnostics" not in plain["kv_cache"]
    j = complete(bounded, words(60, "told "), {**quest, "diagnostics": True}, n=40)
    assert j["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    d = j["kv_cache"]["diagnostics"]
    assert d["drift_samples"] == 3 and 0 <= d["drift"] <= d["drift_most"] < 0.6932
    assert 0 < d["attention_entropy"] < math.log(160) and 1 / 160 < d["largest_weight"] < 1
    for kv in ({"diagnostics": True}, {"policy": "streaming", "max_cache_size": 160, "diagnostics": True}):
        d = complete(bounded, words(60, "told "), kv, n=40)["kv_cache"]["diagnostics"]
        assert d["drift"] is None and d["drift_most"] is None and d["drift_samples"] == 0 and d["attention_entropy"] > 0
    # There is nothing to tell of an answer that has no second token.
    assert complete(bounded, words(5), {"diagnostics": True}, n=1)["kv_cache"]["diagnostics"]["attention_entropy"] is None
    e = post(bounded, "/v1/completions", {"prompt": "x", "kv_cache": {"diagnostics": 1}}, 400)["error"]
    assert e["param"] == "kv_cache.diagnostics"


def test_merge_keeps_a_bound_and_tells_how_many_share(daemon):
    text, kv = words(40, "merge "), {"policy": "merge", "max_cache_size": 256}
    full = complete(daemon, text, n=24)
    same = complete(daemon, text, {"policy": "merge", "max_cache_size": 1024}, n=24)
    assert same["choices"][0]["token_ids"] == full["choices"][0]["token_ids"] and same["kv_cache"]["merged_tokens"] == 0
    first, second = complete(daemon, text, kv, n=24), complete(daemon, text, kv, n=24)
    kept = first["kv_cache"]
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert kept["policy"] == "merge" and kept["evicted_tokens"] == 0 and kept["tokens_resident"] <= 256
    lacks = kept["tokens_logical"] - kept["tokens_resident"]
    assert lacks < kept["merged_tokens"] <= 2 * lacks
    assert kept["shrink_ratio"] == pytest.approx(lacks / kept["tokens_logical"], rel=1e-5)
    pages = -(-kept["tokens_resident"] // 16) * daemon.kv()["pool"]["page_bytes"]
    assert pages < kept["bytes"] < pages + 256 * 64
    # What is exact is shared, and not a token more.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    assert complete(daemon, text, {})["usage"]["prompt_tokens_details"]["cached_tokens"] >= full["usage"]["prompt_tokens"] - 16
    assert metric(daemon, "kvasir:context_merged_tokens_total", policy="merge") >= 2 * kept["merged_tokens"]
    assert daemon.kv()["context_policies"]["merge"]["merged_tokens"] >= 2 * kept["merged_tokens"]
    sid = post(daemon, "/v1/sessions", {})["id"]
    turn = complete(daemon, text, kv, n=16, session_id=sid)
    more = text + turn["choices"][0]["text"] + " Go on, please."
    warm, cold = complete(daemon, more, kv, n=16, session_id=sid), complete(daemon, more, kv, n=16)
    assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
    assert httpx.delete(daemon.url + f"/v1/sessions/{sid}").status_code < 300
    assert daemon.kv()["drift_pages"] == 0


@pytest.fixture(scope="module")
def recalling():
    with Daemon("--kv-bounds", "--kv-memory", 100 * (PAGE + PAGE // 16), "--kv-ram", 100 * PAGE, "--context", 1500) as d:
        yield d


HERON = "The number of the heron is 71432. Remember it: the number of the heron is 71432. "
RECALLED = words(20) + " " + HERON + words(56, "then ") + "\n\nWhat is the number of the heron? The number of the heron is"
WINDOW = {"policy": "streaming", "max_cache_size": 512}


def test_what_left_the_window_comes_back_when_it_is_asked_for(recalling):
    was = recalling.kv()["page_in"]
    lost, found = complete(recalling, RECALLED, WINDOW, n=8), complete(recalling, RECALLED, {**WINDOW, "page_in": True}, n=8)
    kept = found["kv_cache"]
    assert "page_in" not in lost["kv_cache"]
    assert kept["page_in"].pop("pages_below") > 20
    assert kept["page_in"] == {"pages": 7, "pages_lost": 0, "choices": 1, "pages_recomputed": 0, "tokens_recomputed": 0}
    assert kept["tokens_resident"] <= 512 and kept["tokens_resident"] + kept["evicted_tokens"] == kept["tokens_logical"]
    again = complete(recalling, RECALLED, {**WINDOW, "page_in": True}, n=8)
    assert again["choices"][0]["token_ids"] == found["choices"][0]["token_ids"]
    kv = recalling.kv()
    assert kv["page_in"]["kept"] > 40 and kv["page_in"]["back"] == was["back"] + 14 and kv["page_in"]["bounds_bytes"] == 0
    assert metric(recalling, "kvasir:context_page_in_total", event="back") == was["back"] + 14
    assert kv["drift_pages"] == 0
    assert kv["page_in"]["choices"] == was["choices"] + 2 == metric(recalling, "kvasir:context_page_in_choices_total")
    # Of a longer answer it is chosen anew every 16 tokens, or as often as was asked for.
    for every, choices in (None, 3), (10, 4), (0, 1):
        how = True if every is None else {"every": every}
        told = complete(recalling, RECALLED, {**WINDOW, "page_in": how}, n=40)["kv_cache"]["page_in"]
        assert told["choices"] == choices and told["pages"] == 7
    # An exact conversation finds nothing of it.
    assert complete(recalling, RECALLED, {}, n=8)["choices"][0]["token_ids"] == complete(recalling, RECALLED, n=8)["choices"][0]["token_ids"]


@pytest.mark.trained
def test_what_comes_back_is_what_was_asked_for(recalling):
    found = 0
    for name, number in ("heron", "71432"), ("otter", "58213"), ("badger", "90417"), ("beaver", "24681"):
        text = RECALLED.replace("heron", name).replace("71432", number)
        everything, lost, back = (complete(recalling, text, kv, n=8)["choices"][0]["text"]
                                  for kv in ({}, WINDOW, {**WINDOW, "page_in": True}))
        assert number in everything and number not in lost
        found += number in back
    # A choice by bounds: which number is told of seven pages differs between kinds of arithmetic. In exact ones it is three of them.
    assert found >= 2


@pytest.mark.trained  # and its sizes
def test_what_host_memory_lost_is_computed_again(recalling):
    key = "The number of the heron is 71432. Remember it: the number of the heron is 71432. "
    question = "\n\nWhat is the number of the heron? The number of the heron is"
    text = words(30) + " " + key + words(50, "then ") + question
    kv = {"policy": "streaming", "max_cache_size": 256, "page_in": {"every": 0, "recompute": 1000}}
    whole = complete(recalling, text, kv, n=8, logprobs=1)
    assert whole["kv_cache"]["page_in"]["pages_lost"] == 0
    with Daemon("--kv-bounds", "--kv-memory", 100 * (PAGE + PAGE // 16), "--kv-ram", 16 * PAGE, "--context", 1500) as d:
        again = complete(d, text, kv, n=8, logprobs=1)
        told = again["kv_cache"]["page_in"]
        assert again["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        assert again["choices"][0]["logprobs"] == whole["choices"][0]["logprobs"]
        assert told["pages"] == whole["kv_cache"]["page_in"]["pages"]
        assert told["pages_lost"] > 10 and 0 < told["pages_recomputed"] <= told["pages"]
        assert 0 < told["tokens_recomputed"] <= 1000 and told["tokens_recomputed"] % 16 == 0
        assert metric(d, "kvasir:context_recomputed_tokens_total") == told["tokens_recomputed"]
        assert metric(d, "kvasir:context_page_in_total", event="recomputed") == told["pages_recomputed"]
        assert d.kv()["page_in"]["recomputed"] == told["pages_recomputed"]
        # No more than was allowed.
        none = complete(d, text, {**kv, "page_in": {"recompute": 0}}, n=8)["kv_cache"]["page_in"]
        assert none["pages_recomputed"] == none["tokens_recomputed"] == 0 and none["pages_lost"] > 10
        assert d.kv()["drift_pages"] == 0


def test_a_policy_acts_when_pages_run_short(daemon):
    text = words(50, "short ")
    n_pages = daemon.kv()["pool"]["pages"]
    patient = complete(daemon, text, {**STREAMING, "trigger": {"free_pages": 4}}, n=8)
    assert patient["kv_cache"]["trigger"] == {"fired": None, "tokens": None} and patient["kv_cache"]["evicted_tokens"] == 0
    assert patient["choices"][0]["token_ids"] == complete(daemon, text, n=8)["choices"][0]["token_ids"]
    before = metric(daemon, "kvasir:context_triggers_total", trigger="free_pages")
    fired = complete(daemon, words(50, "scarce "), {**STREAMING, "trigger": {"free_pages": n_pages - 20}}, n=8)["kv_cache"]
    assert fired["trigger"]["fired"] == "free_pages" and 17 * 16 <= fired["trigger"]["tokens"] <= 20 * 16
    assert fired["evicted_tokens"] > 0 and fired["tokens_resident"] <= 256
    assert metric(daemon, "kvasir:context_triggers_total", trigger="free_pages") == before + 1
    assert daemon.kv()["context_triggers"]["free_pages"] >= 1
    tokens = complete(daemon, words(50, "known "), {**STREAMING, "trigger": {"tokens": 320, "free_pages": 1}}, n=8)["kv_cache"]
    assert tokens["trigger"] == {"fired": "tokens", "tokens": 320}


def test_a_policy_acts_when_attention_narrows(daemon):
    text, kv = words(40, "narrow "), {**STREAMING, "trigger": {"entropy": 20}}
    j, again = complete(daemon, text, kv, n=60), complete(daemon, text, kv, n=60)
    assert j["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    at = j["kv_cache"]["trigger"]
    assert at == {"fired": "entropy", "tokens": j["usage"]["prompt_tokens"] + 32} == again["kv_cache"]["trigger"]
    assert j["kv_cache"]["evicted_tokens"] > 0 and "diagnostics" not in j["kv_cache"]
    # Entropy is what diagnostics tell: a bound below it is not reached.
    told = complete(daemon, text, {"diagnostics": True}, n=60)
    low = complete(daemon, text, {**STREAMING, "trigger": {"entropy": told["kv_cache"]["diagnostics"]["attention_entropy"] / 2}}, n=60)
    assert low["kv_cache"]["trigger"]["fired"] is None
    assert low["choices"][0]["token_ids"] == told["choices"][0]["token_ids"]


def test_every_endpoint_takes_it_and_tells(daemon):
    chat = {"messages": [{"role": "user", "content": words(60)}], "max_tokens": 8, "kv_cache": STREAMING}
    assert post(daemon, "/v1/chat/completions", chat)["kv_cache"]["evicted_tokens"] > 0
    response = {"input": words(60), "max_output_tokens": 8, "kv_cache": STREAMING}
    assert post(daemon, "/v1/responses", response)["kv_cache"]["evicted_tokens"] > 0
    # Streams tell where the first choice ends.
    with httpx.stream("POST", daemon.url + "/v1/chat/completions", json={**chat, "stream": True}, timeout=60 * SLOW) as r:
        chunks = [json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: {")]
    told = [c for c in chunks if "kv_cache" in c]
    assert len(told) == 1 and told[0]["choices"][0]["finish_reason"] == "length"
    with httpx.stream("POST", daemon.url + "/v1/responses", json={**response, "stream": True}, timeout=60 * SLOW) as r:
        events = [json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: {")]
    assert events[-1]["response"]["kv_cache"]["policy"] == "streaming"
    assert "kv_cache" not in events[0]["response"]


@pytest.mark.parametrize(
    "kv, param, says",
    [
        ({"policy": "snap"}, "kv_cache.policy", "full, streaming, evict"),
        ({"policy": 1}, "kv_cache.policy", "string"),
        ({"window": 64}, "kv_cache.window", "max_cache_size"),
        ({"policy": "evict", "max_cache_size": 512, "aggregation": "sum"}, "kv_cache.aggregation", "norm_ratio"),
        ({"policy": "streaming", "max_cache_size": 512, "aggregation": "recency"}, "kv_cache.aggregation", "evict"),
        ({"policy": "evict", "cache_length_shrink_ratio": 1}, "kv_cache.cache_length_shrink_ratio", "0.95"),
        ({"policy": "evict"}, "kv_cache.max_cache_size", "cache_length_shrink_ratio"),
        ({"max_cache_size": 64}, "kv_cache.max_cache_size", "full"),
        ({"policy": "quest", "max_cache_size": 256}, "kv_cache.policy", "--kv-bounds"),
        ({"policy": "evict", "max_cache_size": 256, "page_in": True}, "kv_cache.page_in", "streaming"),
        ({"policy": "streaming", "max_cache_size": 256, "page_in": True}, "kv_cache.page_in", "--kv-ram"),
        ({"policy": "streaming", "max_cache_size": 256, "page_in": 1}, "kv_cache.page_in", "an object"),
        ({"policy": "streaming", "max_cache_size": 256, "page_in": {"often": 1}}, "kv_cache.page_in.often", '"every"'),
        ({"policy": "streaming", "max_cache_size": 64, "page_in": {"recompute": -1}}, "kv_cache.page_in.recompute", ""),
        ({"policy": "merge"}, "kv_cache.max_cache_size", "cache_length_shrink_ratio"),
        ({"policy": "merge", "max_cache_size": 256, "aggregation": "recency"}, "kv_cache.aggregation", "evict"),
        ({"policy": "streaming"}, "kv_cache.max_cache_size", "recent_size"),
        ({"policy": "streaming", "max_cache_size": 16}, "kv_cache.max_cache_size", "48"),
        ({"policy": "streaming", "recent_size": 0}, "kv_cache.recent_size", ""),
        ({"policy": "streaming", "recent_size": 256, "max_cache_size": 256}, "kv_cache.recent_size", "256"),
        ({"policy": "streaming", "max_cache_size": 1 << 30}, "kv_cache.max_cache_size", "2240"),
        ({"policy": "streaming", "max_cache_size": 64, "trigger": 100}, "kv_cache.trigger", ""),
        ({"policy": "streaming", "max_cache_size": 64, "trigger": {"pages": 2}}, "kv_cache.trigger.pages", '"free_pages"'),
        ({"policy": "streaming", "max_cache_size": 64, "trigger": {"entropy": 0}}, "kv_cache.trigger.entropy", "20"),
        ({"policy": "streaming", "max_cache_size": 64, "trigger": {"free_pages": 140}}, "kv_cache.trigger.free_pages", "less than the 140"),
        ({"policy": "full", "trigger": {"free_pages": 2}}, "kv_cache.trigger", "full"),
        ({"policy": "streaming", "max_cache_size": 64, "trigger": {"tokens": 48}}, "kv_cache.trigger.tokens", "64"),
        ({"dtype": "int4"}, "kv_cache.dtype", "--kv-dtype"),
        ([], "kv_cache", ""),
    ],
)
def test_what_is_impossible_is_refused_with_what_is_possible(daemon, kv, param, says):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ):
        e = post(daemon, path, {**body, "kv_cache": kv}, 400)["error"]
        assert e["param"] == param and says in e["message"] and set(e) == {"message", "type", "param", "code"}


def test_the_servers_own_policy_and_bound():
    with Daemon("--kv-memory", 40 * PAGE, "--context", 4000, "--context-policy", "streaming", "--max-cache-size", 256) as d:
        j = complete(d, words(80), n=16)
        assert j["kv_cache"]["policy"] == "streaming", "nothing is left out in silence"
        assert j["kv_cache"]["tokens_resident"] <= 256
        assert complete(d, words(5), {"policy": "full"})["kv_cache"]["policy"] == "full"
        e = post(d, "/v1/completions", {"prompt": words(80), "kv_cache": {"policy": "full"}}, 400)["error"]
        assert e["code"] == "context_length_exceeded"
        e = post(d, "/v1/completions", {"prompt": "x", "kv_cache": {"max_cache_size": 512}}, 400)["error"]
        assert e["param"] == "kv_cache.max_cache_size" and "256" in e["message"]


def test_streaming_goes_on_past_the_trained_length(tmp_path):
    trained = 2048
    with Daemon("--kv-memory", "4M", "--context", 4000, "--context-policy", "streaming", "--max-cache-size", 256,
                model=tiny_model(str(tmp_path))) as d:
        # Tokens that mean little: what counts is where they stand.
        ids = [4 + i * 7919 % 200 for i in range(2500)]
        near = complete(d, ids[:1000], n=4)
        assert "start_moved" not in near["kv_cache"]
        j = complete(d, ids, n=8)
        kept = j["kv_cache"]
        assert kept["tokens_logical"] == 2507 and kept["tokens_resident"] <= 256
        assert kept["bytes"] <= 16 * d.kv()["pool"]["page_bytes"]
        assert 2507 - trained <= kept["start_moved"] <= 2507 - trained + 1024 + 32
        assert d.kv()["drift_pages"] == 0


def processor_s(d):
    """What the daemon has taken of processors: a busy machine changes it little."""
    with open(f"/proc/{d.process.pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@LONG
def test_a_conversation_of_32k_tokens_costs_what_its_window_costs():
    """Turns of 900 tokens and answers of 100, past the cap and four times the trained length: what a token takes of memory and time stays."""
    # What an idle session keeps for itself is at most half of the cache.
    with Daemon("--kv-memory", 280 * PAGE, "--context", 33000, "--context-policy", "streaming", "--max-cache-size", 2048,
                "--session-heartbeat", "1h", "--session-ttl", "1h") as d:
        sid, ids, took, kept, rss = post(d, "/v1/sessions", {})["id"], [], [], [], []
        for turn in range(32):
            ids += [((turn * 900 + i) * 7919) % 40000 + 1000 for i in range(900)]
            answer, before = [], 0.0
            body = {"prompt": ids, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "session_id": sid,
                    "stream": True, "kv_cache": {"policy": "streaming", "max_cache_size": 2048}}
            with httpx.stream("POST", d.url + "/v1/completions", json=body, timeout=600 * SLOW) as r:
                for line in r.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    before = before or processor_s(d)
                    for choice in chunk.get("choices", []):
                        answer += choice.get("token_ids") or []
                    kept += [chunk["kv_cache"]] if "kv_cache" in chunk else []
            assert len(answer) == 100
            ids += answer
            took.append((processor_s(d) - before) / 99)
            rss.append(d.rss_bytes())
        capped = [k for k in kept if k["evicted_tokens"] > 0]
        assert kept[-1]["tokens_logical"] > 31900 and kept[-1]["start_moved"] > 31900 - 8192
        assert max(k["bytes"] for k in capped) <= 128 * PAGE
        assert max(k["bytes"] for k in capped) - min(k["bytes"] for k in capped) <= 16 * PAGE, "all between two jumps of the window"
        first, end = sorted(took[3:6])[1], sorted(took[-3:])[1]
        print(f"ms of processor time a token at 4k {first * 1e3:.2f}, at 32k {end * 1e3:.2f}; MiB resident {rss[3] >> 20}, {rss[-1] >> 20}")
        assert rss[-1] - rss[3] < 32 << 20
        assert end < 1.1 * first, took


# ---- Whole turns ----

def conversation(turns, seed=""):
    messages = [{"role": "system", "content": "You are brief. The password is heron."}]
    for i in range(turns):
        messages += [{"role": "user", "content": f"{seed} turn {i}: " + words(6)}, {"role": "assistant", "content": f"I see, {i}."}]
    return messages + [{"role": "user", "content": "What was it about?"}]


@pytest.fixture(scope="module")
def short():
    with Daemon("--kv-memory", 100 * PAGE, "--context", 600) as d:
        yield d


def test_truncation_leaves_out_the_oldest_turns_and_lists_them(short):
    messages = conversation(12)
    e = post(short, "/v1/chat/completions", {"messages": messages, "max_tokens": 16}, 400)["error"]
    assert e["code"] == "context_length_exceeded", "nothing is left out unless that was asked for"
    assert post(short, "/v1/chat/completions", {"messages": messages, "max_tokens": 16, "truncation": "disabled"}, 400)
    j = post(short, "/v1/chat/completions", {"messages": messages, "max_tokens": 16, "truncation": "auto"})
    cut = j["usage"]["truncated"]
    assert cut["turns"] >= 1 and cut["messages"] == list(range(1, 1 + 2 * cut["turns"])), "whole turns, never the system message"
    assert j["usage"]["prompt_tokens"] + 16 <= 600
    # As if they had never been sent, and one more would not have fitted.
    rest = [m for i, m in enumerate(messages) if i not in cut["messages"]]
    same = post(short, "/v1/chat/completions", {"messages": rest, "max_tokens": 16, "temperature": 0})
    assert same["usage"]["prompt_tokens"] == j["usage"]["prompt_tokens"] and "truncated" not in same["usage"]
    more = [m for i, m in enumerate(messages) if i not in cut["messages"][2:]]
    assert post(short, "/v1/chat/completions", {"messages": more, "max_tokens": 16}, 400)["error"]["code"] == "context_length_exceeded"
    # What fits is left alone.
    assert "truncated" not in post(short, "/v1/chat/completions", {"messages": conversation(1), "max_tokens": 8, "truncation": "auto"})["usage"]


def test_streams_and_responses_list_what_was_left_out(short):
    body = {"messages": conversation(12), "max_tokens": 4, "truncation": "auto", "stream": True}
    for options in (None, {"include_usage": True}):
        with httpx.stream("POST", short.url + "/v1/chat/completions", json={**body, "stream_options": options}, timeout=60 * SLOW) as r:
            chunks = [json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: {")]
        told = [c.get("truncated") or (c.get("usage") or {}).get("truncated") for c in chunks]
        assert len([t for t in told if t]) == 1 and [t for t in told if t][0]["messages"][0] == 1
    messages = conversation(12)
    j = post(short, "/v1/responses", {"instructions": messages[0]["content"], "input": messages[1:], "max_output_tokens": 4, "truncation": "auto"})
    assert j["truncation"] == "auto" and j["usage"]["truncated"]["messages"][:2] == [0, 1]
    assert post(short, "/v1/responses", {"input": "x", "max_output_tokens": 4})["truncation"] == "disabled"


def test_a_websocket_conversation_goes_on_past_the_context(short):
    from websockets.sync.client import connect

    previous, cut = None, []
    with connect(short.ws_url, max_size=None) as ws:
        for turn in range(8):
            ws.send(json.dumps({"type": "response.create", "input": f"turn {turn}: " + words(10), "max_output_tokens": 8,
                                "previous_response_id": previous, "truncation": "auto", "kv_cache": {"policy": "streaming", "recent_size": 512}}))
            while True:
                event = json.loads(ws.recv(timeout=60 * SLOW))
                assert event["type"] not in ("error", "response.failed"), event
                if event["type"] in ("response.completed", "response.incomplete"):
                    break
            response = event["response"]
            previous = response["id"]
            assert response["kv_cache"]["policy"] == "streaming"
            cut.append(response["usage"].get("truncated", {}).get("turns", 0))
    assert cut[0] == 0 and cut[-1] > 0 and cut == sorted(cut)

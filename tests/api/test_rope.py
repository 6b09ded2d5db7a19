"""--rope-scaling: positions are stretched otherwise than the file says, the context with them, and KV of one choice is never taken for another's."""
import json
import os
import subprocess
import sys

import httpx
import pytest

from daemon import BIN, MODEL, ROOT, SLOW, Daemon

SECRET = ("--transfer-key", "0123456789abcdef-of-both", "--session-heartbeat", "200s", "--session-ttl", "200s")
POOL = ("--kv-memory", "80M")


def complete(d, prompt, n=4, **more):
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "return_token_ids": True, "ignore_eos": True, **more}
    r = httpx.post(d.url + "/v1/completions", json=body, timeout=120 * SLOW)
    assert r.status_code == 200, r.text
    return r.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def words(n):
    return " ".join(f"{i} is followed by {i * 7919 % 1000}." for i in range(n))


def plan(*args):
    done = subprocess.run([BIN, "plan", "--model", MODEL, "--json", *args], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def refused(*args):
    done = subprocess.run([BIN, "serve", "--model", MODEL, "--check", *args], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_the_context_reaches_as_far_as_the_factor_says():
    trained = plan()
    assert trained["rope_factor"] == 1 and trained["rope_reach"] == trained["context_tokens"]
    stretched = plan("--rope-scaling", "yarn:4")
    assert stretched["context_tokens"] == stretched["rope_reach"] == 4 * trained["context_tokens"]
    assert stretched["rope_scaling"] == "yarn" and stretched["rope_original_context"] == trained["context_tokens"]
    n = trained["context_tokens"]
    with Daemon("--rope-scaling", "yarn:4", *POOL, "--context", 2048) as d:
        meta = httpx.get(d.url + "/v1/models").json()["data"][0]["meta"]
        assert meta["n_ctx"] == 2048 and meta["n_ctx_train"] == n
        rope = meta["rope"]
        assert rope["scaling"] == "yarn" and rope["factor"] == 4 and rope["original_context_length"] == n and rope["overridden"] is True
        assert "yarn:4" in d.stdout() and f"reaches {4 * n}" in d.stdout()
        assert "longer than" not in d.stderr()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two random models with the same weights, trained on 128 tokens: one stretches by YaRN, the other's file says nothing."""
    out = tmp_path_factory.mktemp("tiny")
    tool = os.path.join(ROOT, "tests", "tools", "make_model.py")
    for name, args in (("plain", ("--ctx", "128")), ("yarn", ("--ctx", "512", "--rope", "yarn", "--rope-original-ctx", "128"))):
        subprocess.run([sys.executable, tool, str(out / f"{name}.gguf"), "--layers", "4", *args], check=True)
    return out


def test_positions_beyond_the_trained_length_are_computed(tiny):
    """Neither refused nor clamped, and as by a file that says so itself."""
    prompt = [4 + i * 31 % 200 for i in range(400)]
    answers = []
    for name, args in (("yarn", ()), ("plain", ("--rope-scaling", "yarn:4")), ("plain", ("--rope-scaling", "linear:4")), ("plain", ("--context", 512))):
        with Daemon(*args, model=tiny / f"{name}.gguf") as d:
            assert httpx.get(d.url + "/v1/models").json()["data"][0]["context_length"] == 512
            assert ("longer than" in d.stderr()) == ("--context" in args)
            answers.append(complete(d, prompt, n=48)["choices"][0]["token_ids"])
            r = httpx.post(d.url + "/v1/completions", json={"prompt": prompt, "max_tokens": 200}, timeout=60 * SLOW)
            assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded" and "512" in r.text
    assert answers[0] == answers[1]
    assert len({tuple(a) for a in answers}) == 3


def test_chunks_reach_as_far(tiny):
    """
    dca: the same answer as without within the first chunk, another one behind it; told by the model's page and by
    `plan`; of the context policies only `full` goes with it.
    """
    choice = ("--rope-scaling", "dca:4,chunk=64")
    prompt = [4 + i * 31 % 200 for i in range(400)]
    with Daemon("--context", 512, model=tiny / "plain.gguf") as d:
        without = [complete(d, prompt[:n], n=8)["choices"][0]["token_ids"] for n in (50, 400)]
    with Daemon(*choice, "--kv-bounds", model=tiny / "plain.gguf") as d:
        card = httpx.get(d.url + "/v1/models").json()["data"][0]
        assert card["context_length"] == 512
        rope = card["meta"]["rope"]
        assert (rope["scaling"], rope["factor"], rope["original_context_length"], rope["chunk"]) == ("dca", 4, 128, 64)
        assert "chunks of 64" in d.stdout()
        found = [complete(d, prompt[:n], n=8) for n in (50, 400)]
        assert found[0]["choices"][0]["token_ids"] == without[0] and found[1]["choices"][0]["token_ids"] != without[1]
        again = complete(d, prompt, n=8)
        assert cached(again) >= 384 and again["choices"][0]["token_ids"] == found[1]["choices"][0]["token_ids"]
        for policy in ("streaming", "evict", "quest"):
            body = {"prompt": prompt, "max_tokens": 4, "kv_cache": {"policy": policy, "max_cache_size": 128}}
            r = httpx.post(d.url + "/v1/completions", json=body)
            assert r.status_code == 400 and r.json()["error"]["param"] == "kv_cache.policy" and "dca" in r.text
        looked = complete(d, prompt, kv_cache={"policy": "full", "diagnostics": True})["kv_cache"]["diagnostics"]
        assert 0 < looked["attention_entropy"] < 7
    said = plan("--rope-scaling", "dca:2")
    assert said["rope_scaling"] == "dca" and said["rope_chunk"] == said["rope_original_context"] * 3 // 4 // 64 * 64


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_chunks_of_a_conversation_beyond_the_pool(tiny, dtype):
    """The same answer where most of its KV is elsewhere, and read in parts."""
    prompt, choice = [4 + i * 31 % 200 for i in range(1200)], ("--rope-scaling", "dca:16,chunk=64", "--kv-dtype", dtype)
    with Daemon(*choice, model=tiny / "plain.gguf") as d:
        page = d.kv()["pool"]["page_bytes"]
        whole = complete(d, prompt, n=8)["choices"][0]["token_ids"]
    with Daemon(*choice, "--kv-memory", 48 * page, "--kv-overflow", "16M", model=tiny / "plain.gguf") as d:
        answer = complete(d, prompt, n=8)
        assert answer["choices"][0]["token_ids"] == whole and answer["kv_cache"]["pages_by_tier"]["ram"] > 0


def test_what_makes_no_sense_is_named():
    for text, why in (("longrope:4", "longrope"), ("yarn", "factor"), ("yarn:0", "from 1"), ("linear:2,beta-fast=3", "linear"),
                      ("yarn:2,original=1.5", "tokens"), ("beta-fast=8", "none"), ("dca:2,chunk=100", "64")):
        message = refused("--rope-scaling", text)
        assert "rope-scaling" in message and why in message, message
    assert "rope-scaling" in plan("--rope-scaling", "warp:9")
    streaming = ("--context-policy", "streaming", "--max-cache-size", "256")
    assert "context-policy" in refused("--rope-scaling", "dca:2", *streaming)


def test_kv_of_another_choice_is_never_taken(tmp_path):
    disk = ("--kv-disk", f"{tmp_path}/kv:200M")
    text = words(60)
    with Daemon(*POOL, *disk, "--context", 1024) as d:
        first = complete(d, text)
    # The last ones of these make the files their own.
    for choice, found in (("", True), ("none", True), ("yarn:4", False), ("dca:4", False), ("base=200000", False)):
        args = ("--rope-scaling", choice) if choice else ()
        with Daemon(*POOL, *disk, "--context", 1024, *args) as d:
            again = complete(d, text)
            assert (cached(again) > 256) == found, choice
            same = again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
            assert same or not found, choice


def test_a_session_does_not_move_to_another_choice():
    with Daemon(*POOL, *SECRET, "--context", 1024) as a, Daemon(*POOL, *SECRET, "--context", 1024, "--rope-scaling", "linear:2") as b:
        httpx.post(a.url + "/v1/sessions", json={"id": "tea"}).raise_for_status()
        complete(a, words(20), session_id="tea")
        data = httpx.post(a.url + "/v1/sessions/tea/export", timeout=60 * SLOW)
        assert data.status_code == 200
        r = httpx.post(b.url + "/v1/sessions/tea/import", content=data.content, headers={"content-type": "application/octet-stream"})
        assert r.status_code == 400, r.text
        assert httpx.get(b.url + "/v1/sessions/tea").status_code == 404

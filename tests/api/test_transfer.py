"""Sessions move between daemons: the export is a sealed stream, the import takes nothing that is not whole and its own."""
import json
import re

import httpx
import pytest

from daemon import LONG, SLOW, Daemon, eventually

PAGE = 368640  # of SmolLM2-135M: 30 layers, 3 KV heads of 64, f16
POOL = ("--kv-memory", 160 * PAGE, "--context", 2400, "--session-heartbeat", "200s", "--session-ttl", "200s")
SECRET = "0123456789abcdef-of-both"
KEY = ("--transfer-key", SECRET)
OCTETS = {"content-type": "application/octet-stream"}


def prompt(seed, words):
    return " ".join(f"{seed} tells {i} of {i * 7919 % 1000} tales." for i in range(words))


def chat(d, session, messages, key="none"):
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "session_id": session}
    r = httpx.post(d.url + "/v1/chat/completions", json=body, headers={"x-api-key": key}, timeout=120 * SLOW)
    assert r.status_code == 200, r.text
    return r.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def make(d, name, words=120, key="none"):
    made = httpx.post(d.url + "/v1/sessions", json={"id": name}, headers={"x-api-key": key})
    assert made.status_code == 200, made.text
    turns = [{"role": "user", "content": prompt("mine", words)}]
    answer = chat(d, name, turns, key)
    return turns + [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}], answer


def export(d, name, key="none"):
    return httpx.post(f"{d.url}/v1/sessions/{name}/export", headers={"x-api-key": key}, timeout=60 * SLOW)


def send(d, name, data, key="none"):
    return httpx.post(f"{d.url}/v1/sessions/{name}/import", content=data, headers={**OCTETS, "x-api-key": key}, timeout=60 * SLOW)


def error(r):
    return r.status_code, r.json()["error"]["message"]


def nothing_left(d):
    kv = d.kv()
    assert kv["drift_pages"] == 0 and kv["references"]["running"] == 0 and kv["references"]["queued"] == 0


@pytest.fixture(scope="module")
def pair():
    with Daemon(*POOL, *KEY) as a, Daemon(*POOL, *KEY) as b:
        yield a, b


def test_a_session_goes_on_elsewhere_without_a_prefill(pair):
    a, b = pair
    turns, first = make(a, "tea")
    before = httpx.get(a.url + "/v1/sessions/tea").json()
    data = export(a, "tea")
    assert data.status_code == 200 and data.headers["content-type"] == "application/octet-stream"
    # More than one part, and more than a body may be elsewhere.
    assert len(data.content) > before["pages"] * PAGE > 16 << 20
    moved = send(b, "green", data.content)
    assert moved.status_code == 200, moved.text
    after = moved.json()
    assert after["id"] == "green" and after["requests"] == 1
    assert after["tokens"] == before["tokens"] and after["pages"] == before["pages"]
    assert after["age"] >= before["age"]
    here, there = chat(a, "tea", turns), chat(b, "green", turns)
    assert cached(there) == cached(here) >= first["usage"]["prompt_tokens"]
    assert there["choices"][0]["message"] == here["choices"][0]["message"]
    for d in pair:
        nothing_left(d)
        assert re.search(r"event=session_moved .*end=complete", d.stderr())
    # The export has left the session where it was; whoever moves it deletes it.
    assert httpx.delete(a.url + "/v1/sessions/tea").status_code == 200
    assert httpx.delete(b.url + "/v1/sessions/green").status_code == 200


def test_an_empty_session_moves_as_well(pair):
    a, b = pair
    httpx.post(a.url + "/v1/sessions", json={"id": "empty", "max_tokens": 77})
    moved = send(b, "empty", export(a, "empty").content)
    assert moved.status_code == 200, moved.text
    assert moved.json()["max_tokens"] == 77 and moved.json()["pages"] == 0


def test_a_damaged_or_cut_export_makes_no_session(pair):
    a, b = pair
    make(a, "worn", 30)
    whole = export(a, "worn").content
    header = len(whole) % PAGE
    places = {"magic": 0, "header": 700, "a page": len(whole) // 2, "the last record": len(whole) - 20}
    for what, at in places.items():
        bad = bytearray(whole)
        bad[at] ^= 1
        status, message = error(send(b, "worn", bytes(bad)))
        assert status == 400 and ("damaged" in message or "not an export" in message), what
    for n in (0, 1, header, len(whole) // 2, len(whole) - 1):
        status, message = error(send(b, "worn", whole[:n]))
        assert status == 400 and "too early" in message, n
    status, message = error(send(b, "worn", whole + b"x"))
    assert status == 400 and "too many" in message
    # Two records that have changed places are both whole, and still it is not what was sent.
    first = whole.index(b"KVGP")
    second = whole.index(b"KVGP", first + 4)
    swapped = whole[:first] + whole[second:2 * second - first] + whole[first:second] + whole[2 * second - first:]
    assert error(send(b, "worn", swapped))[0] == 400
    assert httpx.get(b.url + "/v1/sessions/worn").status_code == 404
    nothing_left(b)
    assert send(b, "worn", whole).status_code == 200
    assert error(send(b, "worn", whole))[0] == 409


def test_what_is_refused(pair):
    a, b = pair
    assert export(a, "nobody").status_code == 404
    assert send(b, "no spaces", b"").status_code in (400, 404)
    assert error(send(b, "long", b"{" * 5000)) == (400, "the body is not an export of a session")
    make(a, "kept", 10)
    data = export(a, "kept").content
    with Daemon(*POOL) as d:
        status, message = error(export(d, "any"))
        assert status == 404
        httpx.post(d.url + "/v1/sessions", json={"id": "any"})
        status, message = error(export(d, "any"))
        assert status == 400 and "--transfer-key" in message
        assert error(send(d, "kept", data))[0] == 400
    with Daemon(*POOL, "--transfer-key", "another-secret-of-theirs") as d:
        status, message = error(send(d, "kept", data))
        assert status == 400 and "another --transfer-key" in message
    with Daemon(*POOL, *KEY, "--device", "cpu-reference") as d:
        status, message = error(send(d, "kept", data))
        # Whichever of both the devices differ in first.
        assert status == 400 and ("backend" in message or "KV type" in message)
    with Daemon("--kv-memory", 40 * PAGE, "--context", 100, *KEY) as d:
        status, message = error(send(d, "kept", data))
        assert status == 400 and "100 tokens" in message


def test_an_export_is_bound_to_the_name_of_its_api_key():
    def keys(*names):
        return {"KVASIR_API_KEYS": json.dumps({"keys": [{"name": n, "key": "sk-" + n} for n in names]})}

    with Daemon(*POOL, *KEY, env=keys("alice", "bob")) as a, Daemon(*POOL, *KEY, env=keys("bob", "alice")) as b:
        turns, first = make(a, "tea", 60, "sk-alice")
        assert export(a, "tea", "sk-bob").status_code == 404
        data = export(a, "tea", "sk-alice").content
        status, message = error(send(b, "tea", data, "sk-bob"))
        assert status == 400 and "another API key" in message
        assert send(b, "tea", data, "sk-alice").status_code == 200
        assert httpx.get(b.url + "/v1/sessions/tea", headers={"x-api-key": "sk-bob"}).status_code == 404
        assert cached(chat(b, "tea", turns, "sk-alice")) >= first["usage"]["prompt_tokens"]


def test_clients_that_leave_in_the_middle_leave_nothing_behind(pair):
    a, b = pair
    make(a, "long")
    for _ in range(3):
        with httpx.stream("POST", a.url + "/v1/sessions/long/export", timeout=60 * SLOW) as r:
            assert r.status_code == 200
            next(r.iter_raw(1000))

    def broken(data):
        yield data
        raise RuntimeError("the client breaks down")

    whole = export(a, "long").content
    for _ in range(3):
        with pytest.raises(RuntimeError):
            httpx.post(b.url + "/v1/sessions/long/import", content=broken(whole[:len(whole) // 2]), headers=OCTETS, timeout=60 * SLOW)
    eventually(lambda: httpx.get(b.url + "/v1/sessions/long").status_code == 404, 10, "the half of a session is gone")
    for d in pair:
        nothing_left(d)
    # All places for transfers are free again.
    for i in range(20):
        assert send(b, f"long{i}", export(a, "long").content if i < 2 else whole).status_code == 200
    nothing_left(b)


def test_a_pool_that_is_too_small_takes_what_fits(pair):
    a, _ = pair
    turns, first = make(a, "wide")
    data = export(a, "wide").content
    with Daemon("--kv-memory", 150 * PAGE, "--context", 2400, *KEY) as d:
        # Others fill the pool; their pages make room.
        httpx.post(d.url + "/v1/completions", json={"prompt": prompt("other", 130), "max_tokens": 1}, timeout=120 * SLOW)
        moved = send(d, "wide", data)
        assert moved.status_code == 200, moved.text
        assert cached(chat(d, "wide", turns)) >= first["usage"]["prompt_tokens"]
        nothing_left(d)


@pytest.mark.parametrize("kind, narrow", [
    pytest.param("ram", (), marks=LONG, id="ram-exact"), pytest.param("disk", (), id="disk-exact"),
    pytest.param("ram", ("--kv-dtype", "int8"), id="ram-int8"), pytest.param("disk", ("--kv-dtype", "int8"), marks=LONG, id="disk-int8")])
def test_pages_that_have_left_the_pool_are_exported_from_their_tier(kind, narrow, tmp_path):
    small = ("--kv-memory", 64 * PAGE if not narrow else 40 * PAGE, "--context", 900, "--session-heartbeat", "200s", "--session-ttl", "200s")
    args = ("--kv-ram", "256M") if kind == "ram" else ("--kv-disk", f"{tmp_path}/kv:256M")
    with Daemon(*small, *args, *narrow, *KEY) as a, Daemon(*small, *narrow, *KEY) as b:
        turns, first = make(a, "tea", 45)
        whole = httpx.get(a.url + "/v1/sessions/tea").json()
        eventually(lambda: all(t["writing"] == 0 for t in a.kv()["tiers"]), 20, "what it left is written")
        for i in range(3):
            httpx.post(a.url + "/v1/completions", json={"prompt": prompt(f"other{i}", 55), "max_tokens": 1}, timeout=120 * SLOW)
        left = httpx.get(a.url + "/v1/sessions/tea").json()
        assert left["pages"] < whole["pages"] // 2, "others have pushed it out"
        data = export(a, "tea")
        assert data.status_code == 200, data.text
        assert len(data.content) > (whole["pages"] - 2) * a.kv()["pool"]["page_bytes"] * 0.9
        moved = send(b, "tea", data.content)
        assert moved.status_code == 200, moved.text
        # All but the tail, which is not always worth writing.
        assert moved.json()["pages"] >= whole["pages"] - 1
        there = chat(b, "tea", turns)
        assert cached(there) >= first["usage"]["prompt_tokens"] - 16
        if narrow:
            assert b.kv()["pool"]["wide_pages"] >= 1, "the first page is wide there as well"
        here = chat(a, "tea", turns)
        assert here["choices"][0]["message"] == there["choices"][0]["message"]
        for d in (a, b):
            nothing_left(d)


def test_a_session_is_exported_after_a_restart_before_its_next_turn(pair, tmp_path):
    """Twice restarted, since the second daemon knows of its pages only what the first has left."""
    _, b = pair
    disk = ("--kv-disk", f"{tmp_path}/kv:256M")
    with Daemon(*POOL, *KEY, *disk) as d:
        turns, first = make(d, "tea", 60)
        before = httpx.get(d.url + "/v1/sessions/tea").json()
        whole = export(d, "tea").content
    with Daemon(*POOL, *KEY, *disk) as d:
        pass
    with Daemon(*POOL, *KEY, *disk) as d:
        data = export(d, "tea")
        assert data.status_code == 200, data.text
        assert len(data.content) == len(whole)
        # Reading them made nothing of them resident.
        assert d.kv()["pages"]["index"] == 0
    moved = send(b, "restarted", data.content)
    assert moved.status_code == 200, moved.text
    assert (moved.json()["pages"], moved.json()["tokens"]) == (before["pages"], before["tokens"])
    answer = chat(b, "restarted", turns)
    assert cached(answer) >= first["usage"]["prompt_tokens"]
    nothing_left(b)
    httpx.delete(b.url + "/v1/sessions/restarted")


def test_a_daemon_that_drains_gives_its_sessions_away(pair):
    _, b = pair
    with Daemon(*POOL, *KEY, "--drain-timeout", "60s") as d:
        turns, first = make(d, "tea", 60)
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", d.url + "/v1/completions", json=body, timeout=120 * SLOW) as r:
            lines = r.iter_lines()
            next(lines)
            d.signal()
            eventually(lambda: httpx.get(d.url + "/health/ready").status_code == 503, 10, "it drains")
            data = export(d, "tea")
            assert data.status_code == 200
            # It takes none any more, though.
            assert send(d, "other", data.content).status_code == 503
            *_, last, done = [line for line in lines if line]
            assert '"finish_reason":"length"' in last and done == "data: [DONE]"
        assert d.wait() == 0
    assert send(b, "given", data.content).status_code == 200
    assert cached(chat(b, "given", turns)) >= first["usage"]["prompt_tokens"]

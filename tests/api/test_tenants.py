"""API keys: who may come in, what each may hold, and that nobody sees anybody else's."""
import hashlib
import json
import os
import re
import signal
import subprocess
import threading

import httpx
import pytest
import websockets.sync.client as ws_client
from websockets.exceptions import ConnectionClosed

from daemon import BIN, MODEL, SLOW, Daemon, eventually

LONG = "Once upon a time a small boat sailed over the wide sea, and its captain wrote every evening into a book. "
PAGE = 368640  # bytes of a page of SmolLM2-135M
SECRETS = {name: f"sk-{name}-0123456789" for name in ("alice", "bob", "carol", "dave", "root")}


def entry(name, **more):
    return {"name": name, "key": SECRETS[name], **more}


def client(d, name=None, secret=None, **more):
    headers = {"authorization": f"Bearer {secret or SECRETS[name]}"} if name or secret else {}
    return httpx.Client(base_url=d.url, headers=headers, timeout=120 * SLOW, **more)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(json.dumps({"keys": [
        entry("alice", max_requests=2, max_sessions=2, kv_memory=24 * PAGE),
        entry("bob"),
        entry("carol", cache_salt="team"),
        {"name": "dave", "sha256": hashlib.sha256(SECRETS["dave"].encode()).hexdigest(), "cache_salt": "team"},
        entry("root", admin=True)]}))
    with Daemon("--api-keys", path, "--kv-memory", "256M", key=SECRETS["root"]) as d:
        yield d
        log = d.stderr()
        assert not any(s in log for s in SECRETS.values()), "a secret is in the log"


def complete(http, prompt, max_tokens=8, **more):
    r = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more})
    assert r.status_code == 200, r.text
    return r.json()


def cached(reply):
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def key_row(d, name):
    return next(k for k in d.kv()["keys"] if k["key"] == name)


# ---- Coming in


def test_every_wrong_key_gets_the_same_answer(keys):
    tries = [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer " + SECRETS["bob"][:-1]},
             {"authorization": "Basic " + SECRETS["bob"]}, {"authorization": SECRETS["bob"]}, {"x-api-key": ""},
             {"authorization": "Bearer " + "x" * 5000}]
    seen = set()
    for headers in tries:
        for path in ("/v1/models", "/v1/kv", "/metrics", "/v1/sessions"):
            r = httpx.get(keys.url + path, headers=headers, timeout=30 * SLOW)
            assert r.headers["www-authenticate"] == "Bearer"
            seen.add((r.status_code, r.text))
    assert len(seen) == 1 and seen.pop()[0] == 401


@pytest.mark.parametrize("name", SECRETS)
def test_each_key_opens_in_both_headers(keys, name):
    assert client(keys, name).get("/v1/models").status_code == 200
    assert httpx.get(keys.url + "/v1/models", headers={"x-api-key": SECRETS[name]}).status_code == 200


def test_a_single_key_still_works_and_sees_all(keys):
    with Daemon("--api-key", "sesame", key="sesame") as d:
        assert httpx.get(d.url + "/v1/models").status_code == 401
        assert client(d, secret="sesame").get("/v1/models").status_code == 200
        assert d.kv()["keys"][0]["key"] == "default"


def test_keys_from_the_environment():
    text = json.dumps({"keys": [entry("bob")]})
    with Daemon(env={"KVASIR_API_KEYS": text}, key=SECRETS["bob"]) as d:
        assert client(d, "bob").get("/v1/models").status_code == 200
        assert httpx.get(d.url + "/v1/models").status_code == 401
    shown = subprocess.run([BIN, "serve", "--print-config"], env={**os.environ, "KVASIR_API_KEYS": text}, text=True,
                           capture_output=True, check=True).stdout
    assert json.loads(shown)["api_keys"] == "***"


@pytest.mark.parametrize("text", ["", "{}", '{"keys":[]}', '{"keys":[{"name":"a","key":"hush","maxrequests":1}]}'])
def test_a_bad_file_stops_the_start_and_check(tmp_path, text):
    path = tmp_path / "keys.json"
    path.write_text(text)
    for more in ([], ["--check"]):
        p = subprocess.run([BIN, "serve", "--model", MODEL, "--port", "0", "--api-keys", path, *more], text=True, capture_output=True,
                           timeout=60 * SLOW)
        assert p.returncode == 1 and "keys" in p.stderr and "hush" not in p.stderr


# ---- Sharing


def test_keys_share_kv_only_under_one_salt(keys):
    prompt = "Sharing under a salt. " + LONG * 3
    with client(keys, "bob") as bob, client(keys, "root") as root, client(keys, "carol") as carol, client(keys, "dave") as dave:
        first = complete(bob, prompt)
        assert cached(first) == 0
        assert cached(complete(bob, prompt)) >= 48
        alone = complete(root, prompt)
        assert cached(alone) == 0
        assert alone["choices"][0]["text"] == first["choices"][0]["text"]
        assert cached(complete(carol, prompt)) == 0
        assert cached(complete(dave, prompt)) >= 48
        # A salt of the request splits further, and never joins what the key keeps apart.
        assert cached(complete(bob, prompt, cache_salt="team")) == 0
        assert cached(complete(dave, prompt, cache_salt="x")) == 0
        assert cached(complete(carol, prompt, cache_salt="x")) >= 48


def test_a_session_of_another_key_does_not_exist(keys):
    with client(keys, "bob") as bob, client(keys, "carol") as carol:
        assert bob.post("/v1/sessions", json={"id": "mine"}).status_code == 200
        never = carol.get("/v1/sessions/nobody-made-this")
        for r in (carol.get("/v1/sessions/mine"), carol.post("/v1/sessions/mine/heartbeat"), carol.delete("/v1/sessions/mine")):
            assert r.status_code == 404
            assert r.text.replace("mine", "X") == never.text.replace("nobody-made-this", "X")
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "session_id": "mine"}
        assert carol.post("/v1/chat/completions", json=chat).status_code == 404
        assert carol.get("/v1/sessions").json()["data"] == []
        assert [s["id"] for s in bob.get("/v1/sessions").json()["data"]] == ["mine"]
        # The name is free for others, and means their own.
        made = carol.post("/v1/sessions", json={"id": "mine"})
        assert made.status_code == 200 and made.json()["key"] == "carol"
        assert carol.delete("/v1/sessions/mine").status_code == 200
        assert bob.get("/v1/sessions/mine").status_code == 200
        assert [s["id"] for s in keys.kv()["sessions"]["data"]] == ["mine"]  # an admin key sees all
        assert carol.get("/v1/kv").json()["sessions"]["data"] == []
        bob.delete("/v1/sessions/mine")


def ws(d, name):
    return ws_client.connect(d.ws_url, additional_headers={"authorization": f"Bearer {SECRETS[name]}"}, open_timeout=30 * SLOW)


def last_event(conn, **request):
    conn.send(json.dumps({"type": "response.create", "max_output_tokens": 4, "temperature": 0, **request}))
    while True:
        e = json.loads(conn.recv(timeout=120 * SLOW))
        if e["type"] in ("error", "response.completed", "response.incomplete", "response.failed"):
            return e


def test_a_websocket_is_its_keys_own(keys):
    with client(keys, "bob") as bob, ws(keys, "bob") as a, ws(keys, "carol") as b:
        bob.post("/v1/sessions", json={"id": "walled"})
        assert last_event(a, input="Hi", session_id="walled")["type"] != "error"
        refused = last_event(b, input="Hi", session_id="walled")
        assert refused["type"] == "error" and refused["status"] == 404
        done = last_event(a, input="Hello")
        other = last_event(b, input="And?", previous_response_id=done["response"]["id"])
        assert other["type"] == "error" and other["error"]["code"] == "previous_response_not_found"
        lanes = [s["id"] for s in bob.get("/v1/sessions").json()["data"] if s["id"].startswith("ws_")]
        with client(keys, "carol") as carol:
            assert lanes and carol.get(f"/v1/sessions/{lanes[0]}").status_code == 404
        bob.delete("/v1/sessions/walled")
    with pytest.raises(Exception, match="401"):
        ws_client.connect(keys.ws_url, additional_headers={"authorization": "Bearer wrong"})


# ---- Limits


def test_one_request_too_many_is_a_429_of_that_key_alone(keys):
    body = {"prompt": "Tell me.", "max_tokens": 330, "ignore_eos": True, "stream": True}
    with client(keys, "alice") as alice, client(keys, "bob") as bob:
        with alice.stream("POST", "/v1/completions", json=body) as one, alice.stream("POST", "/v1/completions", json=body) as two:
            # Kept: an iterator that is dropped closes its stream, which ends the generation.
            reading = [one.iter_lines(), two.iter_lines()]
            for lines in reading:
                next(lines)
            third = alice.post("/v1/completions", json=body)
            assert third.status_code == 429 and int(third.headers["retry-after"]) >= 1
            error = third.json()["error"]
            assert error["param"] == "max_requests" and "2 generations" in error["message"]
            assert complete(bob, "Hi")["choices"]
        keys.wait_idle()
        assert complete(alice, "Hi")["choices"]
        # Choices count: three at once are one too many, whenever.
        assert alice.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2, "n": 3}).status_code == 429
        keys.wait_idle()
        assert key_row(keys, "alice")["refused"] >= 2


def test_one_session_too_many_is_a_429_that_names_the_limit(keys):
    with client(keys, "alice") as alice:
        ids = [alice.post("/v1/sessions", json={}).json()["id"] for _ in range(2)]
        r = alice.post("/v1/sessions", json={})
        assert r.status_code == 429 and r.json()["error"]["param"] == "max_sessions" and "(2)" in r.json()["error"]["message"]
        for i in ids:
            alice.delete(f"/v1/sessions/{i}")
        again = alice.post("/v1/sessions", json={})
        assert again.status_code == 200
        alice.delete(f"/v1/sessions/{again.json()['id']}")


@pytest.mark.trained
def test_what_could_never_fit_is_refused_with_both_numbers(keys):
    with client(keys, "alice") as alice:
        for prompt, tokens in (("Hi", 400), (LONG * 20, 1)):
            r = alice.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens})
            error = r.json()["error"]
            assert r.status_code == 400 and error["code"] == "context_length_exceeded" and error["param"] == "kv_memory"
            assert "384 tokens" in error["message"] and len(re.findall(r"\d+", error["message"])) >= 2
        # Without a max_tokens the answer ends at the limit and says so.
        done = alice.post("/v1/completions", json={"prompt": "Hi", "max_tokens": -1, "ignore_eos": True}).json()
        assert done["choices"][0]["finish_reason"] == "length"
        assert done["usage"]["total_tokens"] == 384


@pytest.mark.trained
def test_the_kv_limit_is_kept_at_every_moment_and_nothing_is_cut(keys):
    """Two generations that need 14 pages each, under a limit of 24: one waits or is set back, both answer as without a limit."""
    prompts = [f"Number {i}. " + LONG * 3 for i in range(2)]
    with client(keys, "bob") as bob:
        expected = [complete(bob, p, max_tokens=140)["choices"][0]["text"] for p in prompts]
    with client(keys, "alice") as alice:
        s = alice.post("/v1/sessions", json={}).json()["id"]
        complete(alice, "An idle session. " + LONG * 2, session_id=s)
        assert alice.get(f"/v1/sessions/{s}").json()["pages"] > 0
        assert key_row(keys, "alice")["pages"] == 0  # what nothing runs on is the index's, and nobody is charged for it
        answers = [None, None]

        def run(i):
            with client(keys, "alice") as c:
                answers[i] = complete(c, prompts[i], max_tokens=140)["choices"][0]["text"]
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        most = 0
        while any(t.is_alive() for t in threads):
            report = keys.kv()
            row = next(k for k in report["keys"] if k["key"] == "alice")
            assert row["pages"] <= 24 and row["kv_bytes"] == row["pages"] * PAGE
            assert report["drift_pages"] == 0
            most = max(most, row["pages"])
        for t in threads:
            t.join()
        assert answers == expected
        assert most > 14, "they did run together as far as the limit let them"
        report = keys.kv()
        assert report["preemptions"]["decode"] == 0
        alice.delete(f"/v1/sessions/{s}")
        assert key_row(keys, "alice")["pages"] == 0


def test_a_session_has_a_limit_of_its_own():
    with Daemon("--session-tokens", 200) as d, httpx.Client(base_url=d.url, timeout=60 * SLOW) as http:
        assert http.post("/v1/sessions", json={"id": "a"}).json()["max_tokens"] == 200
        assert http.post("/v1/sessions", json={"id": "b", "max_tokens": 64}).json()["max_tokens"] == 64
        assert http.post("/v1/sessions", json={"id": "c", "max_tokens": 9999}).json()["max_tokens"] == 200
        assert http.post("/v1/sessions", json={"id": "d", "max_tokens": 0}).status_code == 400
        r = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100, "session_id": "b"})
        assert r.status_code == 400 and "this session may hold 64 tokens" in r.json()["error"]["message"]
        done = complete(http, "Hi", max_tokens=-1, session_id="b")
        assert done["choices"][0]["finish_reason"] == "length" and done["usage"]["total_tokens"] == 64
        assert complete(http, "Hi", max_tokens=150)["usage"]["completion_tokens"] == 150  # without a session no such limit


def test_a_key_with_a_long_queue_does_not_hold_up_another(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [entry("alice"), entry("bob", admin=True)]}))
    order, lock = [], threading.Lock()

    def ask(c, name, i):
        complete(c, f"{name} {i}.", max_tokens=96, ignore_eos=True)
        with lock:
            order.append(name)
    with Daemon("--api-keys", path, "--max-running", 1, key=SECRETS["bob"]) as d, \
            client(d, "alice") as alice, client(d, "bob") as bob:
        crowd = [threading.Thread(target=ask, args=(alice, "alice", i)) for i in range(8)]
        for t in crowd:
            t.start()
        eventually(lambda: key_row(d, "alice")["waiting"] >= 6, 10, "the crowd waits")
        late = threading.Thread(target=ask, args=(bob, "bob", 0))
        late.start()
        eventually(lambda: key_row(d, "bob")["waiting"] + key_row(d, "bob")["running"] or "bob" in order, 10, "bob's is there")
        done = len(order)
        for t in [*crowd, late]:
            t.join()
    assert order.index("bob") <= done + 2, order  # those that were done already, the one that ran, and one more


def test_a_request_ends_at_its_deadline():
    with Daemon("--request-timeout", 20 * SLOW) as d, httpx.Client(base_url=d.url, timeout=120 * SLOW) as http:
        body = {"prompt": LONG * 2, "max_tokens": 7000, "ignore_eos": True, "temperature": 0, "timeout": 0.5 * SLOW}
        r = http.post("/v1/completions", json=body)
        assert r.status_code == 504 and r.json()["error"]["code"] == "request_timeout"
        assert "did not end within" in r.json()["error"]["message"]
        text = http.post("/v1/completions", json={**body, "stream": True}).text
        events = [x for x in text.split("\n\n") if x]
        assert len(events) > 2 and "request_timeout" in events[-2] and events[-1] == "data: [DONE]"
        d.wait_idle()
        assert cached(complete(http, LONG * 2, max_tokens=1)) >= 32  # what it computed is not lost
        for bad in (0, -1, "1s"):
            r = http.post("/v1/completions", json={**body, "timeout": bad})
            assert r.status_code == 400 and r.json()["error"]["param"] == "timeout"


def test_a_session_has_a_queue_of_its_own():
    with Daemon("--session-requests", 2) as d, httpx.Client(base_url=d.url, timeout=120 * SLOW) as http:
        s = http.post("/v1/sessions", json={}).json()["id"]
        body = {"prompt": "Go on.", "max_tokens": 400, "ignore_eos": True, "session_id": s}
        statuses = []

        def ask():
            statuses.append(httpx.post(d.url + "/v1/completions", json=body, timeout=120 * SLOW))
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        refused = [r for r in statuses if r.status_code == 429]
        assert len(refused) == 2 and all(r.headers["retry-after"] and r.json()["error"]["param"] == "session_id" for r in refused)
        assert all(r.json()["usage"]["completion_tokens"] == 400 for r in statuses if r.status_code == 200)


# ---- Reload


def test_sighup_reads_the_keys_again(tmp_path):
    path = tmp_path / "keys.json"

    def write(*entries):
        path.write_text(json.dumps({"keys": entries}))
    write(entry("alice"), entry("bob", admin=True))
    with Daemon("--api-keys", path, key=SECRETS["bob"]) as d:
        def status(name):
            return client(d, name).get("/v1/models").status_code

        def reload(until):
            n = d.stderr().count("event=reload")
            d.signal(signal.SIGHUP)
            eventually(lambda: d.stderr().count("event=reload") > n, 10, "it has read again")
            assert until in d.stderr().splitlines()[-1]
        assert (status("alice"), status("carol")) == (200, 401)
        with client(d, "bob") as bob, ws(d, "alice") as conn:
            bob.post("/v1/sessions", json={"id": "stays"})
            write(entry("carol", max_sessions=1), {**entry("bob", admin=True), "key": "a-new-secret"})
            reload("was read again")
            assert (status("alice"), status("bob"), status("carol")) == (401, 401, 200)
            d.headers = {"authorization": "Bearer a-new-secret"}
            # The name keeps what was its own when the secret changes.
            assert [s["id"] for s in d.kv()["sessions"]["data"]] == ["stays"]
            refused = last_event(conn, input="Hi")
            assert refused["type"] == "error" and refused["status"] == 401
            with pytest.raises(ConnectionClosed):
                conn.recv(timeout=10 * SLOW)
            assert conn.close_code == 1008
        with client(d, "carol") as carol:
            assert carol.post("/v1/sessions", json={}).status_code == 200
            assert carol.post("/v1/sessions", json={}).status_code == 429
        path.write_text('{"keys": [{"name": "dave", "key": "%s"' % SECRETS["dave"])
        reload("stays as it was")
        assert (status("carol"), status("dave")) == (200, 401)
        assert not any(s in d.stderr() for s in (*SECRETS.values(), "a-new-secret"))

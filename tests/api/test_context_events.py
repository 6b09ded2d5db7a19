"""session.context events: what a WebSocket client is told of a session's KV without asking again."""
import json
import socket
import threading
import time

import httpx
import pytest

from daemon import SLOW, Daemon, eventually
from wire import Wire

PAGE = 368640  # of SmolLM2-135M in f16
SOON = 0.12 * SLOW
QUIET = 0.4


@pytest.fixture(scope="module")
def daemon():
    with Daemon("--kv-memory", 60 * PAGE, "--context", 900) as d:
        yield d


def words(n, seed):
    return " ".join(f"{seed}{i} is {i * 7919 % 1000}." for i in range(n))


def complete(d, text, n=1, **more):
    r = httpx.post(d.url + "/v1/completions", json={"prompt": text, "max_tokens": n, "temperature": 0, "ignore_eos": True, **more}, timeout=120 * SLOW)
    assert r.status_code == 200, r.text
    return r.json()


def subscribe(wire, wanted=True, **more):
    wire.send(type="session.update", context_events=wanted, **more)
    while True:
        ev = wire.event()
        if ev["type"] == "session.updated":
            assert ev["context_events"] is wanted and ev["session_id"] == more.get("session_id")
            return


def contexts(wire, seconds):
    """What comes within so many seconds, with when it came."""
    end, seen = time.monotonic() + seconds, []
    while (left := end - time.monotonic()) > 0:
        try:
            ev = json.loads(wire.socket.recv(timeout=left))
        except TimeoutError:
            break
        if ev["type"] == "session.context":
            seen.append((time.monotonic(), ev))
    return seen


def new_session(d):
    return httpx.post(d.url + "/v1/sessions", json={}).json()["id"]


def test_a_lane_is_told_of_while_it_grows_and_not_while_it_idles(daemon):
    with Wire(daemon) as w:
        subscribe(w)
        start = time.monotonic()
        w.send("Count.", max_output_tokens=60, ignore_eos=True)
        events, told = [], []
        for ev in w.events_of({"session.context"}, told):
            events.append(ev)
        took = time.monotonic() - start
        told += [ev for _, ev in contexts(w, QUIET)]
        last = told[-1]
        usage = events[-1]["response"]["usage"]
        assert last["tokens"] == usage["total_tokens"] - 1 and last["running"] == 0 and last["waiting"] == 0
        assert last["pages_by_tier"]["device"] == last["pages"] == (last["tokens"] + 15) // 16
        assert last["kv_bytes"] == last["pages"] * PAGE and last["policy"] == "full"
        assert len({ev["session_id"] for ev in told}) == 1
        assert len(told) <= 10 * (took + QUIET) + 3, "they are coalesced"
        assert [ev["tokens"] for ev in told] == sorted(ev["tokens"] for ev in told)
        assert contexts(w, QUIET) == [], "nothing changes"
        subscribe(w, False)
        w.send("Again.", max_output_tokens=4)
        assert all(ev["type"] != "session.context" for ev in w.events())
        assert contexts(w, QUIET) == []


def test_an_eviction_by_another_is_told_soon(daemon):
    sid = new_session(daemon)
    complete(daemon, words(30, "mine "), session_id=sid)
    with Wire(daemon) as w:
        subscribe(w, session_id=sid)
        _, first = contexts(w, 1)[0]
        assert first["pages_by_tier"]["device"] == first["pages"] > 10 and first["evicted_pages"] == 0
        ended = []

        def others():
            for i in range(3):
                complete(daemon, words(75, f"other{i} "))
            ended.append(time.monotonic())

        t = threading.Thread(target=others)
        t.start()
        seen = contexts(w, 1)
        while t.is_alive():
            seen += contexts(w, 0.5)
        t.join()
        seen += contexts(w, QUIET)
        lost = sum(ev["moved"]["lost"] for _, ev in seen)
        assert lost == seen[-1][1]["pages_by_tier"]["lost"] == sum(ev["evicted_pages"] for _, ev in seen) > 0
        assert seen[-1][1]["pages_by_tier"]["device"] + lost == first["pages"]
        # An eviction comes before the answer for which room was made.
        assert max(at for at, _ in seen) <= ended[0] + SOON
        s = httpx.get(daemon.url + f"/v1/sessions/{sid}").json()
        assert s["pages_by_tier"] == seen[-1][1]["pages_by_tier"]
        # The end of a session is told as well, once.
        httpx.delete(daemon.url + f"/v1/sessions/{sid}")
        assert [ev.get("ended") for _, ev in contexts(w, 1)] == [True]


def test_a_session_that_is_not_there_has_ended(daemon):
    with Wire(daemon) as w:
        subscribe(w, session_id="nobody")
        assert [ev for _, ev in contexts(w, 1)] == [{"type": "session.context", "session_id": "nobody", "ended": True}]


@pytest.mark.parametrize("body, param", [
    ({}, "context_events"), ({"context_events": "yes"}, "context_events"), ({"context_events": True, "session_id": 5}, "session_id"),
    ({"context_events": True, "session_id": "no such name"}, "session_id"),
])
def test_what_makes_no_sense_is_named(daemon, body, param):
    with Wire(daemon) as w:
        w.send(type="session.update", **body)
        ev = w.event()
        assert ev["type"] == "error" and ev["status"] == 400 and ev["error"]["param"] == param


def test_a_context_policy_and_a_running_turn(daemon):
    with Wire(daemon) as w:
        subscribe(w)
        w.send(words(60, "window "), max_output_tokens=30, ignore_eos=True, kv_cache={"policy": "streaming", "max_cache_size": 128})
        told = []
        list(w.events_of({"session.context"}, told))
        told += [ev for _, ev in contexts(w, QUIET)]
        assert told[-1]["policy"] == "streaming" and told[-1]["tokens_logical"] > 400 > 128 >= told[-1]["tokens"]


def test_a_client_that_does_not_read_holds_up_nobody(daemon):
    sid = new_session(daemon)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", daemon.port))
        s.sendall(b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                  b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
        assert s.recv(4096).startswith(b"HTTP/1.1 101")
        text = json.dumps({"type": "session.update", "context_events": True, "session_id": sid}).encode()
        s.sendall(bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text)
        before = daemon.rss_bytes()
        text = "Go on. "
        for i in range(30):
            text += complete(daemon, text, n=6, session_id=sid)["choices"][0]["text"]
        assert daemon.rss_bytes() - before < 8 << 20
        # What it finds when it reads is whole frames.
        s.settimeout(5 * SLOW)
        got = b""
        try:
            while len(got) < 1 << 20 and (part := s.recv(65536)):
                got += part
                if b'"running":0' in got[-600:]:
                    s.settimeout(0.3)
        except TimeoutError:
            pass
        assert got.count(b'"type":"session.context"') >= 5
    eventually(lambda: daemon.metrics()["kvasir:websockets"] == 0, 5, "it is gone")


def test_a_compaction_is_told_when_it_starts_and_when_it_is_done(daemon):
    compact = [{"type": "compaction", "compact_threshold": 400, "max_output_tokens": 32, "keep_turns": 1}]
    with Wire(daemon) as w:
        subscribe(w)
        previous, told = None, []
        for turn in range(8):
            w.send(words(6, f"turn{turn} "), previous_response_id=previous, max_output_tokens=8, context_management=compact)
            last = list(w.events_of({"session.context"}, told))[-1]
            assert last["type"] in ("response.completed", "response.incomplete"), last
            previous = last["response"]["id"]
        told += [ev for _, ev in contexts(w, 2)]
        states = [ev["compaction"]["state"] for ev in told if "compaction" in ev]
        assert states.count("started") >= 1 and states[0] == "started"
        done = [ev["compaction"] for ev in told if "compaction" in ev and ev["compaction"]["state"] == "done"]
        assert done and all(c["tokens_after"] < c["tokens_before"] and c["turns"] >= 1 for c in done)
        assert states.count("started") == states.count("done") + states.count("failed")

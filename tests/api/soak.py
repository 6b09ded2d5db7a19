#!/usr/bin/env python3
"""Many requests over REST, SSE and WebSocket, many of them cancelled at a random moment, among half-closed sockets, slow readers
and requests that make no sense, while allocations of the daemon fail at random. Afterwards pages, sessions, file descriptors and
memory are what they were, and no connection was dropped without such a failure.

    soak.py [--requests N | --minutes N] [--seed N]

ends with one line "N passed, ..."."""
import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time

import httpx
import websockets.asyncio.client

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from daemon import BIN, MODEL, SLOW, Daemon, eventually  # noqa: E402
from faults import LIBRARY, FaultyDaemon, sanitizer  # noqa: E402

CLIENTS = 24
WORDS = "the old river sings of stone and light while seven quiet ships wait for a wind that never comes".split()


def prompt(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 60)))


class Failed(Exception):
    """A 5xx of the right shape: an allocation failed."""


def check(status, body, *expected):
    """Raises Failed for an error that a failed allocation explains."""
    if status in (500, 503):
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "server_error", body
        raise Failed
    assert status in expected, (status, body)


async def rest(d, c, rng, session):
    body = {"messages": [{"role": "user", "content": prompt(rng)}], "max_tokens": rng.randint(1, 24)}
    if session:
        body["session_id"] = session
    r = await c.post("/v1/chat/completions", json=body)
    check(r.status_code, r.text, 200, 404)  # 404: the session was deleted meanwhile, or never made
    return "done"


async def rest_cancel(d, c, rng, session):
    try:
        r = await asyncio.wait_for(c.post("/v1/completions", json={"prompt": prompt(rng), "max_tokens": 2000}), rng.random() * 0.3)
    except asyncio.TimeoutError:
        return "cancelled"
    check(r.status_code, r.text, 200)
    return "done"


async def connect(d):
    return await asyncio.open_connection("127.0.0.1", d.port)


def request(body, path="/v1/completions"):
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def half_closed(d, c, rng, session):
    """A client that has said all it will, or has stopped in the middle of it."""
    reader, writer = await connect(d)
    data = request({"prompt": prompt(rng), "max_tokens": 4})
    whole = rng.random() < 0.5
    try:
        writer.write(data if whole else data[:rng.randrange(1, len(data))])
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 120 * SLOW)
    finally:
        writer.close()
    if not answer:
        return "cancelled"  # who has sent the last byte cannot be told from who has left
    head, _, body = answer.partition(b"\r\n\r\n")
    check(int(head.split()[1]), body, 200)
    return "done"


async def slow_reader(d, c, rng, session):
    reader, writer = await connect(d)
    try:
        writer.write(request({"prompt": prompt(rng), "max_tokens": 60, "stream": True, "logprobs": 5}))
        for _ in range(rng.randint(1, 10)):
            if not await asyncio.wait_for(reader.read(rng.randint(1, 400)), 120 * SLOW):
                break
            await asyncio.sleep(0.05)
    finally:
        writer.transport.abort()
    return "left"


NONSENSE = [b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60, b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"GET / HTTP/1.1\r\n\r\n",
            b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", request({"prompt": 5}), request({"messages": 5}),
            request([]), request({"prompt": "a", "session_id": "none"}), request({}, "/nothing")]


async def malformed(d, c, rng, session):
    reader, writer = await connect(d)
    try:
        writer.write(rng.choice(NONSENSE) if rng.random() < 0.8 else rng.randbytes(rng.randint(1, 300)))
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 60 * SLOW)
    except OSError:
        return "reset"
    finally:
        writer.close()
    assert not answer or answer.startswith(b"HTTP/1.") and answer[9:10] in b"45", answer[:200]
    return "refused"


async def sse(d, c, rng, session):
    limit = rng.choice([None, None, 1, 3, 10])
    body = {"prompt": prompt(rng), "max_tokens": 24 if limit is None else 1000, "stream": True, "n": rng.choice([1, 1, 2])}
    async with c.stream("POST", "/v1/completions", json=body) as r:
        if r.status_code != 200:
            check(r.status_code, await r.aread())
        n = 0
        async for line in r.aiter_lines():
            n += line.startswith("data: ")
            if line.startswith('data: {"error"'):
                raise Failed
            if limit is not None and n >= limit:
                return "cancelled"
            if line == "data: [DONE]":
                return "done"
    raise AssertionError("a stream without an end")


async def websocket(d, c, rng, session):
    async with websockets.asyncio.client.connect(d.ws_url, open_timeout=60 * SLOW) as ws:
        previous = None
        if rng.random() < 0.3:
            await ws.send(json.dumps({"type": "session.update", "context_events": True}))
        compaction = [{"type": "compaction", "compact_threshold": 128, "max_output_tokens": 16, "keep_turns": 1}] if rng.random() < 0.4 else None
        for _ in range(rng.randint(1, 5 if compaction else 3)):
            if rng.random() < 0.4:  # long enough to be parked, or to be about to be
                await asyncio.sleep(rng.choice([0.03, 0.05, 0.07, 0.3]))
                if rng.random() < 0.1:
                    return "left"
            body = {"type": "response.create", "input": prompt(rng), "max_output_tokens": rng.choice([4, 16, 1000])}
            if compaction:
                body["context_management"] = compaction
            if previous:
                body["previous_response_id"] = previous
            await ws.send(json.dumps(body))
            how = rng.choice(["wait", "wait", "cancel", "leave"]) if body["max_output_tokens"] < 1000 else rng.choice(["cancel", "leave"])
            while True:
                ev = json.loads(await asyncio.wait_for(ws.recv(), 120 * SLOW))
                if ev["type"] == "response.failed" or (ev["type"] == "error" and ev["status"] in (500, 503)):
                    raise Failed
                if ev["type"] in ("response.completed", "response.incomplete", "response.failed"):
                    previous = ev["response"]["id"] if ev["type"] != "response.failed" and ev["response"]["status"] != "cancelled" else None
                    break
                assert ev["type"] != "error", ev
                if ev["type"] == "response.output_text.delta" and how != "wait":
                    if how == "leave":
                        return "cancelled"
                    await ws.send(json.dumps({"type": "response.cancel"}))
                    how = "wait"
    return "done"


KINDS = [rest, rest_cancel, sse, websocket] * 3 + [half_closed, slow_reader, malformed]


async def break_memory(d, rng, fired):
    """Lets one allocation fail now and then, and sometimes a few in a row."""
    while True:
        d.arm(rng.randint(1, 5000), rng.choice([1, 1, 1, 3, 20]))
        await asyncio.sleep(rng.random() * 0.4)
        fired.append(d.disarm())


async def watch_parking(d, most):
    """Whether WebSockets were parked, as far as one can be told while allocations fail."""
    while True:
        await asyncio.sleep(0.5)
        with contextlib.suppress(httpx.TransportError, KeyError):
            most[0] = max(most[0], (await asyncio.to_thread(d.metrics))["kvasir:websockets_parked"])


async def client(d, c, todo, rng, counts):
    session = None

    async def forget():
        if session:
            with contextlib.suppress(httpx.TransportError):
                await c.delete(f"/v1/sessions/{session}")

    def count(kind, outcome):
        counts[kind.__name__, outcome] = counts.get((kind.__name__, outcome), 0) + 1
    for _ in todo:
        kind = rng.choice(KINDS)
        try:
            if rng.random() < 0.1:
                await forget()
                session = None
                r = await c.post("/v1/sessions", json={})
                check(r.status_code, r.text, 200)
                session = r.json()["id"]
            count(kind, await kind(d, c, rng, session))
        except Failed:
            count(kind, "failed")
        except (httpx.TransportError, OSError, websockets.exceptions.WebSocketException, EOFError):
            count(kind, "dropped")
    await forget()


async def run(d, todo, rng, broken):
    """Runs requests until `todo` ends: how often each kind had each outcome, how many allocations failed, and the most that were parked."""
    counts, fired, parked = {}, [], [0]
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=d.url, timeout=240 * SLOW, limits=limits) as c:
        breaker = asyncio.create_task(break_memory(d, rng, fired)) if broken else None
        watcher = asyncio.create_task(watch_parking(d, parked))
        tasks = [asyncio.create_task(client(d, c, todo, rng, counts)) for _ in range(CLIENTS)]
        try:
            await asyncio.gather(*tasks)
        finally:
            watcher.cancel()
            if breaker:
                breaker.cancel()
                fired.append(d.disarm())
        # What a failed answer left behind: a session of which its client never heard.
        for s in (await c.get("/v1/sessions?limit=1000")).json()["data"]:
            await c.delete(f"/v1/sessions/{s['id']}")
    return counts, sum(fired), parked[0]


def until(seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--requests", type=int, default=1000)
    p.add_argument("--minutes", type=float, help="go on for this long, instead of for a number of requests")
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    if not MODEL or not os.path.exists(MODEL) or not os.path.exists(BIN):
        print(f"SKIP soak: no model (KVASIR_TEST_MODEL={MODEL}) or no program ({BIN})")
        print("0 passed, 0 failed, 1 skipped")
        return 0
    rng = random.Random(args.seed)
    failures = []
    broken = os.path.exists(LIBRARY) and sanitizer() != "tsan"
    if not broken:
        print(f"SKIP soak-memory: {LIBRARY} is not built, or TSan does not take it")
    # A small pool: the warm-up fills it with what the prefix index keeps, so that memory grows no more for that reason.
    with (FaultyDaemon if broken else Daemon)("--log-level", "off", "--kv-memory", "128M", "--response-store", "32K",
                                             "--ws-park-after", "50ms") as d:
        start_pages, start_files = d.pages(), d.n_files()
        warm = until(args.minutes * 60 / 8) if args.minutes else iter(range(max(args.requests // 4, 250)))
        asyncio.run(run(d, warm, rng, broken))  # the memory of a warm daemon is the measure
        d.wait_idle()
        rss = d.rss_bytes()
        live = d.live() if broken else 0
        start = time.monotonic()
        counts, fired, parked = asyncio.run(run(d, until(args.minutes * 60) if args.minutes else iter(range(args.requests)), rng, broken))
        took = time.monotonic() - start
        d.wait_idle()
        print(f"{sum(counts.values())} requests in {took:.0f} s, {fired} failed allocations, up to {parked:.0f} parked:",
              ", ".join(f"{k} {o} {n}" for (k, o), n in sorted(counts.items())))
        dropped = sum(n for (_, outcome), n in counts.items() if outcome == "dropped")

        checks = {
            "all KV pages are back": lambda: d.pages() == start_pages,
            "no session is left": lambda: d.metrics()["kvasir:sessions"] == 0,
            "the books agree with the pages": lambda: d.kv()["drift_pages"] == 0,
            "file descriptors are what they were": lambda: d.n_files() <= start_files,
            "memory is what it was": lambda: d.rss_bytes() <= rss * 1.05 + (16 << 20),
            "no connection was dropped without a failed allocation": lambda: dropped <= fired,
            "WebSockets were parked": lambda: parked > 0,
            "it has seen every kind": lambda: {k.__name__ for k in KINDS} == {k for k, _ in counts},
        }
        if broken:
            checks["allocations have failed"] = lambda: fired > 0
            checks["blocks of memory are what they were"] = lambda: d.live() <= live * 1.02 + 200
        for name, check in checks.items():
            try:
                eventually(check, 5, name)
                print(f"ok {name}")
            except AssertionError as e:
                failures.append(name)
                print(f"FAIL soak: {name}: {e}")
        print(f"memory {rss >> 20} MiB -> {d.rss_bytes() >> 20} MiB, blocks {live} -> {d.live() if broken else 0}, "
              f"files {start_files} -> {d.n_files()}")
    print(f"{len(checks) - len(failures)} passed, {len(failures)} failed, {0 if broken else 1} skipped")
    return 1 if failures else 0


sys.exit(main())

#!/usr/bin/env python3
"""A first soak: many requests over REST, SSE and WebSocket, many of them cancelled at a random moment. Afterwards pages, sessions,
file descriptors and memory are what they were. soak.py [--requests N] [--seed N]; ends with one line "N passed, ..."."""
import argparse
import asyncio
import json
import os
import random
import sys
import time

import httpx
import websockets.asyncio.client

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from daemon import BIN, MODEL, SLOW, Daemon, eventually  # noqa: E402

CLIENTS = 24
WORDS = "the old river sings of stone and light while seven quiet ships wait for a wind that never comes".split()


def prompt(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 60)))


async def rest(d, c, rng, session):
    body = {"messages": [{"role": "user", "content": prompt(rng)}], "max_tokens": rng.randint(1, 24)}
    if session:
        body["session_id"] = session
    r = await c.post("/v1/chat/completions", json=body)
    assert r.status_code in (200, 404), r.text  # 404: the session was deleted meanwhile
    return "done"


async def rest_cancel(d, c, rng, session):
    try:
        await asyncio.wait_for(c.post("/v1/completions", json={"prompt": prompt(rng), "max_tokens": 2000}), rng.random() * 0.3)
    except asyncio.TimeoutError:
        return "cancelled"
    return "done"


async def sse(d, c, rng, session):
    limit = rng.choice([None, None, 1, 3, 10])
    body = {"prompt": prompt(rng), "max_tokens": 24 if limit is None else 1000, "stream": True, "n": rng.choice([1, 1, 2])}
    async with c.stream("POST", "/v1/completions", json=body) as r:
        assert r.status_code == 200
        n = 0
        async for line in r.aiter_lines():
            n += line.startswith("data: ")
            if limit is not None and n >= limit:
                return "cancelled"
            if line == "data: [DONE]":
                return "done"
    raise AssertionError("a stream without an end")


async def websocket(d, c, rng, session):
    async with websockets.asyncio.client.connect(d.ws_url, open_timeout=60 * SLOW) as ws:
        previous = None
        for _ in range(rng.randint(1, 3)):
            body = {"type": "response.create", "input": prompt(rng), "max_output_tokens": rng.choice([4, 16, 1000])}
            if previous:
                body["previous_response_id"] = previous
            await ws.send(json.dumps(body))
            how = rng.choice(["wait", "wait", "cancel", "leave"]) if body["max_output_tokens"] < 1000 else rng.choice(["cancel", "leave"])
            while True:
                ev = json.loads(await asyncio.wait_for(ws.recv(), 120 * SLOW))
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


async def run(d, n, rng):
    counts = {}
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=d.url, timeout=240 * SLOW, limits=limits) as c:
        todo = iter(range(n))

        async def client(i):
            session = None
            for _ in todo:
                if rng.random() < 0.1:
                    if session:
                        await c.delete(f"/v1/sessions/{session}")
                    session = (await c.post("/v1/sessions", json={})).json()["id"]
                kind = rng.choice([rest, rest_cancel, sse, websocket])
                outcome = await kind(d, c, rng, session)
                counts[kind.__name__, outcome] = counts.get((kind.__name__, outcome), 0) + 1
            if session:
                await c.delete(f"/v1/sessions/{session}")
        await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    return counts


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--requests", type=int, default=1000)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    if not MODEL or not os.path.exists(MODEL) or not os.path.exists(BIN):
        print(f"SKIP soak: no model (KVASIR_TEST_MODEL={MODEL}) or no program ({BIN})")
        print("0 passed, 0 failed, 1 skipped")
        return 0
    rng = random.Random(args.seed)
    failures = []
    # A small pool: the warm-up fills it with what the prefix index keeps, so that memory grows no more for that reason.
    with Daemon("--log-level", "warn", "--kv-memory", "128M") as d:
        start_pages, start_files = d.pages(), d.n_files()
        asyncio.run(run(d, max(args.requests // 4, 50), rng))  # the memory of a warm daemon is the measure
        d.wait_idle()
        rss = d.rss_bytes()
        start = time.monotonic()
        counts = asyncio.run(run(d, args.requests, rng))
        took = time.monotonic() - start
        d.wait_idle()
        print(f"{args.requests} requests in {took:.0f} s:", ", ".join(f"{k} {o} {n}" for (k, o), n in sorted(counts.items())))

        checks = {
            "all KV pages are back": lambda: d.pages() == start_pages,
            "no session is left": lambda: d.metrics()["kvasir:sessions"] == 0,
            "file descriptors are what they were": lambda: d.n_files() <= start_files,
            "memory is what it was": lambda: d.rss_bytes() <= rss * 1.05 + (16 << 20),
        }
        for name, check in checks.items():
            try:
                eventually(check, 5, name)
                print(f"ok {name}")
            except AssertionError as e:
                failures.append(name)
                print(f"FAIL soak: {name}: {e}")
        print(f"memory {rss >> 20} MiB -> {d.rss_bytes() >> 20} MiB, files {start_files} -> {d.n_files()}")
    print(f"{len(checks) - len(failures)} passed, {len(failures)} failed, 0 skipped")
    return 1 if failures else 0


sys.exit(main())

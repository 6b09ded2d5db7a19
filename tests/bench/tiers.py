#!/usr/bin/env python3
"""What a page below the pool is worth: time to first token of a prompt that is computed, found in the pool, brought back from RAM,
from disk, and from disk after a restart, as ratios to computing it. All in one run, taking turns.

    tests/bench/tiers.py --bin build/server/kvasir --model SmolLM2-135M-Instruct.Q4_1.gguf [--tokens 2000,6000] [--rounds 3]
"""
import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "api"))


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "server", "kvasir"))
    p.add_argument("--model", required=True)
    p.add_argument("--tokens", default="2000,6000")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--dtype", default="f16")
    p.add_argument("--dir", help="where the disk tier is (default: a temporary directory)")
    return p.parse_args()


def call(url, body=None):
    data = json.dumps(body).encode() if body is not None else None
    with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=600) as r:
        return json.load(r)


class Bench:
    def __init__(self, args):
        self.a = args
        self.dir = tempfile.mkdtemp(prefix="kvasir-bench-", dir=args.dir)

    def daemon(self, *more):
        os.environ["KVASIR_BIN"] = self.a.bin
        import daemon
        daemon.BIN = self.a.bin
        return daemon.Daemon("--kv-memory", "2400M", "--session-heartbeat", "1h", "--session-ttl", "1h", *more, model=self.a.model)

    def ask(self, d, ids):
        start = time.monotonic()
        usage = call(d.url + "/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0})["usage"]
        return time.monotonic() - start, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def ids(n, seed):
    return [(seed * 7919 + i * 31) % 40000 + 1000 for i in range(n)]


def quiet(d):
    while any(t["writing"] or t["loading"] for t in call(d.url + "/v1/kv")["tiers"]):
        time.sleep(0.05)


def measure(b, n, rounds):
    rows = {k: [] for k in ("computed", "pool", "ram", "disk", "restart")}
    for r in range(rounds):
        mine = ids(n, 1 + r)
        # A pool that holds one such prompt: another one pushes it out.
        pages = n // 16 + 12
        for kind, args in (("ram", ("--kv-ram", "2G", "--kv-ram-dtype", b.a.dtype)), ("disk", ("--kv-disk", f"{b.dir}:2G"))):
            small = ("--context", n + 64, "--kv-memory", pages * 368640)
            with b.daemon(*args, *small) as d:
                t, cached = b.ask(d, mine)
                assert cached == 0 or kind == "disk", cached
                rows["computed"].append(t)
                rows["pool"].append(b.ask(d, mine)[0])
                quiet(d)
                b.ask(d, ids(n, 1000 + 2 * r + (kind == "disk")))
                quiet(d)
                t, cached = b.ask(d, mine)
                print(f"  {n} tokens, {kind}: {cached} came back in {t:.3f} s, computed in {rows['computed'][-1]:.3f} s", flush=True)
                rows[kind].append(t)
                quiet(d)
        with b.daemon("--kv-disk", f"{b.dir}:2G", *small) as d:
            t, cached = b.ask(d, mine)
            print(f"  {n} tokens, after a restart: {cached} came back in {t:.3f} s", flush=True)
            rows["restart"].append(t)
    base = statistics.median(rows["computed"])
    return {k: statistics.median(v) / base for k, v in rows.items()}


def main():
    a = arguments()
    b = Bench(a)
    try:
        for n in (int(x) for x in a.tokens.split(",")):
            ratios = measure(b, n, a.rounds)
            print(f"{n} tokens, time to first token as a share of computing: " +
                  ", ".join(f"{k} {v:.3f}" for k, v in ratios.items()), flush=True)
    finally:
        shutil.rmtree(b.dir, ignore_errors=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What a page below the pool is worth: time to first token of a prompt that is computed, found in the pool, brought back from RAM,
from disk, and from disk after a restart, as ratios to computing it. All in one run, taking turns.

    tests/bench/tiers.py --bin build/server/kvasir --model SmolLM2-135M-Instruct.Q4_1.gguf [--tokens 2000,6000] [--rounds 3]

With --against BIN, only what a turn of --turn tokens takes behind pages that come from RAM and from disk, with this
program and with that one, which take turns on two conversations that push each other out; and with both while the prompt
is in the pool, which is what is left to compute.
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
    p.add_argument("--against", help="another program")
    p.add_argument("--kinds", default="ram,disk", help="with --against: tiers to compare")
    p.add_argument("--turn", type=int, default=20, help="new tokens of each turn")
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

    def daemon(self, *more, program=None):
        import daemon
        daemon.BIN = program or self.a.bin
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


def compare(b, n, rounds):
    pages = n // 16 + 12 + b.a.turn // 16
    for kind, args in (("ram", ("--kv-ram", "2G", "--kv-ram-dtype", b.a.dtype)), ("disk", ())):
        if kind not in b.a.kinds.split(","):
            continue
        programs, got = (b.a.bin, b.a.against), ([], [])
        small = ("--context", n + b.a.turn + 64, "--kv-memory", pages * 368640)
        tiers = [args or ("--kv-disk", f"{b.dir}/{i}:1G") for i in (0, 1)]
        daemons = [b.daemon(*t, *small, program=p) for t, p in zip(tiers, programs)]
        try:
            for d in daemons:
                for seed in 1, 2:
                    b.ask(d, ids(n, seed))
                    quiet(d)
            for r in range(rounds):
                for i in (0, 1) if r % 2 else (1, 0):
                    prompt = ids(n, 1 + r % 2) + ids(b.a.turn, 5000 + r)
                    t, cached = b.ask(daemons[i], prompt)
                    again, _ = b.ask(daemons[i], prompt[:n] + ids(b.a.turn, 9000 + r))
                    quiet(daemons[i])
                    if cached < n - 16:
                        print(f"  only {cached} of {n} tokens were found", flush=True)
                        continue
                    got[i].append((t, again))
        finally:
            for d in daemons:
                d.stop()
        mine, other = ([statistics.median(x[k] for x in g) for k in (0, 1)] for g in got)
        # Two runs beside each other in time had the same neighbours.
        ratio = statistics.median(x[0] / y[0] for x, y in zip(*got))
        print(f"{n} tokens and {b.a.turn} more, from {kind}: {mine[0] * 1000:.0f} ms against {other[0] * 1000:.0f} ms, "
              f"{mine[0] / other[0]:.2f}, pair by pair {ratio:.2f}; from the pool {mine[1] * 1000:.0f} and "
              f"{other[1] * 1000:.0f} ms", flush=True)


def main():
    a = arguments()
    b = Bench(a)
    try:
        for n in (int(x) for x in a.tokens.split(",") if a.against):
            compare(b, n, a.rounds)
        for n in (int(x) for x in a.tokens.split(",") if not a.against):
            ratios = measure(b, n, a.rounds)
            print(f"{n} tokens, time to first token as a share of computing: " +
                  ", ".join(f"{k} {v:.3f}" for k, v in ratios.items()), flush=True)
    finally:
        shutil.rmtree(b.dir, ignore_errors=True)


if __name__ == "__main__":
    main()

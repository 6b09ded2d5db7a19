#!/usr/bin/env python3
"""What a conversation costs that is larger than the KV cache: tokens/s of its prompt and of its answer where it fits,
where most of it is in host memory below the cache (--kv-overflow), and where it is on disk (--kv-overflow-disk), as
ratios to where it fits. All in one run, taking turns.

    tests/bench/overflow.py --bin build/server/kvasir --model SmolLM2-135M-Instruct.Q4_1.gguf [--tokens 8000]
        [--times 4] [--rounds 3] [--answer 64] [--dtype int8]
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
    p.add_argument("--tokens", type=int, default=8000, help="of the prompt")
    p.add_argument("--times", type=int, default=4, help="how many times the cache the conversation is")
    p.add_argument("--answer", type=int, default=64)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--dir", help="where the file is (default: a temporary directory)")
    return p.parse_args()


def daemon(a, *more):
    import daemon as d
    d.BIN = a.bin
    context = ("--context", a.tokens + a.answer + 32)
    return d.Daemon("--kv-dtype", a.dtype, "--threads", a.threads, *context, *more, model=a.model)


def page_bytes(a):
    """Of a page, with its share of copies where the cache is narrow."""
    with daemon(a, "--kv-memory", "600M") as d:
        with urllib.request.urlopen(d.url + "/v1/kv") as r:
            pool = json.load(r)["pool"]
    return pool["bytes"] / pool["pages"]


def ask(a, d, seed):
    """Tokens/s of the prompt and of the answer, and where the pages were."""
    ids = [(seed * 7919 + i * 31) % 40000 + 1000 for i in range(a.tokens)]
    body = {"prompt": ids, "max_tokens": a.answer, "temperature": 0, "ignore_eos": True, "stream": True}
    times, last = [], {}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(d.url + "/v1/completions", json.dumps(body).encode(), headers)
    begun = time.monotonic()
    with urllib.request.urlopen(request, timeout=1200) as r:
        for line in r:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("kv_cache"):
                last = event["kv_cache"]
            if any(c.get("text") for c in event.get("choices", [])):
                times.append(time.monotonic())
    # Some tokens have no text of their own: what counts is the time from the first text to the last.
    return a.tokens / (times[0] - begun), (a.answer - 1) / (times[-1] - times[0]), last.get("pages_by_tier", {})


def main():
    a = arguments()
    where = tempfile.mkdtemp(prefix="kvasir-bench-", dir=a.dir)
    page = page_bytes(a)
    all_pages = (a.tokens + a.answer) // 16 + 3
    small = ("--kv-memory", int(page * (all_pages // a.times)))
    below = int(page * all_pages * 1.2) + (64 << 20)
    kinds = {
        "fits": ("--kv-memory", int(page * (all_pages + 20))),
        "ram": (*small, "--kv-overflow", below),
        "disk": (*small, "--kv-overflow-disk", f"{where}:{below}"),
    }
    got = {k: [] for k in kinds}
    try:
        for r in range(a.rounds):
            for kind, options in kinds.items():
                with daemon(a, *options) as d:
                    prompt, answer, tiers = ask(a, d, 1 + r)
                got[kind].append((prompt, answer))
                print(f"  {kind}: prompt {prompt:.0f}, answer {answer:.1f} tokens/s; pages {tiers}", flush=True)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    median = {k: [statistics.median(x[i] for x in v) for i in (0, 1)] for k, v in got.items()}
    for kind, (prompt, answer) in median.items():
        print(f"{a.tokens} tokens, {kind}: prompt {prompt:.0f} tokens/s ({prompt / median['fits'][0]:.2f}), "
              f"answer {answer:.1f} tokens/s ({answer / median['fits'][1]:.2f})")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""
What a noisy neighbour costs: decoding alone, and beside a program that keeps one core busy.

    neighbour.py --model FILE [--kvasir PROGRAM] [--threads N] [--decode N] [--rounds N]

The two take turns for some rounds, and medians count. The neighbour is a loop that the system runs on one core only, and that core is then
shared by two; so of N cores N - 1/2 are left, and a pool that loses no more than that keeps (N - 1/2) / N of its speed. One that waited for
its slowest thread at every operation would keep 1/2. The threads of the benchmark are as many as the cores it may use, unless --threads says.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def decode(args):
    command = [args.kvasir, "bench", "--model", args.model, "--prefill", "", "--decode", str(args.decode), "--runs", "1", "--json"]
    out = subprocess.run(command + (["--threads", str(args.threads)] if args.threads else []), capture_output=True, text=True)
    if out.returncode != 0:
        sys.exit(out.stderr.strip())
    result = json.loads(out.stdout)
    return result["rows"][0]["tokens_per_s"], result["threads"]


def decode_beside(args, core):
    busy = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        return decode(args)
    finally:
        busy.kill()
        busy.wait()


def main():
    parser = argparse.ArgumentParser(description="What a noisy neighbour on one core costs.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--kvasir", default=str(ROOT / "build/server/kvasir"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    alone, beside = [], []
    for _ in range(args.rounds):
        speed, threads = decode(args)
        alone.append(speed)
        beside.append(decode_beside(args, cores[0])[0])
    fair = (threads - 0.5) / threads
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"{threads} threads: {statistics.median(alone):.0f} tokens/s alone, {statistics.median(beside):.0f} beside a busy core: "
          f"{ratio:.2f}, where its share of the cores is {fair:.2f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""
Compares Kvasir with llama.cpp: same model file, same number of threads, one run.

    compare.py --model FILE --peer LLAMA_BENCH [--bench BENCH_MODEL] [--threads N] [--rounds N] [--device NAME] [--only WORD]

Both programs take turns, test by test, for some rounds; each keeps its best, since whatever else the machine does can only make a
run slower. llama.cpp runs with flash attention off and on, and the better one counts. The last column is what the README
reports: Kvasir's tokens per second over llama.cpp's. Absolute figures hold for the machine and the moment only.

How to build the peer: its release 0c1e570 (PyPI llama-cpp-python 0.3.36, vendor/llama.cpp) with cmake -DCMAKE_BUILD_TYPE=Release
-DGGML_NATIVE=ON, target llama-bench, compiled with gcc.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# name, bench_model's test, llama-bench's arguments
TESTS = [
    ("decode, short", "n64", ["-p", "0", "-n", "64"]),
    ("prefill 512", "p512", ["-p", "512", "-n", "0"]),
    ("decode at 4096", "n16@4096", ["-p", "0", "-n", "16", "-d", "4096"]),
    ("prefill 512 at 4096", "p512@4096", ["-p", "512", "-n", "0", "-d", "4096"]),
]


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout


def ours(args, test):
    command = [args.bench, "--model", args.model, "--threads", str(args.threads), "--runs", "1", "--device", args.device, test]
    return float(run(command).split()[1])


def peers(args, arguments):
    command = [args.peer, "-m", args.model, "-t", str(args.threads), "-r", "1", "-fa", "0,1", "-o", "json", *arguments]
    rows = json.loads(run(command))
    return max(row["avg_ts"] for row in rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer", required=True, help="the llama-bench program")
    parser.add_argument("--bench", default=str(Path(os.environ.get("KVASIR_BUILD", ROOT / "build")) / "tests/bench/bench-model"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only tests whose name has this in it")
    args = parser.parse_args()

    print(f"{Path(args.model).name}, {args.threads} threads, best of {args.rounds}")
    print(f"{'tokens/s':<22}{'kvasir':>10}{'llama.cpp':>12}{'ratio':>9}")
    for name, test, arguments in TESTS:
        if args.only not in name:
            continue
        best_ours = best_peer = 0.0
        for _ in range(args.rounds):
            best_ours = max(best_ours, ours(args, test))
            best_peer = max(best_peer, peers(args, arguments))
        print(f"{name:<22}{best_ours:>10.1f}{best_peer:>12.1f}{best_ours / best_peer:>9.2f}", flush=True)


if __name__ == "__main__":
    main()

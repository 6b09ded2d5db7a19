#!/usr/bin/env python3
"""
Compares Kvasir with llama.cpp and OpenVINO GenAI: same model file, same number of threads, one run.

    compare.py --model FILE [--llama FOLDER] [--openvino PYTHON] [--threads N] [--rounds N] [--device NAME] [--only WORD,...] [--int8]
               [--cpu-time]

The programs take turns, test by test, for some rounds; the median of each counts, and the last column is what the README reports:
Kvasir's tokens per second over those of the better peer. Absolute figures hold for the machine and the moment only.

--llama names the folder with llama-bench and llama-batched-bench, which run with flash attention off and on; the better one counts.
How to build them: PyPI's llama-cpp-python 0.3.36, vendor/llama.cpp, cmake -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON with gcc.
--openvino names a Python that has `pip install openvino-genai` (2026.4), which loads the GGUF file itself; it does not know all types
of tensors, nor several sequences here. A peer that takes longer than --patience seconds for a test is given up on.
--int8 adds, for decoding at a depth, what Kvasir reaches with --kv-dtype int8: OpenVINO keeps KV in bytes unless told otherwise.
--cpu-time counts the CPU time of each program in place of the time on the wall, on a machine that is busy otherwise; it makes sense
with one thread only, and there are ratios that two threads do not have, since one thread has more of the memory's speed.
Prompts are arbitrary tokens. Kvasir's context at a depth is random numbers (what is computed does not depend on them); the peers
compute theirs, which is not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# name; `kvasir bench`; llama-bench, or llama-batched-bench when it begins with -npp; OpenVINO's tokens of prompt and answer
TESTS = [
    ("decode, short", ["--decode", "32"], ["-p", "0", "-n", "32"], (16, 32)),
    ("decode at 4,096", ["--decode", "16", "--depth", "4096"], ["-p", "0", "-n", "8", "-d", "4096"], (4096, 8)),
    ("decode at 8,000", ["--decode", "16", "--depth", "8000"], ["-p", "0", "-n", "8", "-d", "8000"], (8000, 8)),
    ("8 together", ["--decode", "16", "--batch", "8"], ["-npp", "16", "-ntg", "16", "-npl", "8"], None),
    ("prefill 512", ["--decode", "0", "--prefill", "512"], ["-p", "512", "-n", "0"], (512, 1)),
    ("prefill 4,096", ["--decode", "0", "--prefill", "4096"], ["-p", "4096", "-n", "0"], (4096, 1)),
]

# Run by the Python that has OpenVINO: model, threads, prompt, answer. Prints tokens per second of what was asked for.
OPENVINO = """
import sys
import numpy as np
import openvino as ov
import openvino_genai as genai
model, threads, n, k = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
pipe = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
def run(n, k):
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = k, True, False
    ids = np.array([[i * 7919 % 32000 for i in range(n)]], dtype=np.int64)
    return pipe.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), config).perf_metrics
run(16, 2)
metrics = run(n, k)
print(1000 / metrics.get_tpot().mean if k > 1 else 1000 * n / metrics.get_ttft().mean)
"""


environment = dict(os.environ)


def run(command, patience=None):
    """What it prints; None when it took too long or failed, with the reason on stderr."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience, env=environment)
    except subprocess.TimeoutExpired:
        print(f"{command[0]}: given up after {patience} s", file=sys.stderr)
        return None
    if done.returncode != 0:
        print(f"{command[0]} failed: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    return done.stdout


def kvasir(args, arguments):
    prefill = [] if "--prefill" in arguments else ["--prefill", ""]
    out = run([args.kvasir, "bench", "--model", args.model, "--threads", str(args.threads), "--device", args.device, "--runs", "1",
               "--random-kv", "--json", *prefill, *arguments])
    if out is None:
        sys.exit("kvasir bench failed")
    rows = json.loads(out)["rows"]
    return (rows[0]["tokens_per_s"], rows[0]["read_fraction"]) if rows else None


def llama(args, arguments):
    if not args.llama:
        return None
    best = None
    for flash in args.flash.split(","):
        if arguments[0] == "-npp":
            out = run([f"{args.llama}/llama-batched-bench", "-m", args.model, "-t", str(args.threads), "-c", "2048", "-fa", flash,
                       "--output-format", "jsonl", *arguments], args.patience)
            speeds = [json.loads(line)["speed_tg"] for line in (out or "").splitlines() if line.startswith("{")]
        else:
            out = run([f"{args.llama}/llama-bench", "-m", args.model, "-t", str(args.threads), "-r", "1", "-fa", flash, "-o", "json",
                       *arguments], args.patience)
            speeds = [row["avg_ts"] for row in json.loads(out)] if out else []
        best = max([*speeds, *([best] if best else [])], default=None)
    return best


def openvino(args, shape):
    if not args.openvino or not shape:
        return None
    out = run([args.openvino, "-c", OPENVINO, args.model, str(args.threads), *map(str, shape)], args.patience)
    return float(out.split()[-1]) if out else None


def shown(x):
    return f"{x:,.1f}" if x else "-"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", help="folder with llama-bench and llama-batched-bench")
    parser.add_argument("--openvino", help="a Python with openvino-genai")
    parser.add_argument("--kvasir", default=str(Path(os.environ.get("KVASIR_BUILD", ROOT / "build")) / "server/kvasir"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flash", default="0,1", help="llama.cpp's flash attention: both take twice the time")
    parser.add_argument("--patience", type=float, default=300)
    parser.add_argument("--only", default="", help="only tests whose name has one of these in it")
    parser.add_argument("--int8", action="store_true", help="decoding at a depth with --kv-dtype int8, too")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time; one thread only")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1")
    if args.cpu_time:
        environment["LD_PRELOAD"] = str(Path(args.kvasir).resolve().parents[1] / "tests/support/cpu-time.so")

    print(f"{Path(args.model).name}, {args.threads} threads, median of {args.rounds}\n")
    print("| tokens/s | Kvasir | of read bandwidth | llama.cpp | OpenVINO | ratio |\n|---|---|---|---|---|---|")
    for name, ours, theirs, shape in TESTS:
        if not any(word in name for word in args.only.split(",")):
            continue
        variants = {name: ours}
        if args.int8 and "--depth" in ours:
            variants[f"{name}, int8 KV"] = [*ours, "--kv-dtype", "int8"]
        measured = {variant: [] for variant in variants}
        peers = {"llama": [], "openvino": []}
        given_up = set()
        for _ in range(args.rounds):
            for variant, arguments in variants.items():
                measured[variant].append(kvasir(args, arguments))
            if None in measured[name]:
                break
            for peer, measure in (("llama", lambda: llama(args, theirs)), ("openvino", lambda: openvino(args, shape))):
                speed = None if peer in given_up else measure()
                if speed:
                    peers[peer].append(speed)
                else:
                    given_up.add(peer)
        if None in measured[name]:
            continue  # beyond the model's context
        median = {key: statistics.median(values) if values else None for key, values in peers.items()}
        best = max(median["llama"] or 0, median["openvino"] or 0)
        for variant, values in measured.items():
            speed = statistics.median(value[0] for value in values)
            fraction = f"{statistics.median(value[1] or 0 for value in values):.0%}" if name.startswith("decode") else ""
            ratio = f"{speed / best:.2f}" if best else "-"
            print(f"| {variant} | {shown(speed)} | {fraction} | {shown(median['llama'])} | {shown(median['openvino'])} | {ratio} |",
                  flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""
Gemma 3 270M, whose windows of 512 tokens a text of 2,048 leaves behind three times over: its log-probabilities against those of
numpy_reference.py, on the same file.

    test_windows.py [--model FILE] [--device NAME ...]

Per device the mean absolute difference of the log-probabilities has a bound, over the whole text and over what lies beyond the first
window alone, and the most likely token is the same wherever its margin over the second is 0.5 or more. With a window that is a
token longer or shorter the numbers are others, which is tested too.

The model is what common.gemma_model() finds; the text is this repository's README.
"""

import argparse
import json
import subprocess
import time

import numpy as np

from common import ROOT, Report, available, build_dir, gemma_model, score
from numpy_reference import Model

LENGTH, TAIL = 2048, 128
# Bounds of the mean absolute difference. Float activations; activations of 8 bits, and KV in bfloat16 on some devices.
TOLERANCE, ROUNDED_TOLERANCE = 0.003, 0.045
MARGIN = 0.5


def tokens_of(path, text):
    done = subprocess.run([str(build_dir() / "server/kvasir"), "tokenize", "--model", str(path), "--jsonl", "--add-special"],
                          input=json.dumps({"text": text}) + "\n", capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["ids"]


def check_device(report, path, device, backend, ids, wanted, best):
    start = time.monotonic()
    scores = score(path, [ids], device=device, chunk=256, top=2)
    difference = np.abs(scores.logprob[0][:LENGTH - 1] - wanted)
    bound = TOLERANCE if backend == "cpu-reference" else ROUNDED_TOLERANCE
    for what, part in (("all", difference), ("beyond the window", difference[600:])):
        report.check(part.mean() <= bound, f"{backend}, {what}: mean absolute difference {part.mean():.5f} > {bound}")
    sure = np.array([top[0][1] - top[1][1] >= MARGIN for top in scores.top[0][:LENGTH - 1]])
    wrong = int((scores.argmax[0][:LENGTH - 1][sure] != best[sure]).sum())
    report.check(wrong == 0, f"{backend}: the most likely token differs at {wrong} of {sure.sum()} sure positions")
    print(f"{backend}: {difference.mean():.5f}, {difference[600:].mean():.5f} beyond the window; {sure.sum()} of {LENGTH - 1} tokens "
          f"sure ({time.monotonic() - start:.0f} s)", flush=True)
    return difference


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", metavar="FILE")
    parser.add_argument("--device", action="append", help="default: cpu-reference and cpu")
    args = parser.parse_args()
    path = args.model or gemma_model()
    report = Report()
    if path:
        ids = tokens_of(path, (ROOT / "README.md").read_text(encoding="utf-8"))[:LENGTH]
        report.check(len(ids) == LENGTH, f"the text has {len(ids)} tokens")
        start = time.monotonic()
        model = Model(path, dtype=np.float32)
        report.check(model.window == 512, f"the model's window is {model.window}")
        wanted, best = model.logprobs(ids)
        print(f"NumPy: mean log-probability {wanted.mean():.4f} ({time.monotonic() - start:.0f} s)", flush=True)
        differences = [check_device(report, path, device, backend, ids, wanted, best)
                       for backend, device in available(args.device or ["cpu-reference", "cpu"], path).items()]
        # That the test would notice: a window off by one is further away than the closest device.
        closest = min(d[-TAIL:].mean() for d in differences)
        for window in (511, 513):
            model.window = window
            off = np.abs(model.logprobs(ids, LENGTH - 1 - TAIL)[0] - wanted[-TAIL:]).mean()
            report.check(off > 2 * closest, f"a window of {window} would not be noticed: {off:.5f} beside {closest:.5f}")
            print(f"a window of {window} instead: {off:.5f} in the last {TAIL} tokens", flush=True)
    report.finish()


if __name__ == "__main__":
    main()

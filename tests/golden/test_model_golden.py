#!/usr/bin/env python3
"""
Compares a real model's numbers with independent ones: the golden files' log-probabilities were computed in NumPy with float
activations (their README says how).

    test_model_golden.py [--model smollm2|qwen ...] [--device NAME ...]

The reference's own tokens are scored (teacher forcing). Per device and part (greedy answers, chat answers, a long text)
the mean absolute difference of the log-probabilities has a bound, and the most likely token is the same wherever its
margin over the second is 0.5 or more. The reference backend, which is slow, is compared on a third of them unless KVASIR_FULL=yes.

The model files are named by KVASIR_TEST_MODEL and KVASIR_QWEN_MODEL; with KVASIR_FULL=yes the qwen model is tested too, and
fetched into .cache/models if it is not named (tests/tools/fetch_models.py).
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from common import ROOT, Report, available, score, shared

# the golden file and the variable that names the model
MODELS = {"smollm2": ("smollm2.json", "KVASIR_TEST_MODEL"), "qwen": ("qwen25-coder-0.5b.json", "KVASIR_QWEN_MODEL")}
# Bounds of the mean absolute difference: of the answers' tokens, of the first step's five best, of the text's tokens.
# The golden numbers come from float keys and values; our cache keeps halves, which Qwen's large key biases make visible (0.0021).
TOLERANCE = {"cpu-reference": (0.002, 0.006, 0.003)}
# The other devices quantise activations, most of them to 8 bits and those that make the error to 16.
ROUNDED_TOLERANCE = (0.035, 0.06, 0.035)
MARGIN = 0.5
FULL = os.environ.get("KVASIR_FULL") == "yes"


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_answers(report, what, cases, scores, offset, tolerance, first_tolerance):
    """Prompts with the reference's greedy answer behind them; offset is the first case's index in scores."""
    differences, first_step, compared = [], [], 0
    for i, case in enumerate(cases):
        n_prompt, n = len(case["prompt_ids"]), len(case["continuation"])
        ours = slice(n_prompt - 1, n_prompt - 1 + n)  # position p tells of the token at p + 1
        differences.append(scores.logprob[offset + i][ours] - case["logprobs"])
        argmax, wanted = scores.argmax[offset + i][ours], np.array(case["continuation"])
        sure = np.array(case["margins"]) >= MARGIN
        compared += int(sure.sum())
        report.check((argmax[sure] == wanted[sure]).all(), f"{what} {i}: the most likely token differs at a sure position")
        top = dict(scores.top[offset + i][n_prompt - 1])
        first_step += [top[t] - lp for t, lp in case["top5"] if t in top]
        report.check({t for t, _ in case["top5"]} <= set(top), f"{what} {i}: other tokens are most likely at first")
    mean, first = np.abs(np.concatenate(differences)).mean(), np.abs(first_step).mean()
    report.check(mean <= tolerance, f"{what}: mean absolute difference {mean:.5f} > {tolerance}")
    report.check(first <= first_tolerance, f"{what}: difference of the first step's best {first:.5f} > {first_tolerance}")
    print(f"  {what}: {mean:.5f} over {sum(map(len, differences))} tokens, {compared} of them sure; first step {first:.5f}")


def check_text(report, text, scores, at, tolerance):
    n = len(text["ids"])
    mean = np.abs(scores.logprob[at][:n - 1] - text["logprobs"]).mean()
    # The reference keeps no margins here, so ours tell which positions are sure.
    margin = np.array([top[0][1] - top[1][1] for top in scores.top[at]])
    sure = margin >= MARGIN
    wrong = int((scores.argmax[at][sure] != np.array(text["argmax"])[sure]).sum())
    report.check(wrong == 0, f"text: the most likely token differs at {wrong} of {sure.sum()} sure positions")
    report.check(mean <= tolerance, f"text: mean absolute difference {mean:.5f} > {tolerance}")
    print(f"  text: {mean:.5f} over {n - 1} tokens, {sure.sum()} of them sure")


def model_file(name):
    """The path of the model, or None after saying why there is none."""
    golden_name, variable = MODELS[name]
    path = os.environ.get(variable)
    if not shared(f"golden/{golden_name}"):
        print(f"skipped: golden/{golden_name} is not in the shared folder (KVASIR_SHARED)")
        return None
    if not path and name == "qwen" and FULL:
        done = subprocess.run([sys.executable, str(ROOT / "tests/tools/fetch_models.py"), str(ROOT / ".cache/models"), name],
                              stdout=subprocess.PIPE, text=True)
        path = done.stdout.strip()
    if not path:
        print(f"skipped: {variable} does not name the {name} model, and it was not fetched")
        return None
    return path


def a_part(golden):
    """A third of it, for a device that takes its time."""
    text = [{"ids": t["ids"][:512], "logprobs": t["logprobs"][:511], "argmax": t["argmax"][:512]} for t in golden["text"]]
    return {"greedy": golden["greedy"][::3], "chat": golden["chat"][::3], "text": text}


def check_model(report, name, path, devices, threads):
    whole = json.loads(shared(f"golden/{MODELS[name][0]}").read_text())
    if not report.check(sha256(path) == whole["model"]["sha256"], f"{path} is not the file the golden numbers are of"):
        return
    for backend, device in available(devices, path).items():
        golden = whole if FULL or backend != "cpu-reference" else a_part(whole)
        cases = golden["greedy"] + golden["chat"]
        sequences = [c["prompt_ids"] + c["continuation"] for c in cases] + [t["ids"] for t in golden["text"]]
        start = time.monotonic()
        scores = score(path, sequences, device=device, threads=threads, chunk=256, top=10)
        print(f"{Path(path).name} on {backend} ({time.monotonic() - start:.0f} s)", flush=True)
        answers, first, text_tolerance = TOLERANCE.get(backend, ROUNDED_TOLERANCE)
        check_answers(report, "greedy", golden["greedy"], scores, 0, answers, first)
        check_answers(report, "chat", golden["chat"], scores, len(golden["greedy"]), answers, first)
        for i, text in enumerate(golden["text"]):
            check_text(report, text, scores, len(cases) + i, text_tolerance)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append", choices=MODELS, help="default: smollm2, and qwen with KVASIR_FULL=yes")
    parser.add_argument("--device", action="append", help="default: cpu-reference and cpu")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    report = Report()
    for name in args.model or ["smollm2"] + ["qwen"] * FULL:
        path = model_file(name)
        if path:
            check_model(report, name, path, args.device or ["cpu-reference", "cpu"], args.threads)
    report.finish()


if __name__ == "__main__":
    main()

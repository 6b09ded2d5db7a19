#!/usr/bin/env python3
"""
What narrow KV does to a real model's answers: the text of the golden file is scored with exact pages and with pages narrowed to int8 and
fp8_e4m3, by the RAM tier once they are full (score --kv-type), and by the pool itself (score --kv-dtype), and the mean Kullback-Leibler divergence of the next token's distribution from the
exact one is bounded, position by position over the whole vocabulary.

    test_kv_types.py [--tokens N]

The model is named by KVASIR_TEST_MODEL. Everyday runs look at the first 512 tokens, KVASIR_FULL=yes at all of them.
"""
import argparse
import json
import os
import sys
import tempfile

import numpy as np

from common import Report, score, shared

BOUNDS = {"int8": 0.005, "fp8_e4m3": 0.02}
FULL = os.environ.get("KVASIR_FULL") == "yes"


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def divergences(exact, narrow, n, n_vocab):
    """KL(exact || narrow) of each position; a few rows at a time, since all of them do not fit in memory twice."""
    a, b = (np.memmap(f, np.float32, "r", shape=(n, n_vocab)) for f in (exact, narrow))
    out = np.empty(n)
    for i in range(0, n, 64):
        p, q = log_softmax(a[i:i + 64]), log_softmax(b[i:i + 64])
        out[i:i + 64] = (np.exp(p) * (p - q)).sum(axis=-1)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 30 if FULL else 512)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    report = Report()
    model, golden = os.environ.get("KVASIR_TEST_MODEL"), shared("golden/smollm2.json")
    if not model or not golden:
        print("skipped: " + ("KVASIR_TEST_MODEL names no model" if not model else "there are no golden files"))
        report.finish()
    text = json.loads(golden.read_text())["text"]
    tokens = (text if isinstance(text, list) else [text])[0]["ids"][:args.tokens]
    n = len(tokens)
    with tempfile.TemporaryDirectory(prefix="kvasir-kv-") as where:
        def logits(option, kind):
            path = os.path.join(where, kind)
            # Chunks of a page: what follows a page sees it narrow, and the page itself is computed from exact ones before it.
            return path, score(model, [tokens], device=args.device, chunk=16, logits=path, **{option: kind}).n_vocab
        exact, n_vocab = logits("kv-dtype", "f16")
        for option, kind in [(o, k) for o in ("kv-type", "kv-dtype") for k in BOUNDS]:
            bound = BOUNDS[kind]
            narrow, _ = logits(option, kind)
            kl = divergences(exact, narrow, n, n_vocab)
            os.unlink(narrow)
            print(f"{option} {kind}: mean KL {kl.mean():.6f} over {n} tokens, largest {kl.max():.4f}")
            report.check(kl.mean() < bound, f"{option} {kind}: mean KL {kl.mean():.6f} is not below {bound}")
            # A narrow cache that changed nothing would not have been narrow.
            report.check(kl[32:].mean() > 1e-7, f"{option} {kind}: nothing changed")
    report.finish()


if __name__ == "__main__":
    sys.exit(main())

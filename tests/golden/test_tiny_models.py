#!/usr/bin/env python3
"""
Runs tiny random models through the engine and through numpy_reference.py: every architecture in every tensor format and
with every RoPE scaling, as the file says and as it is told to.

    test_tiny_models.py [--device NAME ...] [--only TEXT] [--verbose]

For each model, the logits of every position are within the device's tolerance of the reference (the norm of the difference
relative to the norm, per position), and they are bit-identical however the sequence is cut into chunks, whichever rows are
asked for, and alone or in steps with eight other sequences. All the ways to cut are tried with the formats of CUT, and with
every one where KVASIR_FULL is yes.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from common import Report, available, score
from numpy_reference import Model, rope_frequencies

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import make_model  # noqa: E402
from gguf import TENSOR_TYPES  # noqa: E402

# A float, a block of 32, and one of 256: kernels of each kind. What is no format's (RoPE, windows) is F32.
CUT = TENSOR_TYPES if os.environ.get("KVASIR_FULL") == "yes" else ("F32", "Q4_1", "Q4_K")

# Rows of matrices are whole blocks of 256 everywhere, so that every format fits every matrix.
SHAPES = {
    "llama": ["--embd", "256", "--ff", "512", "--heads", "8", "--kv-heads", "2"],
    "qwen2": ["--embd", "256", "--ff", "256", "--heads", "4", "--kv-heads", "4", "--tied"],
    "qwen3": ["--embd", "256", "--ff", "256", "--heads", "8", "--kv-heads", "4", "--head-dim", "64"],
    # Windows shorter than the sequence; layers with one and without: two of each, and six of seven with one.
    "gemma2": ["--embd", "256", "--ff", "512", "--heads", "4", "--kv-heads", "2", "--head-dim", "128", "--layers", "4",
               "--window", "24", "--softcap", "20", "--tied"],
    "gemma3": ["--embd", "256", "--ff", "256", "--heads", "4", "--kv-heads", "1", "--head-dim", "256", "--layers", "7",
               "--window", "33", "--rope-base", "1e6", "--tied", "--tokenizer", "tiny-spm"],
}
# What a llama model may have besides: Mistral 0.1's window on all layers, shorter than a page and longer than two.
OTHERS = {
    "mistral": ["--layers", "3", "--window", "40"],
    "mistral small window": ["--layers", "3", "--window", "5"],
    "mistral wide window": ["--layers", "3", "--window", "100"],
    "attention scale": ["--attn-scale", "0.3"],
}
# The context is longer than what RoPE's scalings call the original one, and the sequence runs past it.
CONTEXT = ["--ctx", "128", "--rope-original-ctx", "32"]
LENGTH = 100
# --rope-scaling, what NumPy is told in its place, and the scaling of the file that it replaces.
CHOICES = [
    ("yarn:4,original=32", {"scaling": "yarn", "factor": 4, "original_ctx": 32}, "none"),
    ("yarn:8,original=16,beta-fast=8,beta-slow=2", {"scaling": "yarn", "factor": 8, "original_ctx": 16, "beta_fast": 8, "beta_slow": 2}, "linear"),
    ("linear:4,base=500000", {"scaling": "linear", "factor": 4, "base": 500000.0}, "yarn"),
    ("llama3:4,original=32", {"scaling": "llama3", "factor": 4, "original_ctx": 32}, "none"),
    ("none,original=32", {}, "llama3"),
]

# The reference backend computes with float activations, so only the order of float sums differs from NumPy's doubles.
EXACT = 1e-3
# Other devices round activations to 8 bits per 32, about 0.5% a product, except with weights that are floats.
ROUNDED = 0.04
# Some keep KV as bfloat16, and round to that what it and BF16 weights are multiplied with: 0.4% at most, 0.2% on average.
NARROWED = 0.015


def tolerance(backend, type_name):
    if backend == "cpu-reference":
        return EXACT
    if type_name not in ("F32", "F16", "BF16"):
        return ROUNDED
    return NARROWED if backend in ("cpu-avx512-bf16", "cpu-amx", "cpu-amx-emulated") else EXACT


def variants():
    """(name, arguments of make_model, format) of every model."""
    for arch, shape in SHAPES.items():
        for type_name in TENSOR_TYPES:
            yield f"{arch} {type_name}", ["--arch", arch, "--type", type_name, *shape, *CONTEXT], type_name
        for rope in ("linear", "llama3", "yarn"):
            yield f"{arch} rope {rope}", ["--arch", arch, "--rope", rope, *shape, *CONTEXT], "F32"
    for name, more in OTHERS.items():
        yield name, ["--arch", "llama", *SHAPES["llama"], *CONTEXT, *more], "F32"


def sequences(n_vocab):
    """The sequence under test, then eight others of other lengths."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, n_vocab, n).tolist() for n in (LENGTH, 3, 1, 40, 17, 16, 90, 15, 33)]


def run(model, seqs, logits_file, device, **options):
    """The first sequence's logits, [its wanted positions][vocab], and what score printed."""
    scores = score(model, seqs, device=device, logits=logits_file, **options)
    raw = np.fromfile(logits_file, np.float32).reshape(-1, scores.n_vocab)
    return raw[scores.position[0]], scores


def relative_error(ours, reference):
    return (np.linalg.norm(ours - reference, axis=1) / np.linalg.norm(reference, axis=1)).max()


def same_bits(a, b):
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def check_model(report, name, type_name, model, reference, seqs, device, scratch):
    logits_file = scratch / "logits"
    whole, scores = run(model, seqs[:1], logits_file, device, chunk=LENGTH)
    error, bound = relative_error(whole, reference), tolerance(scores.backend, type_name)
    report.check(error <= bound, f"{name} on {scores.backend}: relative error {error:.2e} > {bound:g}")
    for chunk in (1, 7, 16, 33) if type_name in CUT else (7,):
        cut, _ = run(model, seqs[:1], logits_file, device, chunk=chunk)
        report.check(same_bits(cut, whole), f"{name} on {scores.backend}: chunks of {chunk} change the logits")
    for chunk in (3, 64) if type_name in CUT else (64,):
        together, _ = run(model, seqs, logits_file, device, chunk=chunk, together=True)
        report.check(same_bits(together, whole),
                     f"{name} on {scores.backend}: eight others in the batch (chunks of {chunk}) change the logits")
    if type_name not in CUT:
        return error
    few, printed = run(model, seqs[:1], logits_file, device, chunk=30, sparse=4)
    report.check(same_bits(few, whole[printed.position[0]]), f"{name} on {scores.backend}: fewer outputs change the logits")
    one_thread, _ = run(model, seqs[:1], logits_file, device, chunk=64, threads=1)
    report.check(same_bits(one_thread, whole), f"{name} on {scores.backend}: the number of threads changes the logits")
    return error


def check_choice(report, text, wanted, file_scaling, device, scratch):
    """A file's RoPE scaling gives way to what --rope-scaling says."""
    model = scratch / "model.gguf"
    with contextlib.redirect_stdout(io.StringIO()):
        make_model.main([str(model), "--arch", "llama", "--rope", file_scaling, *SHAPES["llama"], *CONTEXT])
    reference_model = Model(model)
    base = wanted.pop("base", reference_model.meta("rope.freq_base"))
    said = reference_model.freq
    reference_model.freq, reference_model.magnitude = rope_frequencies(reference_model.dim, base, **wanted)
    report.check(not np.allclose(said, reference_model.freq), f"{text} is what the file says anyway")
    seqs = sequences(len(reference_model.file.metadata["tokenizer.ggml.tokens"]))
    reference = reference_model.logits(seqs[0])
    logits, scores = run(model, seqs[:1], scratch / "logits", device, chunk=33, rope_scaling=text)
    error = relative_error(logits, reference)
    report.check(error <= tolerance(scores.backend, "F32"), f"--rope-scaling {text} on {scores.backend}: relative error {error:.2e}")
    unchosen, _ = run(model, seqs[:1], scratch / "logits", device, chunk=33)
    report.check(relative_error(unchosen, reference) > 10 * error, f"--rope-scaling {text} changes nothing")


def check_chunks(report, arch, device, scratch):
    """Dual Chunk Attention over five chunks, on what the file's own scaling gives; layers with windows do without."""
    model = scratch / "model.gguf"
    with contextlib.redirect_stdout(io.StringIO()):
        rope = "none" if arch.startswith("gemma") else "yarn"
        make_model.main([str(model), "--arch", arch, "--rope", rope, *SHAPES[arch], *CONTEXT])
    reference_model = Model(model)
    n_vocab = len(reference_model.file.metadata["tokenizer.ggml.tokens"])
    ids = np.random.default_rng(11).integers(0, n_vocab, 300).tolist()
    plain = reference_model.logits(ids)
    reference_model.chunk, reference_model.reach = 64, 100
    reference = reference_model.logits(ids)
    options = {"rope_scaling": "dca:4,original=100,chunk=64", "chunk": 77}
    logits, scores = run(model, [ids], scratch / "logits", device, **options)
    error = relative_error(logits, reference)
    what = f"dca of {arch} on {scores.backend}"
    report.check(error <= tolerance(scores.backend, "F32"), f"{what}: relative error {error:.2e}")
    report.check(relative_error(plain, reference) > 10 * error, f"{what} changes nothing")
    cut, _ = run(model, [ids], scratch / "logits", device, **(options | {"chunk": 16}))
    report.check(same_bits(cut, logits), f"{what}: chunks of a prompt change the logits")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", action="append", help="default: cpu-reference and cpu")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    report, devices, worst = Report(), None, {}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for name, arguments, type_name in variants():
            if args.only not in name:
                continue
            model = scratch / "model.gguf"
            with contextlib.redirect_stdout(io.StringIO()):
                make_model.main([str(model), *arguments])
            devices = devices or list(available(args.device or ["cpu-reference", "cpu"], model).values())
            reference_model = Model(model)
            seqs = sequences(len(reference_model.file.metadata["tokenizer.ggml.tokens"]))
            reference = reference_model.logits(seqs[0])
            for device in devices:
                error = check_model(report, name, type_name, model, reference, seqs, device, scratch)
                worst[device] = max(worst.get(device, 0), error)
                if args.verbose:
                    print(f"{name} on {device}: relative error {error:.2e}")
        for text, wanted, file_scaling in CHOICES:
            if args.only not in "rope choice":
                continue
            for device in devices or ["cpu-reference"]:
                check_choice(report, text, dict(wanted), file_scaling, device, scratch)
        for arch in ("llama", "qwen2", "gemma3"):
            for device in devices or ["cpu-reference"] if args.only in "chunks" else []:
                check_chunks(report, arch, device, scratch)
    for device, error in worst.items():
        print(f"{device}: largest relative error {error:.2e}")
    report.finish()


if __name__ == "__main__":
    main()

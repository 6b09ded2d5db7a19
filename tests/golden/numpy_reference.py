"""
A transformer in NumPy, written from the papers and nothing else of this project, for tiny models: the independent opinion
that the engine's logits are compared with.

RMS norm: arXiv:1910.07467. SwiGLU: arXiv:2002.05202. Rotary embeddings: arXiv:2104.09864. Grouped queries: arXiv:2305.13245.
YaRN: arXiv:2309.00071. Linear interpolation: arXiv:2306.15595. Llama 3.1's frequency rule: as published with that model.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from gguf import Reader  # noqa: E402


def rms_norm(x, gain, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def rope_frequencies(dims, base, scaling="none", factor=1.0, original_ctx=0, divisors=None, beta_fast=32.0, beta_slow=1.0,
                     low_freq_factor=1.0, high_freq_factor=4.0):
    """The angle per position of each pair of dimensions, [dims / 2], and the magnitude of the rotated vectors."""
    freq = base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if divisors is not None:
        return freq / divisors, 1.0
    if scaling == "none":
        return freq, 1.0
    if scaling == "linear":
        return freq / factor, 1.0
    turns = original_ctx * freq / (2 * np.pi)  # of each pair within the original context
    if scaling == "llama3":
        keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        return keep * freq + (1 - keep) * freq / factor, 1.0
    if scaling == "yarn":
        # The ramp is linear in the pair's index, between the (rounded) pairs that turn beta_fast and beta_slow times.
        pair_of = [dims * np.log(original_ctx / (2 * np.pi * beta)) / (2 * np.log(base)) for beta in (beta_fast, beta_slow)]
        low, high = max(np.floor(pair_of[0]), 0), min(np.ceil(pair_of[1]), dims - 1)
        stretched = np.clip((np.arange(dims // 2) - low) / max(high - low, 0.001), 0, 1)
        return (1 - stretched) * freq + stretched * freq / factor, 0.1 * np.log(factor) + 1
    raise ValueError(f"unknown scaling {scaling}")


def rotate(x, position, freq, magnitude, halves):
    """x [n][heads][dim]; pairs are (2i, 2i + 1), or (i, i + dims / 2) with halves. Dimensions beyond 2 * len(freq) pass."""
    dims = 2 * len(freq)
    turn = np.exp(1j * position[:, None, None] * freq) * magnitude
    a, b = (x[..., :dims // 2], x[..., dims // 2:dims]) if halves else (x[..., 0:dims:2], x[..., 1:dims:2])
    z = (a + 1j * b) * turn
    out = x.copy()
    if halves:
        out[..., :dims // 2], out[..., dims // 2:dims] = z.real, z.imag
    else:
        out[..., 0:dims:2], out[..., 1:dims:2] = z.real, z.imag
    return out


class Model:
    """A GGUF file with everything dequantised. kv_dtype is what keys and values are rounded to before attention."""

    def __init__(self, path, kv_dtype=np.float16):
        self.file, self.kv_dtype = Reader(path), kv_dtype
        self.arch = self.file.metadata["general.architecture"]
        self.n_layer = self.meta("block_count")
        self.heads = self.meta("attention.head_count")
        self.kv_heads = self.meta("attention.head_count_kv", self.heads)
        self.dim = self.meta("attention.key_length", self.meta("embedding_length") // self.heads)
        self.eps = self.meta("attention.layer_norm_rms_epsilon")
        divisors = self.file.tensor("rope_freqs.weight") if "rope_freqs.weight" in self.file.tensors else None
        self.freq, self.magnitude = rope_frequencies(
            self.meta("rope.dimension_count", self.dim), self.meta("rope.freq_base", 10000.0),
            self.meta("rope.scaling.type", "none"), self.meta("rope.scaling.factor", 1.0),
            self.meta("rope.scaling.original_context_length", 0), divisors)
        self.weights = {}

    def meta(self, key, default=None):
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise KeyError(key)
        return value

    def w(self, name):
        if name not in self.weights:
            here = name in self.file.tensors
            self.weights[name] = self.file.tensor(name).astype(np.float64) if here else None
        return self.weights[name]

    def linear(self, name, x):
        y, bias = x @ self.w(name + ".weight").T, self.w(name + ".bias")
        return y if bias is None else y + bias

    def attention(self, blk, x, position):
        n = len(x)
        q = self.linear(blk + "attn_q", x).reshape(n, self.heads, self.dim)
        k = self.linear(blk + "attn_k", x).reshape(n, self.kv_heads, self.dim)
        v = self.linear(blk + "attn_v", x).reshape(n, self.kv_heads, self.dim)
        if self.arch == "qwen3":
            q = rms_norm(q, self.w(blk + "attn_q_norm.weight"), self.eps)
            k = rms_norm(k, self.w(blk + "attn_k_norm.weight"), self.eps)
        halves = self.arch.startswith("qwen")
        q = rotate(q, position, self.freq, self.magnitude, halves)
        k = rotate(k, position, self.freq, self.magnitude, halves)
        k, v = (a.astype(self.kv_dtype).astype(np.float64) for a in (k, v))
        share = self.heads // self.kv_heads
        k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.dim)
        scores[:, position[:, None] < position[None, :]] = -np.inf
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v)
        return self.linear(blk + "attn_output", mixed.reshape(n, -1))

    def logits(self, ids):
        """float64 [len(ids)][n_vocab]"""
        position = np.arange(len(ids))
        h = self.w("token_embd.weight")[np.asarray(ids)]
        for i in range(self.n_layer):
            blk = f"blk.{i}."
            h = h + self.attention(blk, rms_norm(h, self.w(blk + "attn_norm.weight"), self.eps), position)
            x = rms_norm(h, self.w(blk + "ffn_norm.weight"), self.eps)
            h = h + self.linear(blk + "ffn_down", silu(self.linear(blk + "ffn_gate", x)) * self.linear(blk + "ffn_up", x))
        h = rms_norm(h, self.w("output_norm.weight"), self.eps)
        output = self.w("output.weight")
        return h @ (self.w("token_embd.weight") if output is None else output).T

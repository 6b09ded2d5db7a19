"""
A transformer in NumPy, written from the papers and nothing else of this project, for tiny models: the independent opinion
that the engine's logits are compared with.

RMS norm: arXiv:1910.07467. SwiGLU, GeGLU: arXiv:2002.05202. Rotary embeddings: arXiv:2104.09864. Grouped queries:
arXiv:2305.13245. YaRN: arXiv:2309.00071. Dual Chunk Attention: arXiv:2402.17463. Linear interpolation:
arXiv:2306.15595. Llama 3.1's frequency rule: as published with that model. Sliding windows: arXiv:2310.06825. Gemma 2
(alternating windows, norms on both sides, soft caps): arXiv:2408.00118. Gemma 3 (five windows to one without, two
bases of rotation, norms of queries and keys): arXiv:2503.19786.
"""

import math
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


def gelu(x):
    """The usual approximation by tanh (arXiv:1606.08415)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def soft_cap(x, cap):
    return cap * np.tanh(x / cap) if cap else x


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
    turn = (np.exp(1j * position[:, None, None] * freq) * magnitude).astype(np.result_type(x.dtype, np.complex64))
    a, b = (x[..., :dims // 2], x[..., dims // 2:dims]) if halves else (x[..., 0:dims:2], x[..., 1:dims:2])
    z = (a + 1j * b) * turn
    out = x.copy()
    if halves:
        out[..., :dims // 2], out[..., dims // 2:dims] = z.real, z.imag
    else:
        out[..., 0:dims:2], out[..., 1:dims:2] = z.real, z.imag
    return out


# Which layers see everything: of every group of so many the last one. A window in a file of another architecture holds in all layers.
GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6}
LOCAL_BASE = {"gemma3": 10000.0}


class Model:
    """
    A GGUF file with everything dequantised. kv_dtype is what keys and values are rounded to before attention; dtype what is
    computed with.
    """

    def __init__(self, path, kv_dtype=np.float16, dtype=np.float64):
        self.file, self.kv_dtype, self.dtype = Reader(path), kv_dtype, dtype
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
        self.gemma = self.arch.startswith("gemma")
        self.window = self.meta("attention.sliding_window", 0)
        self.period = self.meta("attention.sliding_window_pattern", GLOBAL_EVERY.get(self.arch, 0))
        self.local_freq, self.local_magnitude = self.freq, self.magnitude
        if self.arch in LOCAL_BASE:
            self.local_freq, self.local_magnitude = rope_frequencies(
                self.meta("rope.dimension_count", self.dim), self.meta("rope.freq_base_swa", LOCAL_BASE[self.arch]))
        self.score_cap, self.logit_cap = self.meta("attn_logit_softcapping", 0), self.meta("final_logit_softcapping", 0)
        self.scale = self.meta("attention.scale", self.dim ** -0.5)
        self.weights = {}
        self.chunk = self.reach = 0  # of Dual Chunk Attention; 0: none

    def is_local(self, layer):
        return self.window > 0 and (self.period == 0 or layer % self.period != self.period - 1)

    def meta(self, key, default=None):
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise KeyError(key)
        return value

    def w(self, name):
        if name not in self.weights:
            here = name in self.file.tensors
            self.weights[name] = self.file.tensor(name).astype(self.dtype) if here else None
        return self.weights[name]

    def linear(self, name, x):
        y, bias = x @ self.w(name + ".weight").T, self.w(name + ".bias")
        return y if bias is None else y + bias

    def chunk_positions(self, position):
        """
        Where queries stand for keys of their own chunk, of the one before and of all before that, and which keys
        [queries][keys] these are.
        """
        apart = position[:, None] // self.chunk - position[None, :] // self.chunk
        within, last = position % self.chunk, np.full_like(position, self.reach - 1)
        return [(within, apart <= 0), (np.minimum(within + self.chunk, last), apart == 1), (last, apart > 1)]

    def attention(self, blk, x, position, local=False):
        n = len(x)
        q = self.linear(blk + "attn_q", x).reshape(n, self.heads, self.dim)
        k = self.linear(blk + "attn_k", x).reshape(n, self.kv_heads, self.dim)
        v = self.linear(blk + "attn_v", x).reshape(n, self.kv_heads, self.dim)
        if self.arch in ("qwen3", "gemma3"):
            q = rms_norm(q, self.w(blk + "attn_q_norm.weight"), self.eps)
            k = rms_norm(k, self.w(blk + "attn_k_norm.weight"), self.eps)
        halves = self.arch != "llama"
        freq, magnitude = (self.local_freq, self.local_magnitude) if local else (self.freq, self.magnitude)
        chunked = self.chunk > 0 and not local
        ways = self.chunk_positions(position) if chunked else [(position, True)]
        qs = [rotate(q, at, freq, magnitude, halves) for at, _ in ways]
        k = rotate(k, position % self.chunk if chunked else position, freq, magnitude, halves)
        k, v = (a.astype(self.kv_dtype).astype(self.dtype) for a in (k, v))
        share = self.heads // self.kv_heads
        k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
        scores = sum(np.where(seen, np.einsum("qhd,khd->hqk", q, k), 0) for q, (_, seen) in zip(qs, ways))
        scores = soft_cap(scores * self.scale, self.score_cap)
        back = position[:, None] - position[None, :]
        scores[:, (back < 0) | (back >= self.window if local else False)] = -np.inf
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v)
        return self.linear(blk + "attn_output", mixed.reshape(n, -1))

    def logits(self, ids):
        """float64 [len(ids)][n_vocab]"""
        output = self.w("output.weight")
        h = self.hidden(ids) @ (self.w("token_embd.weight") if output is None else output).T
        return soft_cap(h, self.logit_cap)

    def after(self, name, x):
        """What a sublayer adds: normed where the architecture norms that too."""
        return rms_norm(x, self.w(name), self.eps) if self.gemma else x

    def logprobs(self, ids, first=0, rows=128):
        """
        For positions from `first` on, the log-probability of each next token and the most likely token; the vocabulary is
        taken for `rows` positions at a time.
        """
        output = self.w("output.weight")
        output = (self.w("token_embd.weight") if output is None else output).T
        hidden, following, best = self.hidden(ids), [], []
        for at in range(first, len(ids) - 1, rows):
            x = soft_cap(hidden[at:min(at + rows, len(ids) - 1)] @ output, self.logit_cap)
            best.append(x.argmax(axis=1))
            top = x.max(axis=1)
            total = np.log(np.exp(x - top[:, None]).sum(axis=1, dtype=np.float64)) + top
            following.append(x[np.arange(len(x)), np.asarray(ids[at + 1:at + 1 + len(x)])] - total)
        return np.concatenate(following), np.concatenate(best)

    def hidden(self, ids):
        """What the output matrix is multiplied with."""
        position = np.arange(len(ids))
        h = self.w("token_embd.weight")[np.asarray(ids)]
        act = gelu if self.gemma else silu
        if self.gemma:
            h = h * self.dtype(np.sqrt(h.shape[1]))
        for i in range(self.n_layer):
            blk = f"blk.{i}."
            x = self.attention(blk, rms_norm(h, self.w(blk + "attn_norm.weight"), self.eps), position, self.is_local(i))
            h = h + self.after(blk + "post_attention_norm.weight", x)
            x = rms_norm(h, self.w(blk + "ffn_norm.weight"), self.eps)
            x = self.linear(blk + "ffn_down", act(self.linear(blk + "ffn_gate", x)) * self.linear(blk + "ffn_up", x))
            h = h + self.after(blk + "post_ffw_norm.weight", x)
        return rms_norm(h, self.w("output_norm.weight"), self.eps)

#!/usr/bin/env python3
"""Writes a model with random weights as a GGUF file: the same file for the same arguments.

    make_model.py --arch qwen2 --type Q4_K --embd 256 --ff 512 --rope yarn --chat-template chatml tiny.gguf
    make_model.py --preset llama-1b --type Q4_K_M big.gguf

Names of tensors and keys are those of published files. `--type` is a tensor type for all matrices, or one of the usual
mixes (Q2_K_M, Q3_K_M, Q4_K_M, Q5_K_M), in which a matrix whose rows are not whole blocks takes a 32-element type instead.
Norms and biases are always F32. `--rope llama3` is written as published files have it: factors in rope_freqs.weight.
"""

import argparse
import re
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from gguf import TENSOR_TYPES, Reader, Writer, quantize

# Token types of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6

CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")

TRAINING_TEXT = """
The engine reads a model from a file and keeps the pages of every conversation in memory. When a request comes in, the
server finds the longest prefix that it has seen before, and only computes what is new. A page is shared by all who hold
a reference to it; the last one who lets go of it frees it. Nothing is dropped without telling the one who asked. Small
tools that do one thing, tests that read as a description of what the program does, and numbers that were measured in the
same run: that is how the work is shown to be right. The user writes a question and the assistant writes an answer, token
by token, until the end of the answer or the limit of the context is reached. There are 128 pages of 16 tokens each.
"""

PRESETS = {
    "llama-1b": {"arch": "llama", "layers": 16, "embd": 2048, "ff": 8192, "heads": 32, "kv_heads": 8, "head_dim": 64,
                 "vocab": 49152, "ctx": 8192, "tied": True},
    # A token has as much KV as with SmolLM2-135M, on which tests of the server count, and hardly any weights.
    "smollm2-kv": {"arch": "llama", "type": "Q4_0", "layers": 30, "embd": 64, "ff": 64, "heads": 3, "kv_heads": 3, "head_dim": 64,
                   "ctx": 8192, "tied": True, "chat_template": "chatml"},
}


# ---- Tokenizers ----

def byte_symbols():
    """The printable character that stands for each byte in byte-level BPE vocabularies (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def train_merges(words, n):
    """Pairs to merge, best first: the most frequent pair, ties broken by its text."""
    counts = Counter(words)
    split = {w: list(w) for w in counts}
    merges = []
    for _ in range(n):
        pairs = Counter()
        for w, parts in split.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] += counts[w]
        if not pairs:
            break
        a, b = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append((a, b))
        for w, parts in split.items():
            i = 0
            while i + 1 < len(parts):
                if parts[i] == a and parts[i + 1] == b:
                    parts[i:i + 2] = [a + b]
                i += 1
    return merges


def tiny_bpe(args):
    symbol = byte_symbols()
    words = re.findall(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\n", TRAINING_TEXT)
    merges = train_merges(["".join(symbol[b] for b in w.encode()) for w in words], 200)
    tokens = list(symbol.values())
    for a, b in merges:
        if a + b not in tokens:
            tokens.append(a + b)
    types = [NORMAL] * len(tokens)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    first = len(tokens)
    tokens += specials
    types += [CONTROL] * len(specials)
    pre = args.pre or {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}.get(args.arch, "qwen2")
    return tokens, types, [
        ("tokenizer.ggml.model", "string", "gpt2"),
        ("tokenizer.ggml.pre", "string", pre),
        ("tokenizer.ggml.merges", "array of string", [f"{a} {b}" for a, b in merges]),
        ("tokenizer.ggml.bos_token_id", "u32", first),
        ("tokenizer.ggml.eos_token_id", "u32", first + 2),
        ("tokenizer.ggml.padding_token_id", "u32", first),
        ("tokenizer.ggml.add_bos_token", "bool", False),
    ]


def tiny_spm(_args):
    words = re.findall(r" ?[A-Za-z]+|\d|[^\sA-Za-z\d]|\n", TRAINING_TEXT)
    merges = train_merges([w.replace(" ", "\u2581") for w in words if w != "\n"], 200)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    scores = [0.0] * len(tokens)
    pieces = list(dict.fromkeys(a + b for a, b in merges))
    pieces += ["\u2581"] + [chr(c) for c in range(ord("!"), ord("~") + 1)]
    tokens += pieces
    types += [NORMAL] * len(pieces)
    scores += [-float(i) for i in range(len(pieces))]
    for special in ("<|im_start|>", "<|im_end|>"):
        tokens.append(special)
        types.append(CONTROL)
        scores.append(0.0)
    return tokens, types, [
        ("tokenizer.ggml.model", "string", "llama"),
        ("tokenizer.ggml.pre", "string", "default"),
        ("tokenizer.ggml.scores", "array of f32", scores),
        ("tokenizer.ggml.bos_token_id", "u32", 1),
        ("tokenizer.ggml.eos_token_id", "u32", 2),
        ("tokenizer.ggml.unknown_token_id", "u32", 0),
        ("tokenizer.ggml.add_bos_token", "bool", True),
        ("tokenizer.ggml.add_eos_token", "bool", False),
        ("tokenizer.ggml.add_space_prefix", "bool", True),
    ]


def copied_vocabulary(path):
    """The tokenizer of another file, with all its keys but the template."""
    source = Reader(path)
    skip = {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}
    rest = [(k, source.types[k], v) for k, v in source.metadata.items() if k.startswith("tokenizer.ggml.") and k not in skip]
    tokens = source.metadata["tokenizer.ggml.tokens"]
    types = source.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    return list(tokens), [int(t) for t in types], rest


def vocabulary(args):
    if args.vocab_from:
        tokens, types, rest = copied_vocabulary(args.vocab_from)
    else:
        tokens, types, rest = {"tiny-bpe": tiny_bpe, "tiny-spm": tiny_spm}[args.tokenizer](args)
    n = args.vocab or len(tokens)
    if n < len(tokens):
        raise SystemExit(f"--vocab {n} is less than the {len(tokens)} tokens of the tokenizer")
    extra = n - len(tokens)
    tokens += [f"[UNUSED{i}]" for i in range(extra)]
    types += [UNUSED] * extra
    rest = [(k, t, list(v) + [-1e6] * extra if k == "tokenizer.ggml.scores" else v) for k, t, v in rest]
    return [("tokenizer.ggml.tokens", "array of string", tokens),
            ("tokenizer.ggml.token_type", "array of i32", types), *rest], n


# ---- Weights ----

def more_bits(layer, n_layer):
    """The layers whose attn_v and ffn_down get the better type in the usual mixes: the ends, and every third between."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


# mix: type of most matrices, of attn_v and ffn_down in layers of more_bits(), of the output matrix
MIXES = {"Q2_K_M": ("Q2_K", "Q3_K", "Q6_K"), "Q3_K_M": ("Q3_K", "Q5_K", "Q6_K"), "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
         "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K")}
# What a matrix takes in a mix when its rows are not whole blocks of 256.
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def matrix_type(args, name, n_in, layer):
    if args.type not in MIXES:
        return args.type
    base, better, output = MIXES[args.type]
    chosen = base
    if name == "output.weight" or (name == "token_embd.weight" and args.tied):
        chosen = output
    elif ("attn_v" in name or "ffn_down" in name) and more_bits(layer, args.layers):
        chosen = better
    return chosen if n_in % TENSOR_TYPES[chosen][1] == 0 else FALLBACK[chosen]


def generator(args, name):
    """Each tensor has its own stream, so that its values do not depend on which other tensors there are."""
    return np.random.default_rng([args.seed, zlib.crc32(name.encode())])


POOL_ELEMS = 1 << 20


def matrix_chunks(args, name, type_name, n_in, n_out, scale):
    """
    The raw bytes of a random matrix. A large one draws its blocks at random from a pool, which is what makes a model of
    a billion weights take seconds.
    """
    rng = generator(args, name)
    n_elems = n_in * n_out
    block = max(TENSOR_TYPES[type_name][1], 32)
    if n_elems <= 4 * POOL_ELEMS:
        yield quantize(type_name, rng.standard_normal(n_elems, np.float32) * np.float32(scale))
        return
    pool = quantize(type_name, rng.standard_normal(POOL_ELEMS, np.float32) * np.float32(scale))
    pool = pool.reshape(POOL_ELEMS // block, -1)
    n_blocks, step = n_elems // block, 1 << 15
    for i in range(0, n_blocks, step):
        yield pool[rng.integers(0, len(pool), min(step, n_blocks - i))]


class Model:
    def __init__(self, args, writer):
        self.args, self.writer = args, writer

    def matrix(self, name, n_in, n_out, layer=0, scale=None):
        type_name = matrix_type(self.args, name, n_in, layer)
        if n_in % TENSOR_TYPES[type_name][1]:
            raise SystemExit(f"{name}: rows of {n_in} are not whole blocks of {TENSOR_TYPES[type_name][1]} ({type_name})")
        scale = n_in ** -0.5 if scale is None else scale
        self.writer.tensor(name, type_name, (n_in, n_out),
                           lambda: matrix_chunks(self.args, name, type_name, n_in, n_out, scale))

    def vector(self, name, n, mean, spread):
        x = mean + spread * generator(self.args, name).standard_normal(n, np.float32)
        self.writer.tensor(name, "F32", (n,), x)

    def layer(self, i):
        a, blk = self.args, f"blk.{i}."
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self.vector(blk + "attn_norm.weight", a.embd, 1, 0.1)
        for name, n_out in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            self.matrix(f"{blk}{name}.weight", a.embd, n_out, i)
            if a.arch == "qwen2":
                self.vector(f"{blk}{name}.bias", n_out, 0, 0.2)
        if a.arch in ("qwen3", "gemma3"):
            self.vector(blk + "attn_q_norm.weight", a.head_dim, 1, 0.1)
            self.vector(blk + "attn_k_norm.weight", a.head_dim, 1, 0.1)
        self.matrix(blk + "attn_output.weight", q, a.embd, i)
        if a.arch.startswith("gemma"):
            self.vector(blk + "post_attention_norm.weight", a.embd, 1, 0.1)
            self.vector(blk + "post_ffw_norm.weight", a.embd, 1, 0.1)
        self.vector(blk + "ffn_norm.weight", a.embd, 1, 0.1)
        self.matrix(blk + "ffn_gate.weight", a.embd, a.ff, i)
        self.matrix(blk + "ffn_up.weight", a.embd, a.ff, i)
        self.matrix(blk + "ffn_down.weight", a.ff, a.embd, i)

    def write(self, n_vocab):
        a = self.args
        # An output matrix with rows of length 3 gives logits that spread like a trained model's.
        self.matrix("token_embd.weight", a.embd, n_vocab, scale=3 * a.embd ** -0.5 if a.tied else 1.0)
        if a.rope == "llama3":
            self.writer.tensor("rope_freqs.weight", "F32", (a.head_dim // 2,), llama3_factors(a))
        for i in range(a.layers):
            self.layer(i)
        self.vector("output_norm.weight", a.embd, 1, 0.1)
        if not a.tied:
            self.matrix("output.weight", a.embd, n_vocab, scale=3 * a.embd ** -0.5)


def llama3_factors(args):
    """
    What each RoPE frequency is divided by: 1 for wavelengths below original / 4, the factor above the original context, and
    a blend of the two frequencies between (Llama 3.1's rule with low_freq_factor 1 and high_freq_factor 4).
    """
    wavelength = 2 * np.pi * args.rope_base ** (np.arange(0, args.head_dim, 2) / args.head_dim)
    blend = np.clip((args.rope_original_ctx / wavelength - 1) / (4 - 1), 0, 1)
    return (1 / ((1 - blend) / args.rope_factor + blend)).astype(np.float32)


# ---- Metadata ----

def write_hyperparameters(args, w, n_vocab):
    a, arch = args, args.arch
    w.meta("general.architecture", "string", arch)
    w.meta("general.type", "string", "model")
    w.meta("general.name", "string", f"random {arch} {a.type}")
    w.meta("general.quantization_version", "u32", 2)
    for key, value in (("block_count", a.layers), ("context_length", a.ctx), ("embedding_length", a.embd),
                       ("feed_forward_length", a.ff), ("attention.head_count", a.heads),
                       ("attention.head_count_kv", a.kv_heads), ("vocab_size", n_vocab)):
        w.meta(f"{arch}.{key}", "u32", value)
    if arch == "qwen3" or a.head_dim * a.heads != a.embd:
        w.meta(f"{arch}.attention.key_length", "u32", a.head_dim)
        w.meta(f"{arch}.attention.value_length", "u32", a.head_dim)
    if arch == "llama":
        w.meta(f"{arch}.rope.dimension_count", "u32", a.head_dim)
    w.meta(f"{arch}.attention.layer_norm_rms_epsilon", "f32", 1e-5 if arch == "llama" else 1e-6)
    w.meta(f"{arch}.rope.freq_base", "f32", a.rope_base)
    if a.window:
        w.meta(f"{arch}.attention.sliding_window", "u32", a.window)
    if a.softcap:
        w.meta(f"{arch}.attn_logit_softcapping", "f32", a.softcap)
        w.meta(f"{arch}.final_logit_softcapping", "f32", 0.6 * a.softcap)
    if a.attn_scale:
        w.meta(f"{arch}.attention.scale", "f32", a.attn_scale)
    if a.rope in ("linear", "yarn"):
        w.meta(f"{arch}.rope.scaling.type", "string", a.rope)
        w.meta(f"{arch}.rope.scaling.factor", "f32", a.rope_factor)
    if a.rope == "yarn":
        w.meta(f"{arch}.rope.scaling.original_context_length", "u32", a.rope_original_ctx)


def chat_template(name):
    if name == "chatml":
        return CHATML
    return None if name == "none" else Path(name).read_text(encoding="utf-8")


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("out")
    p.add_argument("--preset", choices=PRESETS)
    p.add_argument("--arch", choices=["llama", "qwen2", "qwen3", "gemma2", "gemma3"], default="llama")
    p.add_argument("--type", choices=[*TENSOR_TYPES, *MIXES], default="F32")
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--embd", type=int, default=64)
    p.add_argument("--ff", type=int, default=128)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, help="default: embd / heads")
    p.add_argument("--vocab", type=int, help="default: what the tokenizer has; more are filled with unused tokens")
    p.add_argument("--ctx", type=int, default=512)
    p.add_argument("--rope", choices=["none", "linear", "llama3", "yarn"], default="none")
    p.add_argument("--rope-base", type=float, default=10000.0)
    p.add_argument("--rope-factor", type=float, default=4.0)
    p.add_argument("--rope-original-ctx", type=int, help="default: ctx / 4")
    p.add_argument("--window", type=int, default=0, help="positions that rows see in layers that have a window; 0: all")
    p.add_argument("--softcap", type=float, default=0, help="of attention scores, and 0.6 of it of logits; 0: none")
    p.add_argument("--attn-scale", type=float, default=0, help="0: 1 / sqrt(head-dim)")
    p.add_argument("--tied", action="store_true", help="the embedding matrix is the output matrix")
    p.add_argument("--tokenizer", choices=["tiny-bpe", "tiny-spm"], default="tiny-bpe")
    p.add_argument("--pre", help="the pre-tokenizer's name for tiny-bpe; default: the architecture's usual one")
    p.add_argument("--vocab-from", metavar="FILE.gguf", help="take the tokenizer of this file")
    p.add_argument("--chat-template", default="none", metavar="chatml|none|FILE")
    p.add_argument("--seed", type=int, default=1)
    preset = p.parse_known_args(argv)[0].preset
    if preset:
        p.set_defaults(**PRESETS[preset])
    args = p.parse_args(argv)
    args.head_dim = args.head_dim or args.embd // args.heads
    args.rope_original_ctx = args.rope_original_ctx or max(1, args.ctx // 4)
    if args.heads % args.kv_heads or args.head_dim % 2:
        p.error("heads must be a multiple of kv-heads, and head-dim even")
    return args


def main(argv):
    args = arguments(argv)
    w = Writer(args.out)
    tokenizer, n_vocab = vocabulary(args)
    write_hyperparameters(args, w, n_vocab)
    for entry in tokenizer:
        w.meta(*entry)
    template = chat_template(args.chat_template)
    if template is not None:
        w.meta("tokenizer.chat_template", "string", template)
    Model(args, w).write(n_vocab)
    w.close()


if __name__ == "__main__":
    main(sys.argv[1:])

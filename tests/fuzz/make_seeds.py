#!/usr/bin/env python3
"""Writes a small seed corpus for each fuzz target: make_seeds.py DIRECTORY makes DIRECTORY/TARGET/NAME."""

import json
import os
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "tools"))

import gguf  # noqa: E402
import make_model  # noqa: E402

SHARED = Path(os.environ.get("KVASIR_SHARED", ROOT.parent / "shared"))


def gguf_all_value_types(path):
    w = gguf.Writer(path, version=2, alignment=8)
    for i, name in enumerate(gguf.VALUE_TYPES):
        if name == "array":
            continue
        value = "text" if name == "string" else name == "bool" or i
        w.meta(f"one.{name}", name, value)
        w.meta(f"many.{name}", "array of " + name, [value] * 3)
    w.close()


def gguf_all_tensor_types(path):
    w = gguf.Writer(path)
    w.meta("general.architecture", "string", "llama")
    for name, (_, elems, _) in gguf.TENSOR_TYPES.items():
        w.tensor(f"t.{name}", name, (elems, 2), np.linspace(-1, 1, 2 * elems))
    w.close()


def gguf_small_model(path):
    """The keys and tensors of a model, in the least bytes: one layer, a vocabulary of five."""
    w = gguf.Writer(path)
    make_model.write_hyperparameters(make_model.arguments(["--layers", "1", "--embd", "8", "--ff", "8", "--heads", "2", "-"]),
                                     w, 5)
    w.meta("tokenizer.ggml.model", "string", "gpt2")
    w.meta("tokenizer.ggml.tokens", "array of string", ["a", "b", "ab", "<|endoftext|>", "c"])
    w.meta("tokenizer.ggml.token_type", "array of i32", [1, 1, 1, 3, 1])
    w.meta("tokenizer.ggml.eos_token_id", "u32", 3)
    w.meta("tokenizer.chat_template", "string", "{{ messages[0].content }}")
    for name, shape in (("token_embd.weight", (8, 5)), ("blk.0.attn_q.weight", (8, 8)), ("output_norm.weight", (8,))):
        w.tensor(name, "F32", shape, np.ones(shape))
    w.close()


def seeds_gguf(folder):
    gguf_all_value_types(folder / "values")
    gguf_all_tensor_types(folder / "tensors")
    gguf_small_model(folder / "model")


TEMPLATES = [
    make_model.CHATML,
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'system' %}{% set ns.n = ns.n + 1 %}{{ loop.index0 }}"
    "{% else %}none{% endfor %}{{ ns.n }}",
    "{% macro item(x, sep=', ') %}{{ x | trim | upper }}{{ sep }}{% endmacro %}{{ item('a') ~ item('b', sep='') }}",
    "{%- if tools is defined and tools | length > 0 -%}{{ tools | tojson(indent=2) }}{%- elif x is none -%}-{%- endif %}",
    "{{ messages[1:][::-1] | map(attribute='content') | join('\\n') }}{{ 'a.b'.split('.')[-1] }}{# comment #}",
    "{% filter replace('a', 'b') %}{% raw %}{{ a }}{% endraw %}{% endfilter %}{{ raise_exception('no ' + 1 | string) }}",
    "{% for k, v in {'a': 1, 'b': [2.5, true]}.items() %}{{ k }}={{ v }};{% if loop.last %}{% break %}{% endif %}{% endfor %}",
]


def seeds_template(folder):
    """Templates of our own that use each construct, and the small published ones where the shared folder is there."""
    for i, source in enumerate(TEMPLATES):
        (folder / f"own{i}").write_text(source, encoding="utf-8")
    for path in sorted((SHARED / "golden" / "templates").glob("*.jinja")):
        if path.stat().st_size <= 4096:
            (folder / path.stem).write_bytes(path.read_bytes())


TEXTS = [
    "The server reads 1,234 tokens, doesn't it?  Yes:\n\n\tit's 3.14159 times as many as we'd have thought!",
    "<|im_start|>user\nA message<|im_end|>\n<|endoftext|><s></s>",
    "Stra\u00dfe na\u00efve e\u0301t\u00e9 \u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \u0645\u0631\u062d\u0628\u0627 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u00a0\u2003\u200b \r\n   \n x  ",
    "int main(void)\n{\n\treturn a[0] != 0x1F ? ~b : c->d;\n}\n",
]


def seeds_tokenizer(folder):
    for i, text in enumerate(TEXTS):
        (folder / f"text{i}").write_text(text, encoding="utf-8", newline="")
    (folder / "broken").write_bytes(b"\xff\xc3 \xed\xa0\x80 \xf4\x90\x80\x80 end\xe2\x82")
    # The top bit of the first byte makes the input a vocabulary: see fuzz_tokenizer.c.
    (folder / "vocabulary-bpe").write_bytes(b"\x90\x01ab\n\x01abc\n\xffa b\n\xffab c\n\x03<|im_end|>\n\x04<t>\n\x01abcab<t>")
    (folder / "vocabulary-spm").write_bytes(b"\xa1\x01a\n\x09b\n\x11ab\n\x19abab\n\x04<t>\n\x01abab ab<t>")


BODIES = [
    {"model": "m", "prompt": "Once", "max_tokens": 16, "temperature": 0.7, "top_p": 1, "stop": ["\n", "."], "stream": True,
     "stream_options": {"include_usage": True}},
    {"messages": [{"role": "system", "content": "Be brief."},
                  {"role": "user", "content": [{"type": "text", "text": "caf\u00e9 \U0001f600"}]}],
     "n": 2, "seed": -1, "logit_bias": {"50256": -100}, "logprobs": True, "top_logprobs": 5, "user": None},
    {"prompt": [[1, 2, 3], [4]], "echo": True, "logprobs": 0, "max_tokens": 0},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
               {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"x\": 1}"},
               {"type": "function_call_output", "call_id": "c", "output": "r"}],
     "tools": [{"type": "function", "name": "f", "parameters": {}}], "instructions": "be brief", "metadata": {"k": "v"},
     "include": ["message.output_text.logprobs"], "top_logprobs": 1, "type": "response.create", "max_output_tokens": 3},
    {"input": "# One\n\nTwo three. Four five.", "instruction": "Sum up.", "max_chunk_tokens": 64, "overlap": 0.2, "max_output_tokens": 8,
     "parallel": 2, "stream": True, "split_only": False},
    {"tokens": [104, 105], "content": "<s>hi", "parse_special": True, "id": "one", "ttl": 1.5, "heartbeat_timeout": 2},
    {"type": "response.cancel", "response_id": "resp_1", "stream_id": "a"},
    {"type": "response.create", "stream_id": "a.b", "input": "hello", "previous_response_id": "resp_1", "generate": False},
    [1e308, -0.0, 18446744073709551615, {"a": {"b": [[[]]]}}, "\u0000\ud800\"\\/"],
]


def seeds_json(folder):
    for i, body in enumerate(BODIES):
        (folder / f"body{i}").write_text(json.dumps(body))
    (folder / "raw").write_text('{"a" : 1e999, "a" : [ , "\\ud83d\\ude00" }', encoding="utf-8")


# One row per target.
def seeds_http_head(folder):
    head = "POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: localhost:8080\r\nContent-Type: application/json\r\n"
    requests = [
        "GET / HTTP/1.0\r\n\r\n",
        head + "Content-Length: 2\r\n\r\n{}" + head + "Connection: close\r\n\r\n",
        head + "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n2;x=y\r\n{}\r\n0\r\nX: y\r\n\r\n" + head + "\r\n",
        "GET /v1/responses HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: a\r\nCookie: a=b; c=d\r\n\r\n",
        head + "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ]
    for i, text in enumerate(requests):
        (folder / f"request{i}").write_bytes(bytes([7]) + text.encode())


def seeds_ws_frame(folder):
    def frame(first, payload, extended=b""):
        return bytes([first, 0x80 | (126 if extended else len(payload))]) + extended + b"\0\0\0\0" + payload

    streams = [
        frame(0x81, b"hello") + frame(0x89, b"ping") + frame(0x88, b"\x03\xe8bye"),
        frame(0x01, b"one") + frame(0x8A, b"") + frame(0x00, b"two") + frame(0x80, b"three"),
        frame(0x81, b"x" * 200, b"\0\xc8"),
        frame(0x82, b"binary"),
    ]
    for i, data in enumerate(streams):
        (folder / f"frames{i}").write_bytes(bytes([4]) + data)


def seeds_split(folder):
    # The way of counting, the most tokens, the overlap: fuzz_split.c.
    texts = [*TEXTS, "# One\n\nTwo three four. Five!\n\nSix\n===\nSeven <|im_end|> eight <s><s>|><|.\n" * 3]
    for i, text in enumerate(texts):
        (folder / f"text{i}").write_bytes(bytes([i % 4, i * 9, 40 * i % 256]) + text.encode())


def seeds_import(folder):
    # Flags (narrow, tags put right, raw, cut short), cuts, and changes: fuzz_import.c.
    for i, data in enumerate([b"\0\0", b"\1\xff", b"\2\7\0\10\1", b"\3\4\1\0\377\1\1\377", b"\10\1\x40", b"\4\0KVXPORT\0"]):
        (folder / f"stream{i}").write_bytes(data)


TARGETS = {"gguf": seeds_gguf, "http_head": seeds_http_head, "import": seeds_import, "json": seeds_json, "split": seeds_split, "template": seeds_template,
           "tokenizer": seeds_tokenizer, "ws_frame": seeds_ws_frame}


def main(directory):
    for name, write in TARGETS.items():
        folder = Path(directory) / name
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)


if __name__ == "__main__":
    main(sys.argv[1])

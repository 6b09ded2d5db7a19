#!/usr/bin/env python3
"""Every tokenisation of the golden files, and the way back; and a megabyte of hard text in under a second.

usage: test_tokenizer.py TOKENIZE_TOOL

Reads KVASIR_SHARED/golden (default: ../shared next to the repository) and KVASIR_TEST_MODEL (the SmolLM2 file). Gemma's tokenizer,
where the model can be had, is compared with the sentencepiece package. What is absent is skipped, with the reason printed. Exit
status: 0 all passed, 1 a failure, 77 nothing could be run.
"""
import json
import os
import pathlib
import struct
import subprocess
import sys
import unicodedata

from common import gemma_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = pathlib.Path(os.environ.get("KVASIR_SHARED", ROOT.parent / "shared")) / "golden"
SPECIAL, ADD_BOS_EOS = 1, 2


class Tool:
    """One run of the tokenize tool over one vocabulary."""

    def __init__(self, program, vocabulary):
        self.process = subprocess.Popen([program, str(vocabulary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self, n):
        data = self.process.stdout.read(n)
        if len(data) != n:
            sys.exit(f"the tool ended early (status {self.process.wait()})")
        return data

    def encode(self, text, flags=0):
        data = text.encode()
        self.process.stdin.write(struct.pack("<II", flags, len(data)) + data)
        self.process.stdin.flush()
        (n,) = struct.unpack("<I", self.read(4))
        ids = list(struct.unpack(f"<{n}I", self.read(4 * n)))
        (n,) = struct.unpack("<I", self.read(4))
        return ids, self.read(n)

    def close(self):
        self.process.stdin.close()
        return self.process.wait()


class Score:
    def __init__(self):
        self.passed = self.failed = 0

    def check(self, ok, what):
        self.passed += bool(ok)
        self.failed += not ok
        if not ok and self.failed <= 20:
            print("FAILED", what)


def compare(score, tool, name, cases, restored=lambda text: text):
    """Ids equal to the reference's, and decoding gives what `restored` says the text becomes."""
    for case in cases:
        ids, back = tool.encode(case["text"])
        score.check(ids == case["ids"], f"{name} {case['text'][:80]!r}\n  want {case['ids'][:40]}\n  got  {ids[:40]}")
        want = restored(case["text"]).encode()
        score.check(back == want, f"{name} {case['text'][:80]!r} comes back as {back[:80]!r}")


def measure(score, program, name, vocabulary):
    """A megabyte of each hard text stays under the tool's limit."""
    run = subprocess.run([program, "--speed", str(vocabulary)], capture_output=True, text=True)
    slow = [line for line in run.stdout.splitlines() if not line.startswith("ok")]
    score.check(run.returncode == 0, f"{name}: " + ("; ".join(slow) or run.stderr.strip()))


def sentencepiece_of(path):
    """The tokenizer of a GGUF file as the sentencepiece package's, which numbers types as GGUF does; None where that is not installed."""
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        return None
    sys.path.insert(0, str(ROOT / "tests/tools"))
    from gguf import Reader
    metadata = Reader(path).metadata
    key = "tokenizer.ggml."
    unknown, user_defined, bpe = 2, 4, 2
    model = sentencepiece_model_pb2.ModelProto()
    rows = zip(metadata[key + "tokens"], metadata[key + "scores"], metadata[key + "token_type"])
    for i, (piece, score, kind) in enumerate(rows):
        kind = unknown if i == metadata[key + "unknown_token_id"] else int(kind)
        model.pieces.add(piece=piece.replace(" ", "\u2581") if kind == user_defined else piece, score=float(score), type=kind)
    spec = model.trainer_spec
    spec.model_type, spec.byte_fallback, spec.vocab_size = bpe, True, len(model.pieces)
    spec.unk_id, spec.bos_id = int(metadata[key + "unknown_token_id"]), int(metadata[key + "bos_token_id"])
    spec.eos_id, spec.pad_id = int(metadata[key + "eos_token_id"]), int(metadata[key + "padding_token_id"])
    spec = model.normalizer_spec
    spec.name, spec.add_dummy_prefix = "identity", bool(metadata[key + "add_space_prefix"])
    spec.remove_extra_whitespaces, spec.escape_whitespaces = False, True
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


# Runs of spaces and of newlines, and tags, are tokens of their own in Gemma's vocabulary; there is no space in front.
GEMMA_TEXTS = [" a", "a  b", "\n\n\na\n \n", "<table><tr><td>x</td></tr></table>", "<start_of_turn>user\nhi<end_of_turn>", " " * 120,
               "\n" * 70, "def f(x):\n        return x\n\n\n", "\t\t x", "", "1234567890", "\U0001F469\u200D\U0001F680 \u00e9\u0301"]


def compare_gemma(score, program):
    path = gemma_model()
    reference = path and sentencepiece_of(path)
    if not reference:
        if path:
            print("skipped: gemma, for the Python package sentencepiece is not installed")
        return
    texts = [case["text"] for case in json.loads((GOLDEN / "smollm2.json").read_text())["tokenize"]] + GEMMA_TEXTS
    cases = [{"text": text, "ids": reference.encode(text)} for text in texts]
    tool = Tool(program, path)
    compare(score, tool, "gemma", cases, spaced)
    score.check(tool.close() == 0, "gemma: the tool failed")
    measure(score, program, "gemma", path)


def nfc(text):
    return unicodedata.normalize("NFC", text)


def spaced(text):
    # SentencePiece writes a space and U+2581 alike.
    return text.replace("\u2581", " ")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    program = sys.argv[1]
    if not GOLDEN.is_dir():
        print(f"skipped: there is no {GOLDEN}")
        return 77
    score = Score()
    for name, restored in (("gpt2", str), ("llama3", str), ("qwen2", nfc), ("mistral-spm", spaced)):
        tool = Tool(program, GOLDEN / "vocab" / f"{name}.gguf")
        compare(score, tool, name, json.loads((GOLDEN / "vocab" / f"{name}.json").read_text()), restored)
        score.check(tool.close() == 0, f"{name}: the tool failed")
        measure(score, program, name, GOLDEN / "vocab" / f"{name}.gguf")

    # Qwen2.5-Coder has the merges of Qwen2, and adds control tokens that these prompts hardly use.
    tool = Tool(program, GOLDEN / "vocab" / "qwen2.gguf")
    coder = json.loads((GOLDEN / "qwen25-coder-0.5b.json").read_text())
    for case in coder["greedy"] + coder["chat"]:
        if max(case["prompt_ids"]) <= 151645:
            ids, _ = tool.encode(case["prompt"], SPECIAL if "messages" in case else 0)
            score.check(ids == case["prompt_ids"], f"qwen2.5-coder {case['prompt'][:80]!r}")
    score.check(tool.close() == 0, "qwen2: the tool failed")

    model = os.environ.get("KVASIR_TEST_MODEL")
    if model:
        tool = Tool(program, model)
        smol = json.loads((GOLDEN / "smollm2.json").read_text())
        compare(score, tool, "smollm2", smol["tokenize"])
        for case in smol["greedy"]:
            ids, _ = tool.encode(case["prompt"])
            score.check(ids == case["prompt_ids"], f"smollm2 {case['prompt'][:80]!r}")
        score.check(tool.close() == 0, "smollm2: the tool failed")
        measure(score, program, "smollm2", model)
    else:
        print("skipped: smollm2, for KVASIR_TEST_MODEL names no model")
    compare_gemma(score, program)
    print(f"{score.passed} passed, {score.failed} failed")
    return 1 if score.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The commands besides serve: what they print, and how they end."""
import json
import os
import signal
import subprocess
import time

import pytest

from daemon import BIN, MODEL, ROOT, SLOW

GOLDEN = os.path.join(os.environ.get("KVASIR_SHARED", os.path.join(os.path.dirname(ROOT), "shared")), "golden")
needs_golden = pytest.mark.skipif(not os.path.isdir(GOLDEN), reason=f"{GOLDEN} is not there")


def kvasir(*args, stdin=None, seconds=120):
    return subprocess.run([BIN, *map(str, args)], input=stdin, capture_output=True, text=True, encoding="utf-8",
                          timeout=seconds * SLOW)


def golden(*path):
    with open(os.path.join(GOLDEN, *path), encoding="utf-8") as f:
        return json.load(f)


@pytest.mark.parametrize("args,status,word", [
    (["version"], 0, "kvasir 0."), (["--version"], 0, "kvasir 0."), (["help"], 0, "serve"), (["--help"], 0, "serve"),
    ([], 2, "usage"), (["help", "generate"], 0, "--max-tokens"), (["generate", "--help"], 0, "--max-tokens"),
    (["serve", "--help"], 0, "--drain-timeout"), (["help", "nothing"], 2, "nothing"), (["nothing"], 2, "nothing"),
    (["generate"], 2, "--model"), (["inspect"], 2, "path"), (["tokenize", "--model", "x"], 2, "--text"),
    (["generate", "--modle", "x"], 2, "--model"), (["bench"], 2, "--model"), (["help", "bench"], 0, "--random-kv"),
    (["bench", "--model", "x", "--prefill", "512,"], 2, "prefill"), (["bench", "--model", "x", "--depth", "-1"], 2, "depth"),
    (["bench", "--model", "x", "--batch", "one"], 2, "batch"), (["bench", "--model", "x", "--batch", "0"], 2, "batch"),
    (["bench", "--model", "x", "--prefill", "99999999999"], 2, "prefill"), (["bench", "--model", "x", "--runs", "0"], 2, "runs"),
    (["bench", "--model", "x", "--depth", ""], 2, "depth"), (["bench", "--model", "x", "--prefill", "", "--decode", "0"], 2, "decode"),
    (["bench", "--model", "/nothing"], 1, "/nothing"), (["bench", "--model", "x", "--kv-dtype", "int4"], 2, "int4"), (["render", "--template", "x", "--jsonl", "--now", "noon"], 2, "noon"),
    (["inspect", "/nothing.gguf"], 1, "/nothing.gguf"), (["tokenize", "--model", "/nothing", "--text", "x"], 1, "/nothing"),
    (["generate", "--model", "/nothing", "--prompt", "x"], 1, "/nothing"),
    (["render", "--template", "/nothing", "--jsonl"], 1, "/nothing"), (["serve"], 1, "--model"),
])
def test_every_way_to_ask_ends_with_the_right_status(args, status, word):
    r = kvasir(*args, stdin="")
    assert r.returncode == status, r.stderr
    assert word in (r.stderr if status == 1 else r.stdout + r.stderr)
    if status == 1:
        assert len(r.stderr.splitlines()) == 1 and r.stdout == ""


@pytest.mark.trained
def test_inspect_tells_what_is_in_the_file():
    text = kvasir("inspect", MODEL).stdout
    for word in ("llama", "49,152", "Q4_1", "chat template"):
        assert word in text, word
    facts = json.loads(kvasir("inspect", MODEL, "--json").stdout)
    assert "llama" in json.dumps(facts)


@pytest.mark.trained
def test_bench_measures_each_test_against_the_memory():
    args = ["bench", "--model", MODEL, "--prefill", "16", "--decode", 2, "--depth", "40,0", "--batch", "1,3", "--runs", 1, "--random-kv"]
    for _ in range(3):  # what memory gives is measured in a moment in which others may have it
        r = json.loads(kvasir(*args, "--json").stdout)
        if all(x["read_fraction"] < 2 for x in r["rows"]):
            break
    assert r["model"] == os.path.basename(MODEL) and r["threads"] >= 1 and r["context"] == "random" and r["left_out"] == []
    assert r["read_bandwidth"]["memory_bytes_per_s"] > 1e8 and r["read_bandwidth"]["cache_bytes_per_s"] > 1e8
    rows = r["rows"]
    assert [(x["test"], x["tokens"], x["depth"], x["batch"]) for x in rows] == [
        ("prefill", 16, 0, 1), ("decode", 2, 0, 1), ("decode", 2, 0, 3), ("prefill", 16, 40, 1), ("decode", 2, 40, 1), ("decode", 2, 40, 3)]
    for x in rows:
        assert x["tokens_per_s"] > 0 and 0 < x["read_fraction"] < 2 and abs(sum(x["ops"].values()) - 1) < 0.01
        assert abs(x["bytes_per_s"] / x["read_bytes_per_s"] - x["read_fraction"]) < 1e-9
    # 30 layers of 3 KV heads of 64 halves: K and V of the 40 tokens that the deeper test reads more.
    assert abs(rows[4]["bytes_per_token"] - rows[1]["bytes_per_token"] - 40 * 30 * 3 * 64 * 2 * 2) < 1
    assert rows[2]["bytes_per_token"] < rows[1]["bytes_per_token"] / 2
    table = kvasir(*args).stdout.splitlines()
    assert len(table) == 2 + len(rows) and "GB/s from memory" in table[0]
    assert [line.split()[0] for line in table[2:]] == [x["test"] for x in rows]


@pytest.mark.trained
def test_generate_streams_text_and_repeats_itself():
    args = ["generate", "--model", MODEL, "--prompt", "The capital of France is", "--max-tokens", 8, "--temperature", 0]
    first = kvasir(*args)
    assert first.returncode == 0 and "Paris" in first.stdout
    assert "tokens/s" in first.stderr and "Paris" not in first.stderr
    assert kvasir(*args).stdout == first.stdout
    assert kvasir(*args[:4], "-", *args[5:], stdin="The capital of France is").stdout == first.stdout


@pytest.mark.trained
def test_generate_applies_the_chat_template():
    r = kvasir("generate", "--model", MODEL, "--prompt", "Hi", "--chat", "--max-tokens", 8, "--temperature", 0)
    assert r.stdout.startswith("Hello")


def test_generate_ends_on_ctrl_c():
    with subprocess.Popen([BIN, "generate", "--model", MODEL, "--prompt", "Once", "--max-tokens", "7000", "--ignore-eos"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout.read(1)
        start = time.monotonic()
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=10 * SLOW)
        assert p.returncode == 130
        assert time.monotonic() - start < 3 * SLOW


def test_a_line_that_is_wrong_is_answered_in_its_place():
    r = kvasir("tokenize", "--model", MODEL, "--jsonl", stdin='{"text":"a"}\n{"text":5}\nnonsense\n\n{"text":"a"}\n')
    rows = [json.loads(line) for line in r.stdout.splitlines()]
    assert r.returncode == 0
    assert [list(row) for row in rows] == [["ids"], ["error"], ["error"], ["ids"]]
    assert rows[0] == rows[3]


def test_special_tokens_only_on_request():
    def ids(*more):
        return json.loads(kvasir("tokenize", "--model", MODEL, "--text", "<|im_start|>x", *more).stdout)["ids"]
    assert len(ids()) > len(ids("--parse-special")) == 2


@needs_golden
@pytest.mark.parametrize("name", ["smollm2", "gpt2", "llama3", "qwen2", "mistral-spm"])
def test_every_tokenisation_is_that_of_the_reference(name):
    cases = golden("smollm2.json")["tokenize"] if name == "smollm2" else golden("vocab", name + ".json")
    model = MODEL if name == "smollm2" else os.path.join(GOLDEN, "vocab", name + ".gguf")
    lines = "".join(json.dumps({"text": c["text"]}) + "\n" for c in cases)
    rows = [json.loads(line) for line in kvasir("tokenize", "--model", model, "--jsonl", stdin=lines).stdout.splitlines()]
    assert len(rows) == len(cases)
    wrong = [(c["text"], row, c["ids"]) for c, row in zip(cases, rows) if row.get("ids") != c["ids"]]
    assert not wrong, wrong[0]


@needs_golden
def test_every_template_case_is_that_of_the_reference():
    data = golden("templates", "cases.json")
    wrong, n = [], 0
    for name, cases in data["templates"].items():
        inputs = [{k: v for k, v in c.items() if k not in ("case", "prompt", "error")} for c in cases]
        lines = "".join(json.dumps({**i, "bos_token": data["bos_token"], "eos_token": data["eos_token"]}) + "\n" for i in inputs)
        r = kvasir("render", "--template", os.path.join(GOLDEN, "templates", name + ".jinja"), "--jsonl",
                   "--now", data["clock"].replace("T", " "), stdin=lines)
        rows = [json.loads(line) for line in r.stdout.splitlines()]
        assert len(rows) == len(cases), (name, r.stderr)
        n += len(rows)
        wrong += [(name, c["case"], row) for c, row in zip(cases, rows)
                  if ("error" in c) != ("error" in row) or c.get("prompt") != row.get("prompt")]
    assert n == 360
    assert not wrong, wrong[0]

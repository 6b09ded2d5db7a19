"""A narrow KV cache: more pages in the same room, the first and the last of a conversation exact, and nothing else changes."""
import shutil
import subprocess
import tempfile

import httpx
import pytest

from daemon import BIN, MODEL, SLOW, Daemon

PAGE = 368640  # of SmolLM2-135M in f16: 30 layers, 3 KV heads of 64
ROOM = 120 * PAGE


def prompt(seed, words):
    return " ".join(f"{seed} tells {i} of {i * 7919 % 1000} tales." for i in range(words))


def complete(d, text, n=8):
    r = httpx.post(d.url + "/v1/completions", json={"prompt": text, "max_tokens": n, "temperature": 0}, timeout=120 * SLOW)
    assert r.status_code == 200, r.text
    j = r.json()
    return j["choices"][0]["text"], j["usage"]["prompt_tokens"], (j["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_a_narrow_cache_holds_half_as_many_again(kind):
    with Daemon("--kv-memory", ROOM, "--context", 1500, "--kv-dtype", kind) as d:
        pool = d.kv()["pool"]
        assert pool["type"] == kind and pool["pages"] > 1.5 * 120
        assert pool["pages"] * pool["page_bytes"] + pool["wide_pages_max"] * PAGE <= ROOM
        text = prompt("mine", 60)
        first, n, _ = complete(d, text)
        kv = d.kv()
        assert kv["pool"]["wide_pages"] in (1, 2), "the first page, and the last"
        assert kv["pool"]["not_finite"] == 0 and kv["pool"]["wide_refused"] == 0
        again, _, cached = complete(d, text)
        assert again == first and cached >= n - 16
        # More conversations than there is room for: none is refused, the wide pages go with their conversations.
        for i in range(12):
            complete(d, prompt(f"other{i}", 40), n=2)
        kv = d.kv()
        assert kv["drift_pages"] == 0 and 2 <= kv["pool"]["wide_pages"] <= kv["pool"]["wide_pages_max"]
        assert complete(d, prompt("mine", 60))[1] == n


def test_narrow_pages_go_down_and_come_back_as_they_are():
    disk = tempfile.mkdtemp(prefix="kvasir-narrow-")
    try:
        with Daemon("--kv-memory", 40 * PAGE, "--context", 900, "--kv-dtype", "int8", "--kv-ram", "64M", "--kv-disk", f"{disk}:64M") as d:
            text = prompt("mine", 50)
            first, n, _ = complete(d, text)
            for i in range(4):
                complete(d, prompt(f"other{i}", 60), n=1)
            tiers = {t["kind"]: t for t in d.kv()["tiers"]}
            assert tiers["ram"]["type"] == tiers["disk"]["type"] == "int8" and tiers["ram"]["stored"] > 0
            assert tiers["disk-wide"]["stored"] > 0, "first pages are kept with their wide copies"
            _, _, cached = complete(d, text)
            assert cached >= n - 17 and d.kv()["drift_pages"] == 0
        # After a restart the first page is wide again, and the answer what it was.
        with Daemon("--kv-memory", 40 * PAGE, "--context", 900, "--kv-dtype", "int8", "--kv-disk", f"{disk}:64M") as d:
            assert d.kv()["pool"]["wide_pages"] == 0
            again, n, cached = complete(d, text)
            assert again == first and cached >= n - 17
            tiers = {t["kind"]: t for t in d.kv()["tiers"]}
            assert tiers["disk-wide"]["fetched"] >= 1 and d.kv()["pool"]["wide_pages"] >= 2
        # Its files are none of an exact cache's.
        with Daemon("--kv-memory", 70 * PAGE, "--context", 900, "--kv-disk", f"{disk}:64M") as d:
            assert complete(d, text)[2] == 0
    finally:
        shutil.rmtree(disk, ignore_errors=True)


@pytest.mark.parametrize("device", ["cpu", "cpu-avx512", "cpu-avx2", "cpu-reference"])
def test_the_type_of_exact_pages_can_be_chosen(device):
    room = ("--kv-memory", 40 * PAGE, "--context", 300)
    if subprocess.run([BIN, "serve", "--model", MODEL, "--device", device, "--check"], capture_output=True).returncode:
        pytest.skip(f"this machine has no {device}")
    for kind in ("f16", "bf16"):
        with Daemon(*room, "--device", device, "--kv-dtype", kind) as d:
            assert d.kv()["pool"]["type"].lower() == kind
            assert d.kv()["pool"]["pages"] == 40
            text, _, _ = complete(d, "The capital of France is", n=3)
            assert "Paris" in text


@pytest.mark.parametrize("args, words", [
    (("--kv-dtype", "int4"), "kv-dtype"),
    (("--kv-dtype", "int8", "--kv-ram", "64M", "--kv-ram-dtype", "int8"), "kv-ram-dtype"),
])
def test_what_does_not_fit_is_said_at_the_start(args, words):
    done = subprocess.run([BIN, "serve", "--model", MODEL, "--port", "0", *args], capture_output=True, text=True, timeout=60 * SLOW)
    assert done.returncode != 0 and words in done.stderr

"""A narrow KV cache: more pages in the same room, the first and the last of a conversation exact, and nothing else changes. On the CPU and
on the GPU; prompts are token ids, so that any model will do."""
import shutil
import subprocess
import tempfile

import httpx
import pytest

from daemon import BIN, DEVICE, LONG, MODEL, SLOW, Daemon, eventually

STRIDE = 4096  # pages are rounded up to it


@pytest.fixture(scope="module")
def page():
    """Bytes of a page in f16."""
    with Daemon("--kv-memory", "16M") as d:
        return d.kv()["pool"]["page_bytes"]


def prompt(seed, n):
    return [(seed * 31 + i * 7919) % 251 for i in range(n)]


def complete(d, tokens, n=8):
    r = httpx.post(d.url + "/v1/completions", json={"prompt": tokens, "max_tokens": n, "temperature": 0, "ignore_eos": True}, timeout=120 * SLOW)
    assert r.status_code == 200, r.text
    j = r.json()
    assert j["usage"]["prompt_tokens"] == len(tokens)
    return j["choices"][0]["text"], (j["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8_e4m3", marks=LONG)])
def test_a_narrow_cache_holds_half_as_many_again(kind, page):
    room = 60 * page
    with Daemon("--kv-memory", room, "--context", 700, "--kv-dtype", kind) as d:
        pool = d.kv()["pool"]
        assert pool["type"] == kind
        assert pool["pages"] > 1.5 * 60 or page < 16 * STRIDE, "with small pages, rounding them up takes what is gained"
        assert pool["pages"] >= room * 5 // 6 // -(-pool["page_bytes"] // STRIDE * STRIDE)
        assert pool["pages"] * pool["page_bytes"] + pool["wide_pages_max"] * page <= room
        mine = prompt(0, 300)
        first, _ = complete(d, mine)
        kv = d.kv()
        assert kv["pool"]["wide_pages"] in (1, 2), "the first page, and the last"
        assert kv["pool"]["not_finite"] == 0 and kv["pool"]["wide_refused"] == 0
        again, cached = complete(d, mine)
        assert again == first and cached >= len(mine) - 16
        # More conversations than there is room for: none is refused, the wide pages go with their conversations.
        for i in range(6):
            complete(d, prompt(1 + i, 250), n=2)
        kv = d.kv()
        assert kv["drift_pages"] == 0 and 2 <= kv["pool"]["wide_pages"] <= kv["pool"]["wide_pages_max"]
        complete(d, mine)


def test_narrow_pages_go_down_and_come_back_as_they_are(page):
    disk = tempfile.mkdtemp(prefix="kvasir-narrow-")
    try:
        with Daemon("--kv-memory", 32 * page, "--context", 400, "--kv-dtype", "int8", "--kv-ram", "64M", "--kv-disk", f"{disk}:64M") as d:
            mine = prompt(0, 300)
            first, _ = complete(d, mine)
            for i in range(4):
                complete(d, prompt(1 + i, 300), n=1)
            tiers = {t["kind"]: t for t in d.kv()["tiers"]}
            assert tiers["ram"]["type"] == tiers["disk"]["type"] == "int8" and tiers["ram"]["stored"] > 0
            assert tiers["disk-wide"]["stored"] > 0, "first pages are kept with their wide copies"
            _, cached = complete(d, mine)
            assert cached >= len(mine) - 17 and d.kv()["drift_pages"] == 0
        # After a restart the first page is wide again, and the answer what it was.
        with Daemon("--kv-memory", 32 * page, "--context", 400, "--kv-dtype", "int8", "--kv-disk", f"{disk}:64M") as d:
            assert d.kv()["pool"]["wide_pages"] == 0
            again, cached = complete(d, mine)
            assert again == first and cached >= len(mine) - 17
            tiers = {t["kind"]: t for t in d.kv()["tiers"]}
            assert tiers["disk-wide"]["fetched"] >= 1 and d.kv()["pool"]["wide_pages"] >= 1
        # Its files are none of an exact cache's.
        with Daemon("--kv-memory", 70 * page, "--context", 500, "--kv-disk", f"{disk}:64M") as d:
            assert complete(d, mine)[1] == 0
    finally:
        shutil.rmtree(disk, ignore_errors=True)


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8_e4m3", marks=LONG)])
def test_exact_pages_become_narrow_in_host_memory(kind, page):
    """--kv-ram-dtype: all but the first page and the last take about half as much there, and serve when they come back."""
    with Daemon("--kv-memory", 48 * page, "--context", 500, "--kv-ram", "64M", "--kv-ram-dtype", kind) as d:
        mine = prompt(0, 300)
        complete(d, mine)
        for i in range(4):
            complete(d, prompt(1 + i, 300), n=1)
        tier = eventually(lambda: (lambda t: t if t["stored"] > 0 and t["writing"] == 0 else None)(d.kv()["tiers"][0]), 20,
                          "the pages that had to go are in the tier")
        assert tier["type"] == kind and tier["kept_exact"]["values"] == 0 and tier["pages"] > tier["kept_exact"]["sinks"] + tier["kept_exact"]["tails"]
        _, cached = complete(d, mine)
        assert cached >= len(mine) - 17 and d.kv()["tiers"][0]["fetched"] > 0 and d.kv()["drift_pages"] == 0


@pytest.mark.parametrize("device", ["cpu", "cpu-avx512", "cpu-avx2", "cpu-reference"] if DEVICE == "cpu" else [DEVICE])
def test_the_type_of_exact_pages_can_be_chosen(device, page):
    if subprocess.run([BIN, "serve", "--model", MODEL, "--device", device, "--check"], capture_output=True).returncode:
        pytest.skip(f"this machine has no {device}")
    for kind in ("f16", "bf16"):
        with Daemon("--kv-memory", 40 * page, "--context", 300, "--device", device, "--kv-dtype", kind) as d:
            pool = d.kv()["pool"]
            assert pool["type"].lower() == kind and pool["pages"] == 40
            first, _ = complete(d, prompt(0, 20), n=3)
            again, cached = complete(d, prompt(0, 20), n=3)
            assert again == first and cached >= 16


@pytest.mark.parametrize("args, words", [
    (("--kv-dtype", "int4"), "kv-dtype"),
    (("--kv-dtype", "int8", "--kv-ram", "64M", "--kv-ram-dtype", "int8"), "kv-ram-dtype"),
])
def test_what_does_not_fit_is_said_at_the_start(args, words):
    done = subprocess.run([BIN, "serve", "--model", MODEL, "--port", "0", "--device", DEVICE, *args], capture_output=True, text=True, timeout=60 * SLOW)
    assert done.returncode != 0 and words in done.stderr

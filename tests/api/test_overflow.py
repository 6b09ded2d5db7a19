"""Conversations larger than the KV cache: the same answer as where they fit, and a disk that fails harms nobody else."""
import concurrent.futures
import errno
import json
import math
import os
import re
import subprocess
import sys

import httpx
import pytest

from bad_disk import BadDiskDaemon
from daemon import BIN, LONG, MODEL, ROOT, SLOW, Daemon, eventually

PAGE = 368640  # of SmolLM2-135M: 30 layers, 3 KV heads of 64, two bytes
POOL = 64
CONTEXT = 4 * POOL * 16
SMALL = ("--kv-memory", POOL * PAGE)
GROUP = 16 * PAGE


def ids(n, seed):
    return [(seed * 7919 + i * 31) % 40000 + 1000 for i in range(n)]


def ask(d, prompt, n=8, **more):
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "logprobs": 3, "ignore_eos": True, **more}
    return httpx.post(d.url + "/v1/completions", json=body, timeout=300 * SLOW)


def answer(d, prompt, n=8, **more):
    r = ask(d, prompt, n, **more)
    assert r.status_code == 200, r.text
    return r.json()


def text_of(r):
    return r["choices"][0]["text"]


def same(a, b):
    assert text_of(a) == text_of(b)
    for x, y in zip(a["choices"][0]["logprobs"]["token_logprobs"], b["choices"][0]["logprobs"]["token_logprobs"]):
        assert math.isclose(x, y, abs_tol=1e-4)


def planned(model, *args):
    done = subprocess.run([BIN, "plan", "--model", model, "--json", *map(str, args)], capture_output=True, check=True)
    return json.loads(done.stdout)


def nothing_left(d):
    d.wait_idle()
    kv = d.kv()
    assert kv["drift_pages"] == 0 and kv["references"]["running"] == 0 and kv["references"]["queued"] == 0
    assert kv["overflow"]["requests"] == kv["overflow"]["pages"] == 0
    assert kv["overflow"]["ram"]["bytes_used"] == kv["overflow"]["disk"]["bytes_used"] == 0
    return kv["overflow"]


@pytest.fixture(scope="module")
def whole():
    """What a daemon says that has room for everything."""
    with Daemon("--kv-memory", (CONTEXT // 16 + 10) * PAGE, "--context", CONTEXT) as d:
        yield {n: answer(d, ids(n, 1), 8) for n in (CONTEXT - 20, 700)}


@pytest.mark.parametrize("room", [pytest.param(("--kv-overflow", 15 * GROUP), id="ram", marks=LONG),
                                  pytest.param(("--kv-overflow-disk", "{}:%d" % (15 * GROUP)), id="disk", marks=LONG),
                                  pytest.param(("--kv-overflow", 5 * GROUP, "--kv-overflow-disk", "{}:%d" % (10 * GROUP)), id="both")])
def test_a_conversation_four_times_the_pool_has_the_same_answer(whole, room, tmp_path):
    room = [str(r).format(tmp_path / "below") for r in room]
    with Daemon(*SMALL, "--context", CONTEXT, *room) as d:
        assert d.kv()["pool"]["pages"] == POOL
        assert re.search(r"conversations of up to \d+ tokens find room beyond the KV cache", d.stderr())
        got = answer(d, ids(CONTEXT - 20, 1))
        same(got, whole[CONTEXT - 20])
        by = got["kv_cache"]["pages_by_tier"]
        assert by["device"] + by["ram"] + by["disk"] == math.ceil((CONTEXT - 20 + 7) / 16)
        assert by["device"] <= POOL // 2 and (by["ram"] > 0) == ("--kv-overflow" in room) and (by["disk"] > 0) == ("--kv-overflow-disk" in room)
        o = nothing_left(d)
        assert o["moved_pages"] >= by["ram"] + by["disk"] and o["lost_requests"] == 0
        assert (o["disk"]["bytes_read"] > 0) == (by["disk"] > 0)
        # One that fits says nothing of it, and is computed in the pool.
        small = answer(d, ids(700, 1))
        same(small, whole[700])
        assert "kv_cache" not in small and d.kv()["overflow"]["moved_pages"] == o["moved_pages"]
        assert d.metrics()["kvasir:overflow_moved_pages_total"] == o["moved_pages"]
        # The file has no name that somebody could find.
        assert not (tmp_path / "below").exists() or not list((tmp_path / "below").iterdir())
        over = ask(d, ids(CONTEXT + 500, 1))
        assert over.status_code == 400 and over.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8_e4m3", marks=LONG)])
@pytest.mark.parametrize("room", ["ram", pytest.param("disk", marks=LONG)])
def test_narrow_kv_has_the_same_answer_as_where_it_fits(dtype, room, tmp_path):
    """Its first page and the one it fills are kept in f16 as well, wherever they are, and however it was cut."""
    below = ("--kv-overflow", "32M") if room == "ram" else ("--kv-overflow-disk", f"{tmp_path / 'below'}:32M")
    with Daemon("--kv-dtype", dtype, "--kv-memory", "40M", "--context", 2048) as d:
        whole = answer(d, ids(1900, 1), 24)
    with Daemon("--kv-dtype", dtype, "--kv-memory", "10M", "--context", 2048, *below) as d:
        assert d.kv()["pool"]["pages"] < 1900 / 16 / 2
        got = answer(d, ids(1900, 1), 24)
        same(got, whole)
        by = got["kv_cache"]["pages_by_tier"]
        assert by[room] >= 64 and by[room] % 16 == 0
        o = nothing_left(d)
        assert o["wide_refused"] == 0 and o["moved_pages"] >= by[room]


def test_a_model_whose_layers_all_have_windows_needs_no_room_below(tmp_path):
    """A conversation passes through a cache that holds a fraction of it, beside others, and the answer is the same."""
    model = tmp_path / "windows.gguf"
    tool = os.path.join(ROOT, "tests", "tools", "make_model.py")
    subprocess.run([sys.executable, tool, "--layers", "3", "--window", "100", "--ctx", "2048", model],
                   check=True, stdout=subprocess.DEVNULL)
    plan = planned(model)
    long, short = ([4 + i * 31 % 200 for i in range(n)] for n in (1900, 150))
    with Daemon("--kv-memory", 300 * plan["page_bytes"], model=model) as d:
        whole, alone = answer(d, long, 40), answer(d, short, 40)
    with Daemon("--kv-memory", 24 * plan["page_bytes"], "--kv-overflow", "1M", model=model) as d:
        assert d.kv()["pool"]["pages"] == 24 and "overflow" not in d.kv()
        assert "conversations may be larger than the KV cache without kv-overflow: it is not used" in d.stderr()
        assert httpx.get(d.url + "/v1/models").json()["data"][0]["context_length"] == 2048
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(answer, d, p, 40) for p in (long, short, long, short)]
            got = [a.result() for a in asked]
        for a, b in zip(got, (whole, alone, whole, alone)):
            same(a, b)
        d.wait_idle()
        kv = d.kv()
        assert kv["drift_pages"] == 0 and kv["references"]["running"] == 0
    rest = plan["weights_bytes"] + plan["activation_bytes"]
    tight = [planned(model, "--memory", rest + n * plan["page_bytes"]) for n in (24, 9)]
    assert [t["longest_tokens"] for t in tight] == [2048, 9 * 16], "a window has to fit"


def test_a_plan_says_how_long_conversations_may_be(tmp_path):
    whole = planned(MODEL)
    memory = whole["weights_bytes"] + whole["activation_bytes"] + POOL * PAGE
    assert planned(MODEL, "--memory", memory)["longest_tokens"] == POOL * 16
    for args in (("--kv-overflow", 15 * GROUP), ("--kv-overflow-disk", 15 * GROUP),
                 ("--kv-overflow", 40 << 20, "--kv-dtype", "int8")):
        p = planned(MODEL, "--memory", memory, *args)
        serve = (*args[:1], f"{tmp_path}/below:{args[1]}", *args[2:]) if args[0] == "--kv-overflow-disk" else args
        with Daemon("--kv-memory", POOL * PAGE, *serve) as d:
            o = d.kv()["overflow"]
            assert (o["ram"]["bytes"], o["disk"]["bytes"]) == (p["overflow_ram_bytes"], p["overflow_disk_bytes"])
            assert min(o["max_tokens"], 8192) == p["longest_tokens"] > POOL * 16
            assert httpx.get(d.url + "/v1/models").json()["data"][0]["context_length"] == p["longest_tokens"]
        if args[0] == "--kv-overflow":
            assert p["overflow_ram_bytes"] <= args[1]


def test_others_go_on_beside_a_large_one(whole, tmp_path):
    with Daemon(*SMALL, "--context", CONTEXT, "--kv-overflow-disk", f"{tmp_path}/below:{15 * GROUP}") as d:
        alone = {i: text_of(answer(d, ids(200, i), 12)) for i in range(2, 6)}
        with concurrent.futures.ThreadPoolExecutor(6) as clients:
            large = clients.submit(answer, d, ids(CONTEXT - 20, 1))
            eventually(lambda: d.kv()["overflow"]["pages"] > 0, 60, "it has left the pool")
            small = {i: clients.submit(answer, d, ids(200, i), 12) for i in alone}
            assert {i: text_of(s.result()) for i, s in small.items()} == alone
            assert not large.done(), "they did not wait for it"
            same(large.result(), whole[CONTEXT - 20])
        # One that is left by its client gives everything back.
        with pytest.raises(httpx.TimeoutException):
            httpx.post(d.url + "/v1/completions", json={"prompt": ids(CONTEXT - 300, 9), "max_tokens": 200}, timeout=1.5)
        nothing_left(d)


FAILURES = {
    "read errors": ({"read_error": errno.EIO}, "n_failed"),
    "full": ({"write_error": errno.ENOSPC}, "n_failed"),
    "wrong bits": ({"flip_reads": 1}, "n_flipped"),
    "hanging reads": ({"hang_reads": 1}, "n_hung"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG if name in {"read errors", "full"} else ()) for name in FAILURES])
def test_a_disk_that_fails_fails_only_whoever_is_on_it(tmp_path, name):
    what, seen = FAILURES[name]
    with BadDiskDaemon(*SMALL, "--context", CONTEXT, "--kv-overflow-disk", f"{tmp_path}/below:{15 * GROUP}") as d:
        alone = text_of(answer(d, ids(300, 2)))
        whole, files = d.pages(), d.n_files()
        with concurrent.futures.ThreadPoolExecutor(6) as clients:
            large = clients.submit(ask, d, ids(CONTEXT - 20, 1))
            waiting = clients.submit(ask, d, ids(CONTEXT - 30, 3))
            eventually(lambda: d.kv()["overflow"]["pages"] > 0, 60, "it has left the pool")
            for field, value in what.items():
                setattr(d.disk, field, value)
            small = [clients.submit(answer, d, ids(300, 2)) for _ in range(3)]
            for r in (large.result(), waiting.result()):
                assert r.status_code >= 500, r.text
                assert "the disk that has conversations larger than the KV cache failed" in r.json()["error"]["message"]
            assert {text_of(s.result()) for s in small} == {alone}
        assert getattr(d.disk, seen) > 0
        o = nothing_left(d)
        assert o["disk"]["state"] == "off" and o["disk"]["reason"] and d.stderr().count("event=kv_overflow_off") == 1
        d.disk.heal()
        # From now on such a conversation is one that does not fit; others do.
        r = ask(d, ids(CONTEXT - 20, 1))
        assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded", r.text
        assert text_of(answer(d, ids(300, 2))) == alone
        nothing_left(d)
        assert d.pages() == whole
        eventually(lambda: d.n_files() <= files, 5, f"no more than {files} descriptors are open")


@LONG
def test_short_transfers_and_a_slow_disk_are_only_slower(whole, tmp_path):
    with BadDiskDaemon(*SMALL, "--context", CONTEXT, "--kv-overflow-disk", f"{tmp_path}/below:{15 * GROUP}", halve=1) as d:
        got = answer(d, ids(CONTEXT - 20, 1))
        same(got, whole[CONTEXT - 20])
        assert d.disk.n_halved > 0
        assert nothing_left(d)["disk"]["state"] == "on"


def test_without_room_on_the_disk_the_daemon_serves_what_fits(tmp_path):
    with BadDiskDaemon(*SMALL, "--kv-overflow-disk", f"{tmp_path}/below:{15 * GROUP}", allocate_error=errno.ENOSPC) as d:
        assert d.stderr().count("conversations have no room beyond the KV cache") == 1 and "No space left" in d.stderr()
        assert "overflow" not in d.kv()
        answer(d, ids(300, 2))
        r = ask(d, ids(CONTEXT - 20, 1))
        assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"


def test_what_it_needs_is_said():
    for args, sentence in (("--kv-memory", 30 * PAGE, "--kv-overflow", "1G"), "for which it is too small: it has 30 pages, and takes 38"), \
                          ((*SMALL, "--kv-overflow", "100K"), "are too few: 16 pages"):
        d = Daemon(*args, wait=False)
        try:
            eventually(lambda: sentence in d.stderr(), 30, sentence)
            assert httpx.get(d.url + "/health/ready").status_code == 503
        finally:
            d.stop()

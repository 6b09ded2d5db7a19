"""KV below the pool: pages come back from RAM and disk with the same answer, a dying disk harms nobody, sessions outlive a restart."""
import concurrent.futures
import errno
import json
import os
import re
import shutil
import tempfile
import time

import httpx
import pytest

from bad_disk import BadDiskDaemon
from daemon import FULL, LONG, SLOW, Daemon, eventually

PAGE = 368640  # of SmolLM2-135M: 30 layers, 3 KV heads of 64, f16
POOL = ("--kv-memory", 32 * PAGE, "--context", 450)  # a conversation of 450 tokens, and little more
SENTENCES = 30                                       # some 350 tokens


@pytest.fixture
def disk():
    path = tempfile.mkdtemp(prefix="kvasir-tiers-")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def prompt(seed, words):
    return " ".join(f"{seed} tells {i} of {i * 7919 % 1000} tales." for i in range(words))


def complete(d, text, n=4, **more):
    r = httpx.post(d.url + "/v1/completions", json={"prompt": text, "max_tokens": n, "temperature": 0, **more}, timeout=120 * SLOW)
    assert r.status_code == 200, r.text
    j = r.json()
    return j["choices"][0]["text"], j["usage"]["prompt_tokens"], (j["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def tier(d, kind):
    tiers = {t["kind"]: t for t in httpx.get(d.url + "/v1/kv", timeout=10 * SLOW).json()["tiers"]}
    return tiers[kind]


def settled(d, kind):
    return eventually(lambda: (lambda t: t if t["writing"] == 0 and t["loading"] == 0 else None)(tier(d, kind)), 20, "the tier is quiet")


def push_out(d, rounds=2):
    """Prompts of others that need the whole pool."""
    for i in range(rounds):
        complete(d, prompt(f"other{i}", SENTENCES), n=1)


def comes_back(d, kind, text, answer, least):
    """What was pushed out is found again, at least so many tokens of it: at once, or by and by where the disk is too busy to take
    all that leaves."""
    for _ in range(5):
        push_out(d)
        assert settled(d, kind)["stored"] > 0
        again, _, cached = complete(d, text)
        assert again == answer
        if cached >= least:
            return
    raise AssertionError(f"{cached} of {least} tokens came back: {tier(d, kind)}")


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_what_left_the_pool_comes_back_with_the_same_answer(disk, kind):
    args = ("--kv-ram", "256M") if kind == "ram" else ("--kv-disk", f"{disk}:256M")
    with Daemon(*POOL, *args) as d:
        text = prompt("mine", SENTENCES)
        first, n, _ = complete(d, text)
        comes_back(d, kind, text, first, n - 17 if SLOW == 1 else 0)  # all of it but the last page, or computing is quicker
        after = tier(d, kind)
        if SLOW == 1:
            assert after["pays"] and after["fetched"] >= n // 16 - 5
        assert after["bytes_used"] <= after["bytes"]
        kv = httpx.get(d.url + "/v1/kv").json()
        assert kv["drift_pages"] == 0 and kv["fetches"]["under_way"] == 0
        m = httpx.get(d.url + "/metrics").text
        assert re.search(r'kvasir:tier_fetched_total\{[^}]*tier="%s"\} [1-9]' % kind, m)


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_request_that_is_alone_begins_with_the_first_layers(disk, kind):
    """It may have to give up where the machine is busy with other things, and have its pages all the same."""
    args = ("--kv-ram", "256M") if kind == "ram" else ("--kv-disk", f"{disk}:256M")
    with Daemon(*POOL, *args) as d:
        text, answers = prompt("mine", SENTENCES), set()
        whole = d.pages()
        for turn in range(6):
            out, n, cached = complete(d, text)
            answers.add(out)
            kv = d.kv()
            assert len(answers) == 1 and kv["drift_pages"] == 0 and kv["fetches"]["under_way"] == 0
            if kv["fetches"]["overlapped"]:
                break
            push_out(d, 1)
            settled(d, kind)
        assert turn > 0 and kv["fetches"]["overlapped"] == 1 and cached > n // 2
        # What came is the index's, as if it had come before.
        assert complete(d, text)[2] >= n - 17
        d.wait_idle()
        assert d.pages() == whole


def test_writes_keep_to_their_rate(disk):
    with Daemon(*POOL, "--kv-disk", f"{disk}:256M", "--kv-disk-rate", 1) as d:
        complete(d, prompt("mine", SENTENCES))
        push_out(d)
        t = settled(d, "disk")
        # A record is written at once; the bound allows the next one after 100 hours.
        assert t["stored"] <= 1 and (t["dropped"]["rate"] > 0 or SLOW > 1)


@pytest.mark.parametrize("delay_us, pays", [(0, True), (1000000, False)])
def test_the_break_even_chooses_rightly_both_ways(disk, delay_us, pays):
    """A page of 16 tokens is computed in some 12 ms: one that is read in a second is not worth it, one that is read in 1 ms is."""
    with BadDiskDaemon(*POOL, "--kv-disk", f"{disk}:256M", read_us=delay_us) as d:
        text = prompt("mine", SENTENCES)
        first, n, _ = complete(d, text)
        push_out(d)
        t = settled(d, "disk")
        assert t["io"] == "threads" and t["pays"] is pays
        if pays:
            comes_back(d, "disk", text, first, n // 2)
            assert tier(d, "disk")["fetched"] > n // 32
        else:
            again, _, cached = complete(d, text)
            assert again == first
            t = tier(d, "disk")
            # Now and then a few pages go down and come up, so that the figures stay true.
            assert t["stored"] <= 4 and t["fetched"] <= 4 and t["dropped"]["unpaid"] > 10
            assert cached < n // 2


def test_a_disk_that_vanishes_harms_nobody(disk):
    with Daemon(*POOL, "--kv-disk", f"{disk}:256M") as d:
        text = prompt("mine", SENTENCES)
        first, _, _ = complete(d, text)
        push_out(d)
        settled(d, "disk")
        # Cut to nothing under the daemon: reads end at once.
        for name in os.listdir(disk):
            os.truncate(os.path.join(disk, name), 0)
        again, _, _ = complete(d, text)
        assert again == first
        t = tier(d, "disk")
        assert t["state"] == "off" or t["loads"]["corrupt"] > 0
        push_out(d, 1)
        assert d.stderr().count("event=kv_disk_off") <= 1
        assert httpx.get(d.url + "/v1/kv").json()["drift_pages"] == 0


# What is done to a disk at work, which pages are written to and read from, whether that is the end of it, and what it shows.
FAILURES = {
    "full": ({"write_error": errno.ENOSPC}, True, "n_failed"),
    "write errors": ({"write_error": errno.EIO}, True, "n_failed"),
    "read errors": ({"read_error": errno.EIO}, True, "n_failed"),
    "hanging reads": ({"hang_reads": 1}, True, "n_hung"),
    "hanging writes": ({"hang_writes": 1}, True, "n_hung"),
    "short transfers": ({"halve": 1}, False, "n_halved"),
    "wrong bits": ({"flip_reads": 1}, False, "n_flipped"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG if n in {"full", "read errors"} else ()) for n in FAILURES])
def test_a_disk_that_fails_fails_no_request(disk, name):
    """Conversations that push each other out, from several clients, while it happens: all have their answers, the tier is off with
    one line, and nothing is left behind."""
    what, ends, seen = FAILURES[name]
    with BadDiskDaemon(*POOL, "--kv-disk", f"{disk}:256M") as d:
        texts, news = ([prompt(f"{who}{i}", SENTENCES // 2) for i in range(4)] for who in ("mine", "new"))
        whole = d.pages()
        answers = [complete(d, t)[0] for t in texts]
        push_out(d, 1)
        settled(d, "disk")
        files = d.n_files()
        for field, value in what.items():
            setattr(d.disk, field, value)
        with concurrent.futures.ThreadPoolExecutor(3) as clients:
            # What is on disk is read, what is new is written.
            again = list(clients.map(lambda t: complete(d, t)[0], [*texts, *news, *reversed(texts)]))
        assert again[:4] == answers and again[8:] == answers[::-1]
        assert getattr(d.disk, seen) > 0
        if ends:
            # The one that hangs is given up after five seconds, whether or not a request waits for it.
            eventually(lambda: tier(d, "disk")["state"] == "off", 20, "the tier is off")
            d.disk.heal()
            assert [complete(d, t)[0] for t in news] == again[4:8], "and stays off"
            assert tier(d, "disk")["pages"] == 0
        assert d.stderr().count("event=kv_disk_off") == ends, d.stderr()
        d.wait_idle()
        assert d.pages() == whole and d.kv()["drift_pages"] == 0 and d.kv()["fetches"]["under_way"] == 0
        eventually(lambda: d.n_files() <= files, 5, f"no more than {files} descriptors are open")


def test_a_disk_that_is_full_from_the_start_fails_no_request(disk):
    with BadDiskDaemon(*POOL, "--kv-disk", f"{disk}:256M", allocate_error=errno.ENOSPC) as d:
        assert d.stderr().count("there is no disk tier") == 1 and "No space left" in d.stderr()
        first = complete(d, prompt("mine", SENTENCES // 2))[0]
        push_out(d, 1)
        assert complete(d, prompt("mine", SENTENCES // 2))[0] == first


def test_no_disk_is_no_reason_not_to_serve():
    with Daemon(*POOL, "--kv-disk", "/proc/nowhere:256M") as d:
        complete(d, "Hello")
        assert "there is no disk tier" in d.stderr()


def test_pages_outlive_kill_9(disk):
    text = prompt("mine", SENTENCES)
    d = Daemon(*POOL, "--kv-disk", f"{disk}:256M")
    first, n, _ = complete(d, text)
    comes_back(d, "disk", text, first, n // 2)
    push_out(d)
    settled(d, "disk")
    d.process.kill()
    d.process.wait()
    with Daemon(*POOL, "--kv-disk", f"{disk}:256M") as d:
        again, _, cached = complete(d, text)
        assert again == first
        # What was pushed out; the last pages of it were perhaps not.
        assert cached >= n // 2


def test_a_client_that_leaves_cancels_what_is_on_its_way(disk):
    with Daemon(*POOL, "--kv-ram", "256M") as d:
        text = prompt("mine", SENTENCES)
        first, _, _ = complete(d, text)
        push_out(d)
        for _ in range(5):
            with pytest.raises(httpx.TimeoutException):
                httpx.post(d.url + "/v1/completions", json={"prompt": text, "max_tokens": 80}, timeout=0.02)
            push_out(d, 1)
        d.wait_idle()
        kv = httpx.get(d.url + "/v1/kv").json()
        assert kv["fetches"]["under_way"] == 0 and kv["drift_pages"] == 0
        assert complete(d, text)[0] == first


def test_a_narrow_tier_says_what_it_is(disk):
    with Daemon(*POOL, "--kv-ram", "256M", "--kv-ram-dtype", "int8") as d:
        text = prompt("mine", SENTENCES)
        _, n, _ = complete(d, text)
        push_out(d)
        t = settled(d, "ram")
        assert t["type"] == "int8" and t["stored"] > 0
        assert t["bytes_used"] < t["pages"] * PAGE * 0.65
        _, _, cached = complete(d, text)
        assert cached >= n - 17


def test_a_session_tells_where_its_pages_are(disk):
    """On the device, then partly below it, then back; and without a tier they are lost, and computed again."""
    def session(d):
        return httpx.get(d.url + "/v1/sessions/s").json()

    def places(d):
        seen = session(d)
        assert sum(seen["pages_by_tier"].values()) == n_pages and seen["pages_by_tier"]["device"] >= seen["pages"]
        return seen["pages_by_tier"]
    for args, kind in (("--kv-ram", "256M"), "ram"), (("--kv-disk", f"{disk}:256M"), "disk"), ((), "lost"):
        with Daemon(*POOL, "--session-heartbeat", "200s", *args) as d:
            made = httpx.post(d.url + "/v1/sessions", json={"id": "s"}).json()
            assert made["pages_by_tier"] == {"device": 0, "ram": 0, "disk": 0, "remote": 0, "lost": 0}
            answer, _, _ = complete(d, prompt("mine", SENTENCES), session_id="s")
            n_pages = session(d)["pages"]
            assert n_pages > 20 and places(d)["device"] == n_pages
            if kind != "lost":
                comes_back(d, kind, prompt("mine", SENTENCES), answer, 16 * n_pages // 2)
                assert re.search(rf"^  below it   {kind} 25[56]\.\d MiB$", d.stdout(), re.M)
            push_out(d)
            left = places(d)
            assert left[kind] > n_pages // 2 and sum(left[k] for k in {"device", kind, "lost"}) == n_pages
            complete(d, prompt("mine", SENTENCES), session_id="s")
            assert places(d)["device"] == n_pages


def chat(d, session, messages, key="none"):
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "session_id": session}
    r = httpx.post(d.url + "/v1/chat/completions", json=body, headers={"x-api-key": key}, timeout=120 * SLOW)
    assert r.status_code == 200, r.text
    return r.json()


def test_a_session_outlives_a_restart(disk):
    args = ("--kv-disk", f"{disk}:256M", "--session-heartbeat", "200s", "--session-ttl", "200s")
    turns = [{"role": "user", "content": prompt("mine", SENTENCES * 3 // 4)}]
    with Daemon(*POOL, *args) as d:
        for name, ttl in (("tea", 200), ("brief", 1)):
            made = httpx.post(d.url + "/v1/sessions", json={"id": name, "ttl": ttl})
            assert made.status_code == 200, made.text
        first = chat(d, "tea", turns)
        born = httpx.get(d.url + "/v1/sessions/tea").json()
    assert sorted(os.listdir(disk)) == ["kvasir-kv.0", "kvasir-sessions"]
    assert all(os.stat(os.path.join(disk, f)).st_mode & 0o777 == 0o600 for f in os.listdir(disk))
    time.sleep(1.1)
    with Daemon(*POOL, *args) as d:
        assert httpx.get(d.url + "/v1/sessions/brief").status_code == 404, "its TTL has passed meanwhile"
        now = httpx.get(d.url + "/v1/sessions/tea").json()
        assert now["age"] >= born["age"] + 1 and now["requests"] == 1
        assert now["pages"] == 0 and now["pages_by_tier"]["disk"] == born["pages"], "it knows where its pages are"
        turns += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        usage = chat(d, "tea", turns)["usage"]
        kept = first["usage"]["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= kept, "the tail came back as well"
        # The sessions were of one moment: what ends from now on does not come back.
        assert sorted(os.listdir(disk)) == ["kvasir-kv.0"]
        httpx.delete(d.url + "/v1/sessions/tea")
    with Daemon(*POOL, *args) as d:
        assert httpx.get(d.url + "/v1/sessions/tea").status_code == 404


@pytest.mark.parametrize("damage", ["a bit", "cut", "longer", "empty"])
def test_a_damaged_file_of_sessions_is_not_used(disk, damage):
    args = ("--kv-disk", f"{disk}:256M", "--session-heartbeat", "200s", "--session-ttl", "200s")
    with Daemon(*POOL, *args) as d:
        httpx.post(d.url + "/v1/sessions", json={"id": "tea"})
        complete(d, prompt("mine", 10), session_id="tea")
    path = os.path.join(disk, "kvasir-sessions")
    data = bytearray(open(path, "rb").read())
    if damage == "a bit":
        data[-5] ^= 4  # in a page's key
    data = {"cut": data[:-7], "longer": data + b"x" * 32, "empty": b""}.get(damage, data)
    with open(path, "wb") as f:
        f.write(data)
    with Daemon(*POOL, *args) as d:
        assert "are not used: they are damaged" in d.stderr()
        assert httpx.get(d.url + "/v1/sessions/tea").status_code == 404
        assert not os.path.exists(path)
        complete(d, "Hello")


def first_token(d, ids):
    """Seconds to the first token of these ids, and how many were found."""
    begun = time.monotonic()
    r = httpx.post(d.url + "/v1/completions", json={"prompt": ids, "max_tokens": 1, "temperature": 0}, timeout=300 * SLOW)
    took = time.monotonic() - begun
    assert r.status_code == 200, r.text
    return took, (r.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def ids(n, seed):
    return [(seed * 7919 + i * 31) % 40000 + 1000 for i in range(n)]


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.alone
@pytest.mark.parametrize("n", [2000, pytest.param(6000, marks=LONG)])
def test_a_page_comes_back_sooner_than_it_is_computed(disk, kind, n):
    args = ("--kv-ram", "1G") if kind == "ram" else ("--kv-disk", f"{disk}:1G")
    with Daemon("--kv-memory", (n // 16 + 20) * PAGE, "--context", n + 100, *args) as d:
        cold, warm = [], []
        for seed in range(2):
            took, found = first_token(d, ids(n, seed))
            assert found == 0
            cold.append(took)
            settled(d, kind)
        # Each has pushed the other out.
        for seed in range(2):
            took, found = first_token(d, ids(n, seed))
            assert found >= n // 2
            warm.append(took)
            settled(d, kind)
        print(f"{kind}, {n} tokens: {min(warm) / min(cold):.1%} of the time to compute them")
        assert min(warm) <= 0.25 * min(cold), f"cold {cold}, from {kind} {warm}"


@pytest.mark.alone
def test_a_session_of_4000_tokens_goes_on_after_a_restart_in_3_percent_of_the_time(disk):
    """In ten, where something else may be computed meanwhile."""
    args = ("--kv-memory", 700 * PAGE, "--context", 5000, "--kv-disk", f"{disk}:1G", "--session-heartbeat", "200s", "--session-ttl", "280s")
    turns = [{"role": "user", "content": prompt("mine", 310)}]
    body = {"messages": turns, "max_tokens": 4, "temperature": 0, "session_id": "tea"}
    warm = []
    with Daemon(*args) as d:
        httpx.post(d.url + "/v1/sessions", json={"id": "tea"})
        begun = time.monotonic()
        first = chat(d, "tea", turns)
        cold = time.monotonic() - begun
        assert first["usage"]["prompt_tokens"] > 3500
    while len(warm) < 2 or (len(warm) < 5 and min(warm) > 0.03 * cold):
        with Daemon(*args) as d:
            turns += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            body = {"messages": turns, "max_tokens": 1, "temperature": 0, "session_id": "tea"}
            begun = time.monotonic()
            r = httpx.post(d.url + "/v1/chat/completions", json=body, timeout=120 * SLOW)
            warm.append(time.monotonic() - begun)
            assert r.status_code == 200, r.text
            usage = r.json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 16
            first = r.json()
    print(f"after a restart: {min(warm) / cold:.1%} of {cold:.2f} s")
    if SLOW == 1:
        assert min(warm) <= (0.03 if FULL else 0.1) * cold, f"cold {cold}, after a restart {warm}"


def test_sessions_of_api_keys_outlive_a_restart_by_their_names(disk):
    def keys(*names):
        return json.dumps({"keys": [{"name": n, "key": "sk-" + n} for n in names]})

    def session(d, name):
        return httpx.get(d.url + "/v1/sessions/tea", headers={"x-api-key": "sk-" + name})

    args = ("--kv-disk", f"{disk}:256M", "--session-heartbeat", "200s", "--session-ttl", "200s")
    turns = [{"role": "user", "content": prompt("mine", SENTENCES * 3 // 4)}]
    with Daemon(*POOL, *args, env={"KVASIR_API_KEYS": keys("alice", "bob", "carol")}) as d:
        for name in ("alice", "bob"):
            made = httpx.post(d.url + "/v1/sessions", json={"id": "tea"}, headers={"x-api-key": "sk-" + name})
            assert made.status_code == 200, made.text
        first = chat(d, "tea", turns, "sk-alice")
    # In another order, so that numbers mean others, and without bob, whose session waits for him.
    with Daemon(*POOL, *args, env={"KVASIR_API_KEYS": keys("carol", "alice")}) as d:
        assert session(d, "carol").status_code == 404
        assert session(d, "alice").json().get("requests") == 1, session(d, "alice").text + d.stderr()
        turns += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        usage = chat(d, "tea", turns, "sk-alice")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    with Daemon(*POOL, *args, env={"KVASIR_API_KEYS": keys("bob")}) as d:
        assert session(d, "bob").json()["requests"] == 0

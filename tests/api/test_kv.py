"""GET /v1/kv and its metrics: the figures are right, agree with each other, and show what sharing saves."""
import threading
import time

import httpx
import pytest

from daemon import SLOW, Daemon, eventually

LONG = "Once upon a time a small boat sailed over the wide sea, and its captain wrote every evening into a book. "


def open_client(d):
    return httpx.Client(base_url=d.url, timeout=120 * SLOW)


def complete(http, prompt, max_tokens=4, **more):
    r = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more})
    assert r.status_code == 200, r.text
    return r.json()


def session(http, **more):
    return http.post("/v1/sessions", json=more).json()["id"]


def add_up(kv):
    """What must be true of every report."""
    pool, pages, refs = kv["pool"], kv["pages"], kv["references"]
    assert kv["drift_pages"] == 0
    assert pages["running"] + pages["queued"] + pages["sessions"] + pages["index"] + pages["nobody"] == pool["pages"]
    assert pages["nobody"] == pool["pages_free"] and pool["pages_used"] == pool["pages"] - pool["pages_free"]
    assert pool["bytes"] == pool["pages"] * pool["page_bytes"] and pool["bytes_used"] == pool["pages_used"] * pool["page_bytes"]
    assert refs["total"] == refs["running"] + refs["queued"] + refs["index"]
    assert refs["total"] >= pool["pages_used"]
    f = kv["fragmentation"]
    assert f["positions_used"] + f["positions_unused"] == pool["pages_used"] * pool["page_tokens"]
    if pool["pages_used"]:
        assert f["ratio"] == pytest.approx(f["positions_unused"] / (pool["pages_used"] * pool["page_tokens"]), rel=1e-4)
    assert sum(k["pages"] for k in kv["keys"]) == refs["running"]
    return kv


@pytest.fixture(scope="module")
def own():
    """A daemon whose every page this file accounts for."""
    with Daemon("--kv-memory", "256M", "--session-heartbeat", "120s") as d:
        yield d


def test_the_figures_agree_with_the_sessions_and_the_metrics(own):
    with open_client(own) as http:
        ids = [session(http) for _ in range(3)]
        for i, s in enumerate(ids):
            complete(http, f"{i} agreements. " + LONG * (i + 1), session_id=s)
        own.wait_idle()
        kv = add_up(own.kv())
        rows = {s["id"]: s for s in kv["sessions"]["data"]}
        assert set(rows) == set(ids)
        assert sum(s["pages"] for s in rows.values()) == kv["pages"]["sessions"]
        assert kv["references"] == {"running": 0, "queued": 0, "index": kv["pool"]["pages_used"], "total": kv["pool"]["pages_used"]}
        assert sum(s["tokens"] for s in rows.values()) == kv["tokens"]["sessions"] == kv["tokens"]["total"]
        m = own.metrics()
        assert m["kvasir:kv_references"] == kv["references"]["total"]
        assert m["kvasir:kv_pages"] == kv["pool"]["pages"]
        assert m["kvasir:kv_tokens"] == kv["tokens"]["total"]
        assert m["kvasir:kv_bytes"] == kv["pool"]["bytes"]
        assert m["kvasir:kv_fragmentation_ratio"] == pytest.approx(kv["fragmentation"]["ratio"], rel=1e-4)
        assert m["kvasir:prefix_pages"] == kv["prefix_index"]["pages"] == kv["references"]["index"]
        assert m["kvasir:kv_pages_free"] == kv["pool"]["pages_free"]
        for s in rows.values():
            one = http.get(f"/v1/sessions/{s['id']}").json()
            for field in ("tokens", "pages", "kv_bytes", "references", "pages_exclusive", "prompt_tokens", "cached_tokens"):
                assert one[field] == s[field]
            assert one["kv_bytes"] == one["pages"] * kv["pool"]["page_bytes"]
            assert one["pages"] * 16 == one["tokens"] + one["positions_unused"]
            assert one["references"] == one["pages"] == one["pages_indexed"]  # a session holds none itself, the index does
            assert one["pages_exclusive"] == one["pages"] and one["pages_shared"] == 0
            assert one["prompt_tokens"] > 0 and one["generated_tokens"] == 4
            assert 0 < one["claim"] <= 120 and 0 < one["expires_in"] <= 120
        for s in ids:
            http.delete(f"/v1/sessions/{s}")
        after = add_up(own.kv())
        assert after["pages"]["sessions"] == 0 and after["sessions"]["data"] == []
        assert after["pages"]["index"] == kv["pages"]["index"] + kv["pages"]["sessions"]  # what they computed may be found again


def test_metrics_follow_within_seconds_without_being_asked_for(own):
    with open_client(own) as http:
        s = session(http)
        complete(http, "Following. " + LONG, session_id=s)
        pages = http.get(f"/v1/sessions/{s}").json()["pages"]
        metrics = lambda: httpx.get(own.url + "/metrics", timeout=10 * SLOW).text  # noqa: E731
        eventually(lambda: f'holder="sessions"}} {pages}\n' in metrics(), 3, "the pages are counted")
        http.delete(f"/v1/sessions/{s}")
        eventually(lambda: f'holder="sessions"}} {pages}\n' not in metrics(), 3, "and are not any more")


def test_a_shared_beginning_is_held_once_and_shown_as_shared(own):
    with open_client(own) as http:
        ids = [session(http) for _ in range(2)]
        for i, s in enumerate(ids):
            complete(http, "Shared beginning. " + LONG * 4 + f"Fork {i}.", session_id=s)
        kv = add_up(own.kv())
        one, two = (http.get(f"/v1/sessions/{s}").json() for s in ids)
        assert one["pages_shared"] == two["pages_shared"] == kv["pages"]["shared"] >= 5
        assert two["cached_tokens"] >= 80 and one["cached_tokens"] == 0
        assert kv["pages"]["sessions"] == one["pages"] + two["pages"] - kv["pages"]["shared"]
        for s in ids:
            http.delete(f"/v1/sessions/{s}")


def test_the_list_of_sessions_comes_in_pages(own):
    with open_client(own) as http:
        ids = [session(http) for _ in range(5)]
        for path in ("/v1/kv", "/v1/sessions"):
            seen, after = [], None
            while True:
                r = http.get(path, params={"limit": 2, **({"after": after} if after else {})}).json()
                part = r["sessions"] if path == "/v1/kv" else r
                assert len(part["data"]) <= 2
                seen += [s["id"] for s in part["data"]]
                if not part["has_more"]:
                    assert part["next"] is None
                    break
                after = part["next"]
                # One that ends meanwhile moves no other.
                if len(seen) == 2:
                    http.delete(f"/v1/sessions/{ids[0]}")
            assert seen == ids
            ids[0] = session(http)
            ids.append(ids.pop(0))
            for bad in ({"limit": 0}, {"limit": 1001}, {"limit": "x"}, {"limit": ""}, {"after": "-1"}, {"after": "1e3"}):
                r = http.get(path, params=bad)
                assert r.status_code == 400 and r.json()["error"]["param"] in bad
        for s in ids:
            http.delete(f"/v1/sessions/{s}")


def test_fragmentation_is_alarmed_once_and_well_again_once():
    """Twenty short answers leave two pages each and fill the second by little; one long prompt outweighs them."""
    with Daemon("--kv-memory", "64M") as d, open_client(d) as http:
        assert not d.kv()["fragmentation"]["alarm"]
        for i in range(20):
            complete(http, [100 + i] * 18, max_tokens=2)
        f = add_up(d.kv())["fragmentation"]
        assert f["alarm"] and f["ratio"] > 0.2
        assert d.metrics()["kvasir:kv_fragmentation_alarm"] == 1
        complete(http, LONG * 70, max_tokens=2)
        f = add_up(d.kv())["fragmentation"]
        assert not f["alarm"] and f["ratio"] < 0.15
        assert d.metrics()["kvasir:kv_fragmentation_alarm"] == 0
        lines = [x for x in d.stderr().splitlines() if "event=kv_fragmentation" in x]
        assert len(lines) == 2 and all("level=warn" in x for x in lines)
        assert "more than 20%" in lines[0] and "well again" in lines[1]


@pytest.mark.trained
def test_every_page_that_had_to_go_is_counted_by_reason():
    """56 pages for conversations of about 20: the index gives way for prompts, then for an answer that grows."""
    with Daemon("--kv-memory", "20M") as d, open_client(d) as http:
        ids = [session(http) for _ in range(4)]
        for i, s in enumerate(ids):
            complete(http, f"{i} conversations. " + LONG * 11, session_id=s)
        kv = add_up(d.kv())
        assert kv["evictions"]["prompt"] > 0 and kv["evictions"]["decode"] == 0
        rows = kv["sessions"]["data"]
        assert sum(s["pages"] for s in rows) == kv["pages"]["sessions"] <= kv["pool"]["pages"]
        assert any(s["tokens"] < s["prompt_tokens"] for s in rows), "some conversation has lost pages, and its page says so"
        complete(http, "An answer that grows. ", max_tokens=700)
        kv = add_up(d.kv())
        assert kv["evictions"]["decode"] > 0
        m = d.metrics()
        assert m["kvasir:prefix_evictions_total"] == sum(kv["evictions"].values())
        assert m["kvasir:prefix_inserted_total"] - sum(kv["evictions"].values()) >= kv["prefix_index"]["pages"]


def first_token(http, messages, sid=None, max_tokens=8):
    start, first, text = time.monotonic(), None, ""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json={**body, **({"session_id": sid} if sid else {})}) as r:
        assert r.status_code == 200
        for line in r.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                first = first or time.monotonic() - start
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["delta"]["content"]
    return first, text


@pytest.mark.alone
@pytest.mark.trained
def test_eight_sessions_with_one_system_prompt_hold_it_once_and_start_in_the_time_of_one():
    with Daemon("--kv-memory", "512M") as d, open_client(d) as http:
        def conversation(system, i):
            return [{"role": "system", "content": system}, {"role": "user", "content": f"Question {i}?"}]

        def start_together(system, n):
            ids = [session(http) for _ in range(n)]
            times = [None] * n

            def run(i):
                with open_client(d) as c:
                    times[i] = first_token(c, conversation(system, i), ids[i])[0]
            threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            return ids, max(times)

        count = http.post("/tokenize", json={"messages": conversation("One. " + LONG * 85, 0)}).json()["count"]
        assert 1900 < count < 2200
        start_together("Warm up. " + LONG, 1)
        _, alone = start_together("Alone. " + LONG * 85, 1)
        d.wait_idle()
        before, computed = d.kv(), d.metrics()["kvasir:computed_prompt_tokens_total"]
        ids, together = start_together("Together. " + LONG * 85, 8)
        d.wait_idle()
        kv, computed = add_up(d.kv()), d.metrics()["kvasir:computed_prompt_tokens_total"] - computed
        # The prompt is computed once, and of each conversation its own end: less than two pages and the question.
        assert computed <= count + 8 * 40, computed
        rows = [http.get(f"/v1/sessions/{s}").json() for s in ids]
        assert sum(r["pages_exclusive"] for r in rows) <= 8 * 4
        added = kv["pool"]["pages_used"] - before["pool"]["pages_used"]
        assert added <= count // 16 + 8 * 4, (added, count)
        assert min(r["pages_shared"] for r in rows) >= count // 16 - 4
        assert SLOW > 1 or together <= 2.0 * alone, (together, alone)
        print(f"time to first token: alone {alone:.3f} s, the last of eight {together:.3f} s; {computed:g} tokens computed for eight "
              f"prompts of {count}; {added} pages more")


@pytest.mark.alone
@pytest.mark.skipif(SLOW > 1, reason="a ratio of times means nothing under a sanitizer")
def test_the_second_turn_of_4000_tokens_begins_in_3_percent_of_a_cold_start():
    with Daemon("--kv-memory", "512M") as d, open_client(d) as http:
        cold, warm = [], []
        for i in range(2):
            s = session(http)
            turns = [{"role": "user", "content": f"Story {i}. " + LONG * 172}]
            assert 3900 < http.post("/tokenize", json={"messages": turns}).json()["count"] < 4200
            t, text = first_token(http, turns, s)
            cold.append(t)
            turns += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
            warm.append(first_token(http, turns, s)[0])
            http.delete(f"/v1/sessions/{s}")
        print(f"cold {cold}, second turn {warm}: {min(warm) / min(cold):.4f}")
        assert min(warm) <= 0.03 * min(cold), f"cold {cold}, second turn {warm}"

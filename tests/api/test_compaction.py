"""context_management: conversations that go on past a threshold by summaries of their older turns; and responses that are stored.

What a small model writes into a summary is poor: these tests look at structure, counts and what had to be computed.
"""
import json
import time

import httpx
import openai
import pytest

from daemon import FULL, SLOW, Daemon, eventually
from wire import Wire

PAGE = 368640  # of SmolLM2-135M in f16
COMPACT = [{"type": "compaction", "compact_threshold": 700, "max_output_tokens": 64, "keep_turns": 2}]
ANSWER = 24  # tokens of one
MARKS = 24 + ANSWER  # of the template around a message; and nonsense may be cut otherwise when it is read again


@pytest.fixture(scope="module")
def daemon():
    with Daemon("--kv-memory", 400 * PAGE, "--context", 1400) as d:
        yield d


def respond(d, status=200, **body):
    body = {"max_output_tokens": ANSWER, "temperature": 0, "instructions": "You are brief. The password is heron.", **body}
    r = httpx.post(d.url + "/v1/responses", json=body, headers=d.headers, timeout=120 * SLOW)
    assert r.status_code == status, r.text
    return r.json()


def say(turn):
    return f"Turn {turn}: " + " ".join(f"item {turn * 10 + i} costs {(turn * 7919 + i * 31) % 97} coins." for i in range(6))


def tokens(d, text):
    return len(httpx.post(d.url + "/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])


def computed(response):
    u = response["usage"]
    return u["input_tokens"] - u["input_tokens_details"]["cached_tokens"]


def rest(d):
    """Until nothing runs: between the parts of a compaction nothing does for a moment, so it is looked at three times."""
    eventually(lambda: all((time.sleep(0.02), d.idle())[1] for _ in range(3)), 30, "nothing runs")


def summary(response):
    items = [i for i in response["output"] if i["type"] == "compaction"]
    assert len(items) <= 1 and response["output"][:len(items)] == items, "a summary comes first"
    return items[0] if items else None


def check(response, item):
    """The item and the usage say the same, and it is what was read."""
    told = response["usage"]["compaction"]
    assert told["failed"] is None
    for key in ("turns", "messages", "tokens_before", "tokens_after"):
        assert told[key] == item[key], key
    assert item["tokens_after"] < item["tokens_before"] and item["summary"] and item["messages"] == 2 * item["turns"]
    assert 0 < told["output_tokens"] <= 64
    # Written behind turns whose KV was there: it took its question.
    assert told["input_tokens"] - told["cached_tokens"] < 96


def test_turns_past_the_threshold_compute_what_is_new(daemon):
    """Thirty of them, or twelve every day. With time to idle between turns, the summaries are made in it, and no turn computes
    more than its own words."""
    previous, past, seen, turns = None, 0, [], 0
    before = daemon.metrics()["kvasir:computed_prompt_tokens_total"]
    new = 0
    while past < (30 if FULL else 12):
        text = say(turns)
        r = respond(daemon, input=text, previous_response_id=previous, context_management=COMPACT)
        item = summary(r)
        if item:
            check(r, item)
            assert r["usage"]["compaction"]["background"]
            assert "password is heron" not in item["encrypted_content"], "instructions are not part of what is summarised"
            assert item["turns"] >= (seen[-1]["turns"] if seen else 1)
            # The latest turns are there word for word.
            assert say(turns - 1) in item["encrypted_content"] and text in item["encrypted_content"]
            seen.append(item)
        if turns:
            assert computed(r) <= tokens(daemon, text) + MARKS, (turns, r["usage"])
        assert r["usage"]["input_tokens"] <= 700
        new += tokens(daemon, text) + MARKS
        past += bool(seen)
        turns += 1
        previous = r["id"]
        rest(daemon)
    assert len(seen) >= (4 if FULL else 2)
    # All that was computed, the summaries' questions and what is read after them included.
    total = daemon.metrics()["kvasir:computed_prompt_tokens_total"] - before
    assert total <= new + sum(96 + i["tokens_after"] for i in seen) + 800, "but for the last one, which no turn has shown"
    assert daemon.kv()["drift_pages"] == 0
    # What came of the first turns can still be looked at, and gone on from.
    m = daemon.metrics()
    assert m["kvasir:context_compacted_tokens_total"] > 0 and m["kvasir:context_compactions_total"] >= len(seen)


def test_turns_without_a_pause_summarise_in_line_or_wait(daemon):
    previous, items = None, []
    for turn in range(24):
        r = respond(daemon, input="Again. " + say(turn), previous_response_id=previous, context_management=COMPACT, kv_cache={})
        item = summary(r)
        assert r["kv_cache"].get("compaction") == r["usage"].get("compaction")
        if item:
            check(r, item)
            items.append(item)
        if turn:
            most = tokens(daemon, say(turn)) + MARKS + (item["tokens_after"] if item else 0)
            assert computed(r) <= most, (turn, r["usage"])
        previous = r["id"]
    assert len(items) >= 2


def test_an_older_response_goes_on_from_the_full_text(daemon):
    ids, item = [], None
    while not item:
        r = respond(daemon, input="Older. " + say(len(ids)), previous_response_id=ids[-1] if ids else None, context_management=COMPACT)
        item, ids = summary(r), ids + [r["id"]]
        rest(daemon)
    full = respond(daemon, input="And?", previous_response_id=ids[-3])
    short = respond(daemon, input="And?", previous_response_id=ids[-1])
    assert summary(full) is None and full["usage"]["input_tokens"] > 350
    assert short["usage"]["input_tokens"] < item["tokens_after"] + 150
    # Every turn that was summarised is there under its response's id.
    for i, response_id in enumerate(ids):
        r = httpx.get(daemon.url + f"/v1/responses/{response_id}").json()
        assert r["id"] == response_id and r["output"][-1]["type"] == "message"
        data = httpx.get(daemon.url + f"/v1/responses/{response_id}/input_items").json()["data"]
        assert data[0]["content"][0]["text"] == "Older. " + say(i)


def test_a_client_that_sends_all_items_appends_the_summary(daemon):
    """Statelessly, as OpenAI's guide has it, with and without what the summary stands for."""
    items, found, inputs = [], False, []
    for turn in range(14):
        items.append({"role": "user", "content": "Stateless. " + say(turn)})
        r = respond(daemon, input=items, store=False, context_management=COMPACT)
        found = found or summary(r) is not None
        items += r["output"]
        inputs.append(r["usage"]["input_tokens"])
    assert found and max(inputs) <= 700
    cut = max(i for i, item in enumerate(items) if item.get("type") == "compaction")
    ask = {"role": "user", "content": "And?"}
    whole, pruned = (respond(daemon, input=i + [ask], store=False) for i in (items, items[cut:]))
    assert whole["usage"]["input_tokens"] == pruned["usage"]["input_tokens"] < 760
    assert whole["output"][0]["content"] == pruned["output"][0]["content"]


def test_a_websocket_conversation(daemon):
    with Wire(daemon) as w:
        previous, items = None, 0
        for turn in range(20):
            w.send("Socket. " + say(turn), previous_response_id=previous, context_management=COMPACT, max_output_tokens=24, store=False)
            events = list(w.events())
            last = events[-1]["response"]
            assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
            item = summary(last)
            shown = [e for e in events if e["type"].startswith("response.output_item") and e["item"]["type"] == "compaction"]
            assert len(shown) == (2 if item else 0) and all(e["output_index"] == 0 for e in shown)
            items += item is not None
            previous = last["id"]
        assert items >= 2
    daemon.wait_idle(30)


def test_a_stream_has_it_as_its_first_item(daemon):
    conversation = [m for i in range(12) for m in ({"role": "user", "content": "Stream. " + say(i)}, {"role": "assistant", "content": "Noted."})]
    body = {"input": conversation + [{"role": "user", "content": "And?"}], "stream": True, "max_output_tokens": 8, "context_management": COMPACT}
    with httpx.stream("POST", daemon.url + "/v1/responses", json=body, timeout=120 * SLOW) as r:
        events = [json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: {")]
    assert [e["type"] for e in events[:4]] == ["response.created", "response.in_progress", "response.output_item.added", "response.output_item.done"]
    assert events[3]["item"]["type"] == "compaction" and events[3]["item"]["turns"] == 11
    assert events[-1]["response"]["output"][0] == events[3]["item"]
    assert not events[-1]["response"]["usage"]["compaction"]["background"]


def test_the_openai_client_reads_it(daemon):
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0, timeout=120 * SLOW) as c:
        conversation = [m for i in range(12) for m in ({"role": "user", "content": "Client. " + say(i)}, {"role": "assistant", "content": "Noted."})]
        r = c.responses.create(model="any", input=conversation + [{"role": "user", "content": "And?"}], max_output_tokens=8,
                               extra_body={"context_management": COMPACT})
        assert r.output[0].type == "compaction" and r.output[-1].type == "message"
        back = [item.model_dump() for item in r.output] + [{"role": "user", "content": "And then?"}]
        again = c.responses.create(model="any", input=back, max_output_tokens=8)
        assert again.usage.input_tokens < 700
        stored = c.responses.retrieve(r.id)
        assert stored.id == r.id and stored.output[0].type == "compaction"
        assert len(list(c.responses.input_items.list(r.id, limit=7))) == 25
        c.responses.delete(r.id)
        with pytest.raises(openai.NotFoundError):
            c.responses.retrieve(r.id)


def test_a_history_far_beyond_the_context_is_folded(daemon):
    conversation = [m for i in range(60) for m in ({"role": "user", "content": "Far. " + say(i)}, {"role": "assistant", "content": "Noted."})]
    r = respond(daemon, input=conversation + [{"role": "user", "content": "And?"}], context_management=COMPACT)
    assert summary(r)["turns"] == 59 and r["usage"]["input_tokens"] < 700


def test_a_cancelled_turn_leaves_the_conversation_as_it_was(daemon):
    conversation = [m for i in range(12) for m in ({"role": "user", "content": "Cancel. " + say(i)}, {"role": "assistant", "content": "Noted."})]
    with Wire(daemon) as w:
        w.send(conversation + [{"role": "user", "content": "And?"}], context_management=COMPACT)
        w.send(type="response.cancel")
        last = list(w.events())[-1]
        assert last["type"] == "response.incomplete" and last["response"]["status"] == "cancelled"
        w.send("Say yes.", max_output_tokens=2)
        assert list(w.events())[-1]["type"] in ("response.completed", "response.incomplete")
    daemon.wait_idle(30)


def test_responses_are_stored_within_their_bytes():
    with Daemon("--response-store", "64K") as d:
        first = respond(d, input="one")
        for i in range(40):
            last = respond(d, input="x" * 2000, max_output_tokens=1)
        m = d.metrics()
        assert m["kvasir:responses_stored_bytes"] <= 65536 and m["kvasir:responses_evicted_total"] > 0
        assert httpx.get(d.url + f"/v1/responses/{first['id']}").status_code == 404
        assert httpx.get(d.url + f"/v1/responses/{last['id']}").status_code == 200
        assert respond(d, 400, input="x", previous_response_id=first["id"])["error"]["code"] == "previous_response_not_found"
    with Daemon("--response-store", "0") as d:
        assert respond(d, input="one")["store"] is False


def test_a_background_summary_takes_no_place_of_its_key_and_ends_with_a_drain():
    keys = json.dumps({"keys": [{"name": "one", "key": "sk-one-0000", "max_requests": 1}, {"name": "two", "key": "sk-two-0000"}]})
    with Daemon("--api-keys", keys, "--kv-memory", 400 * PAGE, "--context", 1400, key="sk-one-0000") as d:
        previous = None
        slow = [{**COMPACT[0], "max_output_tokens": 350}]
        for turn in range(10):
            previous = respond(d, input=say(turn), previous_response_id=previous, context_management=slow)["id"]
        other = httpx.get(d.url + f"/v1/responses/{previous}", headers={"authorization": "Bearer sk-two-0000"})
        assert other.status_code == 404, "another key's response does not exist"

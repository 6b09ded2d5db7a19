"""Memory that cannot be had, at every allocation of every kind of request.

An allocation that fails is answered with an error of our shape, or the request succeeds all the same, with the same text as
without a fault. Where not even an error can be written the connection ends, visibly. Nothing is left behind: afterwards pages,
sessions, descriptors and blocks of memory are what they were, and the next request works. In a build with a sanitizer only some
of the allocations fail, in others each one does in turn; with KVASIR_FULL=yes also several at once.
"""
import json
import os
import signal
import socket
import threading
import time

import pytest
from daemon import FULL, LONG, SLOW, eventually
from faults import FaultyDaemon, need_library, sanitizer, tiny_model
from transport import Ws, error_of, read_chunks, read_head

SANITIZED = 25  # failures for each kind of request
HI = {"messages": [{"role": "user", "content": "The engine reads a model from a file and keeps the pages"}], "max_tokens": 6,
      "temperature": 0}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {
    "type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["yes", "no"]}}, "required": ["n", "s"]}}}
FAILURES = (500, 503)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    need_library()
    model = tiny_model(str(tmp_path_factory.mktemp("tiny")))
    with FaultyDaemon("--kv-memory", "2M", "--threads", 1, "--session-heartbeat", "1h", "--session-ttl", "1h", "--response-store", "8K", model=model) as d:
        yield d


# ---- Kinds of requests: each returns its answer in a form that two runs have in common, or how it failed ----

class Failed(Exception):
    """An error that was said in words."""


class Dropped(Exception):
    """The connection ended within, or before, the answer."""


def connect(d):
    return socket.create_connection(("127.0.0.1", d.port), timeout=30 * SLOW)


def ask(d, method, path, body=None):
    """One request on a connection of its own: (headers, body) of a 2xx answer. Errors must have their shape."""
    data = json.dumps(body).encode() if body is not None else b""
    with connect(d) as s:
        try:
            s.sendall(f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
                      f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            status, headers, rest = read_head(s)
            if headers.get("transfer-encoding") == "chunked":
                rest = b"".join(read_chunks(s, rest)[0])
            else:
                while len(rest) < int(headers["content-length"]):
                    more = s.recv(65536)
                    if not more:
                        raise ConnectionError("closed within the body")
                    rest += more
        except ConnectionError as e:
            raise Dropped(str(e)) from None
    if status < 400:
        return headers, rest
    error = error_of(rest)
    assert status in FAILURES, (status, rest)
    assert error["message"] and error["type"] == "server_error", error
    raise Failed(error["code"])


def ask_json(d, method, path, body=None):
    return json.loads(ask(d, method, path, body)[1])


def chat(d, **more):
    r = ask_json(d, "POST", "/v1/chat/completions", {**HI, **more})
    assert r["usage"]["total_tokens"] == r["usage"]["prompt_tokens"] + r["usage"]["completion_tokens"]
    return r["choices"]


def stream(d, path="/v1/chat/completions", **more):
    """The text and how it ended; an error event must have its shape, and a stream that just stops is no stream."""
    headers, body = ask(d, "POST", path, {**HI, "stream": True, **more})
    assert headers["content-type"].startswith("text/event-stream")
    *events, done, empty = body.decode().split("\n\n")
    assert done == "data: [DONE]" and empty == "", body
    events = [json.loads(e.removeprefix("data: ")) for e in events]
    for e in events:
        if "error" in e:
            assert e is events[-1], "nothing follows an error"
            assert set(e["error"]) == {"message", "type", "param", "code"}, e
            raise Failed(e["error"]["code"])
    return [[(c.get("delta", {}).get("content"), c["finish_reason"]) for c in e["choices"]] for e in events]


def completions(d):
    return ask_json(d, "POST", "/v1/completions", {"prompt": "The engine reads", "n": 2, "logprobs": 2, "echo": True, "max_tokens": 4,
                                                   "temperature": 0})["choices"]


def responses(d):
    r = ask_json(d, "POST", "/v1/responses", {"input": "The engine reads", "max_output_tokens": 4, "temperature": 0, "store": False})
    if r["status"] == "failed":
        raise Failed(r["error"]["code"])
    return [o["content"][0]["text"] for o in r["output"]], r["usage"]


def compaction(d):
    """A summary that finds no memory is told as one that failed, and the answer comes all the same."""
    talk = [m for i in range(5) for m in ({"role": "user", "content": f"{i} engines read {i} books. " * 4}, {"role": "assistant", "content": "I see."})]
    r = ask_json(d, "POST", "/v1/responses", {
        "input": talk + [{"role": "user", "content": "And?"}], "max_output_tokens": 2, "temperature": 0, "store": False,
        "context_management": [{"type": "compaction", "compact_threshold": 128, "max_output_tokens": 16, "keep_turns": 1}]})
    if r["status"] == "failed":
        raise Failed(r["error"]["code"])
    told, kinds = r["usage"]["compaction"], [o["type"] for o in r["output"]]
    assert kinds == (["message"] if told["failed"] else ["compaction", "message"]), r
    return "answered"


def stored(d):
    """Kept, shown, continued and deleted; without memory it is said to be stored only if it is."""
    first = ask_json(d, "POST", "/v1/responses", {"input": "The engine reads", "max_output_tokens": 3, "temperature": 0})
    if first["status"] == "failed" or not first["store"]:
        raise Failed(first["error"] and first["error"]["code"] or "not stored")
    try:
        assert ask_json(d, "GET", f"/v1/responses/{first['id']}")["output"] == first["output"]
        items = ask_json(d, "GET", f"/v1/responses/{first['id']}/input_items")["data"]
        second = ask_json(d, "POST", "/v1/responses", {"input": "Go on.", "max_output_tokens": 3, "temperature": 0, "store": False,
                                                       "previous_response_id": first["id"]})
        if second["status"] == "failed":
            raise Failed(second["error"]["code"])
    finally:
        ask(d, "DELETE", f"/v1/responses/{first['id']}")
    return items[0]["content"], second["output"][-1]["content"][0]["text"]


def session(d):
    """Made, used, kept alive and deleted; each of them may be what fails."""
    ask_json(d, "POST", "/v1/sessions", {"id": "s"})
    ask_json(d, "POST", "/v1/sessions/s/heartbeat")
    answer = chat(d, session_id="s")
    ask_json(d, "GET", "/v1/sessions/s")
    assert [s["id"] for s in ask_json(d, "GET", "/v1/sessions")["data"]] == ["s"]
    assert ask(d, "DELETE", "/v1/sessions/s")
    return answer


def websocket(d, watched=False):
    """An upgrade and two turns. An error event ends it, and so does a close with a reason."""
    class Place:
        @staticmethod
        def connect(receive_buffer=None):
            return connect(d)
    try:
        with Ws(Place) as ws:
            if ws.status != 101:
                assert ws.status in FAILURES, (ws.status, ws.rest)
                raise Failed("upgrade")
            previous, texts = None, []
            if watched:
                ws.send(1, json.dumps({"type": "session.update", "context_events": True}).encode())
            for i in range(2):
                ws.send(1, json.dumps({"type": "response.create", "input": "The engine reads", "max_output_tokens": 3, "temperature": 0,
                                       "previous_response_id": previous, "store": False}).encode())
                while True:
                    op, data = ws.frame()
                    if op == 9:  # it takes long, without memory
                        ws.send(10, data)
                        continue
                    if op == 8:
                        code = int.from_bytes(data[:2], "big")
                        assert code == 1011, (code, data)
                        raise Failed("closed")
                    event = json.loads(data)
                    if event["type"] in ("response.completed", "response.incomplete"):
                        break
                    if event["type"] == "response.failed":
                        raise Failed(event["response"]["error"]["code"])
                    if event["type"] == "error":
                        assert event["error"]["type"] == "server_error", event
                        raise Failed(event["error"]["code"])
                previous = event["response"]["id"]
                texts.append(event["response"]["output"][0]["content"][0]["text"])
            ws.send(8, b"\x03\xe8")
            while (frame := ws.frame())[0] != 8:  # what was told before
                assert watched and json.loads(frame[1])["type"] == "session.context", frame
            assert frame[1] == b"\x03\xe8"
            return texts
    except ConnectionError as e:
        raise Dropped(str(e)) from None


def metrics(d):
    return sorted({line.split(" ")[0] for line in ask(d, "GET", "/metrics")[1].decode().splitlines() if not line.startswith("#")})


KINDS = {
    "chat": chat,
    "stream": stream,
    "stream of two": lambda d: sorted(map(str, stream(d, n=2, logprobs=True, top_logprobs=2))),
    "completions": completions,
    "schema": lambda d: chat(d, response_format=SCHEMA, max_tokens=24),
    "tools": lambda d: chat(d, tools=[WEATHER], tool_choice="auto"),
    "required tool": lambda d: [c["finish_reason"] for c in chat(d, tools=[WEATHER], tool_choice="required", max_tokens=24)],
    "sampling": lambda d: chat(d, temperature=1, seed=7, top_p=0.9, stop=["zzz", "yyy"], frequency_penalty=0.5, logit_bias={"5": -3}),
    "responses": responses,
    "response stream": lambda d: response_stream(d),
    "compaction": compaction,
    "stored": stored,
    "session": session,
    "tokenize": lambda d: ask_json(d, "POST", "/tokenize", {"messages": HI["messages"]}),
    "tokenize text": lambda d: ask_json(d, "POST", "/tokenize", {"content": "The engine <|im_end|> reads", "return_pieces": True}),
    "detokenize": lambda d: ask_json(d, "POST", "/detokenize", {"tokens": [40, 41, 42] * 30}),
    "tokenizer_info": lambda d: ask_json(d, "GET", "/tokenizer_info"),
    "models": lambda d: [m["id"] for m in ask_json(d, "GET", "/v1/models")["data"]],
    "kv": lambda d: sorted(ask_json(d, "GET", "/v1/kv")),
    "metrics": metrics,
    "health": lambda d: ask_json(d, "GET", "/health/ready")["status"],
    "page": lambda d: len(ask(d, "GET", "/")[1]),
    "websocket": websocket,
    "context events": lambda d: websocket(d, watched=True),
}


def response_stream(d):
    """Responses events by SSE: the last one says how it ended."""
    _, body = ask(d, "POST", "/v1/responses", {"input": "The engine reads", "max_output_tokens": 4, "temperature": 0, "stream": True,
                                               "store": False})
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    last = events[-1]
    if last["type"] == "error":
        raise Failed(last.get("code") or last["error"]["code"])
    if last["type"] == "response.failed":
        raise Failed(last["response"]["error"]["code"])
    assert last["type"] in ("response.completed", "response.incomplete"), last
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


def tidy(d):
    """Removes what a request that failed halfway has made."""
    for s in ask_json(d, "GET", "/v1/sessions")["data"]:
        ask(d, "DELETE", f"/v1/sessions/{s['id']}")


def outcome(d, run, n, span=1):
    """Runs one request with the n-th allocation failing: (failures, "right", "error" or "dropped", the answer)."""
    d.arm(n, span)
    try:
        answer, how = run(d), "right"
    except Failed as e:
        answer, how = str(e), "error"
    except Dropped as e:
        answer, how = str(e), "dropped"
    time.sleep(0.001)  # what is done when an answer has been sent, the log among it
    fired = d.disarm()
    assert d.process.poll() is None, f"the daemon died of allocation {n}, status {d.process.returncode}:\n{d.where()}\n{d.stderr()[-3000:]}"
    return fired, how, answer


def sweep(d, run, name, span=1, leaks=True):
    """Fails one allocation after another until a request has none left to fail; says how often each outcome was."""
    right = run(d)
    tidy(d)
    assert run(d) == right, "the answer is the same without a fault"
    tidy(d)
    pages, files = d.pages(), d.n_files()
    d.control.seen = 0
    run(d)
    total = d.control.seen
    tidy(d)
    step = max(1, total // SANITIZED) if sanitizer() and not FULL else 1
    counts, wrong, n = {"right": 0, "error": 0, "dropped": 0}, [], 1
    live = d.live()
    while True:
        try:
            fired, how, answer = outcome(d, run, n, span)
            assert how != "right" or answer == right, f"{answer} instead of {right}"
            counts[how] += fired > 0
        except (AssertionError, OSError, ValueError, LookupError) as e:
            fired = d.disarm()
            wrong.append(f"allocation {n} of about {total}: {e!r}\n{d.where()}")
            assert d.process.poll() is None and len(wrong) < 20, name + ", " + "\n".join(wrong)
        if how == "dropped" and os.environ.get("FAULT_VERBOSE"):
            print(name, n, how, answer, d.where(), sep="\n")
        tidy(d)
        if fired == 0:
            assert how == "right"
            break
        now = d.live(at_most=live) if leaks else live
        if now > live:  # once may be a cache that grew; a fault that leaks does so each time
            grown = [now]
            for _ in range(3):
                outcome(d, run, n, span)
                tidy(d)
                grown.append(d.live(at_most=grown[-1]))
            if all(b > a for a, b in zip([live, *grown], grown)):
                wrong.append(f"allocation {n} of about {total}: leaks, {live} blocks and then {grown}\n{d.where()}")
            live = grown[-1]
        n += step
    assert not wrong, name + ", " + "\n".join(wrong)
    d.wait_same(pages, files)
    assert run(d) == right
    tidy(d)
    print(f"{name}: about {total} allocations, {counts}")
    return counts


@pytest.mark.no_model
@pytest.mark.parametrize("name", KINDS)
def test_an_allocation_that_fails_is_an_error_or_does_no_harm(faulty, name):
    rss = faulty.rss_bytes()
    counts = sweep(faulty, KINDS[name], name)
    assert sanitizer() or faulty.rss_bytes() <= rss + (8 << 20)
    assert counts["right"] + counts["error"] + counts["dropped"] > 0, "the library fails what it is told to"


@pytest.mark.no_model
@LONG
@pytest.mark.parametrize("span", [2, 5, 30, 1000])
@pytest.mark.parametrize("name", KINDS)
def test_many_allocations_that_fail_together(faulty, name, span):
    """Not even the error can be written then, or only after a while."""
    rss = faulty.rss_bytes()
    sweep(faulty, KINDS[name], name, span)
    assert sanitizer() or faulty.rss_bytes() <= rss + (8 << 20)


def open_and_ask(d, asleep=False):
    """An upgrade and a request that needs no engine, on a connection that was parked before or not: what became of it."""
    class Place:
        @staticmethod
        def connect(receive_buffer=None):
            return socket.create_connection(("127.0.0.1", d.port), timeout=2 * SLOW)
    try:
        with Ws(Place) as ws:
            if ws.status != 101:
                return ws.status
            if asleep:
                eventually(lambda: d.metrics()["kvasir:websockets_parked"] == 1, 5, "it is parked")
                d.begin()
            ws.send(1, b"{}")
            op, data = ws.frame()
            return int.from_bytes(data[:2], "big") if op == 8 else json.loads(data)["type"]
    except socket.timeout:
        return "silence"
    except ConnectionError:
        return "closed"


@pytest.mark.no_model
@pytest.mark.parametrize("asleep", [False, True], ids=["opens", "wakes"])
def test_no_memory_for_a_while_for_a_websocket(tmp_path, asleep):
    """From the n-th allocation on all fail, for longer than anybody is patient. However a connection fares, its descriptors come back."""
    need_library()
    with FaultyDaemon("--threads", 1, "--ws-park-after", "20ms", "--log-level", "off", model=tiny_model(str(tmp_path))) as d:
        d.begin = lambda: None
        files = d.n_files()  # no connection is open yet, and none will be
        assert open_and_ask(d, asleep) == "error"
        pages = d.pages()
        outcomes, n = {}, 1
        while True:
            d.begin = lambda: d.arm(n, 1 << 40)
            if not asleep:
                d.begin()
            timer = threading.Timer(0.4, d.disarm)
            timer.start()
            how = open_and_ask(d, asleep)
            timer.cancel()
            timer.join()
            fired = d.control.fired
            d.disarm()
            outcomes[how] = outcomes.get(how, 0) + 1
            assert how in ("error", "closed", 503, 1011, 1013), (n, how, d.where())
            if not fired:
                break
            n += 1
        assert how == "error" and n > 5
        d.wait_same(pages, files)
        print(f"{n} allocations, {outcomes}, {files} files and then {d.n_files()}")


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """One whose pool is too small for what it is asked, so that pages go down into the tiers and come back."""
    need_library()
    folder = tmp_path_factory.mktemp("tiers")
    with FaultyDaemon("--kv-memory", "128K", "--context", 512, "--kv-ram", "64K", "--kv-disk", f"{folder}:4M", "--threads", 1,
                      "--session-heartbeat", "1h", "--session-ttl", "1h", model=tiny_model(str(folder))) as d:
        yield d


def turns(d):
    """Three conversations that do not fit the pool together, twice."""
    return [ask_json(d, "POST", "/v1/completions", {"prompt": f"{i} The engine reads a model from a file. " * 12, "max_tokens": 3,
                                                    "temperature": 0})["choices"] for i in (1, 2, 3, 1, 2, 3)]


@pytest.mark.no_model
def test_an_allocation_that_fails_while_pages_move_between_tiers(tiered):
    sweep(tiered, turns, "tiers", leaks=False)  # what the tiers know of pages grows for a while


@pytest.mark.no_model
def test_an_allocation_that_fails_at_the_start(tmp_path):
    """A status and its reason, or a daemon that says that it failed, or one that works all the same."""
    need_library()
    if sanitizer():
        pytest.skip("a sanitizer begins threads of its own with allocations that it takes for granted")
    model = tiny_model(str(tmp_path))
    # Those before main() are not the program's: libcudart's, where it is linked, takes a failure for granted.
    version = FaultyDaemon(command=("version",), wait=False)
    assert version.wait() == 0
    step, n, outcomes = (1 if FULL else 12), version.control.seen, {}
    while True:
        d = FaultyDaemon("--kv-memory", "2M", "--threads", 1, model=model, wait=False, fail_at=n)
        try:
            def settled():
                if d.process.poll() is not None:
                    return "ended"
                try:
                    return ask_json(d, "GET", "/health/ready")["status"]
                except Failed as e:
                    return "failed" if "failed" in str(e) else None
                except (OSError, Dropped):
                    return None
            state = eventually(settled, 20, f"allocation {n}: it is ready, has failed, or has ended\n{d.where()}")
            fired = d.disarm()
            if state == "ended":
                assert d.process.returncode in (1, 2), f"allocation {n}: status {d.process.returncode}\n{d.stderr()}\n{d.where()}"
                assert d.stderr().splitlines()[-1].startswith("kvasir: "), f"allocation {n}: {d.stderr()}\n{d.where()}"
            else:
                assert state != "ok" or chat(d)
                assert d.stop() == 0, d.where()
        finally:
            if d.process.poll() is None:
                d.process.kill()
                d.process.wait()
        outcomes[state] = outcomes.get(state, 0) + (fired > 0)
        if fired == 0:
            assert state == "ok"
            break
        n += step
    print(f"start: about {n} allocations, {outcomes}")


@pytest.mark.no_model
def test_an_allocation_that_fails_while_keys_are_read_again(tmp_path):
    """Either set of keys works as a whole; nobody is locked out, and nobody let in."""
    need_library()
    keys = tmp_path / "keys.json"

    def write(n):
        keys.write_text(json.dumps({"keys": [{"name": f"key{i}", "key": f"secret-{i}-{n}"} for i in range(3)]}))

    def ask_as(d, key):
        with connect(d) as s:
            s.sendall(f"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Api-Key: {key}\r\n\r\n".encode())
            return read_head(s)[0]
    write(0)
    with FaultyDaemon("--api-keys", keys, "--threads", 1, model=tiny_model(str(tmp_path))) as d:
        now, n = 0, 1
        while True:
            write(now + 1)
            seen = d.control.seen
            d.arm(n)
            d.signal(signal.SIGHUP)
            eventually(lambda: d.control.seen > seen, 10, "the signal is seen")
            d.live(at_most=0)
            fired = d.disarm()
            assert d.process.poll() is None, d.where()
            answers = {(i, k): ask_as(d, f"secret-{i}-{k}") for i in range(3) for k in (now, now + 1)}
            new = answers[0, now + 1] == 200
            for (_, k), status in answers.items():
                assert status == (200 if k == now + new else 401), (n, answers, d.where())
            if fired == 0:
                assert new
                break
            now += new
            n += 1
    assert n > 5, "reading keys allocates"

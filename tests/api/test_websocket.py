"""The Responses WebSocket mode with the websockets client."""
import json

import httpx
import pytest
import websockets

from daemon import SLOW, Daemon, eventually
from wire import Wire, cached

STORY = "A small boat sailed over the wide sea, and its captain wrote every evening into a book. " * 6


@pytest.fixture
def wire(daemon):
    with Wire(daemon) as w:
        yield w


@pytest.mark.trained
def test_one_turn_has_every_event_in_order(wire):
    wire.send("Hi")
    events = list(wire.events())
    kinds = [e["type"] for e in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == (["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
                     + ["response.output_text.delta"] * deltas
                     + ["response.output_text.done", "response.content_part.done", "response.output_item.done", kinds[-1]])
    assert kinds[-1] in ("response.completed", "response.incomplete")
    numbers = [e["sequence_number"] for e in events]
    assert numbers == sorted(set(numbers))
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text.startswith("Hello")
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == text
    assert final["error"] is None and "incomplete_details" in final
    assert final["usage"]["total_tokens"] == final["usage"]["input_tokens"] + final["usage"]["output_tokens"]


def test_the_second_turn_sends_only_what_is_new(wire):
    first, _ = wire.ask(STORY + "Who wrote?")
    second, text = wire.ask("And where?", previous_response_id=first["response"]["id"])
    assert second["type"] in ("response.completed", "response.incomplete"), second
    assert cached(second) >= first["response"]["usage"]["input_tokens"] - 1
    assert second["response"]["previous_response_id"] == first["response"]["id"]
    assert text


def test_store_false_works_on_the_same_connection(wire):
    first, _ = wire.ask("My name is Ada. Remember it.", store=False)
    second, _ = wire.ask("What is my name?", previous_response_id=first["response"]["id"], store=False)
    assert cached(second) > 0


def test_a_cancel_ends_the_response_and_its_work(daemon, wire):
    wire.send("Write a very long story.", max_output_tokens=4000)
    created = wire.event()
    assert created["type"] == "response.created"
    for ev in wire.events():
        if ev["type"] == "response.output_text.delta":
            break
    wire.send(type="response.cancel", response_id=created["response"]["id"])
    last = list(wire.events())[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "cancelled"
    daemon.wait_idle()
    again, text = wire.ask("Say yes.")  # the connection goes on
    assert text


def test_a_lane_forks_from_another_and_runs_beside_it(wire):
    first, _ = wire.ask(STORY, stream_id="main")
    root = first["response"]["id"]
    wire.send("How does it end?", previous_response_id=root, stream_id="left", max_output_tokens=24, ignore_eos=True)
    wire.send("How does it begin?", previous_response_id=root, stream_id="right", max_output_tokens=24, ignore_eos=True)
    ended, lanes = {}, []
    while len(ended) < 2:
        ev = wire.event()
        lanes.append(ev["stream_id"])
        if ev["type"] in ("response.completed", "response.incomplete"):
            ended[ev["stream_id"]] = ev
        assert ev["type"] != "error", ev
    assert set(ended) == {"left", "right"}
    changes = sum(a != b for a, b in zip(lanes, lanes[1:]))
    assert changes > 2, "the lanes ran one after the other"
    for ev in ended.values():
        assert cached(ev) > first["response"]["usage"]["input_tokens"] // 2


def test_inside_a_lane_turns_run_in_order(wire):
    for i in range(3):
        wire.send(f"Say {i}.", stream_id="a", max_output_tokens=6)
    order = []
    while len(order) < 6:
        ev = wire.event()
        if ev["type"] in ("response.created", "response.completed", "response.incomplete"):
            order.append(ev["type"] == "response.created")
    assert order == [True, False] * 3


def test_generate_false_warms_the_cache(wire):
    warm, text = wire.ask(STORY, generate=False)
    assert warm["type"] == "response.completed" and text == ""
    assert warm["response"]["usage"]["output_tokens"] == 0
    turn, text = wire.ask("Who wrote?", previous_response_id=warm["response"]["id"])
    assert cached(turn) >= warm["response"]["usage"]["input_tokens"] // 2
    assert text


@pytest.mark.parametrize("body,code", [
    ({"previous_response_id": "resp_nothing", "input": "Hi"}, "previous_response_not_found"),
    ({"stream_id": "no spaces", "input": "Hi"}, "invalid_stream_id"),
    ({"stream_id": "x" * 257, "input": "Hi"}, "invalid_stream_id"),
    ({"input": "Hi", "temperature": "hot"}, None),
    ({"input": 5}, None),
    ({}, None),
    ({"type": "no.such.event"}, None),
])
def test_errors_are_named_and_the_connection_goes_on(wire, body, code):
    body = {"type": "response.create", **body}
    wire.socket.send(json.dumps(body))
    ev = wire.event()
    assert ev["type"] == "error" and 400 <= ev["status"] < 500, ev
    assert set(ev["error"]) >= {"type", "code", "message", "param"}
    if code:
        assert ev["error"]["code"] == code
    _, text = wire.ask("Say yes.", max_output_tokens=4)
    assert text


@pytest.mark.parametrize("frame", ["", "not json", "[]", "null", '"text"', "{", '{"type":5}', "[" * 5000])
def test_a_frame_that_is_no_event_is_an_error(wire, frame):
    wire.socket.send(frame)
    assert wire.event()["type"] == "error"
    _, text = wire.ask("Say yes.", max_output_tokens=4)
    assert text


def test_too_many_lanes_are_refused(wire):
    for i in range(40):
        wire.send("Hi", stream_id=f"lane{i}", max_output_tokens=1)
    codes, ended = [], 0
    while ended + len(codes) < 40:
        ev = wire.event()
        if ev["type"] == "error":
            codes.append(ev["error"]["code"])
        elif ev["type"] in ("response.completed", "response.incomplete"):
            ended += 1
    assert codes and set(codes) == {"websocket_stream_limit_reached"}
    assert ended >= 16


def test_binary_frames_close_the_connection(daemon, wire):
    wire.socket.send(b"\x00\x01")
    with pytest.raises(websockets.ConnectionClosed) as e:
        wire.event()
    assert e.value.rcvd.code in (1003, 1007)


def test_a_text_frame_that_is_not_utf8_closes_with_1007(daemon, wire):
    wire.socket.send(b"\xff\xfe", text=True)
    with pytest.raises(websockets.ConnectionClosed) as e:
        wire.event()
    assert e.value.rcvd.code == 1007


def test_an_expired_session_is_told_by_name(http):
    with Daemon("--session-heartbeat", 0.3 * SLOW, "--session-gc", 0.05) as d:
        with httpx.Client(base_url=d.url) as c, Wire(d) as w:
            s = c.post("/v1/sessions", json={}).json()["id"]
            ok, _ = w.ask("Hi", session_id=s, max_output_tokens=2)
            assert ok["type"] in ("response.completed", "response.incomplete")
            eventually(lambda: c.get(f"/v1/sessions/{s}").status_code == 404, 3, "the session has ended")
            late, _ = w.ask("Hi again", session_id=s, max_output_tokens=2)
            assert late["type"] == "error" and late["status"] == 404
            assert late["error"]["code"]


def test_a_client_that_leaves_cancels_its_lanes(daemon):
    daemon.wait_idle()
    free = daemon.pages()
    with Wire(daemon) as w:
        for i in range(4):
            w.send("Write a very long story.", stream_id=f"l{i}", max_output_tokens=4000)
        while w.event()["type"] != "response.output_text.delta":
            pass
        w.socket.socket.close()  # without a close frame
    eventually(daemon.idle, 5, "nothing runs")
    eventually(lambda: daemon.pages() == free, 5, "all pages are back")


def test_a_connection_that_answers_no_ping_is_closed():
    import socket
    with Daemon("--ws-ping-interval", 0.2, "--ws-ping-timeout", 0.3) as d:
        with socket.create_connection(("127.0.0.1", d.port)) as s:
            s.sendall(b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                      b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
            s.settimeout(10 * SLOW)
            got = b""
            try:
                while part := s.recv(4096):  # reads pings and answers none
                    got += part
            except ConnectionResetError:
                pass
            assert got.startswith(b"HTTP/1.1 101")
            assert b"\x89" in got.split(b"\r\n\r\n", 1)[1], "no ping came"


def test_the_same_wire_over_sse(daemon, http):
    """POST /v1/responses with stream: the same events, framed."""
    with http.stream("POST", "/v1/responses", json={"input": "What is the capital of France?", "stream": True,
                                                   "max_output_tokens": 16, "temperature": 0}) as r:
        assert r.status_code == 200
        kinds, text = [], ""
        name = None
        for line in r.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: {"):
                ev = json.loads(line[6:])
                assert ev["type"] == name
                kinds.append(name)
                text += ev.get("delta", "")
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    with Wire(daemon) as w:
        assert w.ask("What is the capital of France?")[1] == text

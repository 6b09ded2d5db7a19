"""WebSocket on the wire: handshake, frames, limits, heartbeats, disconnects. No engine and no model."""
import asyncio
import socket
import time

import pytest
import websockets

from daemon import SLOW, eventually
from transport import (BINARY, CLOSE, GET, PING, PONG, TEXT, Echo, Ws, close_frame, error_of, frame, post, read_head,
                       read_to_end)

pytestmark = pytest.mark.no_model


def test_ws_echo(echo):
    with Ws(echo) as ws:
        assert ws.status == 101
        assert "sec-websocket-extensions" not in ws.headers
        ws.send(TEXT, b"hello")
        assert ws.frame() == (TEXT, b"hello")
        ws.send(TEXT, "héllo €𝄞".encode())
        assert ws.frame() == (TEXT, "héllo €𝄞".encode())
        ws.send(TEXT, b"")
        assert ws.frame() == (TEXT, b"(empty)")
        ws.send(CLOSE, close_frame(1000, b"bye"))
        assert ws.frame() == (CLOSE, close_frame(1000, b"bye"))
        assert ws.ended()


def test_ws_library(echo):
    async def run():
        async with websockets.connect(f"ws://127.0.0.1:{echo.port}/v1/responses") as ws:
            await ws.send("x" * 1000000)
            assert len(await ws.recv()) == 1000000
            await (await ws.ping())
            await ws.send("close 4001")
            assert await ws.recv() == "closing"
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await ws.recv()
            assert closed.value.rcvd.code == 4001 and closed.value.rcvd.reason == "asked to"
    asyncio.run(run())


def test_ws_upgrade_is_a_request(echo):
    """It goes through routing and authorization, and is answered in JSON when it does not pass."""
    for path, want in (("/v1/nothing", 404), ("/health/live", 404), ("/echo", 405)):
        with Ws(echo, path=path) as ws:
            assert ws.status == want
            error_of(ws.rest)
    status, _, body = echo.get("/v1/responses")
    assert status == 426 and error_of(body)
    upgrade = b"GET /v1/responses HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    status, headers, body = echo.ask(upgrade + key + b"Sec-WebSocket-Version: 8\r\n\r\n")
    assert status == 426 and headers["sec-websocket-version"] == "13" and error_of(body)
    assert echo.ask(upgrade + b"Sec-WebSocket-Version: 13\r\n\r\n")[0] == 400
    assert echo.ask(upgrade + b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n")[0] == 400
    # The example of RFC 6455, 1.3.
    with echo.connect() as s:
        s.sendall(upgrade + key + b"Sec-WebSocket-Version: 13\r\n\r\n")
        status, headers, _ = read_head(s)
        assert status == 101 and headers["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def test_ws_needs_the_key():
    with Echo(api_key="secret") as e:
        with Ws(e) as ws:
            assert ws.status == 401
            error_of(ws.rest)
        with Ws(e, fields="Authorization: Bearer secret\r\n") as ws:
            assert ws.status == 101


def test_ws_after_other_requests(echo):
    """Any request of a connection may be the upgrade; and its head may be as large as any."""
    with echo.connect() as s:
        cookie = b"Cookie: " + b"c" * 20000 + b"\r\n"
        s.sendall(post(b"hello") + GET + cookie + b"\r\n" +
                  b"GET /v1/responses HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + cookie +
                  b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n" +
                  frame(TEXT, b"early"))
        out = b""
        while not out.endswith(b"\x81\x05early"):
            out += s.recv(65536)
        assert out.count(b"HTTP/1.1 200") == 2 and out.count(b"HTTP/1.1 101") == 1


VIOLATIONS = {
    "unmasked": (frame(TEXT, b"x", mask=False), 1002),
    "reserved bit": (frame(TEXT, b"x", rsv=4), 1002),
    "reserved opcode": (frame(3, b"x"), 1002),
    "reserved control opcode": (frame(11, b"x"), 1002),
    "fragmented ping": (frame(PING, b"x", fin=False), 1002),
    "long ping": (frame(PING, b"x" * 126), 1002),
    "continuation of nothing": (frame(0, b"x"), 1002),
    "message inside a message": (frame(TEXT, b"x", fin=False) + frame(TEXT, b"x"), 1002),
    "binary": (frame(BINARY, b"x"), 1003),
    "invalid UTF-8": (frame(TEXT, b"\xff\xfe"), 1007),
    "overlong UTF-8": (frame(TEXT, b"\xc0\x80"), 1007),
    "surrogate": (frame(TEXT, b"\xed\xa0\x80"), 1007),
    "UTF-8 cut short": (frame(TEXT, b"\xe2\x82"), 1007),
    "UTF-8 wrong across fragments": (frame(TEXT, b"\xe2\x82", fin=False) + frame(0, b"A"), 1007),
    "too large": (b"\x81\xff" + (1 << 40).to_bytes(8, "big") + b"mask", 1009),
    "length with the top bit": (b"\x81\xff" + (1 << 63).to_bytes(8, "big") + b"mask", 1002),
    "overlong length": (b"\x81\xfe\x00\x03mask" + b"abc", 1002),
    "half a close code": (frame(CLOSE, b"\x03"), 1002),
    "close code 1005": (frame(CLOSE, close_frame(1005)), 1002),
    "close code 999": (frame(CLOSE, close_frame(999)), 1002),
    "close reason not UTF-8": (frame(CLOSE, close_frame(1000, b"\xff")), 1007),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_ws_violations(echo, name):
    data, code = VIOLATIONS[name]
    for split in (False, True):
        with Ws(echo) as ws:
            if split:
                ws.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for b in data:
                    ws.s.sendall(bytes([b]))
            else:
                ws.s.sendall(data)
            assert ws.close_code() == code
            ws.send(CLOSE, close_frame(code))
            assert ws.ended()


def test_ws_violation_behind_bytes_that_nobody_has_read(echo):
    """The library closes with input unread; the close frame it wrote before still arrives."""
    for _ in range(20):
        with Ws(echo) as ws:
            ws.s.sendall(frame(TEXT, b"y" * 150000, fin=False) + frame(CLOSE, close_frame(1005)))
            assert ws.close_code() == 1002


def test_ws_fragments(echo):
    with Ws(echo) as ws:
        ws.send(TEXT, b"\xe2\x82", fin=False)
        ws.send(PING, b"between")
        assert ws.frame() == (PONG, b"between")
        ws.send(0, b"", fin=False)
        ws.send(0, b"\xac!")
        assert ws.frame() == (TEXT, "€!".encode())
        for size in (1, 125, 126, 127, 128, 4095, 4096, 4097, 65535, 65536, 300000):
            ws.send(TEXT, b"x" * size)
            assert ws.frame() == (TEXT, b"x" * size), size


def test_ws_every_ping_is_answered(echo):
    """In their order, with their payloads, wherever they stand (Autobahn 2.10, 2.11, 5.19, 5.20); an unasked pong is nothing (2.7 to 2.9)."""
    for step in (None, 1):
        with Ws(echo) as ws:
            ws.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = b"".join(frame(PING, b"payload %d" % i) for i in range(10)) + frame(PONG, b"nobody asked")
            text = "Grüße €".encode()
            for i, b in enumerate(text):  # a message of one-byte fragments, cut inside code points, with pings between
                data += frame(TEXT if i == 0 else 0, bytes([b]), fin=i + 1 == len(text)) + frame(PING, b"%d" % i)
            for at in range(0, len(data), step or len(data)):
                ws.s.sendall(data[at:at + (step or len(data))])
            got = [ws.frame() for _ in range(10 + len(text) + 1)]
            pongs = [b"payload %d" % i for i in range(10)] + [b"%d" % i for i in range(len(text))]
            assert [payload for op, payload in got if op == PONG] == pongs
            assert [payload for op, payload in got if op == TEXT] == [text]
    with Ws(echo) as ws:  # one that does not read has to be content with the latest
        ws.s.sendall(frame(PING, b"p" * 125) * 30000 + frame(PING, b"the last"))
        while (got := ws.frame()) != (PONG, b"the last"):
            assert got == (PONG, b"p" * 125)


# The first and the last code point of each length and around what is left out, and some that are no characters but code points (Autobahn 6).
UTF8 = [0x00, 0x7f, 0x80, 0x7ff, 0x800, 0xfff, 0x1000, 0xcfff, 0xd7ff, 0xe000, 0xfdd0, 0xfffd, 0xfffe, 0xffff, 0x10000, 0x1fffe, 0x3ffff,
        0x40000, 0xfffff, 0x10ffff]
NOT_UTF8 = ["80", "bf", "c0", "c080", "c1bf", "c2", "c27f", "c2c0", "df", "e0", "e080", "e08080", "e09fbf", "e0a0", "e0a07f", "e1", "e180", "e180c0",
            "eda080", "edbfbf", "ee80", "f0", "f080", "f0808080", "f08fbfbf", "f090", "f09080", "f0908041", "f1", "f180", "f18080", "f18080c0",
            "f4908080", "f5", "f5808080", "f7bfbfbf", "f888808080", "fbbfbfbfbf", "fc8480808080", "fdbfbfbfbfbf", "fe", "ff", "feff"]


def test_ws_text_is_utf8(echo):
    """Whole, and in fragments of a byte each."""
    def fragments(data):
        return b"".join(frame(TEXT if i == 0 else 0, data[i:i + 1], fin=i + 1 == len(data)) for i in range(len(data)))
    with Ws(echo) as ws:
        for c in UTF8:
            text = b"a" + chr(c).encode() + b"b" + chr(c).encode()
            for data in (frame(TEXT, text), fragments(text)):
                ws.s.sendall(data)
                assert ws.frame() == (TEXT, text), hex(c)
    for bad in NOT_UTF8:
        for text in (bytes.fromhex(bad), b"ok \xe2\x82\xac " + bytes.fromhex(bad), b"x" * 5000 + bytes.fromhex(bad)):
            for data in (frame(TEXT, text), fragments(text) if len(text) < 100 else frame(TEXT, text[:2500], fin=False) + frame(0, text[2500:])):
                with Ws(echo) as ws:
                    ws.s.sendall(data)
                    assert ws.close_code() == 1007, (bad, len(text))


@pytest.mark.parametrize("wait", [0, 0.25], ids=["at once", "parked"])
def test_ws_close_codes_are_echoed(wait):
    """Each that may be on the wire (RFC 6455, 7.4; the IANA registry); of others test_ws_violations has some, and here are the rest."""
    with Echo(ws_park_after=100) as e:
        codes = [*range(1000, 1004), *range(1007, 1015), 3000, 3999, 4000, 4999]
        for code in [*codes, 0, 1004, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535]:
            with Ws(e) as ws:
                time.sleep(wait if code in (1000, 1003, 1012, 1014, 2999) else 0)
                ws.send(CLOSE, close_frame(code, b"bye"))
                if code in codes:
                    assert ws.frame() == (CLOSE, close_frame(code, b"bye")), code
                else:
                    assert ws.close_code() == 1002, code
                assert ws.ended()
        with Ws(e) as ws:
            time.sleep(wait)
            ws.send(CLOSE)
            assert ws.frame() == (CLOSE, b"") and ws.ended()
        with Ws(e) as ws:  # what was said before is answered before
            time.sleep(wait)
            ws.s.sendall(frame(TEXT, b"last words") + frame(PING, b"?") + frame(CLOSE, close_frame(1013)) + frame(TEXT, b"too late"))
            got = [ws.frame() for _ in range(3)]
            assert got[2] == (CLOSE, close_frame(1013)) and (TEXT, b"last words") in got and (PONG, b"?") in got
            assert ws.ended()


def test_ws_message_limit():
    with Echo(max_body=5000) as e:
        with Ws(e) as ws:
            ws.send(TEXT, b"x" * 5000)
            assert ws.frame()[1] == b"x" * 5000
            ws.send(TEXT, b"x" * 3000, fin=False)
            ws.send(0, b"x" * 2001)
            assert ws.close_code() == 1009


def test_ws_pings_keep_it_open():
    with Echo(ws_ping_interval=100, ws_ping_timeout=200) as e:
        with Ws(e) as ws:
            end = time.monotonic() + 1
            pings = 0
            while time.monotonic() < end:
                op, data = ws.frame()
                assert op == PING
                pings += 1
                ws.send(PONG, data)
            assert pings >= 4
        with Ws(e) as ws:
            # Any other frame is a sign of life as well.
            end = time.monotonic() + 1
            while time.monotonic() < end:
                ws.send(PING, b"alive")
                time.sleep(0.05)
            assert e.stats()["websockets"] == 1


def test_ws_silent_peer_is_dropped():
    with Echo(ws_ping_interval=100, ws_ping_timeout=200) as e:
        with Ws(e) as ws:
            assert ws.frame()[0] == PING
            assert ws.ended()
        assert e.stats()["ws_closed"] == 1


def test_ws_any_frame_is_a_heartbeat(echo):
    with Ws(echo) as ws:
        alive = echo.stats()["alive"]
        for op, fin in ((PING, True), (PONG, True), (TEXT, False), (0, False), (0, True)):
            ws.send(op, b"x", fin=fin)
            alive += 1
            eventually(lambda: echo.stats()["alive"] >= alive, 2, f"opcode {op} counted")


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_ws_disconnect_is_noticed(echo, how):
    before = echo.stats()["ws_closed"]
    ws = [Ws(echo) for _ in range(20)]
    assert echo.stats()["websockets"] == 20
    for w in ws:
        if how == "rst":
            w.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        w.s.close()
    eventually(lambda: echo.stats()["ws_closed"] - before == 20, 5, "all have ended")
    assert echo.stats()["websockets"] == 0


def test_ws_slow_reader_is_dropped():
    with Echo(stream_buffer=100000) as e:
        with Ws(e, receive_buffer=4096) as ws:
            for _ in range(200):
                ws.send(TEXT, b"flood 10 50000")
                time.sleep(0.005)
                if e.stats()["dropped_slow"]:
                    break
            assert e.stats()["dropped_slow"] == 1 and e.stats()["ws_closed"] == 1
            assert read_to_end(ws.s)[1] == "reset"
        assert e.get("/health/live")[0] == 200


def test_ws_big_flood_to_a_reader(echo):
    """Everything that fits the queue arrives, in order and whole."""
    with Ws(echo) as ws:
        for _ in range(20):
            ws.send(TEXT, b"flood 10 50000")
            for _ in range(10):
                assert ws.frame() == (TEXT, b"f" * 50000)


def test_ws_many_small_messages_at_once_are_no_flood():
    """A peer that reads is not dropped because what it sent together has more answers than may be queued."""
    with Echo(stream_buffer=10000) as e:
        with Ws(e) as ws:
            n = 3000
            ws.s.sendall(b"".join(frame(TEXT, b"message %d" % i) + frame(PING, b"%d" % i) for i in range(n)))
            got, pongs = [], 0
            while len(got) < n:
                op, data = ws.frame()
                pongs += op == PONG  # one may stand for several pings (RFC 6455, 5.5.3)
                if op == TEXT:
                    got.append(data)
            assert got == [b"message %d" % i for i in range(n)] and pongs
            assert e.stats()["dropped_slow"] == 0


def test_ws_a_peer_that_only_asks_is_dropped():
    """It is not heard any more, so its silence is that of one that answers no ping."""
    with Echo(stream_buffer=10000, ws_ping_interval=200, ws_ping_timeout=400) as e:
        with Ws(e, receive_buffer=4096) as ws:
            ws.s.settimeout(10 * SLOW)
            with pytest.raises(OSError):
                for _ in range(10000):
                    ws.s.sendall(frame(TEXT, b"message") * 1000)
            eventually(lambda: e.stats()["ws_closed"] == 1, 5, "it is gone")
        assert e.stats()["websockets"] == 0


def test_ws_close_without_an_answer(echo):
    """A peer that does not answer a close frame is dropped."""
    with Ws(echo) as ws:
        ws.s.settimeout(10 * SLOW)
        ws.send(TEXT, b"close 4000")
        assert ws.frame() == (TEXT, b"closing")
        assert ws.close_code() == 4000
        assert ws.ended()


def test_ws_and_http_leave_nothing_behind():
    """Descriptors and memory return to the start after thousands of connections of every kind."""
    with Echo() as e:
        def round_():
            for i in range(150):
                with Ws(e) as ws:
                    ws.send(TEXT, b"hello")
                    ws.frame()
                    if i % 3 == 0:
                        ws.send(CLOSE, close_frame(1000))
                        ws.frame()
                with e.connect() as s:
                    stream = b"GET /stream?n=100&ms=5 HTTP/1.1\r\nHost: a\r\n\r\n"
                    s.sendall(post(b"x" * 10000) + GET + b"\r\n" + (stream if i % 2 else b"?"))
                    s.recv(100)
            eventually(lambda: e.stats()["connections"] == 1, 10, "all are gone")

        round_()
        fds, rss = e.fds(), e.rss()
        for _ in range(4):
            round_()
        eventually(lambda: e.fds() <= fds + 2, 5, "descriptors return")
        if SLOW == 1:  # a sanitizer keeps freed memory for a while
            assert e.rss() - rss < 3e6, "memory grows"

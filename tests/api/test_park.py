"""Parked WebSockets on the wire (server/conn_park.h): what a client sees must not depend on whether it was parked. No engine."""
import asyncio
import resource
import signal
import socket
import time

import pytest
import websockets

from daemon import SLOW, eventually
from transport import CLOSE, PING, PONG, TEXT, Echo, Ws, close_frame, frame

pytestmark = pytest.mark.no_model
SOON = {"ws_park_after": 100}


def parked(e, n, within=5):
    eventually(lambda: e.stats()["parked"] == n, within, f"{n} parked")


@pytest.fixture(scope="module")
def soon():
    with Echo(**SOON) as e:
        yield e


def test_it_takes_one_descriptor_and_goes_on(soon):
    before = soon.fds()
    ws = [Ws(soon) for _ in range(20)]
    parked(soon, 20)
    eventually(lambda: soon.fds() <= before + 20 + 3, 5, "one descriptor each")  # these questions have connections too
    for turn in range(3):
        for i, w in enumerate(ws):
            w.send(TEXT, b"turn %d of %d" % (turn, i))
        for i, w in enumerate(ws):
            assert w.frame() == (TEXT, b"turn %d of %d" % (turn, i))
        parked(soon, 20)
    assert soon.stats()["websockets"] == 20
    for w in ws:
        w.s.close()
    eventually(lambda: soon.stats()["websockets"] == 0 and soon.stats()["parked"] == 0, 5, "none is left")


@pytest.mark.parametrize("split", [False, True])
def test_every_frame_is_as_before(soon, split):
    def send(ws, data):
        parked(soon, 1)
        if not split:
            ws.s.sendall(data)
            return
        ws.s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for b in data:
            ws.s.sendall(bytes([b]))
            time.sleep(0.002)

    with Ws(soon) as ws:
        send(ws, frame(PING, b"a payload"))
        assert ws.frame() == (PONG, b"a payload")
        send(ws, frame(PONG, b"nobody asked") + frame(TEXT, b"behind a pong"))
        assert ws.frame() == (TEXT, b"behind a pong")
        send(ws, frame(TEXT, b"\xe2\x82", fin=False) + frame(PING, b"between") + frame(0, b"\xac!"))
        assert ws.frame() == (PONG, b"between")
        assert ws.frame() == (TEXT, "€!".encode())
        send(ws, b"".join(frame(TEXT, b"%d" % i) for i in range(50)))
        for i in range(50):
            assert ws.frame() == (TEXT, b"%d" % i)
        if not split:
            for size in (65535, 65536, 300000, 3000000):
                send(ws, frame(TEXT, b"x" * size))
                assert ws.frame() == (TEXT, b"x" * size), size
        send(ws, frame(CLOSE, close_frame(4001, b"bye")))
        assert ws.frame() == (CLOSE, close_frame(4001, b"bye"))
        assert ws.ended()
    with Ws(soon) as ws:
        send(ws, frame(CLOSE))
        assert ws.frame() == (CLOSE, b"")
        assert ws.ended()


def test_a_message_cut_by_a_long_pause(soon):
    """A frame, or a message of several, that has begun keeps it awake."""
    whole = frame(TEXT, b"hello", fin=False) + frame(0, b" again")
    for at in range(1, len(whole)):
        with Ws(soon) as ws:
            if at == 1:
                parked(soon, 1)
            ws.s.sendall(whole[:at])
            if at in (1, 7, 11, 13):
                time.sleep(0.3)
                assert soon.stats()["parked"] == 0
            ws.s.sendall(whole[at:])
            assert ws.frame() == (TEXT, b"hello again")


VIOLATIONS = {
    "unmasked": (frame(TEXT, b"x", mask=False), 1002),
    "unmasked pong": (frame(PONG, b"", mask=False), 1002),
    "long pong": (frame(PONG, b"x" * 126), 1002),
    "reserved bit": (frame(TEXT, b"x", rsv=4), 1002),
    "binary": (frame(2, b"x"), 1003),
    "continuation of nothing": (frame(0, b"x"), 1002),
    "invalid UTF-8": (frame(TEXT, b"\xff\xfe"), 1007),
    "close code 1005": (frame(CLOSE, close_frame(1005)), 1002),
    "close reason not UTF-8": (frame(CLOSE, close_frame(1000, b"\xff")), 1007),
    "too large": (b"\x81\xff" + (1 << 40).to_bytes(8, "big") + b"mask", 1009),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations(soon, name):
    data, code = VIOLATIONS[name]
    with Ws(soon) as ws:
        parked(soon, 1)
        ws.s.sendall(data)
        assert ws.close_code() == code
        ws.send(CLOSE, close_frame(code))
        assert ws.ended()
    eventually(lambda: soon.stats()["websockets"] == 0, 5, "it is gone")


def test_heartbeats():
    """Pings go out as before, any answer counts as life and leaves it parked; without one it is dropped."""
    with Echo(ws_park_after=50, ws_ping_interval=100, ws_ping_timeout=400) as e:
        with Ws(e) as ws:
            parked(e, 1)
            alive = e.stats()["alive"]
            for i in range(12):
                assert ws.frame() == (PING, b"")
                pong = frame(PONG, b"p" * (i % 4))
                ws.s.sendall(pong[:i % len(pong)])
                time.sleep(0.01)
                ws.s.sendall(pong[i % len(pong):])
                assert e.stats()["parked"] == 1
            eventually(lambda: e.stats()["alive"] >= alive + 12, 5, "each counts")
            # Its own pings are answered without waking it, whole or in pieces.
            ping = frame(PING, b"are you there?")
            for step in (1, 3, len(ping)):
                for at in range(0, len(ping), step):
                    ws.s.sendall(ping[at:at + step])
                    time.sleep(0.005)
                while (got := ws.frame()) != (PONG, b"are you there?"):
                    assert got == (PING, b"")
                    ws.send(PONG)
                assert e.stats()["parked"] == 1
            ws.send(TEXT, b"still here")
            while (got := ws.frame()) != (TEXT, b"still here"):
                assert got[0] == PING
                ws.send(PONG)
            parked(e, 1)
            start = time.monotonic()
            while True:  # from here on it is silent
                try:
                    assert ws.frame()[0] == PING
                except ConnectionError:
                    break
            assert time.monotonic() - start < 2 * SLOW
        eventually(lambda: e.stats()["ws_closed"] == 1, 5, "it was dropped")


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_disconnect_is_noticed(soon, how):
    before = soon.stats()["ws_closed"]
    ws = [Ws(soon) for _ in range(20)]
    parked(soon, 20)
    for w in ws:
        if how == "rst":
            w.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        w.s.close()
    eventually(lambda: soon.stats()["ws_closed"] - before == 20, 5, "all have ended")
    assert soon.stats()["parked"] == 0


def test_the_library_talks_on(soon):
    async def run():
        async with websockets.connect(f"ws://127.0.0.1:{soon.port}/v1/responses", max_size=None) as ws:
            for i in range(3):
                await asyncio.to_thread(parked, soon, 1)
                await ws.send("x" * 100000)
                assert len(await ws.recv()) == 100000
                await asyncio.to_thread(parked, soon, 1)
                await (await ws.ping())
            await asyncio.to_thread(parked, soon, 1)
            await ws.send("close 4001")
            assert await ws.recv() == "closing"
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await ws.recv()
            assert closed.value.rcvd.code == 4001 and closed.value.rcvd.reason == "asked to"
        async with websockets.connect(f"ws://127.0.0.1:{soon.port}/v1/responses") as ws:
            await asyncio.to_thread(parked, soon, 1)
            await ws.close(4002, "enough")
            assert ws.close_code == 4002 and ws.close_reason == "enough"
    asyncio.run(run())


@pytest.mark.parametrize("answers", [True, False])
def test_drain(answers):
    """1012 for all, without a descriptor more; it ends when the clients have closed, or did not in time."""
    e = Echo(**SOON)
    ws = [Ws(e) for _ in range(50)]
    parked(e, 50)
    resource.prlimit(e.process.pid, resource.RLIMIT_NOFILE, (e.fds(), 20000))
    start = time.monotonic()
    e.process.send_signal(signal.SIGTERM)
    for w in ws:
        assert w.frame() == (CLOSE, close_frame(1012, b"The server restarts."))
        if answers:
            w.send(TEXT, b"begun before")
            w.send(CLOSE, close_frame(1012))
    for w in ws:
        assert w.ended()
        w.s.close()
    e.process.wait(30 * SLOW)
    e.stop()
    assert answers == (time.monotonic() - start < 1.5) or SLOW > 1


def test_no_descriptors_to_wake():
    """Those that cannot be woken are told to come again later, and their owner that they are gone."""
    with Echo(**SOON) as e:
        ws = [Ws(e) for _ in range(4)]
        parked(e, 4)
        soft, hard = resource.prlimit(e.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(e.process.pid, resource.RLIMIT_NOFILE, (4, hard))
        for w in ws[:3]:
            w.send(TEXT, b"hello")
        ws[0].s.settimeout(0.5)
        with pytest.raises(socket.timeout):
            ws[0].frame()
        ws[1].s.close()  # it does not wait for an answer
        resource.prlimit(e.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        ws[0].s.settimeout(10 * SLOW)
        for w in (ws[0], ws[2]):
            assert w.frame() == (TEXT, b"hello")  # there was room in time
        parked(e, 3)
        closed = e.stats()["ws_closed"]
        resource.prlimit(e.process.pid, resource.RLIMIT_NOFILE, (4, hard))
        for w in (ws[0], ws[2]):
            w.send(TEXT, b"hello")
        for w in (ws[0], ws[2]):
            assert w.close_code() == 1013
            assert w.ended()
        ws[3].send(CLOSE, close_frame(1000))
        assert ws[3].close_code() == 1000  # needs nothing
        resource.prlimit(e.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: e.stats()["ws_closed"] == closed + 3, 5, "all are gone")


def test_more_than_can_be_awake_at_once():
    """Connections come before pairs: all are accepted, and take turns at being awake."""
    n = 300
    # A quarter of the limit is for files and the like; then there is room for 334 connections and 83 pairs.
    with Echo(wrap=["prlimit", "--nofile=668:668"], max_connections=n + 100, ws_park_after=60000) as e:
        ws = []
        for i in range(n):
            w = Ws(e)
            assert w.status == 101, (i, w.rest)
            ws.append(w)
        assert e.stats()["websockets"] == n
        for turn in range(2):
            for i, w in enumerate(ws):
                w.send(TEXT, b"%d %d" % (turn, i))
            for i, w in enumerate(ws):
                assert w.frame() == (TEXT, b"%d %d" % (turn, i))
        assert e.fds() < 668
        assert e.stats()["parked"] >= n - 83
        for w in ws:
            w.send(CLOSE, close_frame(1000))
            assert w.close_code() == 1000


def test_memory_is_given_back(soon):
    before = soon.stats()["client_bytes"]
    with Ws(soon) as ws:
        awake = soon.stats()["client_bytes"]
        parked(soon, 1)
        asleep = soon.stats()["client_bytes"]
        assert before < asleep < awake - 4096
        ws.send(TEXT, b"hello")
        assert ws.frame() == (TEXT, b"hello")
    eventually(lambda: soon.stats()["client_bytes"] == before, 5, "nothing is left of it")


def test_never():
    with Echo(ws_park_after=0) as e:
        with Ws(e) as ws:
            time.sleep(0.5)
            assert e.stats()["parked"] == 0
            ws.send(TEXT, b"hello")
            assert ws.frame() == (TEXT, b"hello")


def test_nothing_is_left_behind():
    with Echo(ws_park_after=20) as e:
        def round_():
            for i in range(10):
                ws = [Ws(e) for _ in range(20)]
                parked(e, 20)
                for j, w in enumerate(ws):
                    if (i + j) % 3 == 0:
                        w.send(TEXT, b"hello")
                        w.frame()
                    if (i + j) % 4 == 0:
                        w.send(CLOSE, close_frame(1000))
                        w.frame()
                    w.s.close()
                eventually(lambda: e.stats()["websockets"] == 0, 10, "all are gone")

        round_()
        fds, rss = e.fds(), e.rss()
        for _ in range(3):
            round_()
        eventually(lambda: e.fds() <= fds + 2, 5, "descriptors return")
        if SLOW == 1:  # a sanitizer keeps freed memory for a while
            assert e.rss() - rss < 1e6, "memory grows"

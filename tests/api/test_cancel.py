"""Clients that leave, clients that do not read: what they started ends, what they held comes back."""
import asyncio
import json
import socket

import pytest

from daemon import SLOW, Daemon, eventually


async def open_stream(port, prompt, max_tokens, **more):
    """A streamed completion on a raw socket, once its first token has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **more}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                 % (len(body), body))
    await writer.drain()
    while True:
        line = await reader.readline()
        assert line, "closed before a token"
        if line.startswith(b"data: "):
            return reader, writer


@pytest.mark.quirk(43)
def test_two_hundred_clients_that_leave_mid_stream():
    with Daemon("--max-running", 256) as d:
        free = d.pages()
        files = d.n_files()

        async def crowd():
            jobs = [open_stream(d.port, f"Client {i} says", 4000) for i in range(200)]
            streams = await asyncio.wait_for(asyncio.gather(*jobs), 120 * SLOW)
            assert d.metrics()["vllm:num_requests_running"] == 200
            assert d.pages() < free
            for i, (_, writer) in enumerate(streams):
                if i % 2:
                    writer.transport.abort()  # RST
                else:
                    writer.close()  # FIN
        asyncio.run(crowd())
        eventually(d.idle, 30, "nothing runs")
        eventually(lambda: d.pages() == free, 5, "all pages are back")
        eventually(lambda: d.n_files() <= files, 5, "all sockets are closed")


@pytest.mark.quirk(43)
def test_a_client_that_leaves_before_its_answer_cancels_it(daemon):
    daemon.wait_idle()

    async def leave():
        body = json.dumps({"prompt": "Long:", "max_tokens": 6000, "ignore_eos": True}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        await asyncio.to_thread(eventually, lambda: not daemon.idle(), 5, "it runs")
        writer.close()
    asyncio.run(leave())
    eventually(daemon.idle, 5, "nothing runs")


def test_a_reader_that_stops_is_dropped_and_harms_nobody():
    """Long chunks fill the kernel's buffers and then the client's own; the generation ends, and others go on meanwhile."""
    with Daemon("--stream-buffer", "64K") as d:
        async def stall():
            reader, writer = await open_stream(d.port, "Never read:", 4000, n=16, logprobs=20)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.transport.pause_reading()
            for i in range(3):
                _, other = await open_stream(d.port, f"Other {i}", 4)
                other.close()
            assert d.metrics()["vllm:num_requests_running"] >= 16, "it was dropped before it could stall"
            await asyncio.to_thread(eventually, d.idle, 60, "the stalled one has been dropped")
            writer.close()
        asyncio.run(stall())
        assert "slow" in d.stderr()
        assert d.pages() == d.metrics()["kvasir:kv_pages_total"]


@pytest.mark.parametrize("how", ["prefill", "queue"])
def test_leaving_during_prefill_or_in_the_queue(how):
    args = ["--max-running", 1] if how == "queue" else ["--step-tokens", 16, "--max-running", 4]
    with Daemon(*args) as d:
        free = d.pages()

        async def leave():
            writers = []
            for i in range(4):
                body = json.dumps({"prompt": f"{i} " + "word " * 3000, "max_tokens": 500, "stream": True}).encode()
                _, writer = await asyncio.open_connection("127.0.0.1", d.port)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
                writers.append(writer)
            await asyncio.to_thread(eventually, lambda: d.metrics()["vllm:num_requests_running"] > 0, 10, "it runs")
            for writer in writers:
                writer.close()
        asyncio.run(leave())
        eventually(d.idle, 5, "nothing runs or waits")
        eventually(lambda: d.pages() == free, 5, "all pages are back")

"""The Responses wire over a WebSocket, for tests."""
import json

import websockets.sync.client

from daemon import SLOW

TERMINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


class Wire:
    def __init__(self, daemon, **more):
        self.socket = websockets.sync.client.connect(daemon.ws_url, open_timeout=20 * SLOW, legacy=True, **more)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, text=None, **body):
        """Sends response.create with `text` as the input (or the body as it is when it has a type)."""
        body = {"type": "response.create", **body}
        if text is not None:
            body["input"] = text
        if body["type"] == "response.create":
            body = {"temperature": 0, "max_output_tokens": 16, **body}
        self.socket.send(json.dumps(body))

    def event(self, seconds=60):
        return json.loads(self.socket.recv(timeout=seconds * SLOW))

    def events(self):
        """Up to and with the next terminal event."""
        while True:
            ev = self.event()
            yield ev
            if ev["type"] in TERMINAL:
                return

    def events_of(self, aside, told):
        """As events(), but for those of the types `aside`, which go into `told`."""
        for ev in self.events():
            if ev["type"] in aside:
                told.append(ev)
            else:
                yield ev

    def ask(self, text=None, **body):
        """One turn: the terminal event, and the text of the deltas."""
        self.send(text, **body)
        text = ""
        for ev in self.events():
            if ev["type"] == "response.output_text.delta":
                text += ev["delta"]
        return ev, text


def cached(event):
    return event["response"]["usage"]["input_tokens_details"]["cached_tokens"]

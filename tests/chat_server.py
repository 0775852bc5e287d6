"""A stub of an OpenAI-compatible server on the loopback interface, which answers with the last message in capitals."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StubServer(ThreadingHTTPServer):
    """`url` is its base URL; `requests` are the parsed bodies it got. `failures` are statuses to answer first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.failures: list[int] = []
        self.key: str | None = None
        self.body: bytes | None = None  # sent instead of an answer
        self.seconds = 0.0  # before an answer
        self.said = "busy"  # the message of a failure
        self.location: str | None = None  # where a failure redirects to
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()

    def entered(self, change: int) -> None:
        with self._lock:
            self._now += change
            self.most_at_once = max(self.most_at_once, self._now)


class _Handler(BaseHTTPRequestHandler):
    server: StubServer

    def do_POST(self) -> None:
        self.server.entered(1)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(asked)
        self.server.paths.append(self.path)
        time.sleep(self.server.seconds)
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self._send(401, {"error": {"message": f"bad key {self.headers['Authorization']}"}})
        elif self.server.failures:
            self._send(self.server.failures.pop(0), {"error": {"message": self.server.said}})
        elif self.server.body is not None:
            self._send(200, self.server.body)
        elif asked.get("stream"):
            self._stream(self._text(asked))
        else:
            self._send(200, {"choices": [self._choice(asked)]})
        self.server.entered(-1)

    def _text(self, asked: dict[str, Any]) -> str:
        return (asked["prompt"] if "prompt" in asked else asked["messages"][-1]["content"]).upper()

    def _choice(self, asked: dict[str, Any]) -> dict[str, Any]:
        text = self._text(asked)
        ids = {"token_ids": [ord(letter) for letter in text]} if asked.get("return_token_ids") else {}
        answer = {"text": text} if "prompt" in asked else {"message": {"role": "assistant", "content": text}}
        return {**answer, **ids, "finish_reason": "stop"}

    def _stream(self, text: str) -> None:
        events = [{"choices": [{"delta": {"content": letter}}]} for letter in text]
        events += [{"choices": [{"delta": {}, "finish_reason": "length"}]}, {"choices": []}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, status: int, answer: Any) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status >= 300 and self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def chat_server() -> Iterator[StubServer]:
    server = StubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

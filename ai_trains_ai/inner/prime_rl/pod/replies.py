"""A stand-in for the model: ``python -m …pod.replies --port P --model NAME``, OpenAI's chat API on the loopback.

The environment is tried against it on the CPU before the GPU is taken. Its replies are of the kinds that a small model
gives and that reward functions fall over: nothing at all, junk, numbers, answers in tags, text that is cut off. They
come in a fixed order, each with its usage; a reply longer than the request's limit ends early and says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPLIES = (
    "",
    "42",
    "<answer>7</answer>",
    "I don't know.",
    "Let me think step by step. " * 200,
    "The answer is \\boxed{3/4}.",
    '{"answer": [1, 2, {"x": null}]}',
    "\u00e9\u4e16\u754c \U0001f600 \x07 </answer><answer>",
    "<think>Two and two are four.</think>\n\n4",
    "-1.5e3",
    "```python\nprint('yes')\n```",
    "yes",
)
MAX_BODY = 64 << 20


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, model: str) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.model = model
        self._turns = itertools.count()
        self._lock = threading.Lock()

    def completion(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The next reply, as the API's object. A word is a token here."""
        with self._lock:
            turn = next(self._turns)
        thought, closed, text = REPLIES[turn % len(REPLIES)].rpartition("</think>")
        words = text.split(" ")
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or len(words)
        prompt = len(str(request.get("messages", "")).split())
        said = len(words[:limit])
        message = {"role": "assistant", "content": " ".join(words[:limit])}
        if closed:  # as a server with a reasoning parser gives it
            message["reasoning_content"] = thought.removeprefix("<think>")
        return {
            "id": f"chatcmpl-{turn}",
            "object": "chat.completion",
            "created": 0,
            "model": request.get("model") or self.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "length" if len(words) > limit else "stop",
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said},
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, b"", "text/plain")
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": self.server.model, "object": "model"}]})
        else:
            self._json(404, {"error": {"message": f"There is no {self.path}."}})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(min(length, MAX_BODY))
        if self.path != "/v1/chat/completions":
            self._json(404, {"error": {"message": f"There is no {self.path}."}})
            return
        try:
            request = json.loads(body)
            completion = self.server.completion(request)
        except (ValueError, TypeError, AttributeError) as error:
            self._json(400, {"error": {"message": f"The request is no chat: {error}"}})
            return
        if request.get("stream"):
            events = [json.dumps(chunk) for chunk in _chunks(completion)] + ["[DONE]"]
            self._send(200, "".join(f"data: {event}\n\n" for event in events).encode(), "text/event-stream")
        else:
            self._json(200, completion)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the log is for errors."""

    def _json(self, status: int, value: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _chunks(completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A completion as the events of a stream: the role, the text, the end, the usage."""
    (choice,) = completion["choices"]
    shared = {**completion, "object": "chat.completion.chunk"}
    parts: tuple[tuple[dict[str, Any], str | None], ...] = (
        ({"role": "assistant", "content": ""}, None),
        ({name: text for name, text in choice["message"].items() if name != "role"}, None),
        ({}, choice["finish_reason"]),
    )
    for delta, end in parts:
        yield {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": end}], "usage": None}
    yield {**shared, "choices": []}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Server(arguments.port, arguments.model) as server:
        server.serve_forever(poll_interval=0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

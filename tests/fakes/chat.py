"""A local chat endpoint as OpenAI-compatible servers have it: answers by a function, refuses on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import define, field

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""From a request's body to the fields of the assistant's message."""


@define(eq=False)
class ChatServer:
    """``refusals`` are answered first, one a request: status and message. ``asked`` are the bodies, in order."""

    answer: Answer
    context: int = 4_096
    refusals: list[tuple[int, str]] = field(factory=list)
    asked: list[dict[str, Any]] = field(factory=list)
    keys: list[str] = field(factory=list)
    url: str = ""

    def reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(body)
        if self.refusals:
            status, message = self.refusals.pop(0)
            return status, {"error": {"message": message}}
        prompt = sum(len(str(message.get("content"))) for message in body["messages"]) // 4
        if prompt + body["max_tokens"] > self.context:
            return 400, {"error": {"message": f"This model's maximum context length is {self.context} tokens."}}
        message = {"role": "assistant", "content": None, **self.answer(body)}
        end = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
        usage = {"prompt_tokens": prompt, "completion_tokens": 20, "total_tokens": prompt + 20}
        usage |= {"prompt_tokens_details": {"cached_tokens": prompt // 2}}
        choice = {"index": 0, "message": message, "finish_reason": end}
        return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
                     "choices": [choice], "usage": usage}  # fmt: skip


def call(name: str, arguments: Mapping[str, Any] | str, id: str = "c") -> dict[str, Any]:
    """A tool call of a message; ``arguments`` as text go out as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


@contextmanager
def chat_server(answer: Answer, **options: Any) -> Iterator[ChatServer]:
    """Serves on a free port of 127.0.0.1 inside the context."""
    told = ChatServer(answer, **options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            told.keys.append(self.headers.get("Authorization", ""))
            status, data = told.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)

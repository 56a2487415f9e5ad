"""A local Hugging Face Hub, as far as uploads go: repositories, preupload, LFS over HTTP, commits; refuses at will."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import define, field


@define
class Repository:
    private: bool
    commits: list[dict[str, bytes]] = field(factory=list)


@define(eq=False)
class HubServer:
    """``refusals``: path's part → status and message. ``tokens`` are those that asked; ``blobs`` by SHA-256."""

    repositories: dict[str, Repository] = field(factory=dict)
    refusals: dict[str, tuple[int, str]] = field(factory=dict)
    tokens: set[str] = field(factory=set)
    blobs: dict[str, bytes] = field(factory=dict)
    url: str = ""

    def reply(self, path: str, body: bytes) -> tuple[int, Any]:
        for part, (status, message) in self.refusals.items():
            if part in path:
                return status, {"error": message}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            self.repositories[name] = Repository(asked.get("private", asked.get("visibility") == "private"))
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = json.loads(body)["files"]
            return 200, {"files": [self._mode(file["path"]) for file in files]}
        if re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [self._upload(entry) for entry in objects]}
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            return self._commit(found[1], body)
        return 404, {"error": f"no such route {path}"}

    @staticmethod
    def _mode(path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(".safetensors") else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _upload(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "authenticated": True, "actions": {"upload": {"href": f"{self.url}/blobs/{entry['oid']}"}}}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        files: dict[str, bytes] = {}
        for line in filter(None, body.decode().split("\n")):
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
        self.repositories[name].commits.append(files)
        sha = f"{len(self.repositories[name].commits):040x}"
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha, "success": True}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serves on a free port of 127.0.0.1 inside the context."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer "))
            self._answer(*hub.reply(self.path.partition("?")[0], self._body()))

        def do_PUT(self) -> None:
            hub.blobs[self.path.rpartition("/")[2]] = self._body()
            self._answer(200, {})

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            if status >= 400:
                self.send_header("X-Error-Message", value["error"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

"""A small model hub on 127.0.0.1: one repository at one commit, and the ways in which a real one fails."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "c0ffee" * 6 + "abcd"
LARGE = 4000  # bytes from which a file is kept by sha256, as the real hub does from 10 MB on


class Hub:
    """`files` by path; `faults` maps a path to what happens on its requests, one after the other, then all is well.

    Faults: a status; "cut" (half of what is asked for, then the connection ends); "slow" (as cut, but the client is
    left waiting); "corrupt" (the right size, other bytes). `asked` counts requests by path, `ranges` lists (path, first
    byte) of every GET.
    """

    def __init__(self, repository: str, files: dict[str, bytes], *, repo_type: str = "model", token: str | None = None):
        self.repository, self.files, self.token = repository, files, token
        self.prefix = "/datasets" if repo_type == "dataset" else ""
        self.kind = f"{repo_type}s"
        self.faults: dict[str, list] = {}
        self.gone = False
        self.asked: Counter = Counter()
        self.ranges: list[tuple[str, int]] = []

    def __enter__(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """What a process needs to see this hub and no proxy."""
        kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        return kept | {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"} | more

    def run(self, program: str, *arguments: str, home: Path, **more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(
            command, check=False, env=self.environment(home, **more), capture_output=True, text=True, timeout=600
        )

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        tree = f"/api/{self.kind}/{self.repository}/tree/"
        name = path.removeprefix(f"{self.prefix}/{self.repository}/resolve/{COMMIT}/")
        known = name if name in self.files else "tree" if path.startswith(tree) else path
        self.asked[known] += 1
        fault = self.faults[known].pop(0) if self.faults.get(known) else None
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self._say(request, 401, code="GatedRepo")
        elif isinstance(fault, int):
            self._say(request, fault)
        elif self.gone:
            self._say(request, 404, code="RevisionNotFound")
        elif known == "tree":
            self._say(request, 200, json.dumps([self._entry(name) for name in sorted(self.files)]).encode())
        elif known in self.files:
            self._send(request, known, fault)
        else:
            self._say(request, 404, code="EntryNotFound")

    def _entry(self, name: str) -> dict:
        content = self.files[name]
        entry = {"type": "file", "path": name, "size": len(content), "oid": git_object(content)}
        if len(content) >= LARGE:
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def _send(self, request: BaseHTTPRequestHandler, name: str, fault: str | None) -> None:
        content = self.files[name]
        whole = len(content)
        wanted = request.headers.get("Range")
        first = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self.ranges.append((name, first))
        body = bytes(byte ^ 1 for byte in content) if fault == "corrupt" else content
        request.send_response(206 if wanted else 200)
        if wanted:
            request.send_header("Content-Range", f"bytes {first}-{whole - 1}/{whole}")
        request.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Content-Length", str(whole - first))
        request.end_headers()
        if request.command == "HEAD":
            return
        part = body[first : first + (whole - first) // 2] if fault in ("cut", "slow") else body[first:]
        request.wfile.write(part)
        request.wfile.flush()
        if fault == "slow":
            time.sleep(60)
        if fault in ("cut", "slow"):
            request.close_connection = True
            request.connection.close()

    @staticmethod
    def _say(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", code: str = "") -> None:
        request.send_response(status)
        if code:
            request.send_header("X-Error-Code", code)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


def git_object(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

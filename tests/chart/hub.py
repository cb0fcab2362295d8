"""A Hugging Face hub of one model on the loopback address: as much of its HTTP API as a download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(model: str, commit: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the files that have been fetched so far."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            headers, body = {}, b""
            name = path.removeprefix(f"/{model}/resolve/{commit}/")
            if path == f"/api/models/{model}/tree/{commit}":
                listed = [{"type": "file", "path": name, "size": len(files[name]), "oid": _oid(name)} for name in files]
                headers, body = {"Content-Type": "application/json"}, json.dumps(listed).encode()
            elif path.startswith(f"/api/models/{model}"):
                siblings = [{"rfilename": name} for name in files]
                body = json.dumps({"id": model, "sha": commit, "siblings": siblings}).encode()
                headers = {"Content-Type": "application/json"}
            elif name in files:
                body = files[name]
                headers = {"ETag": f'"{_oid(name)}"', "X-Repo-Commit": commit}
                if with_body:
                    fetched.append(name)
            self.send_response(200 if headers else 404)
            for header, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _oid(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()

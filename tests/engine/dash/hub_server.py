"""A Hub of one machine: what `huggingface_hub` asks of the real one, over real sockets."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


class HubServer:
    """Serves folders as repositories; `asked` has the paths of all requests.

    repos     by their id, the commits there are and the folder of each
    branches  (id, branch) -> commit
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Path]] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def publish(self, repo: str, folder: Path, branch: str = "main") -> str:
        """Make the folder the branch's newest commit; its name."""
        commit = hashlib.sha1(f"{repo} {folder} {len(self.branches)}".encode()).hexdigest()
        self.repos.setdefault(repo, {})[commit] = folder
        self.branches[repo, branch] = commit
        return commit

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Be away from now on."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """-> status, headers, body"""
        self.asked.append(path)
        found = re.fullmatch(r"/api/models/(\w+/[\w-]+)/(revision|tree)/([^?]+)(\?.*)?", path)
        file = re.fullmatch(r"/(\w+/[\w-]+)/resolve/([^/]+)/(.+)", path)
        repo, revision = (found[1], found[3]) if found else (file[1], file[2]) if file else ("", "")
        if repo not in self.repos:
            code = "GatedRepo" if repo.startswith("gated/") else "RepoNotFound"
            return 403 if code == "GatedRepo" else 401, {"X-Error-Code": code}, b"{}"
        commit = self.branches.get((repo, revision), revision)
        folder = self.repos[repo].get(commit)
        if folder is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if file:
            body = (folder / file[3]).read_bytes()
            etag = f'"{hashlib.sha1(body).hexdigest()}"'
            return 200, {"ETag": etag, "X-Repo-Commit": commit}, body
        assert found is not None
        names = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
        listing: Any = {"id": repo, "sha": commit, "siblings": []}
        if found[2] == "tree":
            listing = [
                {
                    "type": "file",
                    "path": str(name),
                    "size": (folder / name).stat().st_size,
                    "oid": hashlib.sha1((folder / name).read_bytes()).hexdigest(),
                }
                for name in names
            ]
        return 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = answer(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

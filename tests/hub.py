"""A server that speaks like the Hugging Face Hub, for repositories that a test puts into it."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import unquote

from tests.receiver import Behaviour, Receiver, answer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Has model and dataset `owner/name` with these files at `main`; redirects tensors to a `cdn`.

    token     that a caller needs, else 401
    instead   by file: how it is answered instead
    """

    def __init__(self, receiver: Receiver, files: dict[str, bytes]) -> None:
        self.receiver = receiver
        self.files = files
        self.token = ""
        self.cdn = ""
        self.instead: dict[str, Behaviour] = {}
        receiver.behave = self._answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.receiver.port}"

    @property
    def tokens(self) -> list[str | None]:
        return [sent.headers.get("authorization") for sent in self.receiver.received]

    @property
    def paths(self) -> list[str]:
        return [sent.path for sent in self.receiver.received]

    def _answer(self, handler: Any) -> None:
        path = unquote(handler.path)
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            answer(401)(handler)
        elif path == "/api/models/owner/name/revision/main":
            names = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": names}).encode()
            self.instead.get("", answer(200, body))(handler)
        elif path == "/api/datasets/owner/name/revision/main?blobs=true":
            self._dataset(handler)
        elif path.startswith(f"/datasets/owner/name/resolve/{COMMIT}/"):
            self._file(handler, path.partition(f"{COMMIT}/")[2])
        elif path.startswith(f"/owner/name/resolve/{COMMIT}/"):
            self._file(handler, path.rpartition("/")[2])
        else:
            answer(404)(handler)

    def _dataset(self, handler: Any) -> None:
        """List a dataset's files, each with the name of its bytes."""
        files = [
            {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]
        body = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": files}).encode()
        self.instead.get("", answer(200, body))(handler)

    def _file(self, handler: Any, name: str) -> None:
        if name in self.instead:
            self.instead[name](handler)
        elif name not in self.files:
            answer(404)(handler)
        elif self.cdn and name.endswith(".safetensors"):
            answer(302, b"", {"Location": f"{self.cdn}/blob?Signature=x"})(handler)
        else:
            answer(200, self.files[name])(handler)

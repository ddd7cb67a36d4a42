"""Files on their way out: read in pieces, never whole, and checked against what arrived."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from lorikeet_cli import progress
from lorikeet_cli.client import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, USER_AGENT, why_unreachable
from lorikeet_cli.errors import CliError, Unreachable
from lorikeet_cli.output import say, shown

PIECE_BYTES = 1 << 18
MAX_ATTEMPTS = 3
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


@dataclasses.dataclass(slots=True)
class Source:
    """A file to upload. After each whole reading it knows the digests of what was read."""

    path: Path
    num_bytes: int
    sha256: str = ""
    md5: str = ""

    @classmethod
    def of(cls, path: Path) -> Source:
        """Look at the file. Raises CliError when it is none, or cannot be read."""
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise CliError(f"{path} is no file.")
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            raise CliError(f"Cannot read {path}: {error.strerror}.") from error
        return cls(path, found.st_size)

    def pieces(self, seen: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the file's bytes, telling `seen` how many there were. Raises CliError."""
        sha256, md5, read = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
        try:
            with self.path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    read += len(piece)
                    if read > self.num_bytes:
                        break
                    sha256.update(piece)
                    md5.update(piece)
                    yield piece
                    seen(read)
        except OSError as error:
            raise CliError(f"Cannot read {self.path}: {error.strerror}.") from error
        if read != self.num_bytes:
            raise CliError(f"{self.path} changed while it was uploaded. Run the command again.")
        self.sha256, self.md5 = sha256.hexdigest(), md5.hexdigest()


def put_presigned(source: Source, upload: dict[str, Any]) -> None:
    """PUT a file to its presigned URL; the store gets no API key. Raises CliError, Unreachable.

    upload  the API's answer: url, method, headers
    """
    parts = urlsplit(upload["url"])
    store = f"{parts.scheme}://{parts.netloc}"
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with (
        httpx.Client(timeout=timeout, headers={"User-Agent": USER_AGENT}) as http,
        progress.bar(source.path.name, total=source.num_bytes, is_bytes=True) as bar,
    ):
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                response = http.request(
                    upload["method"],
                    upload["url"],
                    headers=upload["headers"],
                    content=source.pieces(bar.show),
                )
            except httpx.TransportError as error:
                if attempt == MAX_ATTEMPTS:
                    raise Unreachable(
                        f"The object store: {why_unreachable(store, error)} The server's setting "
                        "S3_PUBLIC_ENDPOINT_URL has to be an address that you can reach."
                    ) from error
                why = "does not answer"
            else:
                if response.is_success:
                    _check_arrived(source, response)
                    return
                if response.status_code < 500 or attempt == MAX_ATTEMPTS:
                    raise CliError(
                        f"The object store {store} refused {source.path.name} with status "
                        f"{response.status_code}: {_store_error(response)}"
                    )
                why = f"answers {response.status_code}"
            say(f"The object store {why}; sending {source.path.name} again.")
            time.sleep(attempt)


def _check_arrived(source: Source, response: httpx.Response) -> None:
    """Compare the store's MD5, where its ETag is one, with that of what was read."""
    match = _MD5.fullmatch(response.headers.get("etag", ""))
    if match and match[1] != source.md5:
        raise CliError(f"{source.path.name} was damaged on its way. Run the command again.")


def _store_error(response: httpx.Response) -> str:
    match = re.search(r"<Message>([^<]{1,300})</Message>", response.text[:4000])
    return shown(match[1]) if match else "run the command again for a new address."

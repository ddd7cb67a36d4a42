"""Send a file to the object store by parts, several at a time; a part that breaks is sent again."""

from __future__ import annotations

import dataclasses
import hashlib
import queue
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from lorikeet_cli import progress
from lorikeet_cli.client import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, USER_AGENT, why_unreachable
from lorikeet_cli.errors import CliError, Unreachable
from lorikeet_cli.output import say, shown
from lorikeet_cli.uploads import Source

PARALLEL = 4
#: Most attempts for one part, and for each part until one has arrived: the store may not exist at
#: all.
MAX_ATTEMPTS, FIRST_ATTEMPTS = 10, 3
MAX_PAUSE_S = 20.0
#: Answers of the store after which the part is sent again: to a new address, or because it was cut.
RETRIED = (400, 404, 408, 409, 429)
PIECE_BYTES = 1 << 18
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')

#: Number and SHA-256 of a part -> the API's answer for it: url, headers.
Sign = Callable[[int, str], dict[str, Any]]


class FileChanged(CliError):
    """The file differs from the one with which the upload began."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    number: int
    data: bytes
    sha256: str


def send_file(source: Source, state: dict[str, Any], sign: Sign) -> None:
    """Send the parts that the store lacks; afterwards `source` knows the file's digest.

    state  the API's answer: part_bytes, and what is known of each part
    Raises CliError, FileChanged when a part that was begun has other bytes here, Unreachable.
    """
    name = source.path.name
    with progress.bar(name, total=source.num_bytes, is_bytes=True) as bar:
        sender = _Sender(source, state, sign, bar)
        sender.run()


class _Sender:
    """This thread reads and hashes the file; others send its parts."""

    def __init__(
        self, source: Source, state: dict[str, Any], sign: Sign, bar: progress.Bar
    ) -> None:
        self._source, self._sign, self._bar = source, sign, bar
        self._part_bytes: int = state["part_bytes"]
        self._known = {part["number"]: part for part in state["parts"]}
        # Together with the parts in the threads, these are all parts in memory.
        self._waiting: queue.Queue[Part | None] = queue.Queue(1)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        #: Part -> its bytes that have arrived or are being sent.
        self._sent: dict[int, int] = {}
        self._has_arrived = False
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.Client(timeout=timeout, headers={"User-Agent": USER_AGENT})

    def run(self) -> None:
        # Daemon threads: after Ctrl-C the process does not wait for them.
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(PARALLEL)]
        for thread in threads:
            thread.start()
        try:
            for part in self._parts():
                self._hand_over(part)
            for _ in threads:
                self._hand_over(None)
            while any(thread.is_alive() for thread in threads):
                threads[0].join(0.05)
                threads.append(threads.pop(0))
                self._check()
            self._check()
        finally:
            self._stop.set()

    def _parts(self) -> Iterator[Part]:
        """Yield the parts to send. Raises FileChanged."""
        whole, read, number = hashlib.sha256(), 0, 0
        try:
            with self._source.path.open("rb") as file:
                while data := file.read(self._part_bytes):
                    number, read = number + 1, read + len(data)
                    whole.update(data)
                    part = Part(number, data, hashlib.sha256(data).hexdigest())
                    known = self._known.get(number)
                    is_other = known is not None and known["sha256"] != part.sha256
                    if is_other or read > self._source.num_bytes:
                        raise FileChanged(f"{self._source.path} has changed.")
                    if known and known["is_uploaded"]:
                        self._has_arrived = True
                        self._show(number, len(data))
                    else:
                        yield part
        except OSError as error:
            raise CliError(f"Cannot read {self._source.path}: {error.strerror}.") from error
        if read != self._source.num_bytes:
            raise FileChanged(f"{self._source.path} has changed.")
        self._source.sha256 = whole.hexdigest()

    def _hand_over(self, part: Part | None) -> None:
        while True:
            self._check()
            try:
                return self._waiting.put(part, timeout=0.1)
            except queue.Full:
                pass

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while (part := self._waiting.get()) is not None:
                self._send(part)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error

    def _send(self, part: Part) -> None:
        name, attempt = self._source.path.name, 0
        while True:
            attempt += 1
            signed = self._sign(part.number, part.sha256)
            store = "{0.scheme}://{0.netloc}".format(urlsplit(signed["url"]))
            is_last = attempt >= (MAX_ATTEMPTS if self._has_arrived else FIRST_ATTEMPTS)
            try:
                response = self._http.request(
                    signed["method"],
                    signed["url"],
                    headers=signed["headers"],
                    content=self._pieces(part),
                )
            except httpx.TransportError as error:
                if is_last:
                    raise Unreachable(
                        f"The object store: {why_unreachable(store, error)} The server's setting "
                        "S3_PUBLIC_ENDPOINT_URL has to be an address that you can reach. Run the "
                        "command again: it resumes where it stopped."
                    ) from error
                why = "does not answer"
            else:
                if response.is_success and _is_whole(part, response):
                    self._has_arrived = True
                    self._show(part.number, len(part.data))
                    return
                status = response.status_code
                is_final = not response.is_success and status < 500 and status not in RETRIED
                if is_final or is_last:
                    raise CliError(_refusal(store, name, response))
                why = "got other bytes" if response.is_success else f"answers {status}"
            self._show(part.number, 0)
            say(f"The object store {why}; sending part {part.number} of {name} again.")
            self._stop.wait(min(MAX_PAUSE_S, 0.5 * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))

    def _pieces(self, part: Part) -> Iterator[bytes]:
        for start in range(0, len(part.data), PIECE_BYTES):
            if self._stop.is_set():
                raise _Stopped
            piece = part.data[start : start + PIECE_BYTES]
            yield piece
            self._show(part.number, start + len(piece))

    def _show(self, number: int, sent: int) -> None:
        self._sent[number] = sent
        self._bar.show(sum(list(self._sent.values())))


class _Stopped(Exception):
    """Another part failed, or the person pressed Ctrl-C."""


def _is_whole(part: Part, response: httpx.Response) -> bool:
    """Return whether the store's MD5, if its ETag is one, is the part's."""
    match = _MD5.fullmatch(response.headers.get("etag", ""))
    return not match or match[1] == hashlib.md5(part.data, usedforsecurity=False).hexdigest()


def _refusal(store: str, name: str, response: httpx.Response) -> str:
    if response.is_success:
        return f"{name} was damaged on its way. Run the command again."
    match = re.search(r"<Message>([^<]{1,300})</Message>", response.text[:4000])
    said = shown(match[1]) if match else "run the command again."
    return f"The object store {store} refused {name} with status {response.status_code}: {said}"

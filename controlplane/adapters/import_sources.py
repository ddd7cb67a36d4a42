"""The source of an import's two files: a repository of the Hub, or two addresses.

The Hub's token and the addresses, whose queries are often signatures, are stored encrypted, for as
long as the work lasts. What stays is the version's `origin`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from cryptography.fernet import InvalidToken
from django.conf import settings

from contract.adapters import peft_config, safetensors_header
from contract.adapters.file_kinds import BIN_FILE, BIN_PICKLE, MLX_ADAPTER, MLX_FILE
from controlplane.adapters.rejection import Rejected
from controlplane.errors import InvalidRequest
from controlplane.infra.ciphers import peppered_cipher
from controlplane.infra.outbound import outbound
from controlplane.infra.outbound.outbound import Answer, Bounds, CallFailed
from controlplane.infra.outbound.outbound_policy import Refused

CONFIG, TENSORS = peft_config.FILE, safetensors_header.FILE
DEFAULT_REVISION = "main"
#: Stores' presigned URLs are long; so is what the Hub redirects to.
MAX_URL_CHARS = 8000
#: A repository's list of files is in the answer.
_MAX_INFO_BYTES = 8 << 20
_BOUNDS = Bounds(
    header_s=20.0,
    idle_s=20.0,
    least_bytes_per_s=2**20,
    total_s=2400.0,
    max_url_chars=MAX_URL_CHARS,
)
PURPOSE = b"adapter import"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"(?:{_PART}/)?{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKEN = re.compile(r"[!-~]{1,500}")
_NOT_FOUND, _REFUSED = 404, (401, 403)
#: The same call may succeed later.
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class TryAgain(Exception):
    """The file could not be fetched now; `rejected` is the reason if it never can."""

    def __init__(self, file: str, message: str) -> None:
        super().__init__(message)
        self.rejected = Rejected.because(file, message)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A place to fetch from. `origin` is shown with the version; the rest is secret."""

    origin: Mapping[str, str]
    #: By file; of a Hub's repository none: its commit gives them.
    urls: Mapping[str, str] = dataclasses.field(default_factory=dict)
    token: str = ""

    def seal(self) -> bytes:
        secrets = json.dumps({"urls": dict(self.urls), "token": self.token})
        return peppered_cipher(PURPOSE).encrypt(secrets.encode())

    @classmethod
    def unseal(cls, origin: Mapping[str, str], sealed: bytes | memoryview) -> Source:
        """Return what `seal` encrypted. Raises Rejected."""
        try:
            secrets = json.loads(peppered_cipher(PURPOSE).decrypt(bytes(sealed)))
        except InvalidToken as error:
            raise Rejected.because("", "its address can no longer be read: import again") from error
        return cls(origin=origin, urls=secrets["urls"], token=secrets["token"])

    @property
    def is_hub(self) -> bool:
        return "repository" in self.origin

    def pinned(self) -> Source:
        """Return the source with the revision's present commit. Raises as `opened`."""
        if not self.is_hub:
            return self
        hub = settings.HUB_ENDPOINT
        if not hub or _host(hub) != self.origin["host"]:
            raise Rejected.because("", "imports from this Hub are switched off")
        repository = self.origin["repository"]
        commit = self.origin.get("commit") or self._commit(hub, repository)
        origin = {**self.origin, "commit": commit}
        urls = {file: f"{hub}/{repository}/resolve/{commit}/{file}" for file in (CONFIG, TENSORS)}
        return dataclasses.replace(self, origin=origin, urls=urls)

    def _commit(self, hub: str, repository: str) -> str:
        revision = quote(self.origin["revision"], safe="")
        url = f"{hub}/api/models/{repository}/revision/{revision}"
        with self._called("", url, _MAX_INFO_BYTES) as answer:
            body = answer.read()
        try:
            info: Any = json.loads(body)
        except (ValueError, RecursionError):
            info = None
        info = info if isinstance(info, dict) else {}
        _check_files(info.get("siblings"))
        commit = info.get("sha")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise Rejected.because("", "the Hub's answer names no commit for the revision")
        return commit

    @contextlib.contextmanager
    def opened(self, file: str, *, max_bytes: int) -> Iterator[Answer]:
        """Call for a file. Raises Rejected with a reason, TryAgain; also for reads in the block."""
        with self._called(file, self.urls[file], max_bytes) as answer:
            kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind in ("text/html", "application/xhtml+xml"):
                raise Rejected.because(
                    file, "its address serves a web page: use the address of the file itself"
                )
            yield answer

    @contextlib.contextmanager
    def _called(self, file: str, url: str, max_bytes: int) -> Iterator[Answer]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        bounds = dataclasses.replace(_BOUNDS, max_bytes=max_bytes)
        try:
            with outbound.call(
                "GET", url, headers=headers, bounds=bounds, redirects=outbound.MAX_REDIRECTS
            ) as answer:
                self._check_status(file, answer.status)
                yield answer
        except Refused as error:
            # The message has no address; after a redirect it is about an address we must not tell.
            raise Rejected.because(file, f"its address may not be called: {error}") from error
        except CallFailed as error:
            raise TryAgain(file, f"it could not be fetched: {error}") from error

    def _check_status(self, file: str, status: int) -> None:
        """Raise Rejected or TryAgain unless the call succeeded."""
        if status == 200:
            return
        whose = "the Hub" if self.is_hub else "its address"
        if status in _LATER:
            raise TryAgain(file, f"{whose} answered {status}")
        if status == _NOT_FOUND:
            what = "file" if file else "repository or revision"
            where = "repository" if self.is_hub and file else "Hub" if self.is_hub else "address"
            raise Rejected.because(file, f"there is no such {what} at this {where} (404)")
        if status in _REFUSED and self.is_hub:
            why = (
                "the token may not read it, or its owner has not let you in"
                if self.token
                else "it does not exist, or needs a token"
            )
            raise Rejected.because(file, f"the Hub refused the repository ({status}): {why}")
        if status in _REFUSED:
            raise Rejected.because(
                file, f"its address refused the call ({status}): it may have expired"
            )
        raise Rejected.because(file, f"{whose} answered {status}")


def _check_files(listed: Any) -> None:
    """Raise Rejected if a repository has tensors of another format only."""
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("rfilename") for entry in entries if isinstance(entry, dict)]
    for file, message in ((MLX_FILE, MLX_ADAPTER), (BIN_FILE, BIN_PICKLE)):
        if file in names and TENSORS not in names:
            raise Rejected.because(file, message)


def hub_source(repository: str, revision: str = "", token: str = "") -> Source:
    """Return a source on the operator's Hub. Raises InvalidRequest."""
    revision = revision or DEFAULT_REVISION
    if not settings.HUB_ENDPOINT:
        raise InvalidRequest("Imports from a Hub are switched off here.", param="repository")
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise InvalidRequest("Name a repository as owner/name.", param="repository")
    if not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision:
        raise InvalidRequest("A revision is a branch, a tag or a commit.", param="revision")
    if token and not _TOKEN.fullmatch(token):
        raise InvalidRequest(
            "A token has only letters, digits, `_` and `-`: copy it again.", param="token"
        )
    host = _host(settings.HUB_ENDPOINT)
    origin = {"host": host, "repository": repository, "revision": revision}
    return Source(origin=origin, token=token)


def url_source(config_url: str, tensors_url: str) -> Source:
    """Return a source of two addresses, which are not called yet. Raises InvalidRequest."""
    hosts = [
        _checked(url, param)
        for url, param in ((config_url, "config_url"), (tensors_url, "tensors_url"))
    ]
    return Source(origin={"host": hosts[1]}, urls={CONFIG: config_url, TENSORS: tensors_url})


def _checked(url: str, param: str) -> str:
    try:
        destination = settings.OUTBOUND.destination(url, max_chars=MAX_URL_CHARS)
    except Refused as error:
        raise InvalidRequest(str(error), param=param) from error
    return str(destination.authority)


def _host(url: str) -> str:
    return urlsplit(url).netloc

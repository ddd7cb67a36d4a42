"""The sources of rows: a bucket of the tenant's, or a dataset of the operator's Hub.

Credentials are stored encrypted, and sent to their owner alone. Neither they nor a signed address
are logged, or told in an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from cryptography.fernet import InvalidToken
from django.conf import settings

from controlplane.adapters.import_sources import MAX_URL_CHARS, hub_source
from controlplane.errors import InvalidRequest
from controlplane.infra.ciphers import peppered_cipher
from controlplane.infra.outbound import outbound, s3_requests
from controlplane.infra.outbound.outbound import Answer, Bounds, CallFailed
from controlplane.infra.outbound.outbound_policy import Refused
from controlplane.infra.outbound.s3_requests import Bucket

PURPOSE = b"dataset source"
#: Largest number of a source's objects; more need a longer prefix.
MAX_OBJECTS = 1000
_MAX_LIST_BYTES = 8 << 20
_BOUNDS = Bounds(
    header_s=20.0,
    idle_s=20.0,
    least_bytes_per_s=2**20,
    total_s=2400.0,
    max_url_chars=MAX_URL_CHARS,
)
_SUFFIX = ".jsonl"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_KEY = re.compile(r"[!-~]{0,2000}")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class PullFailed(Exception):
    """Rows cannot be pulled; the message is for the tenant. A later pull may succeed."""

    def __init__(self, message: str, *, is_final: bool = True) -> None:
        super().__init__(message)
        self.is_final = is_final


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """An object of the source; its tag changes with its bytes."""

    name: str
    tag: str
    url: str


class Place(Protocol):
    """A source with its credentials."""

    def listed(self) -> list[Remote]:
        """Return the objects with rows, in the order of their names. Raises PullFailed."""

    def opened(self, remote: Remote, max_bytes: int) -> contextlib.AbstractContextManager[Answer]:
        """Call for an object's bytes. Raises PullFailed, also for reads in the block."""


def s3_place(place: Mapping[str, Any], secrets: Mapping[str, str]) -> S3Place:
    """Return a bucket's objects. Raises InvalidRequest that names the field."""
    endpoint = str(place.get("endpoint", "")).rstrip("/")
    try:
        settings.OUTBOUND.destination(f"{endpoint}/")
    except Refused as error:
        raise InvalidRequest(str(error), param="endpoint") from error
    if urlsplit(endpoint).path or urlsplit(endpoint).query:
        raise InvalidRequest("An endpoint is an address without a path.", param="endpoint")
    if not s3_requests.BUCKET.fullmatch(str(place.get("bucket", ""))):
        raise InvalidRequest("This is not the name of a bucket.", param="bucket")
    if not _REGION.fullmatch(str(place.get("region", ""))):
        raise InvalidRequest("This is not a region, such as eu-central-1.", param="region")
    for name in ("access_key_id", "secret_access_key", "session_token"):
        if not _KEY.fullmatch(secrets.get(name, "")):
            raise InvalidRequest("This must be at most 2,000 visible ASCII characters.", param=name)
    if bool(secrets.get("access_key_id")) != bool(secrets.get("secret_access_key")):
        raise InvalidRequest(
            "Give both access_key_id and secret_access_key, or neither.", param="access_key_id"
        )
    bucket = Bucket(
        endpoint=endpoint, region=str(place["region"]), name=str(place["bucket"]), **secrets
    )
    return S3Place(bucket, str(place.get("prefix", "")))


def hub_place(place: Mapping[str, Any], secrets: Mapping[str, str]) -> HubPlace:
    """Return the files of a dataset of the Hub. Raises InvalidRequest that names the field."""
    repository, revision = str(place.get("repository", "")), str(place.get("revision", ""))
    checked = hub_source(repository, revision, secrets.get("token", ""))
    return HubPlace(
        repository, checked.origin["revision"], str(place.get("prefix", "")), checked.token
    )


PLACES: dict[str, Callable[[Mapping[str, Any], Mapping[str, str]], Place]] = {
    "s3": s3_place,
    "hub": hub_place,
}


def seal(secrets: Mapping[str, str]) -> bytes:
    """Return credentials, encrypted."""
    return peppered_cipher(PURPOSE).encrypt(json.dumps(dict(secrets)).encode())


def unsealed(kind: str, place: Mapping[str, Any], sealed: bytes | memoryview) -> Place:
    """Return the place of a stored source. Raises PullFailed."""
    try:
        secrets: dict[str, str] = json.loads(peppered_cipher(PURPOSE).decrypt(bytes(sealed)))
        return PLACES[kind](place, secrets)
    except InvalidToken as error:
        raise PullFailed("Its credentials can no longer be read: set the source again.") from error
    except InvalidRequest as error:  # the operator's rules, or the Hub, have changed
        raise PullFailed(error.message) from error


@dataclasses.dataclass(frozen=True, slots=True)
class S3Place:
    bucket: Bucket
    prefix: str

    def listed(self) -> list[Remote]:
        found: list[Remote] = []
        continuation = ""
        while True:
            url = self.bucket.list_url(self.prefix, continuation)
            try:
                with _called(url, "the bucket", _MAX_LIST_BYTES) as answer:
                    page, continuation = s3_requests.read_list(answer.read())
            except s3_requests.WrongAnswer:
                raise PullFailed("The store did not answer with a list of the bucket.") from None
            found += [
                Remote(each.key, each.etag, "")
                for each in page
                if each.num_bytes and _has_rows(each.key, self.prefix)
            ]
            _check_number(found)
            if not continuation:
                return sorted(found, key=lambda remote: remote.name)

    def opened(self, remote: Remote, max_bytes: int) -> contextlib.AbstractContextManager[Answer]:
        return _called(self.bucket.object_url(remote.name), remote.name, max_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class HubPlace:
    repository: str
    revision: str
    prefix: str
    token: str

    def listed(self) -> list[Remote]:
        hub, revision = settings.HUB_ENDPOINT, quote(self.revision, safe="")
        url = f"{hub}/api/datasets/{self.repository}/revision/{revision}?blobs=true"
        with _called(url, "the Hub's dataset", _MAX_LIST_BYTES, self.token) as answer:
            body = answer.read()
        try:
            told = json.loads(body)
            commit, files = told["sha"], told["siblings"]
            found = [
                Remote(
                    file["rfilename"],
                    str(file.get("blobId") or commit),
                    f"{hub}/datasets/{self.repository}/resolve/{commit}/{quote(file['rfilename'])}",
                )
                for file in files
                if file.get("size") != 0 and _has_rows(file["rfilename"], self.prefix)
            ]
            if not _COMMIT.fullmatch(commit):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise PullFailed("The Hub did not answer with a list of files.") from None
        _check_number(found)
        return sorted(found, key=lambda remote: remote.name)

    def opened(self, remote: Remote, max_bytes: int) -> contextlib.AbstractContextManager[Answer]:
        return _called(remote.url, remote.name, max_bytes, self.token, outbound.MAX_REDIRECTS)


def _has_rows(name: str, prefix: str) -> bool:
    return name == prefix or (name.startswith(prefix) and name.endswith(_SUFFIX))


def _check_number(found: list[Remote]) -> None:
    if len(found) > MAX_OBJECTS:
        raise PullFailed(f"There are more than {MAX_OBJECTS} objects: use a longer prefix.")


@contextlib.contextmanager
def _called(
    url: str, what: str, max_bytes: int, token: str = "", redirects: int = 0
) -> Iterator[Answer]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    bounds = dataclasses.replace(_BOUNDS, max_bytes=max_bytes)
    what = what if what.isprintable() else ascii(what)
    try:
        with outbound.call(
            "GET", url, headers=headers, bounds=bounds, redirects=redirects
        ) as answer:
            if answer.status != 200:
                known = {401: ": check the credentials", 403: ": check the credentials"}
                raise PullFailed(
                    f"The answer for {what[:300]} was {answer.status}"
                    f"{known.get(answer.status, '')}.",
                    is_final=answer.status not in _LATER,
                )
            yield answer
    except Refused as error:
        # The message has no address; after a redirect it is about one that we must not tell.
        raise PullFailed(f"Its address may not be called: {error}") from error
    except CallFailed as error:
        raise PullFailed(f"{what[:300]} could not be read: {error}", is_final=False) from error

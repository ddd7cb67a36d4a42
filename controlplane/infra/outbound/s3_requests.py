"""Addresses of a stranger's S3 store, signed with a tenant's keys; `outbound` calls them.

Nothing here calls anybody: a client of S3 would follow redirects, environment and endpoints of its
own. Buckets are named in the path, which all stores understand.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote_plus, urlencode
from xml.etree import ElementTree

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

_EXPIRES_S = 600
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class WrongAnswer(ValueError):
    """The store's list cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket, and the keys to it; without them it is read as everybody may."""

    endpoint: str
    region: str
    name: str
    access_key_id: str = ""
    secret_access_key: str = ""
    session_token: str = ""

    def object_url(self, key: str) -> str:
        return self._signed(f"/{quote(key, safe='/-_.~')}", {})

    def list_url(self, prefix: str, continuation: str) -> str:
        """Return the address of a page of the list of the keys that begin with `prefix`."""
        asked = {"list-type": "2", "encoding-type": "url", "max-keys": "1000", "prefix": prefix}
        return self._signed(
            "", asked | ({"continuation-token": continuation} if continuation else {})
        )

    def _signed(self, path: str, query: Mapping[str, str]) -> str:
        url = f"{self.endpoint}/{self.name}{path}"
        if query:
            url += f"?{urlencode(sorted(query.items()), quote_via=quote)}"
        if not self.access_key_id:
            return url
        keys = Credentials(self.access_key_id, self.secret_access_key, self.session_token or None)
        request = AWSRequest("GET", url)
        S3SigV4QueryAuth(keys, "s3", self.region, expires=_EXPIRES_S).add_auth(request)
        signed: str = request.url
        return signed


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """An object as a store lists it."""

    key: str
    etag: str
    num_bytes: int


def read_list(body: bytes) -> tuple[list[Listed], str]:
    """Return the objects of a page, and where the next page begins; "": this is the last.

    Raises WrongAnswer.
    """
    if b"<!" in body:  # entities, which a list has not, could make it arbitrarily large
        raise WrongAnswer
    try:
        root = ElementTree.fromstring(body)
        found = [
            Listed(
                key=unquote_plus(_text(entry, "Key")),
                etag=_text(entry, "ETag").strip('"'),
                num_bytes=int(_text(entry, "Size")),
            )
            for entry in root.iterfind("{*}Contents")
        ]
        is_cut = root.findtext("{*}IsTruncated") == "true"
        return found, _text(root, "NextContinuationToken") if is_cut else ""
    except (ElementTree.ParseError, ValueError) as error:
        raise WrongAnswer from error


def _text(entry: ElementTree.Element, name: str) -> str:
    text = entry.findtext(f"{{*}}{name}")
    if not text:
        raise WrongAnswer
    return text

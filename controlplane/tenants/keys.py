"""The format of an API key: scanners and this server recognize a key without a database.

    lk_<live|test|ops>_<22 base62: public id><43 base62: secret><6 base62: CRC32 of all before it>

An `ops` key is an operator's service key (`operator.service_keys`); the others are tenants.

The secret has 256 random bits from the operating system and cannot be guessed, so a plain HMAC is
enough to store it. With the checksum the server refuses a typing error before any lookup, and a
scanner for leaked secrets tells a key from a random string (`KEY_REGEX` is the pattern for it).
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
import secrets
import string
import zlib

#: Both can use the same models: the name tells people and scanners where a key belongs.
ENVIRONMENTS = ("live", "test")
#: The part of an operator's service key in this place.
OPERATORS = "ops"
KEY_REGEX = r"\blk_(?:live|test|ops)_[0-9A-Za-z]{71}\b"

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_ID_LENGTH, _SECRET_LENGTH, _CHECKSUM_LENGTH = 22, 43, 6
_FORM = re.compile(
    r"lk_(live|test|ops)_([0-9A-Za-z]{22})([0-9A-Za-z]{43})([0-9A-Za-z]{6})", re.ASCII
)


@dataclasses.dataclass(frozen=True, slots=True)
class KeyParts:
    """The parts of a well-formed key. Its repr shows no secret."""

    public_id: str
    secret: str = dataclasses.field(repr=False)
    environment: str = "live"

    def text(self) -> str:
        """Return the whole key."""
        body = f"lk_{self.environment}_{self.public_id}{self.secret}"
        return body + _checksum(body)

    def secret_hmac(self, pepper: str) -> bytes:
        """Return the HMAC-SHA256 that the database stores instead of the secret, 32 bytes."""
        return hmac.digest(pepper.encode(), self.secret.encode(), hashlib.sha256)


def generate(environment: str = "live") -> KeyParts:
    return KeyParts(_random(_ID_LENGTH), _random(_SECRET_LENGTH), environment)


def renewed(public_id: str, environment: str) -> KeyParts:
    """Return a key with this public id and a new secret."""
    return KeyParts(public_id, _random(_SECRET_LENGTH), environment)


def parse(text: str) -> KeyParts | None:
    """Return the parts of a key whose format and checksum are right, else None."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    environment, public_id, secret, checksum = match.groups()
    if not hmac.compare_digest(_checksum(text[:-_CHECKSUM_LENGTH]), checksum):
        return None
    return KeyParts(public_id, secret, environment)


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = ""
    for _ in range(_CHECKSUM_LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits

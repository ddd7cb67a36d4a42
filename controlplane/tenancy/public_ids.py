"""Ids as clients of /v1 see them: OpenAI's prefix and the row's id in hex."""

from __future__ import annotations

import uuid
from typing import ClassVar

from controlplane.tenancy.scoping import TenantModel


def public_id(prefix: str, id: uuid.UUID) -> str:
    """Return the prefix and 32 hex digits, as in `file-0190…`."""
    return f"{prefix}{id.hex}"


def parse_id(prefix: str, text: str) -> uuid.UUID | None:
    """Return the row's id in a client's public id; None if it is not one with this prefix."""
    digits = text.removeprefix(prefix)
    if digits == text or len(digits) != 32 or not digits.isalnum() or not digits.isascii():
        return None
    try:
        return uuid.UUID(hex=digits)
    except ValueError:
        return None


class PublicIdModel(TenantModel):
    """A tenant's row that has a public id."""

    PREFIX: ClassVar[str]

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.public_id

    @property
    def public_id(self) -> str:
        return public_id(self.PREFIX, self.pk)

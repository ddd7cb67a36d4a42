"""Ids as clients of /v1 see them: OpenAI's prefix, and the row's id in hex."""

from __future__ import annotations

import uuid
from typing import ClassVar

from controlplane.tenancy.scoping import TenantModel


def public_id(prefix: str, id: uuid.UUID) -> str:
    """`file-` and 32 hex digits."""
    return f"{prefix}{id.hex}"


def parse_id(prefix: str, text: str) -> uuid.UUID | None:
    """The id behind what a client sent; None for what is none of this kind."""
    digits = text.removeprefix(prefix)
    if digits == text or len(digits) != 32 or not digits.isalnum() or not digits.isascii():
        return None
    try:
        return uuid.UUID(hex=digits)
    except ValueError:
        return None


class PublicIdModel(TenantModel):
    """A tenant's row that clients know by its public id."""

    PREFIX: ClassVar[str]

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.public_id

    @property
    def public_id(self) -> str:
        return public_id(self.PREFIX, self.pk)

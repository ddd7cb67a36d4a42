"""Fields of answers that describe exactly what they write to the OpenAPI document."""

from __future__ import annotations

import datetime as dt
from typing import Any

from drf_spectacular.drainage import set_override
from rest_framework import serializers


class DescribedField(serializers.Field[Any, Any, Any, Any]):
    """Write a value as it is, described by the JSON schema `schema`."""

    def __init__(self, schema: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        set_override(self, "field", schema)

    def to_representation(self, value: Any) -> Any:
        return value


class Constant(DescribedField):
    """Write the same value in every answer."""

    def __init__(self, value: str | int | None) -> None:
        super().__init__({"type": "null"} if value is None else {"const": value})
        self._value = value

    def get_attribute(self, instance: Any) -> Any:
        return self._value


class UnixTime(DescribedField):
    """Write a moment as whole seconds since 1970."""

    def __init__(self, **options: Any) -> None:
        super().__init__({"type": "integer"}, **options)

    def to_representation(self, value: dt.datetime) -> int:
        return int(value.timestamp())


class PublicId(DescribedField):
    """Write a row's id as clients of /v1 know it."""

    def __init__(self, prefix: str) -> None:
        schema = {"type": "string", "pattern": f"^{prefix}[0-9a-f]{{32}}$"}
        super().__init__(schema, source="public_id")

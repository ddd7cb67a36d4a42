"""Fields of answers that describe exactly what they write to the OpenAPI document."""

from __future__ import annotations

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

"""Serializer fields of the management API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rest_framework import serializers


class ChoiceField(serializers.ChoiceField):
    """Django REST framework's field, with an error that names the allowed values."""

    def __init__(self, choices: Sequence[Any], **options: Any) -> None:
        super().__init__(choices, **options)
        allowed = ", ".join(map(str, self.choices))
        self.error_messages["invalid_choice"] = f'"{{input}}" is not one of: {allowed}.'
        self.error_messages["no_text"] = f"This must be one of: {allowed}."

    def to_internal_value(self, data: Any) -> Any:
        if not isinstance(data, str):
            self.fail("no_text")
        return super().to_internal_value(data)

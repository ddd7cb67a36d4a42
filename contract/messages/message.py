"""Message: the encoding that all messages share, and AdapterRef, which several of them have."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, Self

#: Message class -> field name -> default.
fields_of: Callable[[Any], dict[str, Any]] = functools.cache(
    lambda message: {field.name: field.default for field in dataclasses.fields(message)}
)


class Message:
    """Shared encoding of the dataclasses below. Fields at their default are left out."""

    __slots__ = ()

    def encode(self) -> bytes:
        return json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False).encode()

    def to_dict(self) -> dict[str, Any]:
        fields = {}
        for name, default in fields_of(type(self)).items():
            value = getattr(self, name)
            if value is default or value == default:
                continue
            if isinstance(value, Message):
                value = value.to_dict()
            elif isinstance(value, tuple) and value and isinstance(value[0], Message):
                value = [item.to_dict() for item in value]
            fields[name] = value
        return fields

    @classmethod
    def decode(cls, payload: bytes | str) -> Self:
        return cls.from_dict(json.loads(payload))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        known = fields_of(cls)
        return cls(
            **{
                name: tuple(value) if type(value) is list else value
                for name, value in fields.items()
                if name in known
            }
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef(Message):
    """One adapter of a request: the location of its files, and its weight."""

    digest: str  # `adapter_digest`, hex
    config_key: str  # S3 key of adapter_config.json
    tensors_key: str  # S3 key of adapter_model.safetensors
    num_bytes: int  # size of the tensors file
    weight: float = 1.0
    # Whether workers that keep adapters in FP8 keep this one so; else they have its original.
    in_fp8: bool = False

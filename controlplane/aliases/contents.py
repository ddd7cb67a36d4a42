"""The contents of a revision, its targets and defaults, checked before they are stored."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from contract.messages.sampling import MAX_ADAPTERS, WEIGHT
from controlplane.aliases.guards import guard_parse, guard_read
from controlplane.aliases.models import AliasPart, AliasRevision
from controlplane.aliases.sampling import checked_sampling
from controlplane.aliases.verdict import Guard
from controlplane.errors import InvalidRequest
from controlplane.schemas import BadSchema, Status, paths, plan
from controlplane.tenants.models import is_slug

MAX_SYSTEM_PROMPT_CHARS = 16_000
MAX_NUMBER = 2**31 - 1

Target = AliasPart.Target
Warmth = AliasRevision.Warmth


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One adapter of a target; without a version it is whichever is live."""

    adapter: str
    version: int | None = None
    weight: float = 1.0

    @property
    def model(self) -> str:
        """Return what requests put in `model` for this adapter or version."""
        return self.adapter if self.version is None else f"{self.adapter}@{self.version}"

    def __str__(self) -> str:
        return self.model if self.weight == 1.0 else f"{self.weight:g}*{self.model}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The targets and defaults of a revision.

    primary, canary  the weighted sums that answer; no canary: ()
    json_schema      that answers obey; None: none
    guard            when the canary is rolled back by itself: what is not `verdict.Guard`'s default
    """

    primary: tuple[Part, ...]
    canary: tuple[Part, ...] = ()
    canary_percent: int = 0
    json_schema: dict[str, Any] | None = None
    system_prompt: str = ""
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    warmth: str = Warmth.COLD
    guard: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.primary + self.canary

    @property
    def schema_text(self) -> str:
        """Return the schema as stored text, in which properties keep their order."""
        if self.json_schema is None:
            return ""
        return json.dumps(self.json_schema, separators=(",", ":"))

    @property
    def whole_guard(self) -> Guard:
        """Return the guard, completed with defaults."""
        return guard_read(self.guard)

    def is_same(self, other: Contents) -> bool:
        """Return whether both are equal, also in the order of the schema's properties."""
        return self == other and self.schema_text == other.schema_text

    def checked(self) -> Contents:
        """Return the contents in normal form. Raises InvalidRequest that names the field."""
        _check_target("primary", self.primary)
        if not self.primary:
            raise InvalidRequest("Name the adapter or version that answers.", param="primary")
        _check_target("canary", self.canary)
        _check_percent(self.canary_percent, has_canary=bool(self.canary))
        if self.json_schema is not None:
            _check_schema(self.json_schema)
        _check_prompt(self.system_prompt)
        if self.warmth not in Warmth.values:
            allowed = ", ".join(Warmth.values)
            raise InvalidRequest(f"warmth is one of: {allowed}.", param="warmth")
        sampling, guard = checked_sampling(self.sampling), guard_parse(self.guard)
        return dataclasses.replace(self, sampling=sampling, guard=guard)

    def summary(self) -> dict[str, Any]:
        """Return the contents for the audit trail, with lengths in place of long texts."""
        return {
            "primary": [str(part) for part in self.primary],
            "canary": [str(part) for part in self.canary],
            "canary_percent": self.canary_percent,
            "json_schema_chars": len(self.schema_text),
            "system_prompt_chars": len(self.system_prompt),
            "sampling": self.sampling,
            "warmth": str(self.warmth),
            "guard": self.guard,
        }


def contents_of(revision: AliasRevision) -> Contents:
    """Return what a stored revision says."""
    parts = sorted(revision.parts.all(), key=lambda part: part.position)
    return Contents(
        primary=_parts_of(parts, Target.PRIMARY),
        canary=_parts_of(parts, Target.CANARY),
        canary_percent=revision.canary_percent,
        json_schema=json.loads(revision.json_schema) if revision.json_schema else None,
        system_prompt=revision.system_prompt,
        sampling=revision.sampling,
        warmth=revision.warmth,
        guard=revision.guard,
    )


def canary_of(revision: AliasRevision) -> tuple[Part, ...]:
    """Return the canary that a stored revision names."""
    parts = sorted(revision.parts.all(), key=lambda part: part.position)
    return _parts_of(parts, Target.CANARY)


def _parts_of(parts: Iterable[AliasPart], target: Target) -> tuple[Part, ...]:
    return tuple(
        Part(adapter=part.adapter_name, version=part.number, weight=part.weight)
        for part in parts
        if part.target == target
    )


def _check_target(field: str, parts: tuple[Part, ...]) -> None:
    if len(parts) > MAX_ADAPTERS:
        raise InvalidRequest(f"A blend can have at most {MAX_ADAPTERS} adapters.", param=field)
    for part in parts:
        if not is_slug(part.adapter):
            raise InvalidRequest(
                "Name the adapter only, and put its version into `version`.", param=field
            )
        if not WEIGHT.has(part.weight):
            raise InvalidRequest(f"A weight is {WEIGHT}.", param=field)
        if part.version is not None and not 1 <= part.version <= MAX_NUMBER:
            raise InvalidRequest("A version is a whole number from 1.", param=field)
    if len({(part.adapter, part.version) for part in parts}) < len(parts):
        raise InvalidRequest(
            "A blend can have each version only once: remove the repeated one.", param=field
        )


def _check_percent(percent: int, *, has_canary: bool) -> None:
    if not 0 <= percent <= 100:
        raise InvalidRequest(
            "canary_percent is a whole number from 0 to 100.", param="canary_percent"
        )
    if percent and not has_canary:
        raise InvalidRequest("Name a canary, or set canary_percent to 0.", param="canary_percent")


def _check_schema(schema: dict[str, Any]) -> None:
    """Raise InvalidRequest for a schema that is not enforced whole: answers must obey it."""
    try:
        made = plan(schema)
        made.schema.encode()
    except BadSchema as error:
        raise _bad_schema(str(error)) from error
    except UnicodeEncodeError as error:
        raise _bad_schema("has a lone surrogate: remove it") from error
    faults = made.with_status(Status.CHECKED, Status.UNSUPPORTED)
    if faults:
        first = faults[0]
        raise _bad_schema(
            f"must be enforced while decoding, as a strict one: {first.path} is {first.status} "
            f"({first.reason}). All such keywords: {paths(faults)}"
        )


def _bad_schema(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"'json_schema' {problem.rstrip('.')}.", param="json_schema", code="invalid_schema"
    )


def _check_prompt(prompt: str) -> None:
    if len(prompt) > MAX_SYSTEM_PROMPT_CHARS:
        raise InvalidRequest(
            f"A system prompt can have at most {MAX_SYSTEM_PROMPT_CHARS} characters.",
            param="system_prompt",
        )
    check_text(prompt, "system_prompt")


def check_text(text: str, field: str) -> None:
    """Raise InvalidRequest for text that no row can hold."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequest(
            f"{field} has a character that cannot be stored: remove NUL and lone surrogates.",
            param=field,
        )

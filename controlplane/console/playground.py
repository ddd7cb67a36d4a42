"""The data of the playground's page: the first contents of its columns, and names to choose."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from django.db.models import Prefetch

from contract.messages.sampling import MAX_ADAPTERS
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel, is_serving
from controlplane.adapters.resolution import parse_model_name
from controlplane.aliases.contents import Contents
from controlplane.aliases.contents import Part as TargetPart
from controlplane.aliases.models import AliasPart, AliasRevision, is_current
from controlplane.console.request_log import line_of
from controlplane.inference.access import ServedModel
from controlplane.inference.schemas import MAX_MODEL_CHARS
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.services import StoredWords

MAX_COLUMNS = 3
#: Largest number of names of each kind in the list. Others can be typed.
MAX_NAMES = 200
#: The fields of the page that a request of the log can fill.
PARAMETERS = ("temperature", "top_p", "top_k", "max_tokens", "seed")

Status = AdapterVersion.Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One name of a column; several are a blend, each with its weight."""

    name: str
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first contents of the page.

    columns     the parts of each; none: the script makes an empty one
    parameters  by the names of `PARAMETERS`, and `stop`
    note        the parts of a logged request, or of an alias, that could not be taken over
    """

    columns: list[list[Part]]
    system: str = ""
    user: str = ""
    schema: str = ""
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    request_id: str = ""
    alias: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A name that requests can use, and what it is."""

    name: str
    kind: str


def wanted_columns(names: Iterable[str]) -> list[list[Part]]:
    """Return a column for each name in the page's address; impossible names are left out.

    Names are shown, and looked up only when the person runs them.
    """
    fit = (name for name in names if 0 < len(name) <= MAX_MODEL_CHARS and "\0" not in name)
    return [[Part(name=name)] for name in list(dict.fromkeys(fit))[:MAX_COLUMNS]]


def model_names() -> list[NamedModel]:
    """Return names of the tenant in scope: aliases, live adapters, ready versions, base models.

    An alias comes in place of the adapter of its name.
    """
    serving = is_serving("adapter__base_model__")
    live = Adapter.objects.exclude(live_version=None).filter(is_serving("base_model__"))
    names = _alias_names()
    taken = {each.name for each in names}
    names += [
        NamedModel(name=name, kind=f"adapter, version {number} is live")
        for name, number in live.order_by("name").values_list("name", "live_version__number")[
            :MAX_NAMES
        ]
        if name not in taken
    ]
    ready = AdapterVersion.objects.filter(serving, status=Status.READY).order_by("-created_at")
    names += [
        NamedModel(name=f"{name}@{number}", kind="adapter version")
        for name, number in ready.values_list("adapter__name", "number")[:MAX_NAMES]
    ]
    bases = BaseModel.objects.filter(is_serving()).order_by("name")
    return names + [
        NamedModel(name=name, kind="base model")
        for name in bases.values_list("name", flat=True)[:MAX_NAMES]
    ]


def _alias_names() -> list[NamedModel]:
    rows = AliasRevision.objects.filter(is_current(), is_serving("base_model__"))
    rows = rows.select_related("alias").defer("system_prompt", "json_schema")
    rows = rows.prefetch_related(Prefetch("parts", AliasPart.objects.order_by("position")))
    return [
        NamedModel(name=row.alias.name, kind=f"alias of {_targets(row)}")
        for row in rows.order_by("alias__name")[:MAX_NAMES]
    ]


def _targets(row: AliasRevision) -> str:
    by_target: dict[str, list[str]] = {}
    for part in row.parts.all():
        weight = "" if part.weight == 1.0 else f"{part.weight:g}*"
        by_target.setdefault(part.target, []).append(f"{weight}{part}")
    primary, canary = (" + ".join(by_target.get(each, ())) for each in AliasPart.Target)
    return f"{primary}; {row.canary_percent} %: {canary}" if canary else primary


def start_of_alias(name: str, contents: Contents) -> Start:
    """Return a column for each target of an alias, with the alias's defaults.

    Its targets are asked for by their own names, so the page has to send its defaults itself.
    """
    sampling = dict(contents.sampling)
    stops = sampling.pop("stop", [])
    parameters = {each: sampling.pop(each) for each in PARAMETERS if each in sampling}
    if len(stops) == 1:
        parameters["stop"] = stops[0]
    elif stops:
        sampling["stop"] = stops
    schema = contents.json_schema
    targets = [target for target in (contents.primary, contents.canary) if target]
    return Start(
        columns=[[_part_of(part) for part in target] for target in targets],
        system=contents.system_prompt,
        schema="" if schema is None else json.dumps(schema, indent=2, ensure_ascii=False),
        parameters=parameters,
        alias=name,
        note=f"The page has no field for its {', '.join(sampling)}." if sampling else "",
    )


def _part_of(part: TargetPart) -> Part:
    at = "" if part.version is None else f"@{part.version}"
    return Part(name=f"{part.adapter}{at}", weight=part.weight)


def held_versions(columns: Sequence[Sequence[Part]]) -> list[AdapterVersion]:
    """Return the versions among the columns that are ready and not live."""
    found = []
    for column in columns:
        parsed = parse_model_name(column[0].name) if len(column) == 1 else None
        if parsed is None or parsed.number is None or parsed.base_model is not None:
            continue
        rows = AdapterVersion.objects.filter(
            adapter__name=parsed.name, number=parsed.number, status=Status.READY
        ).select_related("adapter__live_version")
        found += [row for row in rows if row.adapter.live_version_id != row.pk]
    return found


def served_name(model: ServedModel) -> str:
    """Return the exact names that answer, such as `invoices@3`, with the weights of a blend."""
    if not model.parts:
        return f"{model.base_model.name} {model.base_model.revision[:12]}"
    is_blend = len(model.parts) > 1 or model.parts[0][1] != 1.0
    names = (
        (f"{weight:g} * " if is_blend else "") + f"{version.adapter.name}@{version.number}"
        for version, weight in model.parts
    )
    return " + ".join(names)


def start_of(row: InferenceRequest, words: StoredWords | None) -> Start:
    """Return the prompt and settings of a logged request, as far as the page can show them.

    words  None: not stored, or the person may not read them
    """
    sampling = row.sampling or {}
    start = Start(
        columns=[_parts_of(row)],
        parameters={name: sampling[name] for name in PARAMETERS if sampling.get(name) is not None},
        request_id=row.request_id,
        note="Its prompt is not stored, or your role may not read it.",
    )
    return start if words is None else dataclasses.replace(start, **_prompt_of(words))


def _parts_of(row: InferenceRequest) -> list[Part]:
    """Return the column of a request: its model, or the versions of its blend."""
    parts = line_of(row).parts
    if len(parts) > 1 and all(part.version is not None for part in parts):
        return [
            Part(
                name=f"{part.version.adapter.name}@{part.version.number}",
                weight=1.0 if part.weight is None else part.weight,
            )
            for part in parts[:MAX_ADAPTERS]
            if part.version is not None
        ]
    return [Part(name=row.model)]


def _prompt_of(words: StoredWords) -> dict[str, Any]:
    """Return `system`, `user` and `note` for a stored prompt."""
    cut = "A part of it was too long to store. " if words.is_truncated else ""
    messages = words.prompt.get("messages")
    if messages is None:
        text = words.prompt.get("text")
        if isinstance(text, str):
            return {"user": text, "note": cut + "It was sent as plain text; here it is a chat."}
        return {"note": "Its prompt is a list, or token ids: the playground takes one text."}
    systems = [message for message in messages if message.get("role") == "system"]
    users = [message for message in messages if message.get("role") == "user"]
    whole = len(messages) == len(systems) + len(users) and len(systems) < 2 and len(users) < 2
    missing = (
        f"It has {len(messages)} messages; the playground took its first system message and its "
        "last user message."
    )
    return {
        "system": _text(systems[0]) if systems else "",
        "user": _text(users[-1]) if users else "",
        "note": cut + ("" if whole else missing),
    }


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)

"""Parse a model's name, resolve it for the tenant in scope, and refer workers to its files."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from typing import NamedTuple, TypeVar

from django.db.models import F, Model, QuerySet

from contract.messages.protocol import AdapterRef
from controlplane.adapters.models import (
    Adapter,
    AdapterVersion,
    BaseModel,
    is_not_over,
    is_serving,
    today,
)
from controlplane.errors import InvalidRequest, NotFound

_Row = TypeVar("_Row", bound=Model)

#: Names of each kind that an unknown name is compared with, to suggest a similar one.
MAX_LIKE = 60
_PLAIN = re.compile(r"([a-z0-9][a-z0-9._-]{0,62})(?:@([1-9][0-9]{0,8}))?", re.ASCII)
_SLUG = r"([a-z0-9][a-z0-9._-]{0,62})"
_FINE_TUNED = re.compile(rf"ft:{_SLUG}:{_SLUG}:{_SLUG}:([1-9][0-9]{{0,8}})", re.ASCII)


class ModelName(NamedTuple):
    """The parts of `adapter`, `adapter@3` or `ft:<base model>:<tenant>:adapter:3`.

    The last two name the same version. `base_model` and `tenant` are None in the first two forms.
    """

    name: str
    number: int | None
    base_model: str | None = None
    tenant: str | None = None


def parse_model_name(text: str) -> ModelName | None:
    """Return the parts of a model's name, or None if it has none of the forms."""
    if match := _FINE_TUNED.fullmatch(text):
        base_model, tenant, name, number = match.groups()
        return ModelName(name, int(number), base_model, tenant)
    if match := _PLAIN.fullmatch(text):
        return ModelName(match[1], int(match[2]) if match[2] else None)
    return None


def plain_name(text: str) -> str:
    """Return the name that rules use: `adapter@3` for `ft:base:tenant:adapter:3`, else `text`."""
    parsed = parse_model_name(text)
    return text if parsed is None or parsed.base_model is None else f"{parsed.name}@{parsed.number}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A resolved `model`: an adapter's version, a blend of versions, or only a base model."""

    name: str
    base_model: BaseModel
    version: AdapterVersion | None
    created: int  # Unix seconds
    #: An alias's weighted sum, which answers in place of one version.
    blend: tuple[tuple[AdapterVersion, float], ...] = ()

    @property
    def parts(self) -> tuple[tuple[AdapterVersion, float], ...]:
        """Return the versions that answer together, with their weights."""
        return self.blend if self.version is None else ((self.version, 1.0),)

    @property
    def is_base(self) -> bool:
        """Return whether the base model answers without an adapter."""
        return self.version is None and not self.blend

    @property
    def shutdown_date(self) -> dt.date | None:
        """Return the day from which it is refused: the first of its base model's and versions'."""
        ends = [self.base_model.shutdown_date, *(part.shutdown_date for part, _ in self.parts)]
        return min((end for end in ends if end is not None), default=None)

    @property
    def deprecated_at(self) -> dt.datetime | None:
        """Return when the first of its versions was deprecated."""
        moments = (part.deprecated_at for part, _ in self.parts)
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def is_shut_down(self) -> bool:
        """Return whether its shutdown date has come."""
        return self.shutdown_date is not None and self.shutdown_date <= today()


def model_resolve(name: str) -> ResolvedModel:
    """Resolve the name of an adapter (see `parse_model_name`), else of a base model.

    The result may have been shut down: `check_serving` checks that. Raises the same NotFound for
    every reason.
    """
    parsed = parse_model_name(name)
    if parsed is not None:
        version = _ready_version(parsed)
        if version is not None:
            return _resolved(name, version)
        # A name with a number is never a base model's: a guess at versions costs one query.
        base_model = _base_model(name) if parsed.number is None else None
        if base_model is not None:
            return _resolved_base(base_model)
    raise no_such_model(name)


def base_model_resolve(name: str) -> ResolvedModel:
    """Return the base model of this name, also one that requests may not use. Raises NotFound."""
    base_model = _only(BaseModel.objects.filter(name=name))
    if base_model is None:
        raise no_such_model(name)
    return _resolved_base(base_model)


def imported_name(repository: str) -> str:
    """Return the name of the version that was imported from a repository of the Hub.

    It is the live one of those that are ready, else the newest.

    Raises NotFound; InvalidRequest if it was imported as several adapters.
    """
    rows = AdapterVersion.objects.filter(
        origin__repository=repository,
        adapter__base_model__is_active=True,
        status=AdapterVersion.Status.READY,
    ).select_related("adapter")
    versions = list(rows.order_by("-number")[:MAX_LIKE])
    live = [each for each in versions if each.adapter.live_version_id == each.pk]
    found = live or versions
    if not found:
        error = no_such_model(repository)
        error.message += " Import a repository of the Hub before you name it."
        raise error
    if len({each.adapter_id for each in found}) > 1:
        names = ", ".join(sorted({f"`{each.adapter.name}`" for each in found}))
        raise InvalidRequest(
            f"`{repository}` was imported as several adapters: name one of {names}.",
            param="model",
        )
    return f"{found[0].adapter.name}@{found[0].number}"


def check_serving(model: ResolvedModel, *, param: str = "model") -> None:
    """Check that requests may use the model today.

    Raises NotFound, with the date, for one that has been shut down.
    """
    base_model = model.base_model
    if base_model.is_shut_down:
        whose = "" if model.is_base else f", with its base model {base_model.name}"
        raise NotFound(
            f"The model `{model.name}` was shut down on {base_model.shutdown_date}{whose}.",
            param=param,
            code="model_not_found",
        )
    for version, _ in model.parts:
        if version.is_shut_down:
            what = "it is" if model.version is not None else "it has"
            raise NotFound(
                f"The model `{model.name}` was shut down on {version.shutdown_date}: {what} "
                f"version {version.number}.",
                param=param,
                code="model_not_found",
            )


def no_such_model(name: str) -> NotFound:
    """Return the error for a model that does not exist or belongs to another tenant."""
    what = f"The model `{name[:200]}` does" if name else "A model with an empty name does"
    return NotFound(
        f"{what} not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def models_list() -> list[ResolvedModel]:
    """Return what the tenant can use: the base models, then its adapters with a live version."""
    live = _live_adapters().select_related("live_version", "base_model").order_by("name")
    found = [_resolved(adapter.name, adapter.live_version, adapter) for adapter in live]
    bases = BaseModel.objects.filter(is_serving()).order_by("name")
    return [_resolved_base(base_model) for base_model in bases] + found


def names_like(name: str) -> list[str]:
    """Return names that the tenant can use: some with the same first letters, and others."""
    bases = BaseModel.objects.filter(is_serving()).order_by("name")
    live = _live_adapters()
    found: dict[str, None] = {}
    beginning = re.sub("[^a-z0-9]", "", name[:2].lower())
    for rows in (bases, live.filter(name__startswith=beginning), live):
        found |= dict.fromkeys(rows.order_by("name").values_list("name", flat=True)[:MAX_LIKE])
    return list(found)


def _live_adapters() -> QuerySet[Adapter]:
    adapters = Adapter.objects.exclude(live_version=None)
    return adapters.filter(is_serving("base_model__"), is_not_over("live_version__"))


def limit_names(model: str) -> set[str]:
    """Return the names in limits that apply to this model, whichever of its names a request uses.

    A limit of `invoices` applies to all its versions, one of `invoices@3` to that version, also
    while `invoices` means it.
    """
    adapter, at, _ = model.partition("@")
    names = {model, adapter}
    if not at:
        live = Adapter.objects.filter(name=adapter, live_version__isnull=False)
        numbers = live.values_list("live_version__number", flat=True)
        names |= {f"{adapter}@{number}" for number in numbers}
    return names


def _ready_version(wanted: ModelName) -> AdapterVersion | None:
    versions = AdapterVersion.objects.filter(
        adapter__name=wanted.name,
        adapter__base_model__is_active=True,
        status=AdapterVersion.Status.READY,
    ).select_related("adapter__base_model")
    if wanted.base_model is not None:
        versions = versions.filter(
            adapter__base_model__name=wanted.base_model, tenant__slug=wanted.tenant
        )
    if wanted.number is not None:
        return _only(versions.filter(number=wanted.number))
    return _only(versions.filter(adapter__live_version=F("pk")))


def _base_model(name: str) -> BaseModel | None:
    return _only(BaseModel.objects.filter(name=name, is_active=True))


def _only(rows: QuerySet[_Row]) -> _Row | None:
    """Return the only row, or None; `first()` would sort."""
    return next(iter(rows[:1]), None)


def _resolved(
    name: str, version: AdapterVersion | None, adapter: Adapter | None = None
) -> ResolvedModel:
    assert version is not None
    adapter = adapter or version.adapter
    return ResolvedModel(
        name=name,
        base_model=adapter.base_model,
        version=version,
        created=int(version.created_at.timestamp()),
    )


def _resolved_base(base_model: BaseModel) -> ResolvedModel:
    created = int(base_model.created_at.timestamp())
    return ResolvedModel(name=base_model.name, base_model=base_model, version=None, created=created)


def adapter_ref(version: AdapterVersion, weight: float = 1.0) -> AdapterRef:
    """Return the reference to a ready version, as jobs and prefetches have it."""
    return AdapterRef(
        digest=version.digest,
        config_key=version.config_key,
        tensors_key=version.tensors_key,
        num_bytes=version.num_bytes,
        weight=weight,
        in_fp8=version.is_in_fp8,
    )

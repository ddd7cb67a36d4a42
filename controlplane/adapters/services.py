"""All changes to base models, adapters and their versions.

Those to adapters and versions act for the tenant in scope.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Max, Q, Sum
from django.utils import timezone
from kombu.exceptions import OperationalError

from contract.adapters import peft_config, safetensors_header
from contract.adapters.base_shape import BaseShape, context_length
from controlplane.adapters import (
    ingest,
    orphaned_objects,
    promotion,
    retirement,
    tasks,
    uploads,
    users,
)
from controlplane.adapters.models import (
    Adapter,
    AdapterInspection,
    AdapterVersion,
    BaseModel,
    is_serving,
)
from controlplane.adapters.resolution import model_resolve
from controlplane.errors import (
    Conflict,
    InvalidRequest,
    PermissionDenied,
    RateLimited,
    Unavailable,
    from_validation,
    require,
)
from controlplane.events.audit.services import record
from controlplane.infra import storage
from controlplane.tenancy.model_scope import check_named
from controlplane.tenants.models import SLUG_RULE, User, is_slug
from controlplane.usage.limits import quotas

MAX_TENSORS_BYTES = uploads.MAX_TENSORS_BYTES
FILES = uploads.FILES
UPLOAD_EXPIRES_S = uploads.URL_EXPIRES_S
#: Largest number of a tenant's versions that wait for their files: bounds staged bytes.
MAX_UNFINISHED = 50
#: The database's largest version number.
MAX_NUMBER = 2**31 - 1

Status = AdapterVersion.Status


@transaction.atomic
def base_model_add(
    *, name: str, revision: str, config: dict[str, Any], known_names: Sequence[str] = ()
) -> BaseModel:
    """Add a base model, or update an existing one.

    config       its Hugging Face config.json
    known_names  other names of it, which adapters may claim as their base; they are added
    Raises InvalidRequest when a name or a size is missing or wrong.
    """
    known = BaseModel.objects.filter(name=name).first()
    before = {"revision": known.revision, "config": known.config} if known else None
    after = {"name": name, "revision": revision, "config": config}
    base_model = known or BaseModel(name=name)
    base_model.revision = revision
    base_model.config = config
    base_model.known_names = list(dict.fromkeys([*base_model.known_names, *known_names]))
    try:
        BaseShape.from_config(config)
        base_model.context_length = context_length(config)
        base_model.full_clean(validate_unique=False)
    except ValidationError as error:
        raise from_validation(error) from error
    except ValueError as error:
        raise InvalidRequest(f"config.json: {error}", param="config") from error
    base_model.save()
    record("changed" if known else "created", base_model, before=before, after=after)
    return base_model


@transaction.atomic
def base_model_activate(*, base_model: BaseModel, is_active: bool) -> None:
    """Switch a base model, and every adapter of it, on or off."""
    before = {"is_active": base_model.is_active}
    base_model.is_active = is_active
    base_model.save(update_fields=["is_active"])
    record("changed", base_model, before=before, after={"is_active": is_active})


@transaction.atomic
def base_model_shutdown_set(*, base_model: BaseModel, shutdown_date: dt.date | None) -> None:
    """Set the date (UTC) from which nobody may use a base model and its adapters; None: no date.

    A date that has come takes effect at once. Running requests continue to their end.
    """
    before = {"shutdown_date": base_model.shutdown_date}
    base_model.shutdown_date = shutdown_date
    base_model.save(update_fields=["shutdown_date"])
    record("changed", base_model, before=before, after={"shutdown_date": shutdown_date})


def adapter_get(*, name: str) -> Adapter:
    """Return the adapter of this name. Raises NotFound."""
    return require(_find(name), "There is no such adapter.")


def adapter_version_get(*, name: str, number: int) -> AdapterVersion:
    """Return the version of this adapter with this number. Raises NotFound."""
    check_named(f"{name}@{number}", "name")
    version = None
    if is_slug(name) and number <= MAX_NUMBER:
        versions = AdapterVersion.objects.filter(adapter__name=name, number=number)
        version = versions.select_related("adapter").first()
    return require(version, "There is no such adapter version.")


def adapter_inspection_get(*, version: AdapterVersion) -> AdapterInspection:
    """Return the inspection of a version; before its first one that is not saved."""
    rows = AdapterInspection.objects.select_related("version__adapter")
    never = AdapterInspection.Status.NOT_RUN
    return rows.filter(version=version).first() or AdapterInspection(
        version=version, status=never, why="This version has not been inspected yet."
    )


@transaction.atomic
def adapter_create(
    *,
    name: str,
    base_model_name: str | None = None,
    description: str = "",
    promotion_policy: str = Adapter.PromotionPolicy.HOLD,
) -> Adapter:
    """Make an adapter without versions. Raises InvalidRequest, Conflict for a taken name."""
    if promotion_policy == Adapter.PromotionPolicy.GATE:
        raise InvalidRequest(
            "The policy gate needs a suite: set it in `gate` of the adapter.",
            param="promotion_policy",
        )
    adapter = _adapter(name, base_model_name, description)
    defaults = {
        "base_model": adapter.base_model,
        "description": description,
        "promotion_policy": promotion_policy,
    }
    adapter, is_new = Adapter.objects.get_or_create(name=name, defaults=defaults)
    if not is_new:
        raise Conflict(f"The adapter {name} already exists.", param="name")
    _record_created(adapter)
    return adapter


def _record_created(adapter: Adapter) -> None:
    after = {
        "name": adapter.name,
        "base_model": adapter.base_model.name,
        "description": adapter.description,
        "promotion_policy": adapter.promotion_policy,
    }
    record("created", adapter, after=after)


@transaction.atomic
def adapter_version_create(
    *,
    name: str,
    files: Mapping[str, int],
    base_model_name: str | None = None,
    created_by: User | None = None,
    accepts_base_mismatch: bool = False,
    source: AdapterVersion.Source = AdapterVersion.Source.UPLOAD,
    is_multipart: bool = False,
    origin: Mapping[str, str] | None = None,
) -> AdapterVersion:
    """Make the next version of an adapter, to be uploaded; make the adapter on first use.

    files             the length in bytes of each of `FILES`; an import's are known later
    origin            where an import comes from
    is_multipart      the files come by parts: see `adapters.uploads`
    base_model_name   optional for an existing adapter, or when there is only one base model
    accepts_base_mismatch  the config may name another base model, see `adapters.base_claim`
    Raises InvalidRequest, also when a quota is full, Conflict when the adapter has
    another base model, RateLimited when too many versions wait for their files.
    """
    if source != AdapterVersion.Source.IMPORT:
        _check_files(files)
    quotas.check("storage_bytes", sum(files.values()))  # its lock also protects the next count
    if source not in (AdapterVersion.Source.TRAINING, AdapterVersion.Source.CHECKPOINT):
        _check_unfinished()
    adapter, is_new = _find(name), False
    if adapter is None:
        adapter = _adapter(name, base_model_name, "")
        # Another request may have made it since.
        adapter, is_new = Adapter.objects.get_or_create(
            name=name, defaults={"base_model": adapter.base_model}
        )
    if base_model_name not in (None, adapter.base_model.name):
        raise Conflict(
            f"{name} is an adapter of {adapter.base_model.name}: choose another name for one of "
            "another base model.",
            param="base_model",
        )
    # The lock reserves the next number.
    adapter = Adapter.objects.select_for_update().get(pk=adapter.pk)
    last = AdapterVersion.objects.filter(adapter=adapter).aggregate(last=Max("number"))["last"]
    version = AdapterVersion.objects.create(
        adapter=adapter,
        number=max(last or 0, adapter.last_deleted) + 1,
        source=source,
        created_by=created_by,
        accepts_base_mismatch=accepts_base_mismatch,
        config_num_bytes=files.get(peft_config.FILE, 0),
        num_bytes=files.get(safetensors_header.FILE, 0),
        origin=dict(origin or {}),
    )
    if is_multipart:
        uploads.uploads_begin(version, files)
    if is_new:
        _record_created(adapter)
    _record_begun(version, files)
    return version


def _record_begun(version: AdapterVersion, files: Mapping[str, int]) -> None:
    after: dict[str, Any] = {
        "adapter": version.adapter.name,
        "number": version.number,
        "source": version.source,
        "files": dict(files),
    }
    if version.origin:
        after["origin"] = version.origin
    if version.accepts_base_mismatch:
        after["accepts_base_mismatch"] = True
    record("created", version, after=after)


def adapter_version_upload_urls(*, version: AdapterVersion) -> dict[str, str]:
    """Return for each file a URL for a PUT of exactly the stated length."""
    return {
        peft_config.FILE: storage.presign_put(
            version.staged_config_key,
            num_bytes=version.config_num_bytes,
            expires_s=UPLOAD_EXPIRES_S,
        ),
        safetensors_header.FILE: storage.presign_put(
            version.staged_tensors_key, num_bytes=version.num_bytes, expires_s=UPLOAD_EXPIRES_S
        ),
    }


def adapter_version_complete(*, version: AdapterVersion) -> AdapterVersion:
    """Note that both files are uploaded, and queue their check.

    A repeated call only queues a check that has not begun. The sweep finds one that began and was
    lost, so a version is never checked twice at the same time. Raises Conflict when a file or a
    part is missing, a file has another length, or it is an import, RateLimited when too many of the
    tenant's versions wait for their check, Unavailable when the store or the queue does not answer.
    """
    if version.status == Status.UPLOADING:
        if version.source == AdapterVersion.Source.IMPORT:
            raise Conflict("This version is being imported.", code="being_imported")
        uploads.files_assemble(version)
        _check_uploaded(version)
        _set_uploaded(version)
        version.refresh_from_db()
    if version.status == Status.UPLOADED:
        transaction.on_commit(lambda: _queue_validation(version))
    return version


def adapter_version_upload_files(
    *, version: AdapterVersion, config_path: Path, tensors_path: Path
) -> AdapterVersion:
    """Upload two local files of the stated lengths to a version, and check them.

    Returns after the check: the version is ready or rejected. Do not call it in a transaction.
    """
    storage.upload(config_path, version.staged_config_key)
    storage.upload(tensors_path, version.staged_tensors_key)
    _set_uploaded(version, is_bounded=False)
    ingest.version_ingest(version.pk)
    version.refresh_from_db()
    return version


@transaction.atomic
def _set_uploaded(version: AdapterVersion, *, is_bounded: bool = True) -> None:
    """Move the version to `uploaded`.

    is_bounded  False: ignore the quota of waiting checks, because the check runs at once
    """
    if is_bounded and AdapterVersion.objects.filter(pk=version.pk, status=Status.UPLOADING):
        quotas.check("adapter_checks", retry_after_s=lambda: 30)
    if version.move(Status.UPLOADING, Status.UPLOADED):
        record("uploaded", version)


@transaction.atomic
def model_delete(name: str) -> None:
    """Retire an adapter, or one version of it; running requests continue.

    Versions keep their numbers. If its live version is retired, the one that was live before it is
    live again; without one the next version that becomes ready is. Raises NotFound like
    `model_resolve`, PermissionDenied for a base model, Conflict for what an alias needs.
    """
    model = model_resolve(name)
    if model.version is None:
        raise PermissionDenied(
            f"`{name[:200]}` is a base model: ask the operator to remove it.", param="model"
        )
    adapter = promotion.lock(model.version.adapter_id)
    ready = AdapterVersion.objects.filter(adapter=adapter, status=Status.READY)
    if name == adapter.name:
        retired = list(ready.order_by("number"))
    else:
        retired = [model.version]
    retirement.versions_check_unused(adapter, retired)
    retirement.versions_retire(adapter, retired)


def storage_used() -> int:
    """Return the bytes of the tenant's versions: stated, staged or stored, until they are removed.

    A rejected version counts until its URLs have expired and its staged files are removed.
    """
    decided_before = timezone.now() - orphaned_objects.REJECTED_COUNTS
    is_gone = Q(status=Status.REJECTED, status_changed_at__lt=decided_before)
    is_gone |= Q(removed_at__isnull=False)
    rows = AdapterVersion.objects.exclude(is_gone)
    sums = rows.aggregate(tensors=Sum("num_bytes"), configs=Sum("config_num_bytes"))
    return (sums["tensors"] or 0) + (sums["configs"] or 0)


def checks_waiting() -> int:
    """Return the number of the tenant's versions that wait for their check or are being checked."""
    checks = (Status.UPLOADED, Status.VALIDATING)
    return AdapterVersion.objects.filter(status__in=checks).count()


def _find(name: str) -> Adapter | None:
    check_named(name, "name")
    if not is_slug(name):
        return None
    return Adapter.objects.filter(name=name).select_related("base_model", "live_version").first()


def _adapter(name: str, base_model_name: str | None, description: str) -> Adapter:
    """Return a checked adapter that is not saved yet."""
    check_named(name, "name")
    if not is_slug(name):
        raise InvalidRequest(SLUG_RULE, param="name")
    if len(description) > 500:
        raise InvalidRequest("A description can have at most 500 characters.", param="description")
    if BaseModel.objects.filter(name=name).exists():
        raise Conflict(f"{name} is the name of a base model.", param="name")
    users.name_check(name)
    return Adapter(name=name, description=description, base_model=_base_model(base_model_name))


def _base_model(name: str | None) -> BaseModel:
    active = BaseModel.objects.filter(is_serving())
    found = list((active if name is None else active.filter(name=name[:64]))[:2])
    if len(found) == 1:
        return found[0]
    names = ", ".join(active.order_by("name").values_list("name", flat=True)[:20])
    problem = "Name the base model" if name is None else "There is no such base model"
    raise InvalidRequest(f"{problem}; available: {names or 'none yet'}.", param="base_model")


def _check_files(files: Mapping[str, int]) -> None:
    for file in files:
        if file not in FILES:
            raise InvalidRequest(
                f"An adapter has exactly these files: {' and '.join(FILES)}.", param="files"
            )
    for file, max_bytes in FILES.items():
        num_bytes = files.get(file)
        if type(num_bytes) is not int or not 1 <= num_bytes <= max_bytes:
            raise InvalidRequest(
                f"State the length of {file} in bytes, from 1 to {max_bytes}.",
                param=f"files.{file}",
            )


def _check_unfinished() -> None:
    if AdapterVersion.objects.filter(status=Status.UPLOADING).count() >= MAX_UNFINISHED:
        raise RateLimited(
            f"{MAX_UNFINISHED} versions wait for their files. Complete some of them; one that is "
            "not completed is rejected after a day.",
            code="too_many_uploads",
            retry_after_s=3600,
        )


def _check_uploaded(version: AdapterVersion) -> None:
    stated = {
        peft_config.FILE: (version.staged_config_key, version.config_num_bytes),
        safetensors_header.FILE: (version.staged_tensors_key, version.num_bytes),
    }
    for file, (key, num_bytes) in stated.items():
        with storage.answering():
            found = storage.object_size(key)
        if found != num_bytes:
            problem = "is not uploaded" if found is None else f"has {found} bytes"
            raise Conflict(f"{file} {problem}; {num_bytes} bytes were stated.", param=file)


def _queue_validation(version: AdapterVersion) -> None:
    try:
        tasks.adapter_version_validate.delay(str(version.tenant_id), str(version.pk))
    except OperationalError as error:
        raise Unavailable(
            "The files are uploaded, but their check could not be queued: "
            "complete the version again."
        ) from error

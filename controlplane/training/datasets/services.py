"""All changes to datasets that callers ask for. They act for the tenant in scope."""

from __future__ import annotations

import hashlib

from controlplane.errors import InvalidRequest, PayloadTooLarge, require
from controlplane.infra import storage
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.tenants.models import is_slug
from controlplane.training.datasets import contents, row_check, versions
from controlplane.training.models import Dataset, DatasetVersion, dataset_key

#: Largest length of rows in one request's body.
MAX_DIRECT_BYTES = 32 * 1024**2


def dataset_upload(*, name: str, content: bytes, appends: bool = False) -> Dataset:
    """Store chat JSONL as the next version of a dataset, which replaces or extends its rows.

    Raises InvalidRequest with the invalid lines, or when the quota is full,
    PayloadTooLarge, RateLimited when several of the tenant are being checked, or Unavailable when
    the store does not answer.
    """
    versions.name_check(name)
    rows = rows_store(content)
    kind = versions.Kind.APPEND if appends else versions.Kind.UPLOAD
    return versions.version_add(name=name, rows=rows, kind=kind, appends=appends)


def rows_convert(content: bytes) -> tuple[bytes, str]:
    """Return rows of other formats as rows of ours, and the names of their formats; "": none.

    Raises InvalidRequest for rows that would lose something, and as `rows_check`.
    """
    if len(content) > MAX_DIRECT_BYTES:
        return content, ""
    tenant_id = current_tenant_id()
    return row_check.rows_convert(tenant_id, content, max_bytes=MAX_DIRECT_BYTES)


def rows_store(content: bytes, *, has_requests: bool = False) -> contents.Rows:
    """Check chat JSONL, and store it where versions of datasets read theirs.

    has_requests  they are captured requests
    Raises what `dataset_upload` raises.
    """
    if len(content) > MAX_DIRECT_BYTES:
        raise PayloadTooLarge(
            f"An upload by one request can have at most {MAX_DIRECT_BYTES} bytes. Upload more as "
            "a file with purpose fine-tune, and make it a version.",
            param="body",
        )
    tenant_id = current_tenant_id()
    found = row_check.rows_check(tenant_id, [content], len(content))
    if found.problems:
        raise InvalidRequest(found.complaint, param="body", code="invalid_dataset")
    sha256 = hashlib.sha256(content).hexdigest()
    contents.content_begin(tenant_id, sha256, len(content), has_requests=has_requests)
    with storage.answering():
        storage.put_bytes(dataset_key(tenant_id, sha256), content)
    return contents.Rows(sha256=sha256, num_bytes=len(content), num_rows=found.num_rows)


def dataset_get(*, name: str, param: str | None = None) -> Dataset:
    """Return the dataset of this name. Raises NotFound."""
    found = Dataset.objects.filter(name=name).first() if is_slug(name) else None
    return require(found, "There is no such dataset.", param=param)


def dataset_version_get(
    name: str, *, param: str | None = None
) -> tuple[Dataset, DatasetVersion | None]:
    """Return the dataset of `name`, or of `name@n` with that version. Raises NotFound, Conflict."""
    bare, at, number = name.partition("@")
    dataset = dataset_get(name=bare, param=param)
    if not at:
        return dataset, None
    is_number = number.isascii() and number.isdecimal() and len(number) < 10
    return dataset, versions.version_get(dataset, int(number) if is_number else 0, param=param)


def dataset_lock(dataset: Dataset) -> Dataset:
    """Return the dataset as it is until the transaction ends. Raises NotFound."""
    found = Dataset.objects.select_for_update().filter(pk=dataset.pk).first()
    return require(found, "There is no such dataset.", param="dataset")

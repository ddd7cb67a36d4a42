"""Begin a version whose files are fetched from elsewhere; `adapters.fetching` fetches them."""

from __future__ import annotations

import logging

from django.db import transaction
from kombu.exceptions import OperationalError

from controlplane.adapters import services, tasks
from controlplane.adapters.import_sources import Source, hub_source, url_source
from controlplane.adapters.models import AdapterVersion, VersionImport
from controlplane.errors import InvalidRequest
from controlplane.tenants.models import User

log = logging.getLogger(__name__)


@transaction.atomic
def adapter_version_import(
    *,
    name: str,
    source: Source,
    base_model_name: str | None = None,
    created_by: User | None = None,
    accepts_base_mismatch: bool = False,
) -> AdapterVersion:
    """Make the next version of an adapter, and queue the fetching of its files.

    Raises what `adapter_version_create` raises.
    """
    version = services.adapter_version_create(
        name=name,
        files={},
        base_model_name=base_model_name,
        created_by=created_by,
        accepts_base_mismatch=accepts_base_mismatch,
        source=AdapterVersion.Source.IMPORT,
        origin=source.origin,
    )
    VersionImport.objects.create(version=version, sealed=source.seal())
    transaction.on_commit(_send)
    return version


def import_source(
    *,
    repository: str = "",
    revision: str = "",
    token: str = "",
    config_url: str = "",
    tensors_url: str = "",
) -> Source:
    """Return the source of either kind.

    repository, revision, token  of the operator's Hub; without a revision `main`
    config_url, tensors_url      else: addresses of both files, such as presigned ones of S3
    Raises InvalidRequest.
    """
    if repository and not (config_url or tensors_url):
        return hub_source(repository, revision, token)
    if config_url and tensors_url and not (repository or revision or token):
        return url_source(config_url, tensors_url)
    raise InvalidRequest(
        "Name a repository, or both config_url and tensors_url.",
        param="tensors_url" if config_url else "config_url" if tensors_url else "repository",
    )


def _send() -> None:
    try:
        tasks.adapter_imports_run.delay()
    except OperationalError:
        log.warning("an import waits for the next sweep: the broker does not answer")

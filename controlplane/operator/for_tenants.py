"""/ops/v1/tenants/{slug}/…: a tenant's own calls of /api/v1, made by an operator for the tenant.

The views are those of /api/v1. They run in the scope of the tenant in the address, and only there;
the trails have the operator as the actor.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.http import HttpRequest, HttpResponseBase
from django.urls import URLPattern, path
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request

from controlplane.management import aliases, canaries, residency
from controlplane.management.account import tenants
from controlplane.management.adapters import (
    adapter_imports,
    adapter_uploads,
    adapters,
    inspections,
    versions,
)
from controlplane.management.base import TenantAPIView, is_forced
from controlplane.management.training import schedules, training
from controlplane.operator.access import OperatorAccess
from controlplane.operator.api import tenant_get, tenant_to_change
from controlplane.operator.principal import OperatorPrincipal
from controlplane.operator.service_keys.scopes import Scope
from controlplane.tenants.permissions import DEVELOPER, Permission

#: Permissions of an operator in a tenant by scope, for the views of /api/v1. Keys that the scope
#: makes can have a developer's scopes.
_ALLOWED: dict[Scope, frozenset[Permission]] = {
    Scope.ADAPTERS_WRITE: frozenset({Permission.READ, Permission.ADAPTERS_WRITE}),
    Scope.DATASETS_WRITE: frozenset({Permission.READ, Permission.TRAINING_WRITE}),
    Scope.TRAINING_WRITE: frozenset({Permission.READ, Permission.TRAINING_WRITE}),
    Scope.KEYS_WRITE: DEVELOPER | {Permission.READ, Permission.KEYS_MANAGE},
}


#: Views with texts that the tenant wrote for its models: `tenants:read` reads no prompt.
_WITH_PROMPTS = (aliases.AliasView, aliases.AliasRevisionView)


class ForTenant(OperatorAccess, TenantAPIView):
    """A view of /api/v1, run as the operator in the scope of the tenant of the address."""

    scope: ClassVar[Scope]

    def dispatch(
        self, request: HttpRequest, *args: Any, slug: str, **kwargs: Any
    ) -> HttpResponseBase:
        self._slug = slug
        return super().dispatch(request, *args, **kwargs)

    def check_permissions(self, request: Request) -> None:
        self.check_scope(request)
        find = tenant_get if request.method in SAFE_METHODS else tenant_to_change
        tenant = find(self._slug)
        allowed = _ALLOWED[self.scope]
        if request.method == "DELETE" and is_forced(request):  # it also ends schedules and runs
            self.operator.check(Scope.TRAINING_WRITE, param="force")
            allowed |= _ALLOWED[Scope.TRAINING_WRITE]
        principal = OperatorPrincipal.of(self.operator, tenant, allowed)
        request.auth = principal
        request.user = principal  # type: ignore[assignment]  # the trail's actor
        self.acted_for = tenant.slug
        super().check_permissions(request)


def _for_tenant(view: type[TenantAPIView], scope: Scope, name: str) -> Any:
    """Return the view for operators.

    name  of its operations in the OpenAPI document
    """
    made = type(
        f"Ops{view.__name__}",
        (ForTenant, view),
        {
            "__doc__": view.__doc__,
            "scope": scope,
            "readers": (scope,) if view in _WITH_PROMPTS else (Scope.TENANTS_READ, scope),
            "writers": (scope,),
        },
    )
    named = {
        method: extend_schema(operation_id=f"ops_{name}_{method}")
        for method in ("get", "post", "put", "patch", "delete")
        if hasattr(view, method)
    }
    return extend_schema_view(**named)(made).as_view()


def _path(address: str, view: type[TenantAPIView], scope: Scope, name: str) -> URLPattern:
    found: URLPattern = path(f"tenants/<str:slug>/{address}", _for_tenant(view, scope, name))
    return found


_ADAPTERS, _KEYS = Scope.ADAPTERS_WRITE, Scope.KEYS_WRITE
_DATASETS, _TRAINING = Scope.DATASETS_WRITE, Scope.TRAINING_WRITE
_ADAPTER, _ALIAS = "adapters/<str:name>", "aliases/<str:name>"
_VERSION = f"{_ADAPTER}/versions/<int:number>"
_RUN, _SCHEDULE = "training-runs/<uuid:run_id>", f"{_ADAPTER}/schedule"

#: Names of operations -> addresses of an adapter, a version and an alias.
_RELEASES: tuple[tuple[str, type[TenantAPIView], str], ...] = (
    (f"{_ADAPTER}/rollback", adapters.AdapterRollbackView, "adapter_rollback"),
    (f"{_ADAPTER}/history", adapters.AdapterHistoryView, "adapter_history"),
    (f"{_ADAPTER}/residency", residency.ResidencyView, "adapter_residency"),
    (f"{_VERSION}/promote", adapters.VersionPromoteView, "version_promote"),
    (f"{_VERSION}/deprecate", versions.VersionDeprecateView, "version_deprecate"),
    (f"{_VERSION}/undeprecate", versions.VersionUndeprecateView, "version_undeprecate"),
    (f"{_VERSION}/retire", versions.VersionRetireView, "version_retire"),
    (f"{_VERSION}/unretire", versions.VersionUnretireView, "version_unretire"),
    (f"{_VERSION}/doctor", inspections.VersionDoctorView, "version_doctor"),
    ("aliases", aliases.AliasesView, "aliases"),
    (_ALIAS, aliases.AliasView, "alias"),
    (f"{_ALIAS}/revisions", aliases.AliasRevisionsView, "alias_revisions"),
    (f"{_ALIAS}/revisions/<int:number>", aliases.AliasRevisionView, "alias_revision"),
    (f"{_ALIAS}/rollback", aliases.AliasRollbackView, "alias_rollback"),
    (f"{_ALIAS}/ramp", aliases.AliasRampView, "alias_ramp"),
    (f"{_ALIAS}/promote-canary", aliases.AliasPromoteCanaryView, "alias_promote_canary"),
    (f"{_ALIAS}/canary", canaries.CanaryView, "alias_canary"),
    (f"{_ALIAS}/timetable", canaries.RampView, "alias_timetable"),
    (f"{_ALIAS}/timetable/pause", canaries.RampPauseView, "alias_timetable_pause"),
    (f"{_ALIAS}/timetable/resume", canaries.RampResumeView, "alias_timetable_resume"),
)

urlpatterns = [
    _path("keys", tenants.ApiKeysView, _KEYS, "keys"),
    _path("keys/<str:public_id>", tenants.ApiKeyView, _KEYS, "key"),
    _path("keys/<str:public_id>/rotate", tenants.ApiKeyRotateView, _KEYS, "key_rotate"),
    _path("keys/<str:public_id>/revoke", tenants.ApiKeyRevokeView, _KEYS, "key_revoke"),
    _path("adapters", adapters.AdaptersView, _ADAPTERS, "adapters"),
    _path(_ADAPTER, adapters.AdapterView, _ADAPTERS, "adapter"),
    _path(f"{_ADAPTER}/versions", adapters.VersionsView, _ADAPTERS, "versions"),
    _path(f"{_ADAPTER}/import", adapter_imports.VersionImportView, _ADAPTERS, "import"),
    _path(_VERSION, adapters.VersionView, _ADAPTERS, "version"),
    _path(f"{_VERSION}/upload", adapter_uploads.VersionUploadView, _ADAPTERS, "version_upload"),
    _path(f"{_VERSION}/parts", adapter_uploads.VersionPartsView, _ADAPTERS, "version_parts"),
    _path(f"{_VERSION}/complete", adapters.VersionCompleteView, _ADAPTERS, "version_complete"),
    *(_path(address, view, _ADAPTERS, name) for address, view, name in _RELEASES),
    _path("datasets", training.DatasetsView, _DATASETS, "datasets"),
    _path("datasets/<str:name>", training.DatasetView, _DATASETS, "dataset"),
    _path("training-runs", training.TrainingRunsView, _TRAINING, "training_runs"),
    _path(_RUN, training.TrainingRunView, _TRAINING, "training_run"),
    _path(f"{_RUN}/cancel", training.TrainingRunCancelView, _TRAINING, "training_run_cancel"),
    _path(_SCHEDULE, training.ScheduleView, _TRAINING, "schedule"),
    _path(f"{_SCHEDULE}/run", schedules.ScheduleRunNowView, _TRAINING, "schedule_run_now"),
    _path(f"{_SCHEDULE}/runs", schedules.ScheduleRunsView, _TRAINING, "schedule_runs"),
]

"""Settings of Django REST framework and of the OpenAPI document, the same everywhere."""

from typing import Any

REST_FRAMEWORK: dict[str, Any] = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.tenants.auth.ApiKeyAuthentication",
        "controlplane.tenants.auth.ConsoleSessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "controlplane.errors.drf_exception_handler",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS: dict[str, Any] = {
    "TITLE": "Lorikeet",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SCHEMA_PATH_PREFIX": "/(?:api|ops)/v1",
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "controlplane.management.openapi.add_gateway",
        "controlplane.management.openapi.complete_operations",
    ],
    "ENUM_NAME_OVERRIDES": {
        "AdapterVersionStatus": "controlplane.adapters.models.AdapterVersion.Status",
        "TrainingRunStatus": "controlplane.training.models.TrainingRun.Status",
        "TenantStatus": "controlplane.tenants.models.Tenant.Status",
        "TenantStatusSet": "controlplane.tenants.services.SETTABLE",
        "DeletionStatus": "controlplane.deletion.models.TenantDeletion.Status",
        "InviteStatus": "controlplane.tenants.models.Invite.Status",
        "RoleEnum": "controlplane.tenants.models.Role",
        "ScopesEnum": "controlplane.tenants.permissions.SCOPES",
        "ServiceKeyScope": "controlplane.operator.service_keys.scopes.SCOPES",
        "KeyRole": "controlplane.operator.tenant_document.KEY_ROLE_CHOICES",
        "KeyEnvironment": "controlplane.tenants.models.ApiKey.Environment",
        "BatchStatus": "controlplane.files.batches.models.Batch.Status",
        "FilePurpose": "controlplane.files.models.Purpose",
        "UploadPurpose": "controlplane.gateway.files.bodies.PURPOSES",
        "UploadStatus": "controlplane.gateway.files.bodies.UPLOAD_STATUSES",
    },
}

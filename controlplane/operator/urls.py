"""The addresses under /ops/v1."""

from django.urls import path

from controlplane.operator import api, for_tenants
from controlplane.operator import service_key_views as service_keys

urlpatterns = [
    path("service-keys", service_keys.ServiceKeysView.as_view()),
    path("service-keys/<str:public_id>", service_keys.ServiceKeyView.as_view()),
    path("service-keys/<str:public_id>/rotate", service_keys.ServiceKeyRotateView.as_view()),
    path("service-keys/<str:public_id>/revoke", service_keys.ServiceKeyRevokeView.as_view()),
    path("tenants", api.TenantsView.as_view()),
    path("tenants/<str:slug>", api.TenantView.as_view()),
    path("tenants/<str:slug>/limits", api.TenantLimitsView.as_view()),
    path("tenants/<str:slug>/quota", api.TenantQuotaView.as_view()),
    *for_tenants.urlpatterns,
    path("tenants/<str:slug>/restore", api.TenantRestoreView.as_view()),
    path("deletions", api.DeletionsView.as_view()),
    path("base-models", api.BaseModelsView.as_view()),
    path("base-models/<str:name>", api.BaseModelView.as_view()),
    path("workers", api.WorkersView.as_view()),
    path("workers/<str:worker_id>/drain", api.WorkerDrainView.as_view()),
    path("queues", api.QueuesView.as_view()),
    path("dead-letters", api.DeadLettersView.as_view()),
    path("dead-letters/<uuid:letter_id>", api.DeadLetterView.as_view()),
    path("dead-letters/<uuid:letter_id>/requeue", api.DeadLetterRequeueView.as_view()),
    path("quarantine", api.QuarantineView.as_view()),
    path("quarantine/<str:digest>", api.QuarantinedAdapterView.as_view()),
]

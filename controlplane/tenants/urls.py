from django.urls import path

from controlplane.tenants import api

urlpatterns = [
    path("keys", api.ApiKeysView.as_view()),
    path("keys/<str:public_id>/revoke", api.ApiKeyRevokeView.as_view()),
]

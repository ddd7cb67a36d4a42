from django.urls import path

from controlplane.usage import api, request_api

urlpatterns = [
    path("usage", api.UsageView.as_view()),
    path("requests/<str:request_id>/usage", request_api.RequestUsageView.as_view()),
]

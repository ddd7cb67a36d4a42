"""What of this app is under /api/v1; /v1 is in `urls`."""

from django.urls import path

from controlplane.inference import api

urlpatterns = [
    path("requests", api.RequestsView.as_view()),
    path("requests/<str:request_id>", api.RequestView.as_view()),
]

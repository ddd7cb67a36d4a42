from django.urls import path

from controlplane.requestlog import api

urlpatterns = [
    path("requests", api.RequestsView.as_view()),
    path("requests/<str:request_id>", api.RequestView.as_view()),
    path("requests/<str:request_id>/content", api.RequestContentView.as_view()),
    path("request-log", api.LogPolicyView.as_view()),
    path("refusals", api.RefusalsView.as_view()),
]

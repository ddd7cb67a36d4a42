from django.urls import path

from controlplane.usage import api

urlpatterns = [
    path("usage", api.UsageView.as_view()),
]

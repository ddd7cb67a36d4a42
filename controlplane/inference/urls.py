from django.urls import path

from controlplane.inference import views
from controlplane.usage.organization import completions_usage

urlpatterns = [
    path("chat/completions", views.chat_completions),
    path("completions", views.completions),
    path("models", views.model_list),
    path("models/<str:name>", views.model_detail),
    path("organization/usage/completions", completions_usage),
    path("<path:path>", views.unknown),
]

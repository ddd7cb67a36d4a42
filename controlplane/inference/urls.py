from django.urls import path

from controlplane.inference import views

urlpatterns = [
    path("chat/completions", views.chat_completions),
    path("completions", views.completions),
    path("models", views.model_list),
    path("models/<str:name>", views.model_detail),
    path("<path:path>", views.unknown),
]

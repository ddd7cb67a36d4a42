from django.urls import path

from controlplane.gateway import models, tokenizing, views
from controlplane.gateway.batches import views as batches
from controlplane.gateway.files import views as files
from controlplane.gateway.responses import views as responses
from controlplane.gateway.usage.organization import completions_usage

urlpatterns = [
    path("chat/completions", views.chat_completions),
    path("completions", views.completions),
    path("responses", responses.responses),
    path("responses/<str:response_id>", responses.not_kept),
    path("responses/<str:response_id>/<path:rest>", responses.not_kept),
    path("tokenize", tokenizing.tokenize),
    path("detokenize", tokenizing.detokenize),
    path("models", models.model_list),
    path("models/<str:name>", models.model_detail),
    path("organization/usage/completions", completions_usage),
    path("files", files.file_list),
    path("files/<str:file_id>", files.file_detail),
    path("files/<str:file_id>/content", files.file_content),
    path("uploads", files.upload_create),
    path("uploads/<str:upload_id>/complete", files.upload_complete),
    path("uploads/<str:upload_id>/cancel", files.upload_cancel),
    path("batches", batches.batches),
    path("batches/<str:batch_id>", batches.batch_detail),
    path("batches/<str:batch_id>/cancel", batches.batch_cancel),
    path("<path:path>", views.unknown),
]

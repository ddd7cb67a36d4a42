from django.urls import path

from controlplane.gateway import models, tokenizing, views
from controlplane.gateway.batches import views as batches
from controlplane.gateway.feedback import FeedbackView
from controlplane.gateway.files import views as files
from controlplane.gateway.fine_tuning import views as fine_tuning
from controlplane.gateway.responses import views as responses
from controlplane.gateway.usage.organization import CompletionsUsageView

urlpatterns = [
    path("chat/completions", views.chat_completions),
    path("completions", views.completions),
    path("embeddings", views.embeddings),
    path("responses", responses.responses),
    path("responses/<str:response_id>", responses.not_kept),
    path("responses/<str:response_id>/<path:rest>", responses.not_kept),
    path("tokenize", tokenizing.tokenize),
    path("detokenize", tokenizing.detokenize),
    path("models", models.ModelsView.as_view()),
    path("models/<str:name>", models.ModelView.as_view()),
    path("organization/usage/completions", CompletionsUsageView.as_view()),
    path("feedback", FeedbackView.as_view()),
    path("files", files.FilesView.as_view()),
    path("files/<str:file_id>", files.FileView.as_view()),
    path("files/<str:file_id>/content", files.file_content),
    path("uploads", files.UploadsView.as_view()),
    path("uploads/<str:upload_id>/complete", files.UploadCompleteView.as_view()),
    path("uploads/<str:upload_id>/cancel", files.UploadCancelView.as_view()),
    path("batches", batches.BatchesView.as_view()),
    path("batches/<str:batch_id>", batches.BatchView.as_view()),
    path("batches/<str:batch_id>/cancel", batches.BatchCancelView.as_view()),
    path("fine_tuning/jobs", fine_tuning.JobsView.as_view()),
    path("fine_tuning/jobs/<str:job_id>", fine_tuning.JobView.as_view()),
    path("fine_tuning/jobs/<str:job_id>/cancel", fine_tuning.JobCancelView.as_view()),
    path("fine_tuning/jobs/<str:job_id>/pause", fine_tuning.JobPauseView.as_view()),
    path("fine_tuning/jobs/<str:job_id>/resume", fine_tuning.JobResumeView.as_view()),
    path("fine_tuning/jobs/<str:job_id>/events", fine_tuning.JobEventsView.as_view()),
    path("fine_tuning/jobs/<str:job_id>/checkpoints", fine_tuning.JobCheckpointsView.as_view()),
    path("<path:path>", views.unknown),
]

from django.urls import path

from controlplane.training import api

urlpatterns = [
    path("datasets", api.DatasetsView.as_view()),
    path("datasets/<str:name>", api.DatasetView.as_view()),
    path("training-runs", api.TrainingRunsView.as_view()),
    path("training-runs/<uuid:run_id>", api.TrainingRunView.as_view()),
    path("training-runs/<uuid:run_id>/cancel", api.TrainingRunCancelView.as_view()),
    path("adapters/<str:name>/schedule", api.ScheduleView.as_view()),
]

from typing import Any

from django.apps import AppConfig
from django.db.models import QuerySet


class FineTuningConfig(AppConfig):
    name = "controlplane.gateway.fine_tuning"

    def ready(self) -> None:
        from controlplane.files.services import files_made
        from controlplane.gateway.fine_tuning.results import result_file_make
        from controlplane.training.runs.publishing import before_success

        before_success.connect(result_file_make)
        files_made.connect(_made_files)


def _made_files() -> list[QuerySet[Any, Any]]:
    """Return the ids of the files of the jobs that the caller may see."""
    from controlplane.gateway.fine_tuning.services import jobs_list

    return [jobs_list().values("result_file_id")]

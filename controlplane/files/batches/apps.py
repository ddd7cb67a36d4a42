from typing import Any

from django.apps import AppConfig
from django.db.models import QuerySet


class BatchesConfig(AppConfig):
    name = "controlplane.files.batches"

    def ready(self) -> None:
        from controlplane.files import services
        from controlplane.files.batches import readings
        from controlplane.infra import metrics

        metrics.READINGS["batches"] = readings.batches
        services.files_in_use.connect(_input_files)
        services.files_made.connect(_made_files)


def _made_files() -> list[QuerySet[Any, Any]]:
    """Return the ids of the files of the batches that the caller may see."""
    from controlplane.files.batches.services import batches_list

    return [batches_list().values(name) for name in ("output_file_id", "error_file_id")]


def _input_files() -> QuerySet[Any, Any]:
    """Return the ids of the input files whose lines do not all have a result yet."""
    from controlplane.files.batches.models import Batch

    return Batch.objects.filter(status__in=Batch.ACTIVE).values("input_file_id")

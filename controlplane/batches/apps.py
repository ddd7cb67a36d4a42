from typing import Any

from django.apps import AppConfig
from django.db.models import QuerySet


class BatchesConfig(AppConfig):
    name = "controlplane.batches"

    def ready(self) -> None:
        from controlplane.files import services

        services.READERS.append(_input_files)


def _input_files() -> QuerySet[Any, Any]:
    """Ids of the files whose lines are not all told of yet."""
    from controlplane.batches.models import Batch

    return Batch.objects.filter(status__in=Batch.ACTIVE).values("input_file_id")

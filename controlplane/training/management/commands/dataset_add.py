"""Upload a dataset for a tenant: prints {"id", "name", "sha256", "num_rows"}."""

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ApiError
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.management.commands import find_tenant
from controlplane.training.datasets import services as dataset_services


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True, help="its slug")
        parser.add_argument("--name", required=True)
        parser.add_argument("file", type=Path, help="chat JSONL")

    def handle(self, *, tenant: str, name: str, file: Path, **options: Any) -> None:
        try:
            with file.open("rb") as rows, tenant_scope(find_tenant(tenant).id):
                content = rows.read(dataset_services.MAX_DIRECT_BYTES + 1)
                dataset = dataset_services.dataset_upload(name=name, content=content)
        except OSError as error:
            raise CommandError(f"{file} cannot be read: {error}") from error
        except ApiError as error:
            raise CommandError(error.message) from error
        self.stdout.write(
            json.dumps(
                {
                    "id": str(dataset.pk),
                    "name": dataset.name,
                    "sha256": dataset.sha256,
                    "num_rows": dataset.num_rows,
                }
            )
        )

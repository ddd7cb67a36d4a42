"""List the traces of a tenant; after its deletion there must be none."""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.deletion.tenants import tenant_id_of
from controlplane.deletion.traces import tenant_traces
from controlplane.errors import NotFound
from controlplane.tenants.models import Tenant


class Command(BaseCommand):
    help = (
        "Print as JSON what PostgreSQL, the object store and Redis hold of a tenant. Exit with 1 "
        "if the tenant is deleted and more than its audit trail and totals is left."
    )
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", help="its id or slug; of a deleted tenant the slug it had")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            tenant_id = uuid.UUID(options["tenant"])
        except ValueError:
            try:
                tenant_id = tenant_id_of(options["tenant"])
            except NotFound as error:
                raise CommandError(error.message) from error
        found = tenant_traces(tenant_id)
        self.stdout.write(json.dumps(dataclasses.asdict(found), indent=2))
        if found.status in ("", Tenant.Status.DELETED) and not found.is_clean:
            raise CommandError(
                "data of this deleted tenant is left: try again after the next sweep"
            )

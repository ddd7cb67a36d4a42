"""Make an API key of a tenant: prints {"public_id", "name", "key"}, the key this once only."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ApiError
from controlplane.scoping import tenant_scope
from controlplane.tenants import services
from controlplane.tenants.management.commands import find_tenant


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", required=True, help="its slug")
        parser.add_argument("--name", required=True)

    def handle(self, *, tenant: str, name: str, **options: Any) -> None:
        try:
            with tenant_scope(find_tenant(tenant).id):
                api_key, text = services.api_key_create(name=name)
        except ApiError as error:
            raise CommandError(error.message) from error
        self.stdout.write(
            json.dumps({"public_id": api_key.public_id, "name": api_key.name, "key": text})
        )

"""Create a tenant, or find it: prints {"id", "slug", "created"}."""

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import ApiError
from controlplane.tenants import services
from controlplane.tenants.models import Tenant


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--slug", required=True)
        parser.add_argument("--name", required=True)

    def handle(self, *, slug: str, name: str, **options: Any) -> None:
        tenant = Tenant.objects.filter(slug=slug).first()
        is_new = tenant is None
        if tenant is None:
            try:
                tenant = services.tenant_create(slug=slug, name=name)
            except ApiError as error:
                raise CommandError(error.message) from error
        self.stdout.write(
            json.dumps({"id": str(tenant.id), "slug": tenant.slug, "created": is_new})
        )
